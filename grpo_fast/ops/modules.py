"""The losses as nn.Modules without tensors: options at construction, tensors per call."""

from __future__ import annotations

import dataclasses
import inspect

from torch import nn

from grpo_fast.ops.grpo_loss import grpo_loss
from grpo_fast.ops.linear_grpo_loss import linear_grpo_loss
from grpo_fast.ops.options import LogitTransform, PolicyOptions
from grpo_fast.types import LossOutput

# Given per call; every other keyword of the function is an option of the module.
_PER_CALL = (
    "cu_seqlens",
    "old_logps",
    "ref_logps",
    "sampling_weights",
    "denominator",
    "entropy_denominator",
    "bias",
    "live_rows",
)


class _LossModule(nn.Module):
    _function = None

    def __init__(self, **options):
        super().__init__()
        allowed = [
            name
            for name, parameter in inspect.signature(type(self)._function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in _PER_CALL
        ]
        for name in options:
            if name not in allowed:
                raise TypeError(f"{type(self).__name__}: unknown option {name!r}; options are {', '.join(allowed)}")
        for checked in (PolicyOptions, LogitTransform):  # a wrong value is refused here, not at the first call
            names = {field.name for field in dataclasses.fields(checked)}
            checked(**{name: value for name, value in options.items() if name in names})
        self.options = options

    def forward(self, *args, **tensors) -> LossOutput:
        for name in tensors:
            if name in self.options:
                raise TypeError(f"{type(self).__name__}: {name} was given at construction")
        return type(self)._function(*args, **tensors, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class GRPOLoss(_LossModule):
    """grpo_loss with its options bound: GRPOLoss(beta=0.04)(logits, token_ids, advantages, mask, old_logps=...)."""

    _function = staticmethod(grpo_loss)


class LinearGRPOLoss(_LossModule):
    """linear_grpo_loss with its options bound: LinearGRPOLoss()(hidden, weight, token_ids, advantages, mask)."""

    _function = staticmethod(linear_grpo_loss)
