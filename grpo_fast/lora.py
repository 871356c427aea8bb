"""LoRA by peft (Hu et al. 2021, arXiv 2106.09685): adding adapters, finding them, switching them off for a while.

peft is looked up, not imported, except to add adapters: without it no model has any.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_fast.config import LoraConfig


def require_peft(key: str) -> None:
    """Refuses `key`, which asks for adapters, where peft is not installed: an ImportError."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{key}: peft is not installed: pip install 'grpo-fast[peft]'")


def saved_adapter(path: str) -> dict | None:
    """adapter_config.json of the folder `path`, as peft saves it; None if that is no adapter's folder."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def add_lora(model: PreTrainedModel, options: LoraConfig, seed: int) -> nn.Module:
    """The model in peft's wrapper, its own weights frozen, with adapters that change nothing yet.

    Adapters of a bfloat16 model are float32, peft's default: AdamW's small steps would be lost in bfloat16.

    Args:
        model: changed in place.
        options: r is at least 1.
        seed: of the adapters' A; B is zero.

    Raises:
        ValueError: the model has adapters already, or no layer of a name in `target_modules`.
    """
    import peft

    if adapter_layers(model):
        raise ValueError(f"lora.r: expected a model without adapters, got one that has some. Set 0, not {options.r}")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.r,
        lora_alpha=2 * options.r if options.alpha is None else options.alpha,
        target_modules=options.target_modules,
        use_rslora=options.use_rslora,
    )
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU, wherever the model is
        torch.default_generator.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(f"lora.target_modules: {error}") from error


def inner_model(model: nn.Module) -> nn.Module:
    """The model within peft's wrapper for LoRA, which only passes calls on: the adapters are in the layers.

    aLoRA's wrapper does more, it looks for where an adapter begins, and so do those of other methods: they stay.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel) or type(model.base_model) is not peft.LoraModel:
        return model
    if any(getattr(config, "alora_invocation_tokens", None) for config in model.peft_config.values()):
        return model
    return model.base_model.model


def has_adapters(layer: nn.Module) -> bool:
    """Whether this very layer is one that peft put in another's place, for LoRA or another method."""
    return isinstance(layer, getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ()))


def adapter_layers(model: nn.Module) -> list[nn.Module]:
    """Every layer of the model that has adapters."""
    return [module for module in model.modules() if has_adapters(module)]


def adapters_change_nothing(model: nn.Module) -> bool:
    """Whether adapters are all that `model` trains, and switched off would leave it what it is now: B is zero."""
    lora = getattr(sys.modules.get("peft.tuners.lora.layer"), "LoraLayer", ())
    layers = adapter_layers(model)
    if not layers or not all(isinstance(layer, lora) and not layer.merged for layer in layers):
        return False
    adapters = {
        id(p): ("_B." in name, p) for layer in layers for name, p in layer.named_parameters() if "lora_" in name
    }
    if any(parameter.requires_grad and id(parameter) not in adapters for parameter in model.parameters()):
        return False
    return not any(is_b and parameter.any() for is_b, parameter in adapters.values())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, layers with adapters do what they did without them."""
    # peft changes what requires grad with the switch, and does not remember what did.
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    layers = [layer for layer in adapter_layers(model) if not layer.disable_adapters]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, required in flags:
            parameter.requires_grad_(required)
