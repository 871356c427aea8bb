"""How an attention of ours runs inside a model of transformers: by its attention interface, for the time of a `with`.

A model's attention layers look up the function that their configuration names, and hand on what keyword arguments the
model was called with. Inside `own_attention(model)` the name is ours, and the function calls what the keyword argument
`grpo_fast_attention` holds. No mask is made: transformers makes one only for names registered for masks, too.

Letters: L tokens of a packed row, H query heads, K key and value heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "grpo_fast"
_UNDERSTOOD = {"dropout", "scaling", "sliding_window", "softcap", "is_causal"}
# What layers hand on that says nothing of the attention itself.
_IGNORED = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache", "past_key_values"}


class UnsupportedAttention(ValueError):
    """A model's attention cannot be ours; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Attention(Protocol):
    """What `grpo_fast_attention` has to be."""

    def __call__(
        self,
        layer: nn.Module,
        query: Tensor,  # [1, H, L, D], positions already in it
        key: Tensor,  # [1, K, L, D]
        value: Tensor,  # [1, K, L, D]
        *,
        scale: float,
        window: int | None,  # a token sees itself and the window - 1 before it
        softcap: float | None,  # of the scores: softcap * tanh(score / softcap)
    ) -> Tensor:  # [1, L, H, D]
        ...


def _attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    grpo_fast_attention: Attention | None = None,
    **more,
) -> tuple[Tensor, None]:
    """What transformers calls."""
    if grpo_fast_attention is None:
        raise UnsupportedAttention(f"{type(layer).__name__} does not hand on its model's keyword arguments")
    unknown = sorted(name for name, value in more.items() if name not in _IGNORED and value is not None)
    if unknown:
        raise UnsupportedAttention(f"{type(layer).__name__} asks its attention for {', '.join(unknown)}")
    if dropout:
        raise UnsupportedAttention(f"{type(layer).__name__} drops out attention weights, {dropout} of them")
    if is_causal is False or not getattr(layer, "is_causal", True):
        raise UnsupportedAttention(f"{type(layer).__name__} is not causal")
    if attention_mask is not None:
        raise UnsupportedAttention(f"{type(layer).__name__} has an attention mask of its own")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as for scaled_dot_product_attention
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = grpo_fast_attention(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap)
    return out, None


def _configs(model: nn.Module) -> list:
    """Every configuration that an attention layer of `model` may read its implementation from, each once."""
    found = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found[id(module.config)] = module.config
            text = module.config.get_text_config()
            found[id(text)] = text
    return list(found.values())


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Inside, `model(..., grpo_fast_attention=attention)` attends by `attention`; `model` may be a wrapper of one.

    Where layers are recomputed in the backward (gradient checkpointing), that has to run inside too.
    """
    AttentionInterface.register(NAME, _attend)
    saved = [(config, config._attn_implementation_internal) for config in _configs(model)]
    for config, _ in saved:
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for config, implementation in saved:
            config._attn_implementation_internal = implementation
