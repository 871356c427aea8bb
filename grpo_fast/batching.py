"""From rollouts to micro-batches of whole sequences, and denominators that make any split equal one batch.

B sequences of a micro-batch, R rows of L tokens that a model is given, N trained tokens.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from grpo_fast.attention.shared_prefix import SharedPrefix
from grpo_fast.memory import is_out_of_memory
from grpo_fast.rollout import Rollout

T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trained:
    """Which of a step's completions are trained on; what is known of their tokens is kept in flat arrays.

    Attributes:
        rollouts: all of the step.
        advantages: float [len(rollouts)], on the CPU.
        rows: which of them are trained on.
        starts: of every rollout, where its tokens begin in a flat array of all trained tokens.
        tokens: how many those are.
        unmoved_tokens, unmoved_rows: tokens and completions that are left out only because nothing would move them.
    """

    rollouts: Sequence[Rollout]
    advantages: Tensor
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    tokens: int
    unmoved_tokens: int
    unmoved_rows: int

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], advantages: Tensor, lengths: Sequence[int], *, all_move: bool
    ) -> "Trained":
        """The completions with something to learn.

        Args:
            rollouts: of the step.
            advantages: float [len(rollouts)].
            lengths: tokens of every rollout that the loss is for, 0 leaves it out.
            all_move: whether completions whose advantage is 0 have a gradient, of the KL or an entropy bonus.
        """
        advantages = advantages.float().cpu()
        moves = [all_move or advantage != 0 for advantage in advantages.tolist()]
        rows = tuple(row for row, length in enumerate(lengths) if length and moves[row])
        kept = [length if moves[row] else 0 for row, length in enumerate(lengths)]
        unmoved = [length for row, length in enumerate(lengths) if length and not moves[row]]
        starts = tuple(accumulate(kept, initial=0))[:-1]
        return cls(rollouts, advantages, rows, starts, sum(kept), sum(unmoved), len(unmoved))

    def has_sampled_logps(self) -> bool:
        """Whether the engine gave the log-probs of what it sampled."""
        return any(rollout.logprobs is not None for rollout in self.rollouts)

    def sampled_logps(self) -> Tensor:
        """Those log-probs, float32 [tokens], each beside its token; NaN where none was given."""
        logps = torch.full((self.tokens,), torch.nan)
        for row in self.rows:
            given = torch.tensor((self.rollouts[row].logprobs or ())[: len(self.rollouts[row].completion_ids)])
            logps[self.starts[row] : self.starts[row] + len(given)] = given
        return logps


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole sequences, as rows that a model takes.

    Attributes:
        rows: which rollouts these are, in this order.
        input_ids: int64 [R, L].
        attention: how the one row of sequences that share prompts is attended to, with its position ids; None for
            rows of a sequence each, right-padded, whose columns are positions: a causal model needs no mask for them.
        predictors: int64 [N], flat indices of the tokens whose hidden states predict the trained ones. The last token
            of a shared prompt predicts the first of each of its completions.
        token_ids: int64 [N], the trained tokens, sequence after sequence.
        cu_seqlens: int32 [B + 1], where each sequence's trained tokens start, ending with N.
        advantages: float32 [B].
        places: int64 [N], where the tokens are in the step's flat arrays (`Trained.starts`).
        padding: how many of the R * L tokens are none.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    attention: SharedPrefix | None
    predictors: Tensor
    token_ids: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    places: Tensor
    padding: int


def padded_micro_batches(trained: Trained, max_tokens: int, device: torch.device | str = "cpu") -> list[MicroBatch]:
    """A right-padded row for every sequence.

    Args:
        trained: what to train on.
        max_tokens: of a micro-batch, padding included; a longer row is one by itself. The longest come first, which
            shows at once whether memory suffices.
        device: where the tensors go.
    """
    lengths = {row: _length(trained.rollouts[row]) for row in trained.rows}
    order, batches = sorted(trained.rows, key=lambda row: (-lengths[row], row)), []
    while order:
        width = lengths[order[0]]
        rows, order = order[: max(max_tokens // width, 1)], order[max(max_tokens // width, 1) :]
        input_ids, predictors = torch.zeros(len(rows), width, dtype=torch.int64), []
        for index, row in enumerate(rows):
            rollout = trained.rollouts[row]
            input_ids[index, : lengths[row]] = torch.tensor(rollout.prompt_ids + rollout.completion_ids)
            first = index * width + len(rollout.prompt_ids) - 1
            predictors.append(torch.arange(first, first + len(rollout.completion_ids)))
        padding = input_ids.numel() - sum(lengths[row] for row in rows)
        batches.append(_micro_batch(trained, rows, input_ids, None, predictors, padding, device))
    return batches


def shared_prefix_micro_batches(
    trained: Trained, max_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """One row without padding, every prompt once for all its completions.

    The last token of a completion predicts nothing and is not there. A prompt whose completions exceed `max_tokens`
    is in several micro-batches, with some of them each.

    Args:
        trained: what to train on.
        max_tokens: of a micro-batch; one prompt with one completion may have more. The largest come first.
        device: where the tensors go.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for row in trained.rows:
        prompts.setdefault(trained.rollouts[row].prompt_ids, []).append(row)
    parts = [part for prompt, rows in prompts.items() for part in _split(prompt, rows, trained, max_tokens)]
    parts.sort(key=lambda part: -part[0])
    bins: list[tuple[int, list]] = []  # first fit, decreasing
    for size, rows in parts:
        for index, (used, groups) in enumerate(bins):
            if used + size <= max_tokens:
                bins[index] = (used + size, [*groups, rows])
                break
        else:
            bins.append((size, [rows]))
    bins.sort(key=lambda each: -each[0])
    return [_pack(trained, groups, device) for _, groups in bins]


