"""Decoding for groups: each prompt's keys and values are there once, whatever the number of its completions.

Rows come and go: `admit` adds groups of rows, `step` appends a token to every row, `keep` leaves rows out. A row's
attention is that to its group's prompt, for which all rows of a group are one batch of queries, and that to its own
earlier tokens, under one softmax. No key is copied while rows stay, and nothing is masked where lengths are equal.

Letters: n groups, k rows of the largest, R rows, P tokens of the longest prompt, T tokens of the longest row; H query
heads, K key and value heads, D head size.
"""

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fast.attention.interface import own_attention
from grpo_fast.attention.shared_prefix import SharedPrefix
from grpo_fast.ops.backends import unavailable_reason

_PREFILL_TOKENS = 16384  # prompts that go through the model at once, in tokens
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_WINDOW = 2**62
_FIRST_ROOM = 64  # tokens that rows have room for at first; doubled when that is used up


class GroupDecoder:
    """Rows that grow by a token a step. The model should be in eval mode.

    Args:
        model: a causal language model that `attention.support.shared_prefix_refusal` accepts.
        max_tokens: most tokens a row ever gets; the last one is not appended, nothing follows it.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self._layers: dict[nn.Module, _LayerCache] = {}
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
        logits = []
        for start, end in _parts(list(map(len, prompts))):
            part = prompts[start:end]
            prefill = _Prefill([len(prompt) for prompt in part], self.model.device)
            ids = torch.tensor([token for prompt in part for token in prompt], device=self.model.device)
            logits.append(self._logits(ids, prefill.positions, prefill, prefill.last))
            for layer, (keys, values) in prefill.found.items():
                self._layers.setdefault(layer, _LayerCache()).add_prompts(keys, values)
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
            self._room = min(max(2 * self._room, _FIRST_ROOM), self.max_tokens - 1)
            for cache in self._layers.values():
                cache.resize(len(self._groups), self._room)
        step = _Step(self, longest)
        logits = self._logits(tokens, step.positions, step, None)
        self._ages = [min(age + 1, self.max_tokens - 2) for age in self._ages]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves out all rows but these, and groups without rows."""
        groups = sorted({self._groups[row] for row in rows})
        number = {group: index for index, group in enumerate(groups)}
        self._ages = [self._ages[row] for row in rows]
        self._groups = [number[self._groups[row]] for row in rows]
        self._prompts = [self._prompts[group] for group in groups]
        if not rows:
            self._layers.clear()
            return
        device, longest = self.model.device, max(self._prompts)
        for cache in self._layers.values():
            cache.keep(torch.tensor(groups, device=device), longest, torch.tensor(rows, device=device))
        self._arrange()

    def _arrange(self) -> None:
        """Where queries go: a group's rows are k slots, some of them padding, at which row 0 stands in."""
        device, n = self.model.device, len(self._prompts)
        members = [[row for row, group in enumerate(self._groups) if group == number] for number in range(n)]
        k = max(map(len, members))
        slots = [0] * (n * k)
        places = [0] * len(self._groups)
        for number, rows in enumerate(members):
            for index, row in enumerate(rows):
                slots[number * k + index], places[row] = row, number * k + index
        in_order = places == list(range(n * k))  # nothing to gather, then
        self.slots = None if in_order else torch.tensor(slots, device=device)
        self.places = None if in_order else torch.tensor(places, device=device)
        lengths = torch.tensor(self._prompts, device=device)
        self.groups = torch.tensor(self._groups, device=device)  # of rows
        self.prompt_lengths = lengths[self.groups]

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


class _LayerCache:
    """Keys and values of one attention layer; what lies beyond a prompt's or a row's length means nothing."""

    def __init__(self) -> None:
        self.prompt_keys: Tensor | None = None  # [n, K, P, D]
        self.prompt_values: Tensor | None = None
        self.keys: Tensor | None = None  # [R, K, room, D]
        self.values: Tensor | None = None

    def add_prompts(self, keys: Tensor, values: Tensor) -> None:
        self.prompt_keys, self.prompt_values = _joined(self.prompt_keys, keys), _joined(self.prompt_values, values)

    def resize(self, rows: int, room: int) -> None:
        """Room for more rows or longer ones, behind what is there."""
        self.keys = _enlarged(self.keys, self.prompt_keys, rows, room)
        self.values = _enlarged(self.values, self.prompt_values, rows, room)

    def keep(self, groups: Tensor, longest: int, rows: Tensor) -> None:
        if len(groups) < len(self.prompt_keys):
            self.prompt_keys = self.prompt_keys[groups, :, :longest]
            self.prompt_values = self.prompt_values[groups, :, :longest]
        self.keys, self.values = self.keys[rows], self.values[rows]


def _joined(old: Tensor | None, new: Tensor) -> Tensor:
    """Both [n, K, P, D], one after the other, padded to the longer P."""
    if old is None:
        return new
    longest = max(old.shape[2], new.shape[2])
    return torch.cat([nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in (old, new)])


def _enlarged(old: Tensor | None, like: Tensor, rows: int, room: int) -> Tensor:
    if old is not None and old.shape[0] == rows and old.shape[2] == room:
        return old
    new = like.new_zeros(rows, like.shape[1], room, like.shape[3])
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new


