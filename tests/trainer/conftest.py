"""Fixtures of the trainer's tests."""

import pytest
from one_thread import one_thread  # noqa: F401
from tiny_models import make_model, make_tokenizer

from grpo_fast.config import BatchConfig, GRPOConfig, LogConfig, LossConfig, OptimConfig, RolloutConfig


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def llama():
    return make_model()


@pytest.fixture
def make_args(tmp_path):
    """A configuration for tiny runs; sections are given as dicts of what differs."""

    def make(max_steps: int = 2, seed: int = 0, **sections) -> GRPOConfig:
        defaults = {
            "rollout": {"num_generations": 4, "max_completion_length": 6},
            "loss": {"beta": 0.0},
            "optim": {"learning_rate": 1e-2, "lr_scheduler_type": "constant"},
            "batch": {"prompts_per_step": 2},
            "log": {"output_dir": str(tmp_path / "run"), "progress": False, "plot": False},
        }
        types = {
            "rollout": RolloutConfig,
            "loss": LossConfig,
            "optim": OptimConfig,
            "batch": BatchConfig,
            "log": LogConfig,
        }
        given = {name: section(**{**defaults[name], **sections.pop(name, {})}) for name, section in types.items()}
        return GRPOConfig(max_steps=max_steps, seed=seed, **given, **sections)

    return make
