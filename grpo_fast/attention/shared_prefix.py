"""Groups of completions that share their prompt, packed into one row: each prompt's tokens are there once.

A row is [prompt, completion 1 .. k] of one group after the other. A completion attends to its own prompt and to itself,
at the positions it would have alone, so that a model computes for its tokens what it would in a row of their own, and
a prompt's gradient is the sum over its completions.

On a CPU the groups are taken apart into tiles of similar sizes. A completion's attention is that to its prompt, for
which all completions of a group are one batch of queries, and that to itself; the two are merged by their
log-sum-exps, exactly (FlashInfer, arXiv 2501.01005, section 2.2), and so are their backwards, which need no more than
the merged output and log-sum-exp (FlashAttention, arXiv 2205.14135, algorithm 4). No key is copied, and nothing is
masked where sizes are equal. On a GPU it is FlexAttention.

Letters: L tokens of a row, H query heads, K key and value heads, D head size, X heads of either kind; in a tile n
groups of k completions, padded to P prompt and C completion tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

# Groups share a tile while padding them costs less than another tile's calls: up to a share of their tokens, or some.
_PADDING_SHARE, _PADDING_TOKENS = 0.2, 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Groups of similar sizes. Its slots are the prompts' [n, P], then the completions' [n, k, C]; some are padding.

    Attributes:
        shape: (n, k, P, C).
        places: int64 [n * P + n * k * C], which token of the row each slot holds; 0 at padding.
        valid: bool, the same shape, False at padding; None where there is none.
        prompt_lengths: int64 [n]; None where all are P.
    """

    shape: tuple[int, int, int, int]
    places: Tensor
    valid: Tensor | None
    prompt_lengths: Tensor | None

    def gather(self, x: Tensor, *, zero_padding: bool = False) -> tuple[Tensor, Tensor]:
        """From a row's [L, X, D] the prompts' [n, P, X, D] and the completions' [n, k * C, X, D].

        Padding holds what is finite but means nothing, or zeros.
        """
        n, k, p, c = self.shape
        slots = x.index_select(0, self.places)
        if zero_padding and self.valid is not None:
            slots.masked_fill_(~self.valid[:, None, None], 0.0)
        prompts, completions = slots.split([n * p, n * k * c])
        return prompts.view(n, p, *x.shape[1:]), completions.view(n, k * c, *x.shape[1:])

    def alone(self, completions: Tensor) -> Tensor:
        """The completions [n, k * C, X, D] as rows of their own [n * k, C, X, D]."""
        n, k, _, c = self.shape
        return completions.view(n * k, c, *completions.shape[2:])

    def prompt_mask(self, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, k * C, P]: 0 at prompts' tokens, -inf at their padding; None without padding."""
        if self.prompt_lengths is None:
            return None
        n, k, p, c = self.shape
        padding = torch.arange(p, device=self.places.device) >= self.prompt_lengths[:, None]
        mask = torch.zeros(n, p, dtype=dtype, device=padding.device).masked_fill_(padding, -torch.inf)
        return mask[:, None, None].expand(n, 1, k * c, p)

    def mask(self, window: int | None) -> Tensor:
        """bool [n, 1, C, P + C], which keys of [prompt, completion] the tokens of a completion see."""
        n, _, p, c = self.shape
        device = self.places.device
        lengths = torch.full((n,), p, device=device) if self.prompt_lengths is None else self.prompt_lengths
        own = torch.arange(c, device=device)
        queries = lengths[:, None] + own  # positions, [n, C]
        keys = torch.cat([torch.arange(p, device=device).expand(n, p), queries], 1)
        seen = keys[:, None, :] <= queries[:, :, None]
        seen[:, :, :p] &= (torch.arange(p, device=device) < lengths[:, None])[:, None, :]
        if window is not None:
            seen &= keys[:, None, :] > queries[:, :, None] - window
        return seen[:, None]


def _make_tiles(groups: Sequence[tuple[int, Sequence[int]]], device) -> tuple[list[Tile], Tensor]:
    """The tiles of a row, and for every token of the row its slot, counted through all tiles."""
    spans, place = [], 0  # of every group: (first token, length) of the prompt and of completions with tokens
    for prompt, completions in groups:
        pieces = []
        for length in (prompt, *completions):
            pieces.append((place, length))
            place += length
        spans.append((pieces[0], [piece for piece in pieces[1:] if piece[1]]))
    spans.sort(key=lambda span: (span[0][1], max((length for _, length in span[1]), default=0), len(span[1])))
    tiles: list[list] = []
    for span in spans:
        if tiles and _padding([*tiles[-1], span]) <= max(_PADDING_TOKENS, _PADDING_SHARE * _tokens([*tiles[-1], span])):
            tiles[-1].append(span)
        else:
            tiles.append([span])
    slots, made, first = torch.empty(place, dtype=torch.int64), [], 0
    for tile in tiles:
        made.append(_make_tile(tile, slots, first, device))
        first += len(made[-1].places)
    return made, slots.to(device)