def _parts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive prompts (first, end) of at most _PREFILL_TOKENS together, or one."""
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > _PREFILL_TOKENS:
            yield start, index
            start, tokens = index, 0
        tokens += length
    yield start, len(lengths)


class _Prefill:
    """The attention of prompts in a packed row, which notes their keys and values.

    Attributes:
        positions: int64 [L], of the row's tokens.
        last: int64 [n], the place of each prompt's last token.
        found: of every layer its keys and values, [n, K, P, D].
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._attention = SharedPrefix([(length, ()) for length in lengths], device)
        self.positions = self._attention.position_ids[0]
        ends = torch.tensor(lengths).cumsum(0)
        self.last = (ends - 1).to(device)
        within = torch.arange(max(lengths)).expand(len(lengths), -1)
        starts = ends - torch.tensor(lengths)
        self._places = (starts[:, None] + within.minimum(torch.tensor(lengths)[:, None] - 1)).to(device)  # [n, P]
        self.found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        """See `attention.interface.Attention`."""
        self.found[layer] = tuple(x[0][:, self._places].transpose(0, 1).contiguous() for x in (key, value))
        return self._attention(layer, query, key, value, **options)


def _has_kernel(query: Tensor, cache: _LayerCache) -> bool:
    known = query.dtype in _KERNEL_DTYPES and query.dtype == cache.keys.dtype
    return query.is_cpu and known and unavailable_reason("cpu") is None


class _Step:
    """The attention of one token of every row, whose key and value it adds to the cache.

    Attributes:
        positions: int64 [R], of the tokens.
    """

    def __init__(self, decoder: GroupDecoder, longest: int) -> None:
        self._decoder, self._longest = decoder, longest
        ages = torch.tensor(decoder._ages, device=decoder.model.device)
        self.positions = decoder.prompt_lengths + ages
        self._ages = ages
        self._masks: dict[int | None, Tensor | None] = {}
        self._age = decoder._ages[0] if len(set(decoder._ages)) == 1 else None

    def __call__(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `attention.interface.Attention`."""
        cache, (rows, heads) = self._decoder._layers[layer], (query.shape[2], query.shape[1])
        if _has_kernel(query, cache):
            return self._by_kernel(cache, query, key, value, scale, window, softcap)
        for whole, new in ((cache.keys, key), (cache.values, value)):
            self._append(whole, new[0].transpose(0, 1))
        kinds = key.shape[1]
        q = (query[0].transpose(0, 1) * scale).reshape(rows, kinds, heads // kinds, -1)  # [R, K, H / K, D]
        keys, values = cache.keys[:, :, : self._longest], cache.values[:, :, : self._longest]
        of_prompt = self._by_rows(self._by_groups(q) @ cache.prompt_keys.transpose(2, 3), q)
        scores = torch.cat([of_prompt, q @ keys.transpose(2, 3)], -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = self._hidden(window, cache.prompt_keys.shape[2])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        accurate = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=accurate).to(values.dtype)
        of_prompt, own = weights.split([scores.shape[3] - self._longest, self._longest], -1)
        out = self._by_rows(self._by_groups(of_prompt) @ cache.prompt_values, q) + own @ values
        return out.reshape(1, rows, heads, -1)

    def _by_kernel(self, cache: _LayerCache, query, key, value, scale, window, softcap) -> Tensor:
        """The same on a CPU in one call, csrc/cpu/decode.h."""
        query, key, value = (x.transpose(0, 2) for x in (query, key, value))  # [R, H or K, 1, D]
        rows, heads, _, size = query.shape
        out = query.new_empty(1, rows, heads, size)
        torch.ops.grpo_fast_cpu.decode_attention(
            query,
            key,
            value,
            cache.prompt_keys,
            cache.prompt_values,
            cache.keys,
            cache.values,
            self._decoder.groups,
            self._decoder.prompt_lengths,
            self._ages,
            out,
            scale,
            window or _NO_WINDOW,
            softcap or 0.0,
        )
        return out

    def _append(self, whole: Tensor, new: Tensor) -> None:
        """Writes `new` [R, K, D] behind the tokens that rows have in `whole` [R, K, room, D]."""
        if self._age is not None:
            whole[:, :, self._age] = new
        else:
            rows = torch.arange(len(new), device=new.device)
            whole[rows, :, self._ages] = new

    def _by_groups(self, x: Tensor) -> Tensor:
        """[R, K, g, X] to [n, K, k * g, X]: a group's rows are one batch."""
        decoder = self._decoder
        _, kinds, g, size = x.shape
        x = x if decoder.slots is None else x.index_select(0, decoder.slots)
        n = len(decoder._prompts)
        return x.reshape(n, -1, kinds, g, size).transpose(1, 2).reshape(n, kinds, -1, size)

    def _by_rows(self, x: Tensor, like: Tensor) -> Tensor:
        """[n, K, k * g, X] to [R, K, g, X], the heads as in `like`."""
        decoder, (_, kinds, g, _) = self._decoder, like.shape
        n, size = len(x), x.shape[-1]
        x = x.reshape(n, kinds, -1, g, size).transpose(1, 2).reshape(-1, kinds, g, size)
        return x if decoder.places is None else x.index_select(0, decoder.places)

    def _hidden(self, window: int | None, longest_prompt: int) -> Tensor | None:
        """bool [R, 1, 1, P + T], the keys that a row does not see; None where it sees all."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, longest_prompt)
        return self._masks[window]

    def _make_mask(self, window: int | None, longest_prompt: int) -> Tensor | None:
        decoder, device = self._decoder, self.positions.device
        furthest = max(decoder._prompts) + self._longest
        windowed = window is not None and window < furthest
        if not windowed and self._age is not None and len(set(decoder._prompts)) == 1:
            return None
        lengths, of_prompt = decoder.prompt_lengths[:, None], torch.arange(longest_prompt, device=device)
        own = torch.arange(self._longest, device=device)
        hidden = torch.cat([of_prompt >= lengths, own > self._ages[:, None]], 1)
        if windowed:
            keys = torch.cat([of_prompt.expand(len(lengths), -1), lengths + own], 1)
            hidden |= keys <= self.positions[:, None] - window
        return hidden[:, None, None]
