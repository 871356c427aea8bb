"""The machine a run meets: what `grpo-fast env` prints, and what a run refuses before it loads anything."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from grpo_fast import parallel
from grpo_fast.config import GRPOConfig
from grpo_fast.lora import require_peft
from grpo_fast.ops.backends import available_backends, choose
from grpo_fast.rollout.engines import require_vllm

_PACKAGES = ("grpo-fast", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
_OPTIONAL = ("matplotlib", "gguf", "datasets", "pyarrow", "tensorboard", "peft", "trl", "vllm")


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


def default_device() -> torch.device:
    """The current GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_environment(args: GRPOConfig, device: torch.device | None = None) -> None:
    """Refuses settings that this machine cannot serve. Reads no data and no model.

    Args:
        args: the configuration of the run.
        device: where the model is; None: where it would be loaded to.

    Raises:
        ValueError: WORLD_SIZE without torchrun's other variables, a loss.backend that cannot be used here, with the
            reason, rollout.cuda_graphs without a GPU, or several processes with an engine that is for one.
        ImportError: a package that lora.r, rollout.engine or log.report_to needs is not installed.
    """
    parallel.check_environment()
    if args.loss.backend is not None:
        dtype = "float32" if args.model.dtype == "auto" else args.model.dtype  # backends treat the two alike
        try:
            choose(args.loss.backend, (device or default_device()).type, dtype)
        except NotImplementedError as error:
            raise ValueError(f"loss.{error}. Set loss.backend=null for the best one here") from error
    if args.lora.r:
        require_peft("lora.r")
    if args.rollout.cuda_graphs and (device or default_device()).type != "cuda":
        raise ValueError("rollout.cuda_graphs: expected a GPU, got none. Set rollout.cuda_graphs=false")
    if args.rollout.engine == "vllm":
        require_vllm("rollout.engine")
    if "tensorboard" in args.log.report_to and find_spec("tensorboard") is None:
        raise ImportError("log.report_to: tensorboard is not installed: pip install 'grpo-fast[tensorboard]'")
