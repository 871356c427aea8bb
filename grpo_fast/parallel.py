"""Plain data parallelism: every process has the whole model and its share of a step's prompts.

Losses are sums over a step divided by denominators of the whole step, so gradients are summed over processes, once an
optimizer step and not once a micro-batch. A process alone is one of one, and then nothing here communicates.
"""

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.types import LossMetrics

T = TypeVar("T")
_BUCKET_ELEMENTS = 2**24  # gradients are summed in flat pieces of about this size


def world_size() -> int:
    """Processes in the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is."""
    return dist.get_rank() if world_size() > 1 else 0


def check_environment() -> None:
    """Refuse a WORLD_SIZE without what the processes need to meet.

    Raises:
        ValueError: naming what torchrun would have set.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE: expected 1, or torchrun's {', '.join(missing)} beside {os.environ['WORLD_SIZE']}, got none. "
            "Start with torchrun --nproc-per-node=N -m grpo_fast train RECIPE"
        )


def check_model(model: nn.Module) -> None:
    """Refuse a model in a wrapper that would reduce gradients, too (a ValueError)."""
    if isinstance(getattr(model, "module", None), nn.Module):
        raise ValueError(
            f"model: expected the bare model, got one wrapped in {type(model).__name__}. Pass model.module: the "
            "trainer sums gradients over the processes that torchrun starts"
        )


def join(device_type: str) -> None:
    """Meet the other processes that torchrun started, unless that has happened.

    Args:
        device_type: where the model is; for "cuda", the process takes the GPU of its LOCAL_RANK.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


def leave() -> None:
    """Part from the other processes, all at once: whoever ends alone leaves threads that wait for the others.

    A group of one process is not touched: vLLM makes one, and ends it itself.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
        dist.destroy_process_group()


def share(items: Sequence[T]) -> list[T]:
    """This process's part of what all processes have alike: every world_size-th, sizes differ by one at most."""
    return list(items[rank() :: world_size()])


def gather(value: T) -> list[T]:
    """Every process's value, in the order of ranks; plain data, as it is pickled."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_counts(*counts: int) -> list[int]:
    """Each count summed over processes."""
    return [sum(column) for column in zip(*gather(counts), strict=True)]


def reduce(tensor: Tensor, operation: str = "sum") -> Tensor:
    """The sum, "max" or "min" over processes, elementwise, as a new tensor.

    It travels in float64: what a process had nothing to compute for may have another dtype than the others'.
    """
    if world_size() == 1:
        return tensor
    summed = tensor.detach().to(torch.float64, copy=True)
    dist.all_reduce(summed, getattr(dist.ReduceOp, operation.upper()))
    return summed.to(tensor.dtype)


def broadcast(model: nn.Module) -> None:
    """Give every process the weights and buffers of the first."""
    if world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients over processes, in place; one that some process has and another lacks counts as 0 there."""
    if world_size() == 1:
        return
    parameters = list(parameters)
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    bucket: list[Tensor] = []
    for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
        if not somewhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (bucket[0].dtype != parameter.grad.dtype or _elements(bucket) > _BUCKET_ELEMENTS):
            _sum_flat(bucket)
            bucket = []
        bucket.append(parameter.grad)
    _sum_flat(bucket)


def _elements(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _sum_flat(tensors: list[Tensor]) -> None:
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_metrics(metrics: LossMetrics) -> LossMetrics:
    """Of all processes together."""
    return LossMetrics(reduce(metrics.sums), reduce(metrics.ratio_min, "min"), reduce(metrics.ratio_max, "max"))
