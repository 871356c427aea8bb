"""Linear layers with their weights in the order that oneDNN multiplies a few rows by: decoding on a CPU.

torch's own product reads the weights as they lie, and on few rows comes to less than half of the speed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

_MOST_ROWS = 256  # more are as fast without
_LEAST_WEIGHTS = 2**16  # fewer are too


@contextmanager
def packed_linears(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside, the model's float32 linear layers on a CPU multiply few rows by packed copies of their weights.

    Weights must not change inside, and nothing has a gradient. It costs a copy of the weights, time and memory.

    Args:
        model: with any linear layers; those with a forward of their own, and other kinds, stay as they are.
        rows: how many there will be, about.
    """
    layers = []
    if torch.backends.mkldnn.is_available() and not torch.is_autocast_enabled("cpu"):
        layers = [module for module in model.modules() if _can_be_packed(module)]
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), min(rows, _MOST_ROWS))
            layer.forward = partial(_forward, layer, packed)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _can_be_packed(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous()
    return plain and weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= _LEAST_WEIGHTS


def _forward(layer: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() > _MOST_ROWS * layer.in_features or x.dtype != torch.float32:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, layer.bias, "none", [], "")
