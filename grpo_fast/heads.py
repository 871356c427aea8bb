"""From a model's lm_head module to the weight and bias that the fused losses take.

A fused loss never calls the module: whatever the module does beyond a matrix product has to be in the weight, or be
refused. Classes of other packages are looked up, not imported: what is not loaded has no instances.

Letters: V vocabulary, D hidden, r rank of an adapter.
"""

import functools
import sys

import torch
from torch import Tensor, nn

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class UnsupportedHead(ValueError):
    """No weight says what a head does; `reason` says why not, without what to do."""

    def __init__(
        self,
        layer: nn.Module,
        why: str,
        remedy: str = "compute the logits with it, and the loss with grpo_loss or token_logprobs",
    ) -> None:
        self.reason = f"the {type(layer).__name__} {why}"
        super().__init__(f"layer: {self.reason}; {remedy}")


def _loaded(module: str, name: str) -> type | tuple:
    """A class for isinstance, () where its module is not loaded."""
    return getattr(sys.modules.get(module), name, ())


def _is_sharded(layer: nn.Module) -> bool:
    """Whether fully_shard was called on this very module."""
    return isinstance(layer, _loaded("torch.distributed.fsdp", "FSDPModule"))


def _runs(layer: nn.Module, kind: type | tuple) -> bool:
    """Whether calling `layer` runs the forward of `kind`: subclasses, and wrappers of one instance, may change it."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward and "forward" not in vars(layer)


def _whole(layer: nn.Module, name: str, sharded: bool) -> Tensor | None:
    """All of a parameter; of a DTensor only under fully_shard, where it is known what its gradient means."""
    tensor = getattr(layer, name)
    if not isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor")):
        return tensor
    if not sharded or tensor.device_mesh.ndim != 1 or not tensor.placements[0].is_shard():
        why = f"has a DTensor for its {name}, with placements {list(tensor.placements)}"
        remedy = (
            "compute the loss inside the forward of the module that fully_shard was called on, or call fully_shard on "
            "the head by itself (one-dimensional mesh), or gather it as the losses' error for a DTensor says"
        )
        raise UnsupportedHead(layer, why, remedy)
    from torch.distributed.tensor import Partial

    # Each rank's gradient is of its own data, and fully_shard averages.
    return tensor.full_tensor(grad_placements=[Partial("avg")])


def _linear(layer: nn.Module, sharded: bool) -> tuple[Tensor, Tensor | None]:
    conv1d = _loaded("transformers.pytorch_utils", "Conv1D")  # a linear layer with its weight as [D, V]
    if not _runs(layer, nn.Linear) and not _runs(layer, conv1d):
        raise UnsupportedHead(layer, "is not a plain linear layer")
    weight, bias = _whole(layer, "weight", sharded), _whole(layer, "bias", sharded)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if type(tensor) not in (Tensor, nn.Parameter, type(None)):
            raise UnsupportedHead(layer, f"has a {name} of type {type(tensor).__name__}, not a plain tensor")
    if weight.dtype not in _DTYPES or weight.dim() != 2:
        # Quantised, or sharded by something that gathers it only for the module's own forward.
        raise UnsupportedHead(layer, f"has a weight of {weight.dtype} {list(weight.shape)}, not floating-point [V, D]")
    return (weight if isinstance(layer, nn.Linear) else weight.t()), bias


def _add_adapter(layer: nn.Module, name: str, weight: Tensor, bias: Tensor | None, sharded: bool):
    """weight + scaling * B A, and the same of the biases, in float32 at least.

    A bf16 sum would lose all of an adapter that is below half a rounding step of the weight, as one in training is.
    """
    if name in layer.lora_variant:
        variant = type(layer.lora_variant[name]).__name__
        raise UnsupportedHead(layer, f"has adapter {name!r} with a {variant}, no plain LoRA")
    dropout = layer.lora_dropout[name]
    if dropout.training and not isinstance(dropout, nn.Identity):
        why = f"has adapter {name!r} with lora_dropout in training mode, which no weight can express"
        raise UnsupportedHead(layer, why, "set lora_dropout=0 or call layer.eval()")
    a, _ = _linear(layer.lora_A[name], sharded)  # [r, D]
    b, b_bias = _linear(layer.lora_B[name], sharded)  # [V, r]
    dtype = functools.reduce(torch.promote_types, (weight.dtype, a.dtype, b.dtype), torch.float32)
    scale = layer.scaling[name]
    with torch.autocast(weight.device.type, enabled=False):
        weight = torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=scale)
    if b_bias is not None:
        b_bias = b_bias.to(dtype) * scale
        bias = b_bias if bias is None else bias + b_bias
    return weight, bias


def _with_lora(layer: nn.Module, sharded: bool) -> tuple[Tensor, Tensor | None]:
    if layer.disable_adapters and layer.merged:
        why = "has adapters that are disabled but merged into its weight"
        raise UnsupportedHead(layer, why, "call layer.unmerge()")
    weight, bias = _resolve(layer.base_layer, sharded)
    if layer.disable_adapters or layer.merged:  # merged: peft leaves out active adapters that are not
        return weight, bias
    for name in layer.active_adapters:
        if name in layer.lora_A:
            weight, bias = _add_adapter(layer, name, weight, bias, sharded)
    return weight, bias


def _resolve(layer: nn.Module, sharded: bool) -> tuple[Tensor, Tensor | None]:
    sharded = sharded or _is_sharded(layer)
    if _runs(layer, _loaded("peft.tuners.lora.layer", "Linear")):
        return _with_lora(layer, sharded)
    if _runs(layer, _loaded("peft.utils.other", "ModulesToSaveWrapper")):
        active = [] if layer.disable_adapters else layer.active_adapters
        if not active or any(name not in layer.modules_to_save for name in active):
            return _resolve(layer.original_module, sharded)
        return _resolve(layer.modules_to_save[active[0]], sharded)
    return _linear(layer, sharded)


def head_weight(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight and bias with which the fused losses do what `layer` does: layer(h) == h @ weight.T + bias.

        weight, bias = grpo_fast.head_weight(model.get_output_embeddings())
        out = grpo_fast.linear_grpo_loss(hidden, weight, token_ids, advantages, mask, bias=bias)

    Call it anew for every loss: what it returns belongs to the graph of one backward, and adapters move.

    Args:
        layer: the module that makes logits of hidden states. Forward hooks on it do not run.
            * nn.Linear, or a subclass that keeps its forward (transformers' Conv1D too): its own weight and bias.
            * A LoRA layer of peft around one: W + scaling * B A over the active adapters (lora_bias likewise),
              differentiable in A and B, and in W where it is not frozen. W alone where adapters are merged or
              disabled. It takes one [V, D] in float32 (float64 with such a weight) for the sum, one for its gradient.
              With bf16 hidden states the losses' products are then in fp32, which a GPU does slowly: use autocast.
              Cast to bfloat16, by yourself or by autocast, the sum keeps no adapter smaller than half a step of W.
            * peft's modules_to_save: the module in use.
            * Any of them after `fully_shard(layer)` (FSDP2, one-dimensional mesh): the gathered weight. Gradients are
              averaged over the ranks, as fully_shard does unless set_gradient_divide_factor says otherwise: multiply
              a loss with a global denominator by the world size. A collective: every rank must call it, and backward.

    Returns:
        weight [V, D] and bias [V], or None.

    Raises:
        UnsupportedHead, a ValueError: no weight says what `layer` does, or what its gradient means to the ranks: a
            quantised weight, DoRA and other variants of LoRA, lora_dropout in training mode, trainable tokens, another
            kind of module, DTensors of a module that fully_shard was not called on.
    """
    if not isinstance(layer, nn.Module):
        raise ValueError(f"layer: expected the lm_head's module, got {type(layer).__name__}")
    if hasattr(layer, "get_output_embeddings"):
        raise UnsupportedHead(layer, "is a whole model", "pass its get_output_embeddings()")
    return _resolve(layer, False)
