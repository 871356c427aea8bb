"""From rollouts to micro-batches of whole sequences, and denominators that make any split equal one batch.

B sequences of a micro-batch, L its longest row of prompt + completion, N its trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.rollout import Rollout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole sequences, right-padded: columns are positions, a causal model needs no mask nor position ids.

    Attributes:
        rows: which rollouts these are, in this order.
        input_ids: int64 [B, L], prompt + completion + padding.
        predicts: bool [B, L], True at column j where the token of column j + 1 is trained on: for a prompt of
            P tokens token t of the completion at column P - 1 + t. The last column is never True.
        positions: int64 [N], the flat indices of predicts' True slots.
        first_column: leftmost column with a True slot.
        token_ids: int64 [N], the trained tokens, row after row.
        cu_seqlens: int32 [B + 1], where each sequence's trained tokens start, ending with N.
        advantages: float32 [B].
        live_rows: int64 [at most N], which of the N tokens belong to sequences whose advantage is not 0.
        tokens: prompt and completion tokens without padding.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    predicts: Tensor
    positions: Tensor
    first_column: int
    token_ids: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    live_rows: Tensor
    tokens: int


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of sequences in groups whose padded size (rows x longest) is at most `max_tokens`.

    A longer sequence is a group of its own. Longest first, which shows at once whether memory suffices.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups, start = [], 0
    while start < len(order):
        rows = max(max_tokens // max(lengths[order[start]], 1), 1)
        groups.append(order[start : start + rows])
        start += rows
    return groups


def make_micro_batches(
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    lengths: Sequence[int],
    *,
    max_tokens: int,
    pad_id: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Micro-batches over the rollouts that have something to train on.

    Args:
        rollouts: the step's completions.
        advantages: float [len(rollouts)].
        lengths: trained tokens of every rollout; 0 leaves one out (it still counts in `denominators`).
        max_tokens: see `pack`.
        pad_id: fills rows up; its value does not matter.
        device: where the tensors go.
    """
    kept = [index for index, length in enumerate(lengths) if length > 0]
    groups = pack([len(rollouts[i].prompt_ids) + len(rollouts[i].completion_ids) for i in kept], max_tokens)
    return [_collate([kept[g] for g in group], rollouts, advantages, pad_id, device) for group in groups]


def _collate(rows: list[int], rollouts: Sequence[Rollout], advantages: Tensor, pad_id: int, device) -> MicroBatch:
    sequences = [rollouts[row].prompt_ids + rollouts[row].completion_ids for row in rows]
    width = max(map(len, sequences))
    input_ids = torch.tensor([[*sequence, *[pad_id] * (width - len(sequence))] for sequence in sequences])
    ends = torch.tensor([len(sequence) - 1 for sequence in sequences])[:, None]
    starts = torch.tensor([len(rollouts[row].prompt_ids) - 1 for row in rows])[:, None]
    columns = torch.arange(width)
    predicts = (columns >= starts) & (columns < ends)
    lengths = (ends - starts)[:, 0]
    cu_seqlens = torch.zeros(len(rows) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    # Index tensors are found here, on the host: on a GPU the length of a nonzero() would have to be waited for.
    live = (advantages[rows].cpu() != 0).repeat_interleave(lengths)
    return MicroBatch(
        rows=tuple(rows),
        input_ids=input_ids.to(device),
        predicts=predicts.to(device),
        positions=predicts.flatten().nonzero()[:, 0].to(device),
        first_column=int(starts.min()),
        token_ids=input_ids.roll(-1, dims=1)[predicts].to(device),
        cu_seqlens=cu_seqlens.to(device),
        advantages=advantages[rows].float().to(device),
        live_rows=live.nonzero()[:, 0].to(device),
        tokens=sum(map(len, sequences)),
    )


def denominators(loss_type: str, lengths: Sequence[int], max_completion_length: int) -> tuple[int, int]:
    """`denominator` and `entropy_denominator` of a whole optimizer step.

    Args:
        loss_type: as in `grpo_fast.grpo_loss`.
        lengths: trained tokens of every sequence of the step; an empty or left-out sequence is 0 and still
            counts as one.
        max_completion_length: for dr_grpo.
    """
    tokens = sum(lengths)
    if loss_type in ("grpo", "luspo"):
        return len(lengths), tokens
    if loss_type == "dr_grpo":
        return len(lengths) * max_completion_length, tokens
    return tokens, tokens
