"""The lm_head ops: chunks of rows through GEMM -> row kernel in place -> GEMM, so that [N,V] never exists.

Letters: N rows (tokens), R rows of a chunk, V vocabulary, D hidden. `rows` are the int64 indices of the tokens to
score; None scores all. Weight and bias gradients are accumulated in fp32 over the chunks and rounded once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_fast.ops import backends, library
from grpo_fast.ops.library import _OBJECTIVE, _TRANSFORM, check_ids, define

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? rows, Tensor ids, Tensor valid"
_TAIL = "ScalarType gemm_dtype, int rows_per_chunk, str backend"


def gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """autocast's dtype where it is on, else the dtype both operands fit in.

    Decided by the caller of an op, never inside: a compiled graph runs its ops with autocast off.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


def without_autocast(body):
    """Decorator of an op's body: the dtypes in it are meant as they are written."""

    @functools.wraps(body)
    def wrapper(hidden, *args):
        with torch.autocast(hidden.device.type, enabled=False):
            return body(hidden, *args)

    return wrapper


class _Head:
    """One chunked walk over the rows of hidden: yields logits chunks, takes back their gradients."""

    def __init__(self, hidden, weight, bias, rows, valid, dtype: torch.dtype, rows_per_chunk: int):
        self.hidden = hidden
        self.valid = valid[0, :, None]
        self.dtype = dtype
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.rows = rows
        self.rows_per_chunk = max(1, rows_per_chunk)
        self.num_rows = hidden.shape[0] if rows is None else rows.shape[0]

    def chunks(self):
        """(slice or index of the chunk's tokens, hidden_RD, logits_RV)"""
        for start in range(0, self.num_rows, self.rows_per_chunk):
            stop = min(start + self.rows_per_chunk, self.num_rows)
            where = slice(start, stop) if self.rows is None else self.rows[start:stop]
            # A masked row may hold NaN, which its zero coefficient would not keep out of the weight's gradient.
            hidden_RD = torch.where(self.valid[where], self.hidden[where], 0.0).to(self.dtype)
            logits_RV = hidden_RD @ self.weight.t()
            if self.bias is not None:
                logits_RV += self.bias
            if self.dtype == torch.float16:
                logits_RV = logits_RV.float()  # for the gradients' sake, see _Grads._add_fp16
            yield where, hidden_RD, logits_RV


class _Grads:
    """Gradients of hidden, weight and bias, each only where needed (None otherwise)."""

    def __init__(self, head: _Head, need: tuple[bool, bool, bool], keep_fp32: bool):
        hidden, weight = head.hidden, head.weight
        self.head, self.keep_fp32 = head, keep_fp32
        dtype = torch.float32 if keep_fp32 else hidden.dtype
        self.hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if need[0] else None
        self.weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need[1] else None
        self.bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if need[2] else None

    def add(self, where, hidden_RD: Tensor, dlogits_RV: Tensor) -> None:
        """Add a chunk's share."""
        if self.head.dtype == torch.float16:
            self._add_fp16(where, hidden_RD, dlogits_RV)
            return
        if self.hidden is not None:
            self.hidden[where] = (dlogits_RV @ self.head.weight).to(self.hidden.dtype)
        if self.weight is not None:
            if dlogits_RV.dtype == torch.float32:
                self.weight.addmm_(dlogits_RV.t(), hidden_RD)
            else:
                self.weight += _mm_fp32(dlogits_RV.t(), hidden_RD)
        if self.bias is not None:
            self.bias += dlogits_RV.sum(0, dtype=torch.float32)

    def _add_fp16(self, where, hidden_RD: Tensor, dlogits_RV: Tensor) -> None:
        """fp16 gradients would flush to 0 or overflow: fp32 ones are brought near 1 for the GEMMs, exactly."""
        size = _power_of_two_below(dlogits_RV)
        dlogits_RV = (dlogits_RV / size).half()
        if self.hidden is not None:
            self.hidden[where] = (_mm_fp32(dlogits_RV, self.head.weight) * size).to(self.hidden.dtype)
        if self.weight is not None:
            self.weight += _mm_fp32(dlogits_RV.t(), hidden_RD) * size
        if self.bias is not None:
            self.bias += dlogits_RV.sum(0, dtype=torch.float32) * size

    def finish(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """In the parameters' dtypes (fp32 where the backward still has to scale fp16); empty where not needed."""
        results = []
        for grad, parameter in ((self.hidden, self.head.hidden), (self.weight, weight), (self.bias, bias)):
            if grad is None:
                results.append(self.head.hidden.new_empty(0))
            else:
                results.append(grad if self.keep_fp32 else grad.to(parameter.dtype))
        return results


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of half-precision operands with fp32 accumulation and an fp32 result."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # the CPU has no mixed GEMM, and rounding each chunk's sum would bias the total


def _power_of_two_below(values: Tensor) -> Tensor:
    """A power of two in [max|values| / 2, max|values|], 1 where all are 0: dividing by it is exact."""
    largest = values.abs().amax().clamp(max=torch.finfo(torch.float32).max)
    return torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-126)))), 1.0)


def _select(vector: Tensor | None, where) -> Tensor | None:
    return None if vector is None else vector[:, where].contiguous()


