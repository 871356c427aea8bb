"""GRPO loss and its gradient in one launch: row statistics, the injected objective, row gradient."""

import triton
import triton.language as tl

from grpo_fast.kernels.launch import Transform, aligned, launch_shape, on_device
from grpo_fast.kernels.objectives import clip, clip_params, clip_unbiased_kl
from grpo_fast.kernels.primitives import load_target, locate, statistics, write_gradient, write_zeros

DYNAMIC = ["T", "V", "stride_b", "stride_t", "out_stride_b", "out_stride_t"]


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=["logits", "out"])
def _grpo_loss_kernel(logits, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale,
                      losses, logps, entropy, out, T, V, stride_b, stride_t, out_stride_b, out_stride_t,
                      transform, constants, OBJECTIVE: tl.constexpr,
                      ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    d, V = locate(out, row, T, V, out_stride_b, out_stride_t, OUT_ALIGNED)
    loss, logp, row_entropy = 0.0, 0.0, 0.0
    live = tl.load(valid + row) != 0
    if live:
        x, V = locate(logits, row, T, V, stride_b, stride_t, ALIGNED)
        token_id = tl.load(ids + row)
        x_y, _ = load_target(x, token_id, V)
        HAS_ENTROPY: tl.constexpr = (entropy is not None) or (entropy_scale is not None)
        reference, e_sum, logp, row_entropy = statistics(x, V, x_y, transform, HAS_ENTROPY, ALIGNED, BLOCK)
        weight = 1.0 if weights is None else tl.load(weights + row)
        old = None if old_logps is None else tl.load(old_logps + row)
        ref = None if ref_logps is None else tl.load(ref_logps + row)
        loss, g = OBJECTIVE(logp, old, ref, tl.load(advantages + row), weight, constants)
        g *= tl.load(coef + row)
        g_entropy = 0.0
        if entropy_scale is None:
            live = g != 0.0
        else:
            g_entropy = -tl.load(entropy_scale)
        if live:
            write_gradient(
                x, d, V, token_id, x_y, logp, row_entropy, reference, e_sum,
                g, g_entropy, transform, entropy_scale is not None, BLOCK,
            )  # fmt: skip
    if not live:
        write_zeros(d, V, BLOCK)
    tl.store(losses + row, loss)
    tl.store(logps + row, logp)
    if entropy is not None:
        tl.store(entropy + row, row_entropy)


def grpo_loss(
    logits, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale, losses, logps, entropy, out,
    temperature, softcap, logit_scale, clip_low, clip_high, delta, beta, bias_correction,
):  # fmt: skip
    """Clipped GRPO losses per token, log-probs, and dL/dlogits of L = sum coef*losses - entropy_scale * sum entropy.

    logits [B, T, V] fp32, bf16 or fp16, unit last stride; ids [B, T] int64; valid [B, T] uint8; other vectors [B, T]
    fp32. weights, old_logps (None: ratio 1), ref_logps, entropy and entropy_scale (0-d fp32) may be None. losses =
    w*policy + beta*k3; clip_low, clip_high and delta (inf: off) bound the ratio. `out`, which may be `logits`, gets
    the gradient in the logits' dtype. Masked tokens give 0 everywhere; nothing else in their slots is used. An id
    outside [0, V) is not read and gives NaN. Formulas: objectives.py.
    """
    if valid.numel() == 0:
        return
    if beta == 0.0:
        ref_logps = None
    unbiased = bias_correction and ref_logps is not None
    transform = Transform.of(temperature, softcap, logit_scale)
    B, T, V = logits.shape
    with on_device(logits):
        _grpo_loss_kernel[(B * T,)](
            logits, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale,
            losses, logps, entropy, out,
            T, V, logits.stride(0), logits.stride(1), out.stride(0), out.stride(1), transform,
            clip_params(clip_low, clip_high, delta, beta), OBJECTIVE=clip_unbiased_kl if unbiased else clip,
            ALIGNED=aligned(logits), OUT_ALIGNED=aligned(logits, out), **launch_shape(logits),
        )  # fmt: skip
