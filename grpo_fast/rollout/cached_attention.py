"""The attention of decoding for groups: that of prompts, which fills the cache, and that of a step, which reads it.

A row's attention in a step is that to its group's prompt, for which all rows of a group are one batch of queries, and
that to its own earlier tokens, under one softmax.

Letters: n groups, k rows of the largest, R rows, P tokens of the longest prompt, T tokens of the longest row; L tokens
of a packed row; H query heads, K key and value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_fast.attention.shared_prefix import SharedPrefix
from grpo_fast.ops.backends import unavailable_reason
from grpo_fast.rollout.cache import LayerCache

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_WINDOW = 2**62


class Prefill:
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


def _has_kernel(query: Tensor, cache: LayerCache) -> bool:
    known = query.dtype in _KERNEL_DTYPES and query.dtype == cache.keys.dtype
    return query.is_cpu and known and unavailable_reason("cpu") is None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a batch and their groups.

    Attributes:
        prompts: tokens of every group's prompt.
        groups: int64 [R], of every row.
        prompt_lengths: int64 [R], of every row's group.
        ages: int64 [R], tokens that every row has in the cache; counted up in place.
        slots: int64 [n * k], a group's rows side by side, row 0 standing in where there are fewer; None if that is
            the order they are in.
        places: int64 [R], where in `slots` each row is, or None.
    """

    prompts: list[int]
    groups: Tensor
    prompt_lengths: Tensor
    ages: Tensor
    slots: Tensor | None
    places: Tensor | None

    @staticmethod
    def of(prompts: list[int], groups: list[int], ages: list[int], device: torch.device) -> "Rows":
        """From `groups` and `ages` of every row."""
        n = len(prompts)
        members = [[row for row, group in enumerate(groups) if group == number] for number in range(n)]
        k = max(map(len, members))
        slots, places = [0] * (n * k), [0] * len(groups)
        for number, rows in enumerate(members):
            for index, row in enumerate(rows):
                slots[number * k + index], places[row] = row, number * k + index
        in_order = places == list(range(n * k))  # nothing to gather, then
        of_rows = torch.tensor(groups, device=device)
        return Rows(
            prompts=prompts,
            groups=of_rows,
            prompt_lengths=torch.tensor(prompts, device=device)[of_rows],
            ages=torch.tensor(ages, device=device),
            slots=None if in_order else torch.tensor(slots, device=device),
            places=None if in_order else torch.tensor(places, device=device),
        )


class Step:
    """The attention of one token of every row, whose key and value it adds to the cache.

    Args:
        rows: the batch.
        layers: the cache.
        longest: tokens of a row that may be looked at, the new one included: no row has more.
        age: what all rows' ages are, None if they differ or may come to: whoever records the step and repeats it must
            not have it depend on ages of the time of recording.

    Attributes:
        positions: int64 [R], of the tokens.
    """

    def __init__(self, rows: Rows, layers: dict[nn.Module, LayerCache], longest: int, age: int | None) -> None:
        self._rows, self._layers, self._longest, self._age = rows, layers, longest, age
        self.positions = rows.prompt_lengths + rows.ages
        self._masks: dict[int | None, Tensor | None] = {}

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
        cache, (rows, heads) = self._layers[layer], (query.shape[2], query.shape[1])
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

    def _by_kernel(self, cache: LayerCache, query, key, value, scale, window, softcap) -> Tensor:
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
            self._rows.groups,
            self._rows.prompt_lengths,
            self._rows.ages,
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
            whole[rows, :, self._rows.ages] = new

    def _by_groups(self, x: Tensor) -> Tensor:
        """[R, K, g, X] to [n, K, k * g, X]: a group's rows are one batch."""
        _, kinds, g, size = x.shape
        x = x if self._rows.slots is None else x.index_select(0, self._rows.slots)
        n = len(self._rows.prompts)
        return x.reshape(n, -1, kinds, g, size).transpose(1, 2).reshape(n, kinds, -1, size)

    def _by_rows(self, x: Tensor, like: Tensor) -> Tensor:
        """[n, K, k * g, X] to [R, K, g, X], the heads as in `like`."""
        (_, kinds, g, _), n, size = like.shape, len(x), x.shape[-1]
        x = x.reshape(n, kinds, -1, g, size).transpose(1, 2).reshape(-1, kinds, g, size)
        return x if self._rows.places is None else x.index_select(0, self._rows.places)

    def _hidden(self, window: int | None, longest_prompt: int) -> Tensor | None:
        """bool [R, 1, 1, P + T], the keys that a row does not see; None where it sees all."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, longest_prompt)
        return self._masks[window]

    def _make_mask(self, window: int | None, longest_prompt: int) -> Tensor | None:
        device = self.positions.device
        furthest = max(self._rows.prompts) + self._longest
        windowed = window is not None and window < furthest
        if not windowed and self._age is not None and len(set(self._rows.prompts)) == 1:
            return None
        lengths, of_prompt = self._rows.prompt_lengths[:, None], torch.arange(longest_prompt, device=device)
        own = torch.arange(self._longest, device=device)
        hidden = torch.cat([of_prompt >= lengths, own > self._rows.ages[:, None]], 1)
        if windowed:
            keys = torch.cat([of_prompt.expand(len(lengths), -1), lengths + own], 1)
            hidden |= keys <= self.positions[:, None] - window
        return hidden[:, None, None]
