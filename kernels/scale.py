"""grad *= scale, skipped on the device where scale is 1."""

import triton
import triton.language as tl

from grpo_fast.kernels.launch import aligned, launch_shape, on_device
from grpo_fast.kernels.primitives import locate


@triton.jit(do_not_specialize=["T", "V", "stride_b", "stride_t"], do_not_specialize_on_alignment=["grad"])
def _scale_kernel(grad, scale, T, V, stride_b, stride_t, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(scale)
    if factor != 1.0:
        row, V = locate(grad, tl.program_id(0), T, V, stride_b, stride_t, ALIGNED)
        lanes = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            mask = lanes < V - start
            x = tl.load(row + start + lanes, mask=mask).to(tl.float32) * factor
            tl.store(row + start + lanes, x.to(grad.dtype.element_ty), mask=mask)


def scale_(grad, scale):
    """Multiply grad [B, T, V] (unit last stride) in place by scale, a 0-d fp32 tensor on its device; no host sync."""
    if grad.numel() == 0:
        return
    B, T, V = grad.shape
    with on_device(grad):
        _scale_kernel[(B * T,)](
            grad, scale, T, V, grad.stride(0), grad.stride(1), ALIGNED=aligned(grad), **launch_shape(grad)
        )
