"""The lm_head ops for torch.library: chunk by chunk, [N, V] never exists. Letters as in head.py."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_fast.ops.head import Head, HeadGrads, HeadOptions, grad_dtype, plan
from grpo_fast.ops.head_walk import RowStats, rows_or_all, rows_with_gradient, walk
from grpo_fast.ops.library import _TRANSFORM, check_ids, define
from grpo_fast.ops.objective import PolicyInputs, policy_objective
from grpo_fast.ops.options import PolicyOptions

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
_ROWS = "Tensor? rows, Tensor ids, Tensor valid"
_TAIL = "ScalarType dtype, ScalarType logits_dtype, int rows_per_chunk, str backend"
_POLICY = (  # PolicyOptions, field by field
    "str loss_type, float epsilon, float? epsilon_high, float? delta, float beta, str importance_sampling_level, "
    "bool use_bias_correction_kl, float entropy_coef, int? max_completion_length"
)
_NEED = "bool need_hidden, bool need_weight, bool need_bias"
_GRADS = "Tensor dhidden, Tensor dweight, Tensor dbias"


def gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """autocast's dtype where it is on (it leaves float64 alone), else the dtype both operands fit in.

    Decided by the caller of an op, never inside: a compiled graph runs its ops with autocast off.
    """
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return dtype


def without_autocast(body):
    """Decorator of an op's body: the dtypes in it are meant as they are written."""

    @functools.wraps(body)
    def wrapper(hidden, *args):
        with torch.autocast(hidden.device.type, enabled=False):
            return body(hidden, *args)

    return wrapper


@without_autocast
def _linear_grpo_loss(
    hidden, weight, bias, need_hidden, need_weight, need_bias, rows, ids, valid, advantages, weights, old_logps,
    ref_logps, coef, entropy_scale, cu_seqlens, want_entropy, *numbers,
):  # fmt: skip
    transform, options, how = numbers[:3], PolicyOptions(*numbers[3:-4]), HeadOptions(*numbers[-4:])
    inputs = PolicyInputs.of(ids, valid, cu_seqlens, advantages, weights, old_logps, ref_logps)
    return walk(
        hidden, weight, bias, (need_hidden, need_weight, need_bias), rows, ids.reshape(-1), valid.reshape(-1),
        functools.partial(policy_objective, inputs=inputs, options=options, coef=coef, entropy_scale=entropy_scale),
        inputs.tokens.sequences if options.is_sequence_level else None,
        want_entropy, transform, how,
    )  # fmt: skip


def _linear_grpo_loss_fake(
    hidden, weight, bias, need_hidden, need_weight, need_bias, rows, ids, valid, advantages, weights, old_logps,
    ref_logps, coef, entropy_scale, cu_seqlens, want_entropy, *numbers,
):  # fmt: skip
    logps = coef.new_empty(coef.numel(), dtype=torch.float32)
    entropy = torch.empty_like(logps) if want_entropy else logps.new_empty(0)
    how = HeadOptions(*numbers[-4:])
    grads = _fake_grads(hidden, weight, bias, need_hidden, need_weight, need_bias, how)
    return logps.new_empty(()), logps, entropy, *grads


def _fake_grads(hidden, weight, bias, need_hidden, need_weight, need_bias, how):
    def gradient(tensor, needed):
        if not needed:
            return hidden.new_empty(0)
        return torch.empty(tensor.shape, dtype=grad_dtype(tensor, how.dtype), device=tensor.device)

    needs = (need_hidden, need_weight, need_bias)
    return tuple(gradient(*pair) for pair in zip((hidden, weight, bias), needs, strict=True))


@without_autocast
def _linear_row_stats(
    hidden, weight, bias, rows, ids, valid, temperature, softcap, logit_scale, want_entropy, unit, *how
):
    """unit "hidden" keeps dlogp/dhidden, (N, D); "logits" dlogp/dlogits, (rows, V), from one chunk; "" nothing."""
    check_ids(ids, valid, weight.shape[0])
    how, transform, rows = HeadOptions(*how), (temperature, softcap, logit_scale), rows_or_all(rows, ids)
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, (unit == "hidden", False, False))
    whole = [torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(4)]
    units = None
    if unit == "logits":
        units = torch.empty(rows.shape[0], weight.shape[0], dtype=how.logits_dtype, device=hidden.device)
    for chunk in plan(rows, rows.shape[0] if unit == "logits" else how.rows_per_chunk):
        stats = RowStats(chunk.rows, ids, valid, want_entropy, transform, how.backend)
        everything = slice(0, chunk.rows.shape[0])
        hidden_RD = head.rows(chunk.rows)
        logits_RV = head.logits(hidden_RD, units)
        stats.collect(everything, logits_RV)
        for vector, values in zip(whole, (stats.logps, stats.entropy, stats.row_max, stats.row_sum), strict=True):
            if values is not None:
                vector[chunk.rows] = values
        if unit:
            stats.differentiate(everything, logits_RV, torch.ones_like(stats.logps), None)
        if unit == "hidden":
            grads.add(chunk.rows, hidden_RD, logits_RV)
    head.close()
    logps, entropy, row_max, row_sum = whole
    if unit != "logits":
        units = grads.finish()[0]
    return logps, entropy if want_entropy else entropy.new_empty(0), row_max, row_sum, units


