"""AdamW and the learning rate as a function of the optimizer step."""

import dataclasses
import math

import torch
from torch import nn

from grpo_fast.config import OptimConfig
from grpo_fast.lora import adapter_layers


def with_learning_rate(options: OptimConfig, model: nn.Module) -> OptimConfig:
    """The options with the learning rate that None stands for, which is another for a model with adapters."""
    if options.learning_rate is not None:
        return options
    return dataclasses.replace(options, learning_rate=1e-5 if adapter_layers(model) else 1e-6)


def make_optimizer(model: nn.Module, options: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that require grad, fused where possible; biases and norms do not decay.

    Args:
        model: what to train.
        options: with a learning rate (`with_learning_rate`).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("model: expected parameters that require grad, got none")
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained),
    )


def learning_rate(options: OptimConfig, step: int, total: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`: linear warm-up, then constant, linear or cosine to 0."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / (options.warmup_steps + 1)  # 0 would waste the first step
    progress = (step - options.warmup_steps) / max(total - options.warmup_steps, 1)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[options.lr_scheduler_type]
    return options.learning_rate * max(factor, 0.0)