def _split(prompt: tuple[int, ...], rows: list[int], trained: Trained, max_tokens: int) -> list[tuple[int, list[int]]]:
    """(tokens, rows) of as few parts of a prompt's completions as `max_tokens` allows, filled in order."""
    parts = []
    for row in rows:
        length = len(trained.rollouts[row].completion_ids) - 1
        if parts and parts[-1][0] + length <= max_tokens:
            parts[-1] = (parts[-1][0] + length, [*parts[-1][1], row])
        else:
            parts.append((len(prompt) + length, [row]))
    return parts


def _pack(trained: Trained, groups: list[list[int]], device) -> MicroBatch:
    ids, predictors, sizes, place = [], [], [], 0
    for rows in groups:
        prompt = trained.rollouts[rows[0]].prompt_ids
        ids.append(torch.tensor(prompt))
        last, place = place + len(prompt) - 1, place + len(prompt)
        for row in rows:
            completion = torch.tensor(trained.rollouts[row].completion_ids)
            ids.append(completion[:-1])
            predictors.append(torch.cat([torch.tensor([last]), torch.arange(place, place + len(completion) - 1)]))
            place += len(completion) - 1
        sizes.append((len(prompt), [len(trained.rollouts[row].completion_ids) - 1 for row in rows]))
    rows = [row for group in groups for row in group]
    return _micro_batch(trained, rows, torch.cat(ids)[None], SharedPrefix(sizes, device), predictors, 0, device)


def _micro_batch(
    trained: Trained,
    rows: list[int],
    input_ids: Tensor,
    attention: SharedPrefix | None,
    predictors: list[Tensor],
    padding: int,
    device,
) -> MicroBatch:
    completions = [torch.tensor(trained.rollouts[row].completion_ids) for row in rows]
    places = [
        torch.arange(trained.starts[row], trained.starts[row] + len(trained.rollouts[row].completion_ids))
        for row in rows
    ]
    cu_seqlens = torch.tensor(list(accumulate(map(len, completions), initial=0)), dtype=torch.int32)
    return MicroBatch(
        rows=tuple(rows),
        input_ids=input_ids.to(device),
        attention=attention,
        predictors=torch.cat(predictors).to(device),
        token_ids=torch.cat(completions).to(device),
        cu_seqlens=cu_seqlens.to(device),
        advantages=trained.advantages[rows].to(device),
        places=torch.cat(places).to(device),
        padding=padding,
    )


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.completion_ids)


@dataclass(slots=True)
class TokenBudget:
    """batch.max_tokens_per_micro_batch, and what is left of it for the rest of the run once memory has run out."""

    max_tokens: int


class MicroBatches:
    """A step's micro-batches, cut anew into smaller ones when memory runs out.

    Args:
        trained: what is in them.
        make: makes them of it, of at most so many tokens each (`PolicyForward.micro_batches`).
        budget: the run's; halved here.

    Attributes:
        batches: as they are cut now.
        all_tokens: what one padded-free row for every completion of the step would hold.
    """

    def __init__(self, trained: Trained, make: Callable[[Trained, int], list[MicroBatch]], budget: TokenBudget) -> None:
        self._trained, self._make, self._budget = trained, make, budget
        self.batches = make(trained, budget.max_tokens)
        self.all_tokens = sum(map(_length, trained.rollouts))

    def run(self, work: Callable[[list[MicroBatch]], T]) -> T:
        """`work` on the micro-batches; repeated from its beginning with smaller ones when memory runs out.

        Raises:
            MemoryError: one completion by itself is too much.
        """
        while True:
            try:
                return work(self.batches)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            self._halve(reason)  # after the except clause, which holds the tensors of the failed attempt

    def _halve(self, reason: str) -> None:
        largest = max(batch.input_ids.numel() for batch in self.batches)
        if all(len(batch.rows) == 1 for batch in self.batches):
            raise MemoryError(
                f"one prompt and completion, {largest} tokens, do not fit in memory ({reason}). "
                "Set model.gradient_checkpointing=true, or a smaller rollout.max_completion_length"
            )
        before = self._budget.max_tokens
        self._budget.max_tokens = max(min(before, largest) // 2, 1)
        _logger.warning(
            "out of memory with a micro-batch of %d tokens (%s): the step is repeated with "
            "batch.max_tokens_per_micro_batch=%d instead of %d, which changes nothing else",
            largest,
            reason,
            self._budget.max_tokens,
            before,
        )
        self.batches = []
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.batches = self._make(self._trained, self._budget.max_tokens)


def denominators(loss_type: str, sequences: int, tokens: int, max_completion_length: int) -> tuple[int, int]:
    """`denominator` and `entropy_denominator` of a whole optimizer step.

    Args:
        loss_type: as in `grpo_fast.grpo_loss`.
        sequences: of the step, those that are empty or left out included.
        tokens: that the loss is for.
        max_completion_length: for dr_grpo.
    """
    if loss_type in ("grpo", "luspo"):
        return sequences, tokens
    if loss_type == "dr_grpo":
        return sequences * max_completion_length, tokens
    return tokens, tokens
