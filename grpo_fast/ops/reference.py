"""The executable specification, in plain PyTorch: log-probs and entropy of a row, and their closed-form gradient.

`row_logprobs` is textbook code under autograd and is what backend="reference" runs. `row_stats`, `row_grad` and
`scale_` are the backend contract (backends.py) written out, used where the reference works in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.ops.options import LogitTransform


def transformed(logits: Tensor, transform: LogitTransform) -> Tensor:
    """z in fp32 (fp64 for fp64): scale, softcap, temperature, in this order; -inf stays -inf."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    hidden = z == -torch.inf
    z = torch.where(hidden, 0.0, z)
    if transform.logit_scale is not None:
        z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return torch.where(hidden, -torch.inf, z / transform.temperature)


def row_logprobs(
    logits: Tensor, ids: Tensor, valid: Tensor, transform: LogitTransform, want_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z)[id] and, if wanted, -sum p log p, (B, T) each; differentiable; 0 where masked."""
    vocab = logits.shape[-1]
    logits = torch.where(valid[..., None], logits, 0.0)  # nothing of a masked row enters, not even 0 * NaN
    in_range = (ids >= 0) & (ids < vocab)
    target = torch.where(valid & in_range, ids, 0)
    logp_BTV = torch.log_softmax(transformed(logits, transform), dim=-1)
    logps = logp_BTV.gather(-1, target[..., None])[..., 0]
    logps = torch.where(in_range | ~valid, logps, torch.nan)
    entropy = None
    if want_entropy:
        seen = logp_BTV != -torch.inf
        plogp = torch.where(seen, logp_BTV.exp() * torch.where(seen, logp_BTV, 0.0), 0.0)
        entropy = torch.where(valid, -plogp.sum(-1), 0.0)
    return torch.where(valid, logps, 0.0), entropy


def row_stats(logits, ids, valid, logps, entropy, row_max, row_sum, temperature, softcap, logit_scale):
    transform = _transform(temperature, softcap, logit_scale)
    values = row_logprobs(logits, ids, valid.bool(), transform, entropy is not None)
    logps.copy_(values[0])
    if entropy is not None:
        entropy.copy_(values[1])
    z = transformed(logits, transform)
    row_max.copy_(torch.where(valid.bool(), z.amax(-1), 0.0))
    row_sum.copy_(torch.where(valid.bool(), torch.exp(z - row_max[..., None]).sum(-1), 1.0))


def row_grad(
    logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, out, temperature, softcap, logit_scale
):
    """dz/dlogit * (g (onehot - p) - g_entropy p (log p + H))."""
    z = transformed(logits, _transform(temperature, softcap, logit_scale))
    logp_BTV = z - row_max[..., None] - row_sum.log()[..., None]
    p = logp_BTV.exp()
    grad = -g[..., None] * p
    target = torch.where(valid.bool(), ids, 0).clamp(0, z.shape[-1] - 1)[..., None]
    grad.scatter_(-1, target, (-torch.expm1(logps) * g)[..., None])
    if g_entropy is not None:
        grad -= g_entropy[..., None] * p * (torch.where(p > 0, logp_BTV, 0.0) + entropy[..., None])
    if softcap > 0:
        grad *= 1.0 - (z * temperature / softcap).square()
    grad *= logit_scale / temperature
    keep = valid.bool()[..., None] & (logits != -torch.inf)
    out.copy_(torch.where(keep, grad, 0.0))


def scale_(grad, scale):
    grad.mul_(scale.to(grad.dtype))


def _transform(temperature: float, softcap: float, logit_scale: float) -> LogitTransform:
    return LogitTransform(temperature, softcap or None, logit_scale)
