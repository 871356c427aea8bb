"""The frozen model that the KL term pulls towards."""

import copy

import torch
from transformers import PreTrainedModel


def reference_dtype(name: str | None, model_dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """model.reference_dtype as a dtype; None: bfloat16 on a GPU, the policy's own on a CPU."""
    if name is not None:
        return getattr(torch, name)
    return torch.bfloat16 if torch.device(device).type == "cuda" else model_dtype


def make_reference(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the policy as it is now, in eval mode and without gradients."""
    return copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
