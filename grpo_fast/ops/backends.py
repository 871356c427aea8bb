"""Which code does the vocabulary-sized work. A backend is four functions on [B,T,V] logits and [B,T] vectors:

    row_stats(logits, ids, valid, logps, entropy|None, row_max, row_sum, temperature, softcap, logit_scale)
    row_grad(logits, ids, valid, row_max, row_sum, logps, entropy|None, g, g_entropy|None, out, temperature, ...)
    grpo_loss(logits, ids, valid, advantages, weights|None, old_logps|None, ref_logps|None, coef, entropy_scale|None,
              losses, logps, entropy|None, out, temperature, softcap, logit_scale, clip_low, clip_high, delta,
              beta, bias_correction)
    scale_(grad, scale)

All write into what they are given; `out` may be `logits`. row_stats makes (max, sum) for row_grad of the same backend.
A backend may refuse a problem, with the reason; it never changes what a name means.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

# cuda is not chosen by itself: it has not been run on a GPU yet.
BACKENDS = ("triton", "cuda", "cpu", "reference")
_FUNCTIONS = ("row_stats", "row_grad", "grpo_loss", "scale_")


def available_backends() -> dict[str, str | None]:
    """Name -> None, or the reason why the backend cannot be used in this process."""
    return {name: unavailable_reason(name) for name in BACKENDS}


@functools.cache
def functions(name: str) -> SimpleNamespace:
    """The four functions of a backend that is available."""
    if name in _MODULES:
        _load_extension(name)
        namespace = getattr(torch.ops, f"grpo_fast_{name}")
        return SimpleNamespace(**{f: getattr(namespace, f).default for f in _FUNCTIONS})
    if name == "triton":
        from grpo_fast.kernels import grpo_loss, row_grad, row_stats, scale

        return SimpleNamespace(
            row_stats=row_stats.row_stats,
            row_grad=row_grad.row_grad,
            grpo_loss=grpo_loss.grpo_loss,
            scale_=scale.scale_,
        )
    assert name == "reference", f"backend {name} has no functions here"
    from grpo_fast.ops import reference

    return SimpleNamespace(row_stats=reference.row_stats, row_grad=reference.row_grad, scale_=reference.scale_)


_MODULES = {"cpu": "_C", "cuda": "_cuda"}


@functools.cache
def _load_extension(name: str) -> None:
    (path,) = _extension_paths(name)
    torch.ops.load_library(path)


def _extension_paths(name: str) -> list[Path]:
    return sorted(Path(__file__).parents[1].glob(f"{_MODULES[name]}*.so"))[:1]


@functools.cache
def unavailable_reason(name: str) -> str | None:
    """None where the backend can be used, else one line that says why not."""
    if name == "reference":
        return None
    if name in _MODULES:
        return _unloadable(name) or (None if name == "cpu" else _unfit_gpu())
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available() and not _interpreted():
            return "no CUDA device (TRITON_INTERPRET=1 runs the kernels, slowly, on the CPU)"
        return None if _interpreted() else _unwritable_cache()
    raise ValueError(f"backend: expected None or one of {', '.join(BACKENDS)}, got {name!r}")


def _unloadable(name: str) -> str | None:
    if not _extension_paths(name):
        return {
            "cpu": "the C++ extension was not built (no compiler at install time?); reinstall with one",
            "cuda": "it was not built; reinstall with a CUDA build of torch and the nvcc of its CUDA",
        }[name]
    try:
        _load_extension(name)
    except OSError as error:
        return f"the extension does not load: {error}"
    return None


def _unfit_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 0) else f"needs a GPU of compute capability 8.0, got {capability}"


def _unwritable_cache() -> str | None:
    """Triton writes every kernel it compiles to a folder; where it cannot, say so before a step has been paid for."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton"))
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if os.access(there, os.W_OK):
        return None
    return f"Triton cannot write its cache in {folder}; set TRITON_CACHE_DIR to a folder that is writable"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@torch.compiler.assume_constant_result
def choose(backend: str | None, device_type: str, dtype_name: str) -> str:
    """The backend to use for tensors of this device type and dtype.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a known backend that cannot serve these tensors, with the reason.
    """
    if backend is not None:
        reason = unavailable_reason(backend) or _refusal(backend, device_type, dtype_name)
        if reason:
            raise NotImplementedError(f'backend="{backend}": {reason}')
        return backend
    if dtype_name in ("float32", "bfloat16", "float16"):
        first = {"cuda": "triton", "cpu": "cpu"}.get(device_type)
        if first and unavailable_reason(first) is None:
            return first
        if first:
            _say_once(f"grpo_fast: the reference backend answers, since {first} cannot: {unavailable_reason(first)}")
    return "reference"


def _refusal(backend: str, device_type: str, dtype_name: str) -> str | None:
    if backend == "reference":
        return None
    if dtype_name not in ("float32", "bfloat16", "float16"):
        return f"{dtype_name} is served by the reference backend only"
    serves = {"cpu": ("cpu",), "cuda": ("cuda",), "triton": ("cuda", "cpu") if _interpreted() else ("cuda",)}[backend]
    if device_type not in serves:
        return f"needs tensors on {' or '.join(serves)}, got {device_type}"
    return None


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
