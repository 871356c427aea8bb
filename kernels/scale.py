"""grad *= scale, skipped on the device where scale is 1."""

import triton
import triton.language as tl

from grpo_fast.kernels.launch import launch_shape, on_device
from grpo_fast.kernels.primitives import aligned, edge_columns, row_body, row_start


@triton.jit(do_not_specialize=["T", "V", "stride_b", "stride_t"], do_not_specialize_on_alignment=["grad"])
def _scale_kernel(grad, scale, T, V, stride_b, stride_t, BLOCK: tl.constexpr):
    factor = tl.load(scale)
    if factor != 1.0:
        row = row_start(grad, tl.program_id(0), T, stride_b, stride_t)
        head, body = row_body(row, V)
        columns, mask = edge_columns(row, head, body, V)
        edge = tl.load(row + columns, mask=mask).to(tl.float32) * factor
        tl.store(row + columns, edge.to(grad.dtype.element_ty), mask=mask)
        lanes = tl.arange(0, BLOCK)
        base = aligned(row, head)
        for start in range(0, body, BLOCK):
            left = lanes < body - start
            x = tl.load(base + start + lanes, mask=left).to(tl.float32) * factor
            tl.store(base + start + lanes, x.to(grad.dtype.element_ty), mask=left)


def scale_(grad, scale):
    """Multiply grad [B, T, V] (unit last stride) in place by scale, a 0-d fp32 tensor on its device; no host sync."""
    if grad.numel() == 0:
        return
    B, T, V = grad.shape
    with on_device(grad):
        _scale_kernel[(B * T,)](grad, scale, T, V, grad.stride(0), grad.stride(1), **launch_shape(grad))
