"""Problems for the native row ops and the float64 formulas they are held against.

The formulas are plain autograd on PyTorch's own log_softmax, written from docs/math.md and independent of
grpo_fast.ops: a fault shared by both would have to be in PyTorch.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Problem:
    """logits (B, T, V), the rest (B, T). `options` are the ops' trailing scalars."""

    logits: torch.Tensor
    ids: torch.Tensor
    valid: torch.Tensor
    advantages: torch.Tensor
    coef: torch.Tensor
    weights: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    entropy_scale: torch.Tensor | None = None
    temperature: float = 1.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    clip_low: float = 0.8
    clip_high: float = 1.2
    delta: float = math.inf
    beta: float = 0.0
    bias_correction: bool = False

    @property
    def transform(self):
        return self.temperature, self.softcap, self.logit_scale


@dataclass
class Result:
    losses: torch.Tensor
    logps: torch.Tensor
    entropy: torch.Tensor | None
    grad: torch.Tensor


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, math.nan, dtype=dtype)


def make_problem(B, T, V, dtype=torch.float32, seed=0, scale=3.0, masked=True, **options):
    """Random rows; masked slots are poisoned in every vector."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    p = Problem(
        logits=(normal(B, T, V) * scale).to(dtype),
        ids=torch.randint(0, V, (B, T), generator=rng),
        valid=torch.ones(B, T, dtype=torch.uint8),
        advantages=normal(B, T),
        coef=torch.rand(B, T, generator=rng) + 0.5,
        **options,
    )
    if masked and B * T > 2:
        p.valid.view(-1)[1::3] = 0
        poison_masked(p)
    return p


def poison_masked(p):
    gone = p.valid == 0
    p.logits[gone] = math.nan
    p.ids[gone] = torch.tensor([-100, 2**62, p.logits.shape[-1]]).repeat(gone.sum())[: gone.sum()]
    for vector in (p.advantages, p.coef, p.weights, p.old_logps, p.ref_logps):
        if vector is not None:
            vector[gone] = math.nan


def off_policy(p, seed=1, spread=0.4):
    """Adds old and reference log-probs near the true ones, and sampling weights."""
    rng = torch.Generator().manual_seed(seed)
    logps = torch.where(p.valid.bool(), float64_logps(p)[0], 0.0)
    p.old_logps = (logps + spread * torch.randn(logps.shape, generator=rng)).float()
    p.ref_logps = (logps + spread * torch.randn(logps.shape, generator=rng)).float()
    p.weights = 0.2 + 1.6 * torch.rand(logps.shape, generator=rng)
    poison_masked(p)
    return p


def float64_logps(p, logits=None):
    """Log-probs of the ids and entropies, (B, T), in float64; NaN-free at masked rows."""
    x = p.logits.double() if logits is None else logits
    x = torch.where(p.valid.bool()[..., None], x, 0.0)
    z = x * p.logit_scale
    if p.softcap:
        z = torch.where(z == -math.inf, z, p.softcap * torch.tanh(z / p.softcap))
    log_p = (z / p.temperature).log_softmax(-1)
    ids = torch.where(p.valid.bool(), p.ids, 0)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)
    return log_p.gather(-1, ids[..., None])[..., 0], entropy


def float64_loss(p):
    """Losses, log-probs, entropies and the gradient of sum(coef * losses) - entropy_scale * sum(H)."""
    valid = p.valid.bool()

    def clean(vector, otherwise):
        return torch.full_like(p.coef, otherwise).double() if vector is None else vector.double().where(valid, 0.0)

    logits = p.logits.double().requires_grad_()
    logps, entropy = float64_logps(p, logits)
    advantages, weights = clean(p.advantages, 1.0), clean(p.weights, 1.0)
    log_ratio = logps - (logps.detach() if p.old_logps is None else clean(p.old_logps, 0.0))
    ratio = log_ratio.exp()
    capped = torch.where(advantages < 0, ratio.clamp(max=p.delta), ratio)
    objective = torch.minimum(capped * advantages, ratio.clamp(p.clip_low, p.clip_high) * advantages)
    losses = -weights * objective
    if p.ref_logps is not None and p.beta:
        d = clean(p.ref_logps, 0.0) - logps
        losses = losses + p.beta * (ratio if p.bias_correction else 1.0) * (torch.expm1(d) - d)
    total = (losses * clean(p.coef, 1.0)).where(valid, 0.0).sum()
    if p.entropy_scale is not None:
        total = total - p.entropy_scale.double() * entropy.where(valid, 0.0).sum()
    total.backward()
    zero = torch.zeros_like(logps)
    results = (x.detach().where(valid, zero) for x in (losses, logps, entropy))
    return Result(*results, logits.grad.where(valid[..., None], 0.0).nan_to_num(0.0))


def native_loss(ops, p, out=None, entropy=True):
    """Runs grpo_loss into poisoned outputs. `out=None` is a new tensor; it may be p.logits (in place)."""
    shape = p.ids.shape
    losses, logps = poisoned(*shape), poisoned(*shape)
    entropies = poisoned(*shape) if entropy else None
    out = poisoned(*p.logits.shape, dtype=p.logits.dtype) if out is None else out
    ops.grpo_loss(
        p.logits, p.ids, p.valid, p.advantages, p.weights, p.old_logps, p.ref_logps, p.coef, p.entropy_scale,
        losses, logps, entropies, out, *p.transform,
        p.clip_low, p.clip_high, p.delta, p.beta, p.bias_correction,
    )  # fmt: skip
    return Result(losses, logps, entropies, out)


def native_stats(ops, p, entropy=True):
    shape = p.ids.shape
    logps, row_max, row_sum = poisoned(*shape), poisoned(*shape), poisoned(*shape)
    entropies = poisoned(*shape) if entropy else None
    ops.row_stats(p.logits, p.ids, p.valid, logps, entropies, row_max, row_sum, *p.transform)
    return logps, entropies, row_max, row_sum


ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_gradient_close(got, want, dtype, tolerance=2e-6):
    """Elementwise: one rounding of the dtype, plus `tolerance` of the largest entry; 2^-25 is fp16's flush to zero."""
    assert got.dtype == dtype
    error = (got.double() - want).abs()
    flush = 2.0**-25 if dtype == torch.float16 else 0.0
    allowed = 1.001 * ROUNDING[dtype] * want.abs() + tolerance * want.abs().max() + flush
    assert (error <= allowed).all(), f"worst {(error - allowed).max():.3e} over, of {want.abs().max():.3e}"


def assert_vector_close(got, want, tolerance=1e-6):
    error = (got.double() - want).abs()
    assert (error <= tolerance * want.abs().clamp(min=1.0)).all(), f"worst {error.max():.3e}"
