"""What `grpo-fast env` prints: versions, devices, and which backends can be used here."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from grpo_fast.ops.backends import available_backends

_PACKAGES = ("grpo-fast", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
_OPTIONAL = ("matplotlib", "gguf", "datasets", "pyarrow", "tensorboard", "trl", "liger-kernel")


def describe_environment() -> str:
    """Returns the report as text."""
    return "\n".join(f"{name:18} {value}" for name, value in _facts())


def _facts() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _PACKAGES:
        yield name, _version(name) or "not installed"
    optional = {name: _version(name) for name in _OPTIONAL}
    yield "optional", ", ".join(f"{name} {found}" for name, found in optional.items() if found) or "none"
    yield "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{index}", f"{properties.name}, {memory}, compute {properties.major}.{properties.minor}"
    for name, reason in available_backends().items():
        yield f"backend {name}", "available" if reason is None else f"unavailable: {reason}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
