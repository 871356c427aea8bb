"""The GPU kernels' contract in float64 PyTorch, by autograd and textbook formulas, and calls of them on a case."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = SimpleNamespace()  # row_stats, row_grad, grpo_loss and scale_ of those under test: a fixture fills it in


@dataclass(frozen=True)
class Case:
    """A call of grpo_loss: tensors [B, T(, V)] and scalars, under the names of the kernel's arguments."""

    logits: torch.Tensor
    ids: torch.Tensor
    valid: torch.Tensor
    advantages: torch.Tensor
    coef: torch.Tensor
    weights: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    entropy_scale: torch.Tensor | None = None
    scalars: dict = field(default_factory=dict)

    def with_(self, **changes):
        return replace(self, **changes)


SCALARS = {
    "temperature": 1.0, "softcap": 0.0, "logit_scale": 1.0, "clip_low": 0.8, "clip_high": 1.2, "delta": math.inf,
    "beta": 0.0, "bias_correction": False,
}  # fmt: skip


def make_case(B=2, T=3, V=1003, dtype=torch.float32, *, spread=3.0, seed=0,
              old=False, ref=False, weights=False, entropy=False, **scalars):  # fmt: skip
    """Random case with one masked slot (where there are several); old and ref within 0.5 of logp."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    logits = (normal(B, T, V) * spread).to(dtype)
    ids = torch.randint(V, (B, T), generator=draw)
    valid = torch.ones(B, T, dtype=torch.uint8)
    if B * T > 1:
        valid[0, T // 2] = 0
    case = Case(logits, ids, valid, normal(B, T), normal(B, T).abs() / (B * T), scalars=scalars)
    logps = expected(case).logps.float()
    return on(
        DEVICE,
        case.with_(
            weights=normal(B, T).abs() if weights else None,
            old_logps=logps + 0.3 * normal(B, T) if old else None,
            ref_logps=logps + 0.3 * normal(B, T) if ref else None,
            entropy_scale=torch.tensor(0.03) if entropy else None,
        ),
    )


def on(device, case):
    moved = {k: v.to(device) for k, v in vars(case).items() if isinstance(v, torch.Tensor)}
    return case.with_(**moved)


def transformed(x, temperature, softcap, logit_scale):
    z = x * logit_scale
    if softcap:
        z = torch.where(z == -math.inf, z, softcap * torch.tanh(z / softcap))
    return z / temperature


def policy(logps, old, advantages, weights, clip_low, clip_high, delta):
    ratio = torch.exp(logps - (logps.detach() if old is None else old.double()))
    objective = torch.minimum(ratio.clamp(max=delta) * advantages, ratio.clamp(clip_low, clip_high) * advantages)
    return -objective if weights is None else -objective * weights.double(), ratio


def expected(case):
    """losses, logps, entropy, grad (float64) and the scalar loss they belong to."""
    s = SimpleNamespace(**{**SCALARS, **case.scalars})
    valid = case.valid.bool()
    x = case.logits.double().masked_fill(~valid[..., None], 0.0).requires_grad_()
    ids = case.ids.masked_fill(~valid, 0)
    z = transformed(x, s.temperature, s.softcap, s.logit_scale)
    logp_V = z.log_softmax(-1)
    logps = logp_V.gather(-1, ids[..., None])[..., 0].masked_fill(~valid, 0.0)
    entropy = -(logp_V.exp() * logp_V.masked_fill(logp_V == -math.inf, 0.0)).sum(-1).masked_fill(~valid, 0.0)

    def at(vector):
        return None if vector is None else vector.double().masked_fill(~valid, 0.0)

    losses, ratio = policy(
        logps, at(case.old_logps), at(case.advantages), at(case.weights), s.clip_low, s.clip_high, s.delta
    )
    if case.ref_logps is not None:
        d = at(case.ref_logps) - logps
        k3 = torch.exp(d) - d - 1
        losses = losses + s.beta * (ratio * k3 if s.bias_correction else k3)
    losses = losses.masked_fill(~valid, 0.0)
    total = (losses * at(case.coef)).sum()
    if case.entropy_scale is not None:
        total = total - case.entropy_scale.double() * entropy.sum()
    (grad,) = torch.autograd.grad(total, x)
    return SimpleNamespace(
        losses=losses.detach(),
        logps=logps.detach(),
        entropy=entropy.detach(),
        grad=grad.masked_fill(~valid[..., None], 0.0),
    )


def poison(*shape, dtype=torch.float32):
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def grpo_loss(case, out=None, return_entropy=True):
    """Call the kernel on poisoned outputs; `out` may be case.logits."""
    shape = case.ids.shape
    losses, logps = poison(*shape), poison(*shape)
    entropy = poison(*shape) if return_entropy else None
    out = poison(*case.logits.shape, dtype=case.logits.dtype) if out is None else out
    scalars = {**SCALARS, **case.scalars}
    kernels.grpo_loss(
        case.logits, case.ids, case.valid, case.advantages, case.weights, case.old_logps, case.ref_logps, case.coef,
        case.entropy_scale, losses, logps, entropy, out, *scalars.values(),
    )  # fmt: skip
    return SimpleNamespace(losses=losses, logps=logps, entropy=entropy, grad=out)


def error(got, want):
    """max |a - b| / max |b| in float64 (max |a| where b is 0)."""
    got, want = got.double(), want.double()
    scale = want.abs().max().item() or 1.0
    return ((got - want).abs().max().item() if torch.isfinite(got).all() else math.inf) / scale


# To nearest on a GPU; Triton's interpreter cuts a bf16 off, which is up to a whole unit in the last place.
ROUNDING = {
    torch.float32: 3e-6,
    torch.float16: 2.0**-11 + 3e-6,
    torch.bfloat16: 2.0**-7 if DEVICE == "cpu" else 2.0**-8,
}


def check(got, want, dtype, tolerance=3e-6):
    """fp32 results to `tolerance` of the largest; the gradient to one rounding of its dtype besides."""
    for name in ("losses", "logps", "entropy"):
        if getattr(got, name) is not None:
            assert error(getattr(got, name), getattr(want, name)) <= tolerance, name
    assert error(got.grad, want.grad) <= max(tolerance, ROUNDING[dtype]), "grad"
