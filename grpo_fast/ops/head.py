"""The lm_head's matrix products, chunk by chunk, so that [N, V] never exists.

Letters: N tokens, R rows of a chunk, V vocabulary, D hidden, B sequences. Rows are named by their int64 places among
the N tokens, in ascending order. Weight and bias gradients are accumulated in fp32 over the chunks and rounded once.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.ops.inputs import Sequences


class HeadOptions(NamedTuple):
    """The last arguments of every head op. `dtype` is the matrix products', decided outside of the op (autocast)."""

    dtype: torch.dtype
    logits_dtype: torch.dtype
    rows_per_chunk: int
    backend: str


@dataclass(frozen=True)
class Chunk:
    """Rows that are scored together: any, or those of whole sequences."""

    rows: Tensor  # (R,) their places among the flat tokens
    sequences: tuple[int, int] | None = None  # first, last + 1
    span: tuple[int, int] | None = None  # the flat places of all tokens of these sequences, scored or not
    longest: int | None = None  # of these sequences, in tokens

    def parts(self, size: int) -> list[slice]:
        """In parts of at most `size` rows: one, but for an overlong sequence."""
        total = self.rows.shape[0]
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]

    def of(self, sequences: Sequences) -> tuple[Sequences, Callable, Callable]:
        """What the chunk is of the whole: its sequences, `take` and `place`.

        take: a vector of all tokens -> of the chunk's, in the layout of its sequences; place: (R,) values of its rows
        into that layout, 0 elsewhere. Without whole sequences the layout is one row, (1, R).
        """
        if self.sequences is None:
            one = Sequences(1, (1, self.rows.shape[0]))
            return one, lambda vector: vector.reshape(-1)[self.rows][None], lambda values: values[None]
        start, stop = self.span
        part = sequences.narrow(*self.sequences, start, stop)

        def place(values: Tensor) -> Tensor:
            return values.new_zeros(stop - start).index_put((self.rows - start,), values).view(part.shape)

        return part, lambda vector: vector.reshape(-1)[start:stop].view(part.shape), place


