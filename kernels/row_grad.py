"""Row gradient: dL/dlogits of a row from dL/dlogp and dL/dentropy, in place or not."""

import triton
import triton.language as tl

from grpo_fast.kernels.launch import Transform, aligned, launch_shape, on_device
from grpo_fast.kernels.primitives import load_target, locate, write_gradient, write_zeros

DYNAMIC = ["T", "V", "stride_b", "stride_t", "out_stride_b", "out_stride_t"]


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=["logits", "out"])
def _row_grad_kernel(logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, out,
                     T, V, stride_b, stride_t, out_stride_b, out_stride_t, transform,
                     ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    x, V = locate(logits, row, T, V, stride_b, stride_t, ALIGNED)
    d, V = locate(out, row, T, V, out_stride_b, out_stride_t, OUT_ALIGNED)
    live = tl.load(valid + row) != 0
    row_g = tl.load(g + row)
    row_entropy, row_g_entropy = 0.0, 0.0
    if g_entropy is None:
        live = live & (row_g != 0.0)
    else:
        row_entropy = tl.load(entropy + row)
        row_g_entropy = tl.load(g_entropy + row)
    if live:
        token_id = tl.load(ids + row)
        x_y, _ = load_target(x, token_id, V)
        write_gradient(
            x, d, V, token_id, x_y, tl.load(logps + row), row_entropy, tl.load(row_max + row), tl.load(row_sum + row),
            row_g, row_g_entropy, transform, g_entropy is not None, BLOCK,
        )  # fmt: skip
    else:
        write_zeros(d, V, BLOCK)


def row_grad(
    logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, out, temperature, softcap, logit_scale
):
    """Write dL/dlogits into `out`, which may be `logits`, given g = dL/dlogp and g_entropy = dL/dentropy (or None).

    Arguments as row_stats wrote them; g and g_entropy [B, T] fp32; out [B, T, V] in the logits' dtype, unit last
    stride. entropy is read only with g_entropy. Rows that are masked, or have g == 0 and no g_entropy, are zeroed
    without being read.
    """
    if valid.numel() == 0:
        return
    transform = Transform.of(temperature, softcap, logit_scale)
    B, T, V = logits.shape
    with on_device(logits):
        _row_grad_kernel[(B * T,)](
            logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, out,
            T, V, logits.stride(0), logits.stride(1), out.stride(0), out.stride(1), transform,
            ALIGNED=aligned(logits), OUT_ALIGNED=aligned(logits, out), **launch_shape(logits),
        )  # fmt: skip