def _sizes(spans: list) -> tuple[int, int, int, int]:  # of the tile that holds these groups
    completions = [[length for _, length in own] for _, own in spans]
    longest = max((max(lengths, default=0) for lengths in completions), default=0)
    return len(spans), max(map(len, completions)), max(length for (_, length), _ in spans), longest


def _tokens(spans: list) -> int:
    return sum(length + sum(own for _, own in completions) for (_, length), completions in spans)


def _padding(spans: list) -> int:
    n, k, p, c = _sizes(spans)
    return n * (p + k * c) - _tokens(spans)


def _make_tile(spans: list, slots: Tensor, first: int, device) -> Tile:
    """A tile of these groups, whose first slot is number `first`; notes in `slots` where their tokens went."""
    n, k, p, c = shape = _sizes(spans)
    places = torch.zeros(n * (p + k * c), dtype=torch.int64)
    valid = torch.zeros(len(places), dtype=torch.bool)
    for row, (prompt, completions) in enumerate(spans):
        starts = [row * p, *(n * p + (row * k + index) * c for index in range(len(completions)))]
        for slot, (place, length) in zip(starts, [prompt, *completions], strict=True):
            places[slot : slot + length] = torch.arange(place, place + length)
            valid[slot : slot + length] = True
            slots[place : place + length] = torch.arange(first + slot, first + slot + length)
    lengths = torch.tensor([length for (_, length), _ in spans])
    return Tile(
        shape=shape,
        places=places.to(device),
        valid=None if bool(valid.all()) else valid.to(device),
        prompt_lengths=None if bool((lengths == p).all()) else lengths.to(device),
    )