def plan(rows: Tensor, rows_per_chunk: int, sequences: Sequences | None = None) -> list[Chunk]:
    """Chunks of at most `rows_per_chunk` rows; with `sequences`, of whole ones, a longer one being a chunk by itself.

    On a GPU, `sequences` costs one host synchronisation: how many of each one's tokens are among the rows.
    """
    rows_per_chunk = max(1, rows_per_chunk)
    if sequences is None:
        count = -(-rows.shape[0] // rows_per_chunk)
        return [Chunk(part) for part in rows.tensor_split(count)] if count else []
    if sequences.cu_seqlens is None:
        bounds = torch.arange(sequences.num + 1, device=rows.device) * sequences.shape[1]
    else:
        bounds = sequences.cu_seqlens.long().contiguous()
    bounds, starts = torch.stack([bounds, torch.searchsorted(rows, bounds)]).tolist()
    chunks, first = [], 0
    while first < sequences.num:
        last = first + 1
        while last < sequences.num and starts[last + 1] - starts[first] <= rows_per_chunk:
            last += 1
        if starts[last] > starts[first]:
            longest = max(bounds[i + 1] - bounds[i] for i in range(first, last))
            of_whole = ((first, last), (bounds[first], bounds[last]), longest)
            chunks.append(Chunk(rows[starts[first] : starts[last]], *of_whole))
        first = last
    return chunks


# Every page of new memory costs a CPU about as much as the softmax of its logits: the workspace is kept, one a thread.
_kept = threading.local()
_KEPT_BYTES = 1 << 29


def _take_memory(size: int, device: torch.device) -> Tensor:
    """At least `size` bytes, for its taker alone until it gives them back."""
    if device.type == "cpu":
        memory = vars(_kept).pop("memory", None)
        if memory is not None and memory.shape[0] >= size:
            return memory
    with torch.inference_mode(False):  # else it could not be written to outside of it later
        return torch.empty(size, dtype=torch.uint8, device=device)


def release_workspace() -> None:
    """Free the logits workspace that the calling thread keeps for its next head on the CPU, at most 512 MiB."""
    vars(_kept).clear()


def _keep_memory(memory: Tensor) -> None:
    if memory.device.type == "cpu" and type(memory) is Tensor and memory.shape[0] <= _KEPT_BYTES:
        _kept.memory = memory


class Head:
    """hidden @ weight.T + bias for some rows, in one workspace of at most rows_per_chunk x V."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, valid: Tensor, how: HeadOptions):
        self.hidden, self.weight, self.bias, self.how = hidden, weight, bias, how
        self.valid = valid[:, None]
        self.operand = weight.to(how.dtype)
        self._memory: Tensor | None = None

    def rows(self, rows: Tensor) -> Tensor:
        """(R, D) of hidden. A masked row may hold NaN, which its zero coefficient would not keep out of dweight."""
        return torch.where(self.valid[rows], self.hidden[rows], 0.0).to(self.how.dtype)

    def logits(self, hidden_RD: Tensor, out: Tensor | None = None) -> Tensor:
        """(R, V), in the workspace unless `out` is given: the next call overwrites them."""
        logits_RV = self.workspace(hidden_RD.shape[0]) if out is None else out
        if self.how.logits_dtype == self.how.dtype:
            torch.mm(hidden_RD, self.operand.t(), out=logits_RV)
        elif hidden_RD.device.type == "cuda":
            torch.mm(hidden_RD, self.operand.t(), out_dtype=self.how.logits_dtype, out=logits_RV)
        else:
            torch.mm(hidden_RD.to(self.how.logits_dtype), self.wide_operand.t(), out=logits_RV)
        if self.bias is not None:
            logits_RV += self.bias.to(self.how.logits_dtype)
        return logits_RV

    @functools.cached_property
    def wide_operand(self) -> Tensor:
        """The weight in float32: the CPU has no product of half-precision operands with a float32 result."""
        return self.operand.float()

    def workspace(self, num_rows: int) -> Tensor:
        """(num_rows, V), of any content."""
        shape = (num_rows, self.weight.shape[0])
        size = math.prod(shape) * self.how.logits_dtype.itemsize
        if self._memory is None or self._memory.shape[0] < size:
            self._memory = _take_memory(size, self.hidden.device)
        return self._memory[:size].view(self.how.logits_dtype).view(shape)

    def close(self) -> None:
        """No more logits."""
        if self._memory is not None:
            _keep_memory(self._memory)
            self._memory = None


def grad_dtype(parameter: Tensor, gemm_dtype: torch.dtype) -> torch.dtype:
    """Of a gradient that the backward has yet to scale: before a loss scaler's factor a float16 one may flush to 0."""
    return torch.float32 if torch.float16 in (parameter.dtype, gemm_dtype) else parameter.dtype


class HeadGrads:
    """Gradients of hidden, weight and bias from those of logits chunks, each only where needed (None otherwise).

    float16 products would overflow or flush to zero, so a float32 gradient is brought near 1 for them, exactly, and
    the results stay float32 until the backward has scaled them, as those of float16 parameters do (`grad_dtype`). All
    are contiguous, whatever the strides of what they are gradients of: the backends scale rows.
    """

    def __init__(self, head: Head, need: tuple[bool, bool, bool]):
        self.head, self.need = head, need
        dtype = grad_dtype(head.hidden, head.how.dtype)
        self.hidden = torch.zeros(head.hidden.shape, dtype=dtype, device=head.hidden.device) if need[0] else None
        self.weight: Tensor | None = None  # by the first chunk, so that nothing is zeroed and read for it
        self.bias: Tensor | None = None

    def add(self, rows: Tensor, hidden_RD: Tensor, dlogits_RV: Tensor) -> None:
        """Add a chunk's share."""
        need_hidden, need_weight, need_bias = self.need
        size = None
        if dlogits_RV.dtype != self.head.how.dtype:
            if self.head.how.dtype == torch.float16:
                size = _power_of_two_below(dlogits_RV)
                dlogits_RV = dlogits_RV.div_(size)
            dlogits_RV = dlogits_RV.to(self.head.how.dtype)
        if need_hidden:
            if size is None:
                dhidden_RD = dlogits_RV @ self.head.operand
            else:
                dhidden_RD = self._times_weight_fp32(dlogits_RV) * size
            self.hidden[rows] = dhidden_RD.to(self.hidden.dtype)
        if need_weight:
            self.weight = _accumulate(self.weight, dlogits_RV.t(), hidden_RD, size)
        if need_bias:
            dbias_V = dlogits_RV.sum(0, dtype=torch.float32) * (1.0 if size is None else size)
            self.bias = dbias_V if self.bias is None else self.bias + dbias_V

    def _times_weight_fp32(self, dlogits_RV: Tensor) -> Tensor:
        if dlogits_RV.device.type == "cuda":
            return torch.mm(dlogits_RV, self.head.operand, out_dtype=torch.float32)
        return dlogits_RV.float() @ self.head.wide_operand

    def finish(self) -> list[Tensor]:
        """In the parameters' dtypes, or float32 (`grad_dtype`); empty where not needed."""
        head, results = self.head, []
        for grad, parameter, needed in zip(
            (self.hidden, self.weight, self.bias), (head.hidden, head.weight, head.bias), self.need, strict=True
        ):
            if not needed:
                results.append(head.hidden.new_empty(0))
                continue
            dtype = grad_dtype(parameter, head.how.dtype)
            if grad is None:  # no row had one
                grad = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            results.append(grad.to(dtype))
        return results


def _accumulate(total: Tensor | None, a: Tensor, b: Tensor, scale: Tensor | None) -> Tensor:
    """total + a @ b * scale in fp32: rounding each chunk's product would bias the sum."""
    if total is not None and scale is None:
        if a.device.type == "cuda" and a.dtype != torch.float32:
            return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return total.addmm_(a.float(), b.float())
    if a.device.type == "cuda" and a.dtype != torch.float32:
        product = torch.mm(a, b, out_dtype=torch.float32)
    else:
        product = a.float() @ b.float()
    if scale is not None:
        product *= scale
    return product if total is None else total.add_(product)


def _power_of_two_below(values: Tensor) -> Tensor:
    """A power of two in [max|values| / 2, max|values|], 1 where all are 0: dividing by it is exact."""
    largest = values.abs().amax()
    exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-126))).clamp(max=127.0)  # inf has one, too
    return torch.where(largest > 0, torch.exp2(exponent), 1.0)


def move_up(rows_RV: Tensor, keep: Tensor) -> Tensor:
    """The rows `keep` (ascending), moved to the top of their own memory."""
    for place, row in enumerate(keep.tolist()):
        if place != row:
            rows_RV[place].copy_(rows_RV[row])
    return rows_RV[: keep.shape[0]]


# (R,) log-probs, (R,) entropies or None, their chunk -> the chunk's 0-d share of the loss
Objective = Callable[[Tensor, Tensor | None, Chunk], Tensor]
