"""What grpo_loss and linear_grpo_loss share: preparing the constants, and turning log-probs into a LossOutput.

A path supplies two things: `fused` (loss and gradient in the forward, where it can) and `logprobs` (differentiable
log-probs and entropy); everything else about the objective is here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.ops.inputs import Tokens
from grpo_fast.ops.objective import (
    PolicyInputs,
    make_metrics,
    scalar_divisor,
    token_coefficients,
    token_losses,
)
from grpo_fast.ops.options import PolicyOptions
from grpo_fast.types import LossOutput


@dataclass(frozen=True)
class Problem:
    """One call of a loss: its options, its constants, and the two numbers it is divided by."""

    options: PolicyOptions
    inputs: PolicyInputs
    coef: Tensor  # (B, T), c_t / D
    entropy_scale: Tensor | None  # 0-d, entropy_coef / entropy_denominator; None without a bonus
    reduction: str
    return_entropy: bool

    @property
    def want_entropy(self) -> bool:
        return self.return_entropy or self.options.entropy_coef > 0

    @property
    def fits_one_launch(self) -> bool:
        """Whether the kernel of one launch over the logits has this objective: the clip, per token, summed."""
        return not self.options.is_sequence_level and not self.options.is_cispo and self.reduction == "sum"


def make_problem(
    tokens: Tokens,
    options: PolicyOptions,
    dtype: torch.dtype,
    *,
    advantages: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    sampling_weights: Tensor | None,
    denominator,
    entropy_denominator,
    reduction: str,
    return_entropy: bool,
) -> Problem:
    """Check the constants and bring them to (B, T) vectors of `dtype`."""
    if reduction not in ("sum", "none"):
        raise ValueError(f'reduction: expected "sum" or "none", got {reduction!r}')
    if options.beta > 0 and ref_logps is None:
        raise ValueError(
            f"ref_logps: beta={options.beta:g} needs the reference's log-probs, got None; pass them, or beta=0"
        )
    if advantages is None:
        raise ValueError("advantages: expected a tensor, got None")
    inputs = PolicyInputs(
        tokens,
        tokens.valid,
        tokens.broadcast("advantages", advantages, dtype),
        tokens.broadcast("sampling_weights", sampling_weights, dtype),
        tokens.vector("old_logps", old_logps, dtype),
        tokens.vector("ref_logps", ref_logps, dtype),
    )
    entropy_scale = None
    if options.entropy_coef > 0:
        if entropy_denominator is None:
            entropy_denominator = tokens.valid.sum()
        divisor = scalar_divisor("entropy_denominator", entropy_denominator, inputs.advantages)
        entropy_scale = options.entropy_coef / divisor
    coef = token_coefficients(inputs, options, denominator, dtype) if reduction == "sum" else inputs.advantages
    return Problem(options, inputs, coef, entropy_scale, reduction, return_entropy)


def evaluate(problem: Problem, fused: Callable | None, logprobs: Callable) -> LossOutput:
    """The loss by the fused schedule where the head offers it, else by log-probs and autograd on (B, T) vectors."""
    if fused is not None:
        loss, logps, entropy = fused()
    else:
        logps, entropy = logprobs()
        loss = _reduce(token_losses(logps, problem.inputs, problem.options), entropy, problem)
    logps = logps.detach()
    entropy = entropy.detach() if problem.want_entropy else None
    shape = problem.inputs.tokens.shape
    return LossOutput(
        loss.reshape(shape) if problem.reduction == "none" else loss,
        logps.reshape(shape),
        None if entropy is None else entropy.reshape(shape),
        problem.inputs.scored.reshape(shape),
        make_metrics(logps, entropy, problem.inputs, problem.options),
    )


def _reduce(losses: Tensor, entropy: Tensor | None, problem: Problem) -> Tensor:
    if problem.reduction == "none":
        coef = problem.options.entropy_coef
        return losses - coef * entropy if coef > 0 else losses
    loss = (losses * problem.coef).sum()
    return loss if problem.entropy_scale is None else loss - problem.entropy_scale * entropy.sum()
