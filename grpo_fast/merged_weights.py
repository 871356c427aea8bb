"""The policy's weights as a plain model has them: for an engine that samples, for a copy, for a file.

Where LoRA is on a layer its weight is W + scaling * B A, summed in float32; the policy itself stays as it is, bit by
bit. Names are those of the model without adapters.
"""

import copy
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grpo_fast.heads import UnsupportedHead, head_weight
from grpo_fast.lora import adapter_layers, has_adapters, inner_model
from grpo_fast.modes import evaluation_mode


def merged_weights(model: nn.Module, *, strict: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every parameter and saved buffer, one at a time; a tied one once, under its first name.

    Args:
        model: a causal language model, with or without peft's adapters.
        strict: refuse adapters that are no sum with a weight (DoRA, IA3, prompt tuning, ...); else their layers keep
            their parts and names.

    Yields:
        tensors without a graph, of the weight's dtype. What no adapter changed is the policy's own storage: read it,
        or copy it, before the next optimizer step.

    Raises:
        ValueError: an adapter that cannot be merged, with the layer's name.
    """
    model, seen = inner_model(model), set()
    _check_wrapper(model, strict)
    with evaluation_mode(model):
        for name, module, merged in _parts(model, "", strict):
            tensors = dict(module.named_parameters(recurse=False)) if merged is None else merged
            for key, tensor in [*tensors.items(), *_saved_buffers(module)]:
                if id(tensor) not in seen:
                    yield f"{name}{key}", tensor.detach()
                if isinstance(tensor, nn.Parameter):  # it lives on, its id cannot become another's
                    seen.add(id(tensor))


def frozen_copy(model: nn.Module, dtype: torch.dtype | None = None, *, strict: bool = False) -> nn.Module:
    """A plain model with the weights the model has now, in eval mode and without gradients.

    Weights are cast one by one, so that no second copy in the model's own dtype ever exists. Buffers stay as they
    are: rotary frequencies rounded to bfloat16 would move far positions. An adapter on one side of a tied head unties
    the copy's.

    Args:
        model: a causal language model, with or without peft's adapters.
        dtype: of the copy's parameters; None: their own.
        strict: as for `merged_weights`.
    """
    model, memo = inner_model(model), {}
    _check_wrapper(model, strict)

    def cast(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor.detach().to(dtype or tensor.dtype, copy=True), requires_grad=False)

    with evaluation_mode(model):
        for _, module, merged in _parts(model, "", strict):
            if merged is None:
                memo |= {id(p): cast(p) for p in module.parameters(recurse=False) if id(p) not in memo}
                continue
            layer = module.get_base_layer()
            memo[id(module)] = plain = copy.deepcopy(layer, {id(p): p for p in layer.parameters()})
            for key, tensor in merged.items():
                setattr(plain, key, cast(tensor))
    memo |= {id(m): copy.deepcopy(_in_use(m), memo) for m in model.modules() if _in_use(m) is not m}
    plain = copy.deepcopy(model, memo).eval()
    if adapter_layers(model) and not adapter_layers(plain):
        plain._hf_peft_config_loaded = False
        vars(plain).pop("peft_config", None)
    if unties(model):
        plain.config.tie_word_embeddings = plain.config.get_text_config().tie_word_embeddings = False
    return plain


def unties(model: nn.Module) -> bool:
    """Whether merging gives a head another weight than the embedding that it shares one with."""
    model = inner_model(model)
    if not hasattr(model, "get_output_embeddings") or (head := model.get_output_embeddings()) is None:
        return False
    layers = (model.get_input_embeddings(), head)
    bases = [layer.get_base_layer() if has_adapters(layer) else layer for layer in layers]
    shared = getattr(bases[0], "weight", None) is getattr(bases[1], "weight", ())
    return shared and any(map(has_adapters, layers))


def _parts(module: nn.Module, name: str, strict: bool) -> Iterator[tuple[str, nn.Module, dict[str, Tensor] | None]]:
    """Every module of the plain model: the prefix of its tensors' names, itself, and its tensors if they are merged."""
    module = _in_use(module)
    merged = _merged(module, name, strict) if has_adapters(module) else None
    yield name, module, merged
    if merged is None:
        for key, child in module.named_children():
            yield from _parts(child, f"{name}{key}.", strict)


@torch.no_grad()
def _merged(layer: nn.Module, name: str, strict: bool) -> dict[str, Tensor] | None:
    """Weight and bias of the layer without adapters that does what this one does; None if there is none."""
    base = layer.get_base_layer()
    try:
        weight, bias = head_weight(layer)
    except UnsupportedHead as refusal:
        if strict:
            raise ValueError(f"model: expected adapters that can be merged, got {name[:-1]}: {refusal}") from refusal
        return None
    if isinstance(base, getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())):
        weight = weight.t().contiguous()  # such a layer has it as [in, out]
    merged = {"weight": weight.to(base.weight.dtype)}
    return merged if bias is None else merged | {"bias": bias.to(base.weight.dtype)}


def _check_wrapper(model: nn.Module, strict: bool) -> None:
    peft = sys.modules.get("peft")
    if strict and peft is not None and isinstance(model, peft.PeftModel):
        kind = type(model.base_model).__name__
        raise ValueError(f"model: expected a plain model or LoRA's PeftModel, got one around a {kind}")


def _in_use(module: nn.Module) -> nn.Module:
    """The module itself, or of peft's wrapper of one that is trained whole (modules_to_save) the one that runs."""
    if not isinstance(module, getattr(sys.modules.get("peft.utils.other"), "ModulesToSaveWrapper", ())):
        return module
    names = [] if module.disable_adapters else module.active_adapters
    return module.modules_to_save[names[0]] if names else module.original_module


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    skipped = module._non_persistent_buffers_set
    return (item for item in module.named_buffers(recurse=False) if item[0] not in skipped)
