"""The objectives in plain PyTorch on [B,T] vectors: value, and by autograd the derivative, of every loss.

This is the specification, and it also runs behind every backend wherever the coefficient of a token depends on more
than the token (sequence level), or is applied in the backward (reduction="none", fp16). Letters: B sequences, T tokens.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.ops.inputs import Sequences, Tokens, check_constant
from grpo_fast.ops.options import PolicyOptions
from grpo_fast.types import LossMetrics


@dataclass(frozen=True)
class PolicyInputs:
    """Constants of the objective, (B, T) each. `scored` are the valid tokens whose log-probs exist."""

    tokens: Tokens
    scored: Tensor
    advantages: Tensor
    weights: Tensor | None
    old_logps: Tensor | None
    ref_logps: Tensor | None

    @classmethod
    def of(cls, ids, valid, cu_seqlens, advantages, weights, old_logps, ref_logps) -> PolicyInputs:
        """From (B, T) vectors, or (1, N) and cu_seqlens; `valid` are the scored tokens."""
        if cu_seqlens is None:
            sequences = Sequences(ids.shape[0], tuple(ids.shape))
        else:
            sequences = Sequences.packed(cu_seqlens, ids.shape[1])
        tokens = Tokens(ids, valid, sequences, tuple(ids.shape))
        return cls(tokens, valid, advantages, weights, old_logps, ref_logps)

    def map(self, function, sequences: Sequences) -> PolicyInputs:
        """The same of other tokens: `function` takes a vector (B, T) to what belongs to `sequences`."""
        ids, valid, *vectors = (
            None if v is None else function(v)
            for v in (
                self.tokens.ids, self.scored, self.advantages, self.weights, self.old_logps, self.ref_logps
            )
        )  # fmt: skip
        return PolicyInputs(Tokens(ids, valid, sequences, tuple(ids.shape)), valid, *vectors)

    @property
    def weighted_advantages(self) -> Tensor:
        """A * w, 0 where masked."""
        product = self.advantages if self.weights is None else self.advantages * self.weights
        return torch.where(self.tokens.valid, product, 0.0)


def k3(d: Tensor) -> Tensor:
    """e^d - d - 1 for d = ref - logp (Schulman, http://joschu.net/blog/kl-approx.html), accurate near d = 0.

    expm1(d) - d cancels there, so |d| < 0.5 takes the series d^2/2! + d^3/3! + ...
    """
    small = d.abs() < 0.5
    near = torch.where(small, d, 0.0)
    series = torch.ones_like(near)
    for n in range(17, 2, -1):
        series = 1.0 + near / n * series
    far = torch.where(small, 1.0, d)
    large = far > 60.0  # beyond, e^d alone: at d = inf the difference would be NaN
    middle = torch.where(large, 1.0, far)
    beyond = torch.where(large, torch.exp(far), torch.expm1(middle) - middle)
    return torch.where(small, near * near / 2.0 * series, beyond)


def log_ratios(logps: Tensor, inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    """log pi/pi_old per token, or its mean over the sequence (GSPO, https://arxiv.org/abs/2507.18071, equation 7)."""
    if inputs.old_logps is None:  # on-policy: 0 exactly, and the gradient still flows
        finite = torch.where(logps.isinf(), 0.0, logps)
        log_ratio = finite - finite.detach()
    else:
        log_ratio = logps - torch.where(inputs.scored, inputs.old_logps, 0.0)
    log_ratio = torch.where(inputs.scored, log_ratio, 0.0)
    if options.is_sequence_level:
        sequences = inputs.tokens.sequences
        length = sequences.sum(inputs.tokens.valid).clamp(min=1)
        log_ratio = sequences.expand(sequences.sum(log_ratio) / length.to(log_ratio.dtype))
    return log_ratio


def token_losses(logps: Tensor, inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    """w * policy + beta * KL per token, (B, T), nats; 0 where not scored."""
    log_ratio = log_ratios(logps, inputs, options)
    weighted = torch.where(inputs.scored, inputs.weighted_advantages, 0.0)
    if options.is_cispo:
        losses = _cispo(logps, log_ratio, weighted, options)
    else:
        losses = _clip(log_ratio, inputs.advantages, weighted, options)
    if options.beta > 0:
        d = torch.where(inputs.scored, inputs.ref_logps, 0.0) - torch.where(inputs.scored, logps, 0.0)
        losses = losses + options.beta * (
            _corrected(d, log_ratio, inputs, options) if options.use_bias_correction_kl else k3(d)
        )
    return torch.where(inputs.scored, losses, 0.0)


def _corrected(d: Tensor, log_ratio: Tensor, inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    """r k3(d), the bias-corrected KL (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1)."""
    product = k3(d) * torch.exp(torch.where(d == 0, 0.0, log_ratio))  # d = 0: an overflowing ratio times 0 is no NaN
    # r e^d = pi_ref / pi_old is a constant; leaving it in would make the derivative, -r d, a difference of large terms.
    far = (d > 1.0) & (log_ratio < 80.0)
    if options.is_sequence_level:  # where r is that of one token only if the sequence has no other
        sequences = inputs.tokens.sequences
        far = far & (sequences.expand(sequences.sum(inputs.tokens.valid)) == 1)
    far_d, far_log = torch.where(far, d, 0.0), torch.where(far, log_ratio, 0.0)
    difference = torch.exp((far_log + far_d).detach()) - torch.exp(far_log) * (1.0 + far_d)
    return torch.where(far, difference, torch.where(far, 0.0, product))


def _clip(log_ratio: Tensor, advantages: Tensor, weighted: Tensor, options: PolicyOptions) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1-eps, 1+eps_high) A), by log-ratios (PPO, arXiv 1707.06347, equation 7)."""
    log_low, log_high, log_delta = options.log_bounds
    above = (advantages > 0) & (log_ratio > log_high)
    below = (advantages < 0) & (log_ratio < log_low)
    capped = (advantages < 0) & (log_ratio > log_delta)
    flows = (weighted != 0) & ~(above | below | capped)
    # exp sees only ratios that are used: an overflow elsewhere would turn 0 * inf into NaN.
    ratio = torch.exp(torch.where(flows, log_ratio, 0.0))
    bound = torch.where(above, options.clip_high * weighted, options.clip_low * weighted)
    if options.delta is not None:
        bound = torch.where(capped, options.delta * weighted, bound)
    return -torch.where(flows, ratio * weighted, bound)


def _cispo(logps: Tensor, log_ratio: Tensor, weighted: Tensor, options: PolicyOptions) -> Tensor:
    """-stopgrad(min(r, cap)) A logp (MiniMax-M1, https://arxiv.org/abs/2506.13585, equation 4)."""
    capped = torch.exp(log_ratio.detach().clamp(max=options.log_bounds[1]))
    return -torch.where(weighted != 0, capped * weighted * torch.where(weighted != 0, logps, 0.0), 0.0)


def policy_objective(
    logps: Tensor,
    entropy: Tensor | None,
    chunk,
    *,
    inputs: PolicyInputs,
    options: PolicyOptions,
    coef: Tensor,
    entropy_scale: Tensor | None,
) -> Tensor:
    """A head chunk's share of the loss, 0-d, from its rows' log-probs and entropies, (R,)."""
    sequences, take, place = chunk.of(inputs.tokens.sequences)
    losses = token_losses(place(logps), inputs.map(take, sequences), options)
    loss = (losses * take(coef)).sum()
    return loss if entropy_scale is None else loss - entropy_scale * entropy.sum()


def token_coefficients(inputs: PolicyInputs, options: PolicyOptions, denominator, dtype: torch.dtype) -> Tensor:
    """c_t / D, (B, T): what a token's loss is multiplied by in the sum. DESIGN of each loss_type: docs/math.md."""
    valid, sequences = inputs.tokens.valid, inputs.tokens.sequences
    if denominator is None:
        if options.loss_type in ("grpo", "luspo"):
            denominator = sequences.num
        elif options.loss_type == "dr_grpo":
            if options.max_completion_length is None:
                raise ValueError(
                    'max_completion_length: loss_type="dr_grpo" divides by sequences * max_completion_length; '
                    "give it, or give denominator"
                )
            denominator = sequences.num * options.max_completion_length
        else:
            denominator = valid.sum()
    weight = valid.to(dtype)
    if options.loss_type == "grpo":
        weight = weight / sequences.expand(sequences.sum(valid).clamp(min=1).to(dtype))
    return weight / scalar_divisor("denominator", denominator, weight)


def scalar_divisor(name: str, value, like: Tensor) -> Tensor:
    """A user's denominator as a 0-d tensor on the device; 0 counts as 1."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: expected a 0-d tensor or a number, got shape {list(value.shape)}")
        check_constant(name, value)
        on_cpu = value.device.type == "cpu" and not torch.compiler.is_compiling()
        if value.dtype == torch.bool or (on_cpu and not value >= 0):
            raise ValueError(f"{name}: expected a number >= 0, got {value}")
        divisor = value.reshape(()).to(device=like.device, dtype=like.dtype)
    else:
        number = isinstance(value, (numbers.Real, torch.SymInt)) and not isinstance(value, bool)
        if not number or not value >= 0:
            raise ValueError(f"{name}: expected a 0-d tensor or a number >= 0, got {value!r}")
        divisor = torch.full((), value, dtype=like.dtype, device=like.device)
    return torch.where(divisor == 0, 1.0, divisor)


@torch.no_grad()
def make_metrics(logps: Tensor, entropy: Tensor | None, inputs: PolicyInputs, options: PolicyOptions) -> LossMetrics:
    """Metrics by the loss's own comparisons. Clip ratios count valid tokens, the rest scored ones."""
    valid, scored = inputs.tokens.valid, inputs.scored
    sequences = inputs.tokens.sequences
    log_ratio = log_ratios(logps, inputs, options)
    weighted = inputs.weighted_advantages
    log_low, log_high, _ = options.log_bounds
    low = scored & (weighted < 0) & (log_ratio < log_low)
    high = scored & (weighted > 0) & (log_ratio > log_high)
    if options.is_sequence_level:
        has_valid, has_scored = sequences.sum(valid) > 0, sequences.sum(scored) > 0
        low, high = sequences.sum(low) > 0, sequences.sum(high) > 0
        ratio_B = sequences.sum(torch.where(scored, log_ratio, 0.0)) / sequences.sum(scored).clamp(min=1)
        clip_count, counted, ratio = has_valid.sum(), has_scored, torch.exp(ratio_B)
    else:
        clip_count, counted, ratio = valid.sum(), scored, torch.exp(log_ratio)
    ratio = torch.where(counted, ratio, 0.0)
    counts = {
        "tokens": valid.sum(),
        "scored_tokens": scored.sum(),
        "ratio_sum": ratio.sum(),
        "ratio_count": counted.sum(),
        "clip_count": clip_count,
    }
    if inputs.ref_logps is not None:
        kl = torch.where(scored, k3(torch.where(scored, inputs.ref_logps - logps, 0.0)), 0.0)
        counts |= {"kl_sum": kl.sum(), "kl_count": scored.sum()}
    if entropy is not None:
        counts |= {"entropy_sum": entropy.sum(), "entropy_count": scored.sum()}
    if options.is_cispo:
        counts["cispo_clipped"] = high.sum()
    else:
        counts |= {"low_clipped": low.sum(), "high_clipped": high.sum()}
    if counted.numel() > 0:
        counts["ratio_min"] = torch.where(counted, ratio, torch.inf).amin()
        counts["ratio_max"] = torch.where(counted, ratio, -torch.inf).amax()
    return LossMetrics.of(logps.device, **counts)
