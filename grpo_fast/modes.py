"""The mode a model runs in: no dropout in rollout, reference and update, or the first ratio is not 1."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside: no dropout, and no gradient checkpointing, which would switch the cache off."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def update_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, except for layers with gradient checkpointing, which would not checkpoint in it."""
    with evaluation_mode(model):
        saved = []
        for layer in model.modules():
            if not getattr(layer, "gradient_checkpointing", False):
                continue
            layer.training = True
            for name, value in vars(
                layer
            ).items():  # some layers call F.dropout(p=self.dropout, training=self.training)
                if "dropout" in name and isinstance(value, float):
                    saved.append((layer, name, value))
        for layer, name, _ in saved:
            setattr(layer, name, 0.0)
        try:
            yield
        finally:
            for layer, name, value in saved:
                setattr(layer, name, value)


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute the activations of the model's layers in the backward."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in newer versions of transformers
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
