"""What the functions of other trainers share: log-probs and entropy of logits with any leading shape."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.ops import token_logprobs
from grpo_fast.ops.inputs import check_inplace

IGNORED = -100  # the label that cross-entropies leave out, in PyTorch and in flash-attn


def _as_rows(logits: Tensor) -> Tensor:
    """[..., V] as token_logprobs takes it. 2-D and 3-D stay as they are: slices are read in place."""
    return logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])


def _may_overwrite(logits: Tensor) -> bool:
    """Whether the gradient may take the logits' memory: not that of a parameter, nor of a view of one."""
    owner = logits if logits._base is None else logits._base
    if owner.is_leaf and owner.requires_grad:
        return False
    try:
        check_inplace(logits)
    except ValueError:  # a leaf, or memory that overlaps itself
        return False
    return logits.stride(-1) == 1


def entropy(logits: Tensor) -> Tensor:
    """-sum p log p of softmax(logits), nats, differentiable: [..., V] -> [...], fp32 (fp64 for fp64 logits)."""
    rows = _as_rows(logits)
    ids = torch.zeros(rows.shape[:-1], dtype=torch.int64, device=rows.device)  # whose log-prob nobody reads
    return token_logprobs(rows, ids, return_entropy=True).entropy.reshape(logits.shape[:-1])


def label_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0, inplace: bool = False) -> Tensor:
    """log softmax(logits / temperature)[label], differentiable.

    Args:
        logits: [..., V], fp32, bf16, fp16 or fp64, any strides.
        labels: as many integers as there are rows; -100 gives 0 and no gradient.
        temperature: one positive number.
        inplace: the backward may write the gradient over the logits. It does not where they are a parameter or a view
            of one, overlap themselves or have strided rows: there it allocates the gradient.

    Returns:
        [...], the logits' leading shape, fp32 (fp64 for fp64 logits), nats.

    Raises:
        ValueError: another number of labels, an id outside [0, V) (on the CPU; NaN on a GPU).
    """
    lead = logits.shape[:-1]
    if labels.numel() != lead.numel():
        raise ValueError(
            f"labels: expected {list(lead)} to go with logits {list(logits.shape)}, got {list(labels.shape)}"
        )
    rows = _as_rows(logits)
    labels = labels.reshape(rows.shape[:-1]).to(torch.int64)
    inplace = inplace and _may_overwrite(logits)
    logps = token_logprobs(rows, labels, labels != IGNORED, temperature=float(temperature), inplace=inplace)
    return logps.reshape(lead)
