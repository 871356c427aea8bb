"""verl's functions of logits and of hidden states, under their names and signatures (0.9.1).

| here | in the place of |
|---|---|
| logprobs_from_logits, ..._v2, ..._naive, ..._flash_attn | `verl.utils.torch_functional` |
| entropy_from_logits, entropy_from_logits_with_chunking | `verl.utils.torch_functional` |
| FusedLinearForPPO | `verl.utils.experimental.torch_functional` (fused kernels, backend "torch" or "liger") |
| linear_cross_entropy | `verl.utils.kernel.linear_cross_entropy` (fused kernels, backend "triton") |

docs/drop-in.md has the module that puts them there, which VERL_USE_EXTERNAL_MODULES names.

verl itself is not imported here. All results are fp32 (fp64 for fp64 inputs), in nats, and differentiable once; verl's
are of the inputs' dtype in places, which each function names.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.integrations.from_logits import IGNORED, entropy, label_logprobs
from grpo_fast.ops import linear_token_logprobs


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """log softmax(logits)[label]: [..., V], [...] -> [...], fp32.

    verl's has two behaviours: with flash-attn fp32 log-probs, a gradient written over the logits and 0 for the label
    -100; without, log-probs of the logits' dtype (a bf16 one near -10 is off by up to 0.03, and its ratio by 3 %), a
    gradient of its own and an index error for -100. This is the first one, everywhere.

    Args:
        logits: [..., V], fp32, bf16 or fp16, any strides.
        labels: [...] or flat, integers; -100 gives 0 and no gradient.
        inplace_backward: the backward writes the gradient over the logits, where they are no parameter, nor view of
            one, and have rows of unit stride. Unlike flash-attn's it says so: a backward that needs the old values
            afterwards raises in autograd. With an entropy loss from the same logits pass False, as verl's engines do.

    Raises:
        ValueError: shapes that do not fit, another id outside [0, V) (on the CPU; NaN on a GPU).
    """
    return label_logprobs(logits, labels, inplace=inplace_backward)


def logprobs_from_logits_flash_attn(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """logprobs_from_logits by the name under which verl asks for flash-attn's."""
    return label_logprobs(logits, labels, inplace=inplace_backward)


def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """logprobs_from_logits that leaves the logits. verl's loops over the first axis; from bf16 it gives bf16."""
    return label_logprobs(logits, labels)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """logprobs_from_logits that leaves the logits. verl's holds all of log-softmax; from bf16 it gives bf16."""
    return label_logprobs(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """-sum p log p of each row, [..., V] -> [...]. verl's has the logits' dtype, and NaN where a logit is -inf."""
    return entropy(logits)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """entropy_from_logits: one sweep keeps nothing of the logits' size, so chunk_size has nothing to bound."""
    return entropy(logits)


def _linear(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    # Not by a mask: dropping the ignored rows would make a GPU's host wait to count them.
    ignored = labels == IGNORED
    ids = torch.where(ignored, 0, labels)
    logps, entropies = linear_token_logprobs(hidden, weight, ids, temperature=float(temperature), return_entropy=True)
    return torch.where(ignored, 0.0, logps), entropies


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of hidden @ weight.T / temperature, without the logits.

    Differences from verl's kernels: any hidden size (theirs: multiples of 128), any strides and device; weight's
    gradient is accumulated in fp32; a label of -100 gives log-prob 0 without a gradient (theirs: unwritten memory), and
    the row's entropy as ever; "sum" and "mean" are added in a fixed order (theirs: atomics onto unwritten memory).

    Args:
        hidden: [..., D], fp32, bf16 or fp16.
        weight: [V, D], the whole head. A frozen one gets no gradient, and costs no GEMM for it.
        labels: [...], integers.
        temperature: > 0, applied in fp32.
        reduction: of the log-probs: "none", "sum" or "mean". The entropy is never reduced.
        dist_process_group: None, or a group of one rank.

    Returns:
        log-probs [tokens], flat whatever hidden's shape (0-d for "sum" and "mean"), and entropy [tokens].

    Raises:
        NotImplementedError: a head that is split over several ranks.
        ValueError: another reduction, shapes that do not fit, an id outside [0, V) (on the CPU; NaN on a GPU).
    """
    reduction = reduction.lower()
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected none, sum or mean, got {reduction!r}")
    ranks = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    if ranks > 1:
        raise NotImplementedError(
            f"dist_process_group: {ranks} ranks share the vocabulary, and only a whole "
            "head is supported; keep verl's linear_cross_entropy under tensor parallelism"
        )
    labels = labels.reshape(-1).to(torch.int64)
    logps, entropies = _linear(hidden.reshape(-1, hidden.shape[-1]), weight, labels, temperature)
    if reduction == "sum":
        logps = logps.sum()
    elif reduction == "mean":
        logps = logps.sum() / max(logps.shape[0], 1)
    return logps, entropies


class FusedLinearForPPO(torch.nn.Module):
    """(log-probs, entropy) of hidden_states @ vocab_weights.T / temperature, chunk by chunk.

    verl's "torch" backend scales the logits by the temperature in the inputs' dtype, and both of its backends round the
    entropy to it; here all is fp32. Its chunk_size counts rows, each of which it holds several times over; here the
    chunk is sized in bytes (`grpo_fast.linear_token_logprobs`), and neither argument changes the result.

    Args:
        chunk_size: accepted.
        impl_backend: "torch" or "liger", as verl's configuration names its own.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch"):
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueError(f"impl_backend: expected 'torch' or 'liger', got {impl_backend!r}")
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [B, T, D] or [N, D], vocab_weights [V, D], input_ids [B, T] or [N], the token each position
        predicts (not shifted here; -100: both 0, no gradient, as with "liger") -> two of input_ids' shape."""
        input_ids = input_ids.to(torch.int64)
        logps, entropies = _linear(hidden_states, vocab_weights, input_ids, temperature)
        return logps, torch.where(input_ids == IGNORED, 0.0, entropies)
