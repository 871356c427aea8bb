"""Decoding for groups: each prompt's keys and values are there once, whatever the number of its completions.

Rows come and go: `admit` adds groups of rows, `step` appends a token to every row, `keep` leaves rows out. No key is
copied while rows stay, and nothing is masked where lengths are equal.

Letters: n groups, R rows, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fast.attention.interface import own_attention
from grpo_fast.rollout.cache import LayerCache
from grpo_fast.rollout.cached_attention import Prefill, Rows, Step

_PREFILL_TOKENS = 16384  # prompts that go through the model at once, in tokens
_FIRST_ROOM = 64  # tokens that rows have room for at first; doubled when that is used up


Recorder = Callable[[Callable[[Tensor], Tensor], Tensor], Callable[[Tensor], Tensor]]


class GroupDecoder:
    """Rows that grow by a token a step. The model should be in eval mode.

    Args:
        model: a causal language model that `attention.support.shared_prefix_refusal` accepts.
        max_tokens: most tokens a row ever gets; the last one is not appended, nothing follows it.
        record: `cuda_graph.record`, or None. Then a step is recorded and repeated for as long as rows stay and have
            room: it computes over all of the room that rows have.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int, record: Recorder | None = None) -> None:
        self.model, self.max_tokens, self._record = model, max_tokens, record
        self._recorded: Callable[[Tensor], Tensor] | None = None
        self._layers: dict[nn.Module, LayerCache] = {}
        self._prompts: list[int] = []  # tokens of every group's prompt
        self._groups: list[int] = []  # of every row
        self._ages: list[int] = []  # tokens that every row has in the cache
        self._room = 0  # tokens that rows have room for

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Adds groups of `counts[i]` rows behind those that are there.

        Args:
            prompts: token ids, at least one each.

        Returns:
            logits [len(prompts), V] of each prompt's next token.
        """
        self._recorded = None
        logits = []
        for start, end in _parts(list(map(len, prompts))):
            part = prompts[start:end]
            prefill = Prefill([len(prompt) for prompt in part], self.model.device)
            ids = torch.tensor([token for prompt in part for token in prompt], device=self.model.device)
            logits.append(self._logits(ids, prefill.positions, prefill, prefill.last))
            for layer, (keys, values) in prefill.found.items():
                self._layers.setdefault(layer, LayerCache()).add_prompts(keys, values)
        first = len(self._prompts)
        self._prompts += map(len, prompts)
        self._groups += [first + index for index, count in enumerate(counts) for _ in range(count)]
        self._ages += [0] * sum(counts)
        for cache in self._layers.values():
            cache.resize(len(self._groups), self._room)
        self._arrange()
        return torch.cat(logits)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens`, int64 [R], to the rows. (One with max_tokens - 1 has its last replaced: it has ended.)

        Returns:
            logits [R, V] of each row's next token.
        """
        longest = max(self._ages) + 1
        if longest > self._room:
            self._recorded = None
            self._room = self._room_for(longest)
            for cache in self._layers.values():
                cache.resize(len(self._groups), self._room)
        if self._record is None:
            age = self._ages[0] if len(set(self._ages)) == 1 else None
            logits = self._step(tokens, longest, age)
        else:
            if self._recorded is None:
                self._recorded = self._record(lambda tokens: self._step(tokens, self._room, None), tokens)
            logits = self._recorded(tokens)
        self._ages = [min(age + 1, self.max_tokens - 2) for age in self._ages]
        self._rows.ages.add_(1).clamp_(max=self.max_tokens - 2)
        return logits

    def _step(self, tokens: Tensor, longest: int, age: int | None) -> Tensor:
        step = Step(self._rows, self._layers, longest, age)
        return self._logits(tokens, step.positions, step, None)

    def _room_for(self, tokens: int) -> int:
        """Doublings of what rows have at first, so that they seldom have to move."""
        room = _FIRST_ROOM
        while room < tokens:
            room *= 2
        return min(room, self.max_tokens - 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves out all rows but these, and groups without rows."""
        self._recorded = None
        groups = sorted({self._groups[row] for row in rows})
        number = {group: index for index, group in enumerate(groups)}
        self._ages = [self._ages[row] for row in rows]
        self._groups = [number[self._groups[row]] for row in rows]
        self._prompts = [self._prompts[group] for group in groups]
        if not rows:
            self._layers.clear()
            self._room = 0
            return
        self._room = min(self._room, self._room_for(max(self._ages) + 1))
        device, longest = self.model.device, max(self._prompts)
        for cache in self._layers.values():
            cache.keep(torch.tensor(groups, device=device), longest, torch.tensor(rows, device=device), self._room)
        self._arrange()

    def _arrange(self) -> None:
        self._rows = Rows.of(self._prompts, self._groups, self._ages, self.model.device)

    def _logits(self, ids: Tensor, positions: Tensor, attention, last: Tensor | None) -> Tensor:
        """Logits at the places `last` of a packed row, all if None."""
        keep = {}
        if last is not None and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            keep, last = {"logits_to_keep": last}, None
        with own_attention(self.model):
            out = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                grpo_fast_attention=attention,
                **keep,
            )
        return out.logits[0] if last is None else out.logits[0, last]


def _parts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive prompts (first, end) of at most _PREFILL_TOKENS together, or one."""
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > _PREFILL_TOKENS:
            yield start, index
            start, tokens = index, 0
        tokens += length
    yield start, len(lengths)
