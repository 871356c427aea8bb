"""The mode a model runs in: dropout is off in rollout, reference and update alike, or the first ratio would not be 1."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside (so no dropout, and no gradient checkpointing, which would switch the cache off); restores every flag."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def update_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, except that layers with gradient checkpointing are told they train, or they would not checkpoint."""
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