class SharedPrefix:
    """The attention of one packed row, for `grpo_fast_attention` (see `attention.interface`).

    Args:
        groups: of every group its prompt's length, at least 1, and its completions' lengths, in the order they have
            in the row; a completion may be empty.
        device: where the row is.

    Attributes:
        position_ids: int64 [1, L]; a completion's go on where its prompt's end.
        longest: positions of the longest sequence.
    """

    def __init__(self, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu") -> None:
        if not groups or min(prompt for prompt, _ in groups) < 1:
            raise ValueError(f"groups: expected at least one, each with a prompt of 1 token or more, got {groups}")
        self.longest = max(prompt + max(completions, default=0) for prompt, completions in groups)
        positions, pieces, prompts = [], [], []  # of every token; a piece is a prompt or a completion
        for prompt, completions in groups:
            root = len(pieces)
            for first, length in ((0, prompt), *((prompt, length) for length in completions)):
                positions.append(torch.arange(first, first + length))
                prompts.append(torch.full((length,), root))
                pieces.append(torch.full((length,), len(pieces)))
        self.position_ids = torch.cat(positions)[None].to(device)
        self._piece, self._prompt = torch.cat(pieces).to(device), torch.cat(prompts).to(device)
        self._tiles, self._slots = _make_tiles(groups, device)
        self._block_masks: dict[int | None, object] = {}

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
        if window is not None and window >= self.longest:
            window = None
        if query.device.type == "cuda" and query.dtype != torch.float64:
            return self.by_flex_attention(query, key, value, scale=scale, window=window, softcap=softcap)
        same_size = query.shape[-1] == value.shape[-1]
        if query.device.type == "cpu" and window is None and softcap is None and same_size:
            return _MergedAttention.apply(query, key, value, self._tiles, self._slots, scale)
        return self.by_masks(query, key, value, scale=scale, window=window, softcap=softcap)

    def by_masks(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """The same with keys repeated for every completion and a mask: any window, softcap, device and head size."""
        outputs = []
        for tile in self._tiles:
            _, k, p, c = tile.shape
            (q, q_own), (keys, k_own), (values, v_own) = (
                tile.gather(x[0].transpose(0, 1)) for x in (query, key, value)
            )
            options = {"scale": scale, "softcap": softcap}
            causal = torch.arange(p, device=q.device)[:, None] - torch.arange(p, device=q.device)
            seen = (causal >= 0) if window is None else (causal >= 0) & (causal < window)
            outputs.append(_attend(q, keys, values, seen, **options).flatten(0, 1))
            if k and c:
                keys = torch.cat([keys.repeat_interleave(k, 0), tile.alone(k_own)], 1)
                values = torch.cat([values.repeat_interleave(k, 0), tile.alone(v_own)], 1)
                seen = tile.mask(window).repeat_interleave(k, 0)
                outputs.append(_attend(tile.alone(q_own), keys, values, seen, **options).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._slots)[None]

    def by_flex_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """The same by FlexAttention, compiled on a GPU, for any length once."""
        from torch.nn.attention.flex_attention import create_block_mask

        piece, prompt, position = self._piece, self._prompt, self.position_ids[0]

        def sees(batch, head, i, j):
            seen = (i >= j) & ((piece[i] == piece[j]) | (prompt[i] == piece[j]))
            return seen if window is None else seen & (position[i] - position[j] < window)

        def capped(score, batch, head, i, j):
            return softcap * torch.tanh(score / softcap)

        if window not in self._block_masks:
            length = len(piece)
            self._block_masks[window] = create_block_mask(sees, None, None, length, length, device=piece.device)
        out = _flex_attention(query.device.type)(
            query,
            key,
            value,
            score_mod=None if softcap is None else capped,
            block_mask=self._block_masks[window],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)


@functools.cache
def _flex_attention(device: str):
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic=True: each new length would else be compiled anew, for many seconds.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Attention of [B, Q, H, D] to [B, S, K, D] where `seen`, broadcastable to [B, 1, Q, S]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if softcap is None:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped).transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, -torch.inf)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    return torch.matmul(scores.softmax(-1, dtype=accurate).to(v.dtype), v).transpose(1, 2)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _MergedAttention(torch.autograd.Function):
    """Query [1, H, L, D], key and value [1, K, L, D] -> [1, L, H, D], on a CPU, in any floating-point dtype."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, tiles: list[Tile], slots: Tensor, scale: float
    ) -> Tensor:
        q_LHD, k_LKD, v_LKD = (x[0].transpose(0, 1) for x in (query, key, value))
        outputs, sums = [], []  # slot after slot; log-sum-exps of the scores, by heads
        for tile in tiles:
            (q, q_own), (k, k_own), (v, v_own) = (_heads_first(tile.gather(x)) for x in (q_LHD, k_LKD, v_LKD))
            out, lse = _flash(q, k, v, 0.0, True, scale=scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
            if q_own.shape[2] == 0:
                continue
            prefix, prefix_lse = _flash(q_own, k, v, 0.0, False, attn_mask=tile.prompt_mask(q.dtype), scale=scale)
            own, own_lse = _flash(*(_alone(tile, x) for x in (q_own, k_own, v_own)), 0.0, True, scale=scale)
            prefix, own = prefix.transpose(1, 2).flatten(0, 1), own.transpose(1, 2).flatten(0, 1)
            prefix_lse, own_lse = prefix_lse.transpose(1, 2).flatten(0, 1), own_lse.transpose(1, 2).flatten(0, 1)
            share = torch.sigmoid(prefix_lse - own_lse).unsqueeze(-1)
            outputs.append(torch.lerp(own.to(share.dtype), prefix.to(share.dtype), share).to(own.dtype))
            sums.append(torch.logaddexp(prefix_lse, own_lse))
        out_LHD = torch.cat(outputs).index_select(0, slots)
        ctx.save_for_backward(query, key, value, out_LHD, torch.cat(sums).index_select(0, slots), slots)
        ctx.tiles, ctx.scale = tiles, scale
        return out_LHD[None]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, key, value, out_LHD, lse_LH, slots = ctx.saved_tensors
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        gradients: tuple[list[Tensor], ...] = ([], [], [])
        for tile in ctx.tiles:
            (q, q_own), (k, k_own), (v, v_own) = (_heads_first(tile.gather(x)) for x in rows)
            out, out_own = _heads_first(tile.gather(out_LHD))
            dout, dout_own = _heads_first(tile.gather(grad[0], zero_padding=True))
            lse, lse_own = (x[..., 0] for x in _heads_first(tile.gather(lse_LH[..., None])))
            of_prompt = _flash_backward(dout, q, k, v, out, lse, 0.0, True, scale=ctx.scale)
            if q_own.shape[2] == 0:
                for collected, x in zip(gradients, of_prompt, strict=True):
                    collected.append(x.transpose(1, 2).flatten(0, 1))
                continue
            mask = tile.prompt_mask(q.dtype)
            of_prefix = _flash_backward(
                dout_own, q_own, k, v, out_own, lse_own, 0.0, False, attn_mask=mask, scale=ctx.scale
            )
            own = (_alone(tile, x) for x in (dout_own, q_own, k_own, v_own, out_own))
            of_own = _flash_backward(*own, _alone(tile, lse_own[..., None])[..., 0], 0.0, True, scale=ctx.scale)
            of_own = [x.transpose(1, 2).flatten(0, 1) for x in of_own]
            of_own[0] += of_prefix[0].transpose(1, 2).flatten(0, 1)
            of_prompt = (of_prompt[0], of_prompt[1] + of_prefix[1], of_prompt[2] + of_prefix[2])
            for collected, x, y in zip(gradients, of_prompt, of_own, strict=True):
                collected += (x.transpose(1, 2).flatten(0, 1), y)
        dq, dk, dv = (torch.cat(x).index_select(0, slots).transpose(0, 1)[None] for x in gradients)
        return dq, dk, dv, None, None, None


def _heads_first(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].transpose(1, 2), pair[1].transpose(1, 2)


def _alone(tile: Tile, x: Tensor) -> Tensor:
    """[n, X, k * C, D] to [n * k, X, C, D]."""
    return tile.alone(x.transpose(1, 2).contiguous()).transpose(1, 2)
