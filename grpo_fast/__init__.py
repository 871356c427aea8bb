"""grpo_fast: reinforcement-learning losses for large vocabularies, and a lean trainer on top of them.

Importing this package loads neither transformers nor triton nor peft; the trainer is imported on first use.
"""

from grpo_fast.advantages import group_advantages
from grpo_fast.heads import head_weight
from grpo_fast.ops import (
    GRPOLoss,
    LinearGRPOLoss,
    grpo_loss,
    linear_grpo_loss,
    linear_policy_loss,
    linear_token_logprobs,
    release_workspace,
    set_debug,
    token_logprobs,
)
from grpo_fast.types import LossMetrics, LossOutput, TokenLogprobs

__version__ = "0.1.0"

__all__ = [
    "GRPOConfig",
    "GRPOLoss",
    "GRPOTrainer",
    "LinearGRPOLoss",
    "LossMetrics",
    "LossOutput",
    "TokenLogprobs",
    "group_advantages",
    "grpo_loss",
    "head_weight",
    "linear_grpo_loss",
    "linear_policy_loss",
    "linear_token_logprobs",
    "release_workspace",
    "set_debug",
    "token_logprobs",
]


def __getattr__(name):
    if name == "GRPOTrainer":
        from grpo_fast.trainer import GRPOTrainer

        return GRPOTrainer
    if name == "GRPOConfig":
        from grpo_fast.config import GRPOConfig

        return GRPOConfig
    raise AttributeError(f"module 'grpo_fast' has no attribute {name!r}")
