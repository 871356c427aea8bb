"""Frozen copies of the policy: the reference that the KL term pulls towards, and what a GPU samples from."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel


def reference_dtype(name: str | None, model_dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """model.reference_dtype as a dtype; None: bfloat16 on a GPU, the policy's own on a CPU."""
    if name is not None:
        return getattr(torch, name)
    return torch.bfloat16 if torch.device(device).type == "cuda" else model_dtype


def frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with the weights the model has now, in eval mode and without gradients.

    Weights are cast one by one, so that no second copy in the model's own dtype ever exists. Buffers stay as they
    are: rotary frequencies rounded to bfloat16 would move far positions.
    """
    weights = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, weights).eval()