def _linear_row_stats_fake(hidden, weight, bias, rows, ids, valid, t, c, s, want_entropy, unit, *how):
    logps, row_max, row_sum = (torch.empty(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(3))
    entropy = torch.empty_like(logps) if want_entropy else logps.new_empty(0)
    how = HeadOptions(*how)
    units = hidden.new_empty(0)
    if unit == "hidden":
        (units, *_) = _fake_grads(hidden, weight, bias, True, False, False, how)
    elif unit == "logits":
        num_rows = ids.shape[0] if rows is None else rows.shape[0]
        units = hidden.new_empty((num_rows, weight.shape[0]), dtype=how.logits_dtype)
    return logps, entropy, row_max, row_sum, units


@without_autocast
def _linear_row_grad(
    hidden, weight, bias, need_hidden, need_weight, need_bias, rows, ids, valid, row_max, row_sum, logps, entropy, g,
    g_entropy, temperature, softcap, logit_scale, *how,
):  # fmt: skip
    how, transform = HeadOptions(*how), (temperature, softcap, logit_scale)
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, (need_hidden, need_weight, need_bias))
    rows = rows_or_all(rows, ids)
    keep = rows_with_gradient(g[rows], None if g_entropy is None else g_entropy[rows])
    for chunk in plan(rows if keep is None else rows[keep], how.rows_per_chunk):
        stats = RowStats(chunk.rows, ids, valid, False, transform, how.backend)
        stats.recall(logps, entropy, row_max, row_sum)
        hidden_RD = head.rows(chunk.rows)
        logits_RV = head.logits(hidden_RD)
        g_R, g_entropy_R = (None if v is None else v[chunk.rows] for v in (g, g_entropy))
        stats.differentiate(slice(0, chunk.rows.shape[0]), logits_RV, g_R, g_entropy_R)
        grads.add(chunk.rows, hidden_RD, logits_RV)
    head.close()
    return tuple(grads.finish())


def _linear_row_grad_fake(hidden, weight, bias, need_hidden, need_weight, need_bias, *args):
    return _fake_grads(hidden, weight, bias, need_hidden, need_weight, need_bias, HeadOptions(*args[-4:]))


@without_autocast
def _linear_unit_grad(hidden, weight, bias, need_hidden, need_weight, need_bias, rows, valid, units, g, *how):
    """Gradients from units = dlogp/dlogits (rows, V) and g (N,): two GEMMs."""
    how = HeadOptions(*how)
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, (need_hidden, need_weight, need_bias))
    done = 0
    for chunk in plan(rows_or_all(rows, g), how.rows_per_chunk):
        scaled_RV = head.workspace(chunk.rows.shape[0])
        torch.mul(units[done : done + len(scaled_RV)], g[chunk.rows][:, None], out=scaled_RV)
        grads.add(chunk.rows, head.rows(chunk.rows), scaled_RV)
        done += len(scaled_RV)
    head.close()
    return tuple(grads.finish())


linear_grpo_loss = define(
    "linear_grpo_loss",
    f"({_HEAD}, {_NEED}, {_ROWS}, Tensor advantages, Tensor? weights, Tensor? old_logps, Tensor? ref_logps, "
    f"Tensor coef, Tensor? entropy_scale, Tensor? cu_seqlens, bool want_entropy, {_TRANSFORM}, {_POLICY}, {_TAIL})"
    f" -> (Tensor loss, Tensor logps, Tensor entropy, {_GRADS})",
    _linear_grpo_loss,
    _linear_grpo_loss_fake,
)
linear_row_stats = define(
    "linear_row_stats",
    f"({_HEAD}, {_ROWS}, {_TRANSFORM}, bool want_entropy, str unit, {_TAIL})"
    " -> (Tensor logps, Tensor entropy, Tensor row_max, Tensor row_sum, Tensor units)",
    _linear_row_stats,
    _linear_row_stats_fake,
)
linear_row_grad = define(
    "linear_row_grad",
    f"({_HEAD}, {_NEED}, {_ROWS}, Tensor row_max, Tensor row_sum, Tensor logps, Tensor? entropy, Tensor g, "
    f"Tensor? g_entropy, {_TRANSFORM}, {_TAIL}) -> ({_GRADS})",
    _linear_row_grad,
    _linear_row_grad_fake,
)
linear_unit_grad = define(
    "linear_unit_grad",
    f"({_HEAD}, {_NEED}, Tensor? rows, Tensor valid, Tensor units, Tensor g, {_TAIL}) -> ({_GRADS})",
    _linear_unit_grad,
    _linear_row_grad_fake,
)
