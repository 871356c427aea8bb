"""The operations of csrc/cuda on tensors of the CPU, called like torch.ops.grpo_fast_cpu.

`on_host` executes their source on the CPU (cuda_on_host/cuda_on_host.h), `on_gpu` calls the extension on a GPU.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from ctypes import Structure, byref, c_bool, c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from grpo_fast.ops import backends

HERE = Path(__file__).parent / "cuda_on_host"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Rows(Structure):
    _fields_ = (
        ("data", c_void_p), ("T", c_int64), ("V", c_int64), ("stride_b", c_int64), ("stride_t", c_int64),
        ("dtype", c_int),
    )  # fmt: skip

    @classmethod
    def of(cls, x):
        size = x.element_size()
        return cls(x.data_ptr(), x.shape[1], x.shape[2], x.stride(0) * size, x.stride(1) * size, DTYPES[x.dtype])


class Tokens(Structure):
    _fields_ = (("ids", c_void_p), ("valid", c_void_p), ("n", c_int64))


class Scaling(Structure):
    _fields_ = (("temperature", c_double), ("softcap", c_double), ("logit_scale", c_double))


def _pointers(*tensors):
    """A struct of pointers, null where there is no tensor."""
    return (c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


class CudaOnHost:
    """As on a device of this compute capability, with so much shared memory for a block."""

    def __init__(self, library, capability, shared_bytes):
        self._library, self._device = library, (capability, shared_bytes)

    def _call(self, name, *arguments):
        self._library.set_device(*self._device)
        message = getattr(self._library, name)(*arguments)
        if message:
            raise RuntimeError(message.decode())

    @property
    def last_cluster(self):
        """Blocks of a cluster, and threads of a block, in the last launch."""
        return self._library.last_cluster(), self._library.last_threads()

    @property
    def last_bytes(self):
        """Read from and written to device memory in the last launch, in whole vectors and bulk copies."""
        return self._library.last_bytes_read(), self._library.last_bytes_written()

    def row_stats(self, logits, ids, valid, logps, entropy, row_max, row_sum, *scaling):
        tokens = Tokens(ids.data_ptr(), valid.data_ptr(), ids.numel())
        args = _pointers(logps, entropy, row_max, row_sum)
        self._call("row_stats", byref(Rows.of(logits)), byref(tokens), args, byref(Scaling(*scaling)))

    def row_grad(self, logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, out, *scaling):
        tokens = Tokens(ids.data_ptr(), valid.data_ptr(), ids.numel())
        args = _pointers(row_max, row_sum, logps, entropy, g, g_entropy)
        self._call(
            "row_grad", byref(Rows.of(logits)), byref(tokens), args, byref(Rows.of(out)), byref(Scaling(*scaling))
        )

    def grpo_loss(
        self, logits, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale, losses, logps,
        entropy, out, temperature, softcap, logit_scale, clip_low, clip_high, delta, beta, bias_correction,
    ):  # fmt: skip
        tokens = Tokens(ids.data_ptr(), valid.data_ptr(), ids.numel())
        args = _pointers(advantages, weights, old_logps, ref_logps, coef, entropy_scale, losses, logps, entropy)
        self._call(
            "grpo_loss", byref(Rows.of(logits)), byref(tokens), args, byref(Rows.of(out)),
            byref(Scaling(temperature, softcap, logit_scale)), *map(c_double, (clip_low, clip_high, delta, beta)),
            c_bool(bias_correction),
        )  # fmt: skip

    def scale_(self, grad, scale):
        self._call("scale", byref(Rows.of(grad)), c_int64(grad.shape[0] * grad.shape[1]), c_void_p(scale.data_ptr()))


@functools.cache
def _library():
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.so"
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-DGRPO_FAST_CUDA_ON_HOST"]
        subprocess.run(
            [compiler, *flags, f"-I{HERE}", "-x", "c++", str(HERE / "rows.cpp"), "-o", str(path)], check=True
        )
        library = ctypes.CDLL(str(path))
    for name in ("last_bytes_read", "last_bytes_written"):
        getattr(library, name).restype = c_int64
    for name in ("row_stats", "row_grad", "grpo_loss", "scale"):
        getattr(library, name).restype = c_char_p
    return library


def on_host(capability, shared_bytes=227 << 10):
    """The operations as on a device of this compute capability; None without a C++ compiler."""
    library = _library()
    return None if library is None else CudaOnHost(library, capability, shared_bytes)


class CudaOnGpu:
    """Every tensor goes there with all of its memory, so that it lies as it did, and comes back."""

    def __getattr__(self, name):
        operation = getattr(torch.ops.grpo_fast_cuda, name)

        def call(*arguments):
            storages = {}

            def there(x):
                if not torch.is_tensor(x):
                    return x
                here = x.untyped_storage()
                _, moved = storages.setdefault(here.data_ptr(), (here, here.cuda()))
                return torch.empty(0, dtype=x.dtype, device="cuda").set_(moved, x.storage_offset(), x.shape, x.stride())

            operation(*map(there, arguments))
            for here, moved in storages.values():
                here.copy_(moved)

        return call


def on_gpu():
    """The extension's operations; None where it cannot be used."""
    return CudaOnGpu() if backends.unavailable_reason("cuda") is None else None
