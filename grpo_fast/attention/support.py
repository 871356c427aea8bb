"""Whether a model can run packed rows with shared prompts: its configuration first, then a trial against itself."""

import inspect

import torch
from torch import Tensor, nn

from grpo_fast.attention.interface import UnsupportedAttention, own_attention
from grpo_fast.attention.shared_prefix import SharedPrefix
from grpo_fast.modes import evaluation_mode

# Prompts and completions of the trial: a group of ragged completions, one of them empty, and another group.
_TRIAL = ((3, (2, 0, 4, 1)), (1, (3,)))
# Largest difference, as a share of the largest value, that rounding alone explains (some layers take their
# softmax in float32 whatever they are given); masks or positions that are wrong
# make differences of the values' own size.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_HALF = 0.1


def shared_prefix_refusal(model: nn.Module) -> str | None:
    """Why `model` cannot run packed rows with shared prompts, or None if it can.

    Runs the model on a dozen tokens, packed and as rows of their own, and compares.

    Args:
        model: a causal language model of transformers on its device.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of type {', '.join(others)}"
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    accepted = inspect.signature(model.base_model.forward).parameters
    if "position_ids" not in accepted:
        return "it takes no position ids"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return "it does not take keyword arguments for its attention"
    try:
        difference, windows = _trial(model)
    except UnsupportedAttention as refusal:
        return refusal.reason
    if difference > _TOLERANCE.get(model.dtype, _TOLERANCE_HALF):
        return f"its hidden states in a packed row differ from those in rows of their own, by {difference:.1e}"
    return _wrong_window(config, windows)


@torch.no_grad()
def _trial(model: nn.Module) -> tuple[float, dict[int, int | None]]:
    """The relative difference of hidden states, packed against alone, and the window that each layer passed."""
    ids = torch.arange(sum(prompt + sum(rest) for prompt, rest in _TRIAL), device=model.device)
    ids = ids * 7919 % model.get_input_embeddings().num_embeddings  # tokens all over the vocabulary
    attention, windows = SharedPrefix(_TRIAL, model.device), {}

    def recording(layer: nn.Module, *tensors: Tensor, window: int | None, **options) -> Tensor:
        windows[getattr(layer, "layer_idx", len(windows))] = window
        return attention(layer, *tensors, window=window, **options)

    with evaluation_mode(model):
        with own_attention(model):
            packed = _hidden(model, ids, position_ids=attention.position_ids, grpo_fast_attention=recording)
        difference, largest, place = 0.0, packed.abs().max().item(), 0
        for prompt, completions in _TRIAL:
            rows, end = list(range(place, place + prompt)), place + prompt
            for length in completions:
                own = list(range(end, end + length))
                alone = _hidden(model, ids[rows + own])
                difference = max(difference, (alone - packed[rows + own]).abs().max().item())
                end += length
            place = end
    return difference / max(largest, 1e-12), windows


def _hidden(model: nn.Module, ids: Tensor, **options) -> Tensor:  # [L, D]
    return model.base_model(input_ids=ids[None], use_cache=False, **options)[0][0].double()


def _wrong_window(config, windows: dict[int, int | None]) -> str | None:
    """The trial is shorter than any window: that layers pass the one they should is compared by itself."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if size else "full_attention"] * len(windows)
    for index, window in windows.items():
        expected = size if kinds[index] == "sliding_attention" else None
        if window != expected:
            return f"layer {index} passes its attention a sliding window of {window}, its configuration says {expected}"
    return None
