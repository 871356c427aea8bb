"""Token-level objectives: small functions of a token's scalars, injected into the row kernels as a tl.constexpr.

An objective takes (logp, old, ref, advantage, weight, params) and returns (loss, g = dloss/dlogp). `old` and `ref` are
None where the caller has none; `params` is a tuple of fp32 scalars, whose meaning is the objective's own.
"""

import math

import triton
import triton.language as tl

from grpo_fast.kernels.primitives import exp, exp_remainder, expm1


@triton.jit
def clip_policy(log_ratio, ratio, advantage, weight, params):
    """-w * min(min(r, delta)*A, clip(r, low, high)*A) and its derivative, decided on log-ratios, which overflow not."""
    low, high, delta, log_low, log_high, log_delta, _ = params
    above = (advantage > 0.0) & (log_ratio > log_high)
    below = (advantage < 0.0) & (log_ratio < log_low)
    capped = (advantage < 0.0) & (log_ratio > log_delta)
    bound = tl.where(above, high, tl.where(below, low, delta))
    clipped = above | below | capped
    loss = -tl.where(clipped, bound, ratio) * advantage * weight
    live = advantage * weight != 0.0
    return tl.where(live, loss, 0.0), tl.where(live & (clipped == 0), loss, 0.0)


@triton.jit
def kl(logp, ref, beta):
    """beta * k3 = beta * (e^d - d - 1), d = ref - logp, and its derivative (http://joschu.net/blog/kl-approx.html)."""
    d = ref - logp
    return beta * exp_remainder(d), -beta * expm1(d)


@triton.jit
def clip(logp, old, ref, advantage, weight, params):
    """PPO's clipped surrogate with GRPO's k3 penalty, which sampling weights do not touch."""
    if old is None:
        log_ratio = tl.where(logp != logp, logp, 0.0)  # an id without a column has logp NaN, and must not vanish
        ratio = log_ratio + 1.0
    else:
        log_ratio = logp - old
        ratio = exp(log_ratio)
    loss, g = clip_policy(log_ratio, ratio, advantage, weight, params)
    if ref is not None:
        kl_loss, kl_g = kl(logp, ref, params[6])
        loss += kl_loss
        g += kl_g
    return loss, g


@triton.jit
def clip_unbiased_kl(logp, old, ref, advantage, weight, params):
    """`clip` with the penalty beta * r * k3, r unclipped: d(r*k3)/dlogp = r*(k3 + 1 - e^d) = -r*d."""
    loss, g = clip(logp, old, None, advantage, weight, params)
    ratio = 1.0
    if old is not None:
        ratio = exp(logp - old)
    d = ref - logp
    ratio = tl.where(d == 0.0, 1.0, ratio)  # no penalty, however large the ratio
    beta = params[6]
    return loss + beta * ratio * exp_remainder(d), g - beta * ratio * d


def clip_params(low, high, delta, beta):
    """`params` of `clip`: the bounds, their logarithms rounded once from double, and beta."""
    return (low, high, delta, math.log(low) if low > 0.0 else -math.inf, math.log(high), math.log(delta), beta)
