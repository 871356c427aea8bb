"""A step of decoding as a CUDA graph: launched as a whole, where its kernels are short and launching each takes longer.

Recording runs the step twice, so it is done again only when the batch's shape changes.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

_REREADS_POSITIONS = ("dynamic", "longrope")  # kinds of rotary embedding that look at positions on the host


def refusal(model: PreTrainedModel) -> str | None:
    """Why steps of `model` cannot be recorded, or None if they can."""
    if model.device.type != "cuda":
        return f"it is on {model.device}"
    return host_refusal(model)


def host_refusal(model: PreTrainedModel) -> str | None:
    """Why a step of `model` waits for values on the host, or None if it does not; whatever the device."""
    if not model._can_compile_fullgraph:
        return f"transformers does not say of {type(model).__name__} that it runs without waiting for the device"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {value for part in (rope, *rope.values()) if isinstance(part, dict) for value in [part.get("rope_type")]}
    for kind in kinds.intersection(_REREADS_POSITIONS):
        return f"its rotary embedding, of type {kind}, looks at positions on the host"
    return None


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep a workspace for every stream that they have ever run on."""
    return torch.cuda.Stream(device)


def record(step: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Records `step(tokens)`.

    Args:
        step: reads and writes the same memory whenever it is called, apart from what it is given and returns; calling
            it twice in a row changes nothing that calling it once does not.
        tokens: on a GPU.

    Returns:
        What does as `step` on tokens of this shape. A result is overwritten by the next call.
    """
    static = tokens.clone()
    here = torch.cuda.current_stream(tokens.device)
    aside = _aside(tokens.device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # libraries set themselves up in a first call, which cannot be recorded
        step(static)
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        result = step(static)

    def replay(tokens: Tensor) -> Tensor:
        static.copy_(tokens)
        graph.replay()
        return result

    return replay
