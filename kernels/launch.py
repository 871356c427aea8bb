"""Launch choices and arguments common to the row kernels. Host code only."""

import contextlib
import math
from typing import NamedTuple

import torch

# (row bytes up to, block in elements, warps, registers a thread). A row is read twice, the second time from L2, so the
# rows in flight on the whole device must fit there (50 MB on an H100): the longer the row, the fewer and wider the
# programs of a multiprocessor. 16 elements a thread keep 32 bytes of a 16-bit dtype in flight. Chosen by this
# arithmetic, not timed. The widest says what registers it may use, or ptxas spills to fit two programs.
LAUNCHES = (
    (8 << 10, 2048, 4, None),
    (32 << 10, 4096, 8, None),
    (96 << 10, 8192, 16, None),
    (math.inf, 16384, 32, 64),
)

# Contracting a*b + c is wanted; Triton is about to change its default, so every launch says so.
OPTIONS = {"enable_fp_fusion": True}


class Transform(NamedTuple):
    """logits -> z/temperature as the kernels want it: see primitives.cap and primitives.exponents."""

    k: float
    slope: float
    softcap: float | None
    cap_slope: float | None

    @classmethod
    def of(cls, temperature, softcap, logit_scale):
        slope = logit_scale / temperature
        if softcap == 0.0:
            return cls(slope * math.log2(math.e), slope, None, None)
        return cls(math.log2(math.e) / temperature, slope, softcap, logit_scale / softcap)


def launch_shape(logits):
    """Keyword arguments of a launch over rows of this length."""
    row_bytes = logits.shape[-1] * logits.element_size()
    block, warps, registers = next(choice for limit, *choice in LAUNCHES if row_bytes <= limit)
    return {"BLOCK": block, "num_warps": warps, "maxnreg": registers, **OPTIONS}


def aligned(*tensors):
    """Whether all rows of [B, T, V] tensors start on 16 bytes and hold whole 16-byte vectors: see primitives.locate."""
    return all(
        tensor.data_ptr() % 16 == 0
        and all(n * tensor.element_size() % 16 == 0 for n in (tensor.shape[2], tensor.stride(0), tensor.stride(1)))
        for tensor in tensors
    )


def on_device(tensor):
    """Launch on the tensor's device, whatever the current one is. CPU tensors only occur in Triton's interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
