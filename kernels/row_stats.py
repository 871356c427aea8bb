"""Row statistics: log-probability of the target, entropy, and what row_grad needs to form the softmax again."""

import triton
import triton.language as tl

from grpo_fast.kernels.launch import Transform, aligned, launch_shape, on_device
from grpo_fast.kernels.primitives import load_target, locate, statistics

DYNAMIC = ["T", "V", "stride_b", "stride_t"]


@triton.jit(do_not_specialize=DYNAMIC, do_not_specialize_on_alignment=["logits"])
def _row_stats_kernel(logits, ids, valid, logps, entropy, row_max, row_sum, T, V, stride_b, stride_t,
                      transform, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    logp, row_entropy, reference, e_sum = 0.0, 0.0, 0.0, 1.0
    if tl.load(valid + row) != 0:
        x, V = locate(logits, row, T, V, stride_b, stride_t, ALIGNED)
        x_y, _ = load_target(x, tl.load(ids + row), V)
        reference, e_sum, logp, row_entropy = statistics(x, V, x_y, transform, entropy is not None, ALIGNED, BLOCK)
    tl.store(logps + row, logp)
    tl.store(row_max + row, reference)
    tl.store(row_sum + row, e_sum)
    if entropy is not None:
        tl.store(entropy + row, row_entropy)


def row_stats(logits, ids, valid, logps, entropy, row_max, row_sum, temperature, softcap, logit_scale):
    """Write a row's log p(ids), entropy and softmax reference, in nats.

    logits [B, T, V] fp32, bf16 or fp16, unit last stride; ids [B, T] int64; valid [B, T] uint8. Outputs [B, T] fp32;
    entropy may be None. p_j = e^((z_j - row_max)/temperature) / row_sum, where row_max is the target's z or, where
    that would lose digits, the maximum. Masked rows: 0, 0, 0, 1, without reading them. An id outside [0, V): NaN.
    """
    if valid.numel() == 0:
        return
    transform = Transform.of(temperature, softcap, logit_scale)
    B, T, V = logits.shape
    with on_device(logits):
        _row_stats_kernel[(B * T,)](
            logits, ids, valid, logps, entropy, row_max, row_sum, T, V, logits.stride(0), logits.stride(1),
            transform, ALIGNED=aligned(logits), **launch_shape(logits),
        )  # fmt: skip
