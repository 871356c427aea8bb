from grpo_fast.ops.grpo_loss import grpo_loss
from grpo_fast.ops.head import release_workspace
from grpo_fast.ops.library import set_debug
from grpo_fast.ops.linear_grpo_loss import linear_grpo_loss
from grpo_fast.ops.linear_policy_loss import linear_policy_loss
from grpo_fast.ops.linear_token_logprobs import linear_token_logprobs
from grpo_fast.ops.modules import GRPOLoss, LinearGRPOLoss
from grpo_fast.ops.token_logprobs import token_logprobs

__all__ = [
    "GRPOLoss",
    "LinearGRPOLoss",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_policy_loss",
    "linear_token_logprobs",
    "release_workspace",
    "set_debug",
    "token_logprobs",
]