@without_autocast
def _linear_grpo_loss(
    hidden, weight, bias, rows, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale,
    want_entropy, need_hidden, need_weight, need_bias, temperature, softcap, logit_scale, clip_low, clip_high, delta,
    beta, bias_correction, dtype, rows_per_chunk, backend,
):  # fmt: skip
    check_ids(ids, valid, weight.shape[0])
    kernel = backends.functions(backend).grpo_loss
    numbers = (temperature, softcap, logit_scale, clip_low, clip_high, delta, beta, bias_correction)
    head = _Head(hidden, weight, bias, rows, valid, dtype, rows_per_chunk)
    grads = _Grads(head, (need_hidden, need_weight, need_bias), dtype == torch.float16)
    losses, logps, entropy = (torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(3))
    for where, hidden_RD, logits_RV in head.chunks():
        vectors = [_select(v, where) for v in (ids, valid, advantages, weights, old_logps, ref_logps)]
        vectors[1] = vectors[1].view(torch.uint8)
        logits_1RV = logits_RV[None]
        outputs = library.like_vectors(logits_1RV, 3)
        if not want_entropy:
            outputs[2] = None
        kernel(logits_1RV, *vectors, _select(coef, where), entropy_scale, *outputs, logits_1RV, *numbers)
        grads.add(where, hidden_RD, logits_RV)
        for whole, part in zip((losses, logps, entropy), outputs, strict=True):
            if part is not None:
                whole[:, where] = part
        del logits_RV, logits_1RV  # before the next chunk's are made
    return losses, logps, entropy if want_entropy else entropy.new_empty(0), *grads.finish(weight, bias)


def _linear_grpo_loss_fake(hidden, weight, bias, rows, ids, *args):
    coef, want_entropy, need, dtype = args[5], args[7], args[8:11], args[-3]
    losses, logps = torch.empty_like(coef), torch.empty_like(coef)
    entropy = torch.empty_like(coef) if want_entropy else coef.new_empty(0)
    return losses, logps, entropy, *_fake_grads(hidden, weight, bias, need, keep_fp32=dtype == torch.float16)


def _fake_grads(hidden, weight, bias, need, keep_fp32):
    def gradient(tensor, needed):
        if not needed:
            return hidden.new_empty(0)
        return torch.empty(tensor.shape, dtype=torch.float32 if keep_fp32 else tensor.dtype, device=tensor.device)

    return tuple(gradient(*pair) for pair in zip((hidden, weight, bias), need, strict=True))


@without_autocast
def _linear_row_stats(hidden, weight, bias, rows, ids, valid, *args):
    *transform, want_entropy, dtype, rows_per_chunk, backend = args
    check_ids(ids, valid, weight.shape[0])
    kernel = backends.functions(backend).row_stats
    head = _Head(hidden, weight, bias, rows, valid, dtype, rows_per_chunk)
    whole = [torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(4)]
    for where, _, logits_RV in head.chunks():
        logits_1RV = logits_RV[None]
        outputs = library.like_vectors(logits_1RV, 4)  # logps, entropy, row_max, row_sum
        if not want_entropy:
            outputs[1] = None
        kernel(logits_1RV, _select(ids, where), _select(valid, where).view(torch.uint8), *outputs, *transform)
        for vector, part in zip(whole, outputs, strict=True):
            if part is not None:
                vector[:, where] = part
        del logits_RV, logits_1RV
    return whole[0], whole[1] if want_entropy else whole[1].new_empty(0), *whole[2:]


def _linear_row_stats_fake(hidden, weight, bias, rows, ids, valid, t, c, s, want_entropy, *tail):
    logps, row_max, row_sum = (torch.empty(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(3))
    return logps, torch.empty_like(logps) if want_entropy else logps.new_empty(0), row_max, row_sum


@without_autocast
def _linear_row_grad(
    hidden, weight, bias, rows, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, need_hidden, need_weight,
    need_bias, temperature, softcap, logit_scale, dtype, rows_per_chunk, backend,
):  # fmt: skip
    kernel = backends.functions(backend).row_grad
    head = _Head(hidden, weight, bias, rows, valid, dtype, rows_per_chunk)
    grads = _Grads(head, (need_hidden, need_weight, need_bias), keep_fp32=False)
    for where, hidden_RD, logits_RV in head.chunks():
        vectors = [_select(v, where) for v in (ids, valid, row_max, row_sum, logps, entropy, g, g_entropy)]
        vectors[1] = vectors[1].view(torch.uint8)
        logits_1RV = logits_RV[None]
        kernel(logits_1RV, *vectors, logits_1RV, temperature, softcap, logit_scale)
        grads.add(where, hidden_RD, logits_RV)
        del logits_RV, logits_1RV
    return tuple(grads.finish(weight, bias))


def _linear_row_grad_fake(hidden, weight, bias, *args):
    return _fake_grads(hidden, weight, bias, args[9:12], keep_fp32=False)


_NEED = "bool need_hidden, bool need_weight, bool need_bias"
_GRADS = "Tensor dhidden, Tensor dweight, Tensor dbias"

linear_grpo_loss = define(
    "linear_grpo_loss",
    f"({_HEAD}, Tensor advantages, Tensor? weights, Tensor? old_logps, Tensor? ref_logps, Tensor coef, "
    f"Tensor? entropy_scale, bool want_entropy, {_NEED}, {_TRANSFORM}, {_OBJECTIVE}, {_TAIL})"
    f" -> (Tensor losses, Tensor logps, Tensor entropy, {_GRADS})",
    _linear_grpo_loss,
    _linear_grpo_loss_fake,
)
linear_row_stats = define(
    "linear_row_stats",
    f"({_HEAD}, {_TRANSFORM}, bool want_entropy, {_TAIL})"
    " -> (Tensor logps, Tensor entropy, Tensor row_max, Tensor row_sum)",
    _linear_row_stats,
    _linear_row_stats_fake,
)
linear_row_grad = define(
    "linear_row_grad",
    f"({_HEAD}, Tensor row_max, Tensor row_sum, Tensor logps, Tensor? entropy, Tensor g, Tensor? g_entropy, "
    f"{_NEED}, {_TRANSFORM}, {_TAIL}) -> ({_GRADS})",
    _linear_row_grad,
    _linear_row_grad_fake,
)
