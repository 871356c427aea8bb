"""The lm_head ops: per chunk logits -> row statistics -> objective -> row gradient in place -> the other two GEMMs.

The objective sees log-probs (and entropies) of the chunk's tokens and nothing of the vocabulary. Its derivative is
taken by autograd on these short vectors, so every loss that is plain PyTorch goes this way: the built-in ones through
the op `linear_grpo_loss`, a user's by calling `walk` directly.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from grpo_fast.ops import backends
from grpo_fast.ops.head import Chunk, Head, HeadGrads, HeadOptions, Objective, move_up, plan
from grpo_fast.ops.inputs import Sequences
from grpo_fast.ops.library import _TRANSFORM, check_ids, define
from grpo_fast.ops.objective import PolicyInputs, policy_objective
from grpo_fast.ops.options import PolicyOptions

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? rows, Tensor ids, Tensor valid"
_TAIL = "ScalarType dtype, ScalarType logits_dtype, int rows_per_chunk, str backend"
_POLICY = (  # PolicyOptions, field by field
    "str loss_type, float epsilon, float? epsilon_high, float? delta, float beta, str importance_sampling_level, "
    "bool use_bias_correction_kl, float entropy_coef, int? max_completion_length"
)
_NEED = "bool need_hidden, bool need_weight, bool need_bias"
_GRADS = "Tensor dhidden, Tensor dweight, Tensor dbias"

_DROPPED_SHARE = 1 / 16  # of a chunk's rows must have no gradient before they are moved out of the last two products


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


@contextlib.contextmanager
def _autograd_inside_an_op(device_type: str):
    """Autograd for an op's own use: a compiled graph calls its ops below the autograd keys."""
    key = getattr(torch._C.DispatchKey, f"Autograd{device_type.upper()}")
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key).remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


class _RowStats:
    """What is kept of a chunk's logits between their two sweeps, (R,) each."""

    def __init__(self, rows: Tensor, ids: Tensor, valid: Tensor, want_entropy: bool, transform, backend: str):
        self._rows, self.ids, self.valid = rows, ids[rows], valid[rows].view(torch.uint8)
        self.logps, self.row_max, self.row_sum = (self.ids.new_empty(rows.shape, dtype=torch.float32) for _ in range(3))
        self.entropy = torch.empty_like(self.logps) if want_entropy else None
        self._transform, self._kernels = transform, backends.functions(backend)

    def recall(self, logps: Tensor, entropy: Tensor | None, row_max: Tensor, row_sum: Tensor) -> None:
        """What an earlier `collect` gave, (N,) each, instead of collecting again."""
        self.logps, self.row_max, self.row_sum = logps[self._rows], row_max[self._rows], row_sum[self._rows]
        self.entropy = None if entropy is None else entropy[self._rows]

    def collect(self, part: slice, logits_RV: Tensor) -> None:
        outputs = _pick(part, self.logps, self.entropy, self.row_max, self.row_sum)
        self._kernels.row_stats(logits_RV[None], *_pick(part, self.ids, self.valid), *outputs, *self._transform)

    def differentiate(self, part: slice | Tensor, logits_RV: Tensor, g: Tensor, g_entropy: Tensor | None) -> None:
        """The logits become their gradient, from those of the log-probs and entropies."""
        entropy = None if g_entropy is None else self.entropy
        vectors = (self.ids, self.valid, self.row_max, self.row_sum, self.logps, entropy, g, g_entropy)
        self._kernels.row_grad(logits_RV[None], *_pick(part, *vectors), logits_RV[None], *self._transform)


def _pick(part: slice | Tensor, *vectors: Tensor | None) -> list[Tensor | None]:
    """(R,) -> (1, r), as the backends take them; views where `part` is a slice."""
    return [None if vector is None else vector[part][None] for vector in vectors]


def _all_or(rows: Tensor | None, ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0], device=ids.device) if rows is None else rows


def walk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    ids: Tensor,
    valid: Tensor,
    objective: Objective,
    sequences: Sequences | None,
    want_entropy: bool,
    need: tuple[bool, bool, bool],
    transform: tuple[float, float, float],
    how: HeadOptions,
) -> tuple[Tensor, ...]:
    """Loss, log-probs, entropies and gradients of one objective: 3 GEMMs, 2 without dweight, 1 without gradients.

    Args:
        hidden: (N, D); ids, valid: (N,); rows: the tokens to score, ascending, None for all.
        objective: makes a 0-d loss of a chunk's log-probs and entropies.
        sequences: given, chunks hold whole ones, and the logits of one longer than a chunk are computed twice.
        want_entropy: give the objective entropies, and return them.
        need: which of hidden, weight, bias want a gradient.

    Returns:
        loss (0-d), logps (N,), entropy (N,) or empty, dhidden, dweight, dbias (see HeadGrads.finish).
    """
    check_ids(ids, valid, weight.shape[0])
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, need)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    logps, entropy = (torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(2))
    chunks = plan(_all_or(rows, ids), how.rows_per_chunk, sequences)
    head.workspace(max((min(chunk.rows.shape[0], how.rows_per_chunk) for chunk in chunks), default=0))
    for chunk in chunks:
        stats = _RowStats(chunk.rows, ids, valid, want_entropy, transform, how.backend)
        parts = chunk.parts(how.rows_per_chunk)
        for part in parts:
            hidden_RD = head.rows(chunk.rows[part])
            logits_RV = head.logits(hidden_RD)
            stats.collect(part, logits_RV)
        logps[chunk.rows] = stats.logps
        if want_entropy:
            entropy[chunk.rows] = stats.entropy
        chunk_loss, g, g_entropy = _derivatives(objective, stats, chunk, any(need))
        loss += chunk_loss
        if g is None:  # nothing wants a gradient, or nothing has one
            continue
        for part in parts:
            if len(parts) > 1:  # a sequence longer than the workspace: its logits have been overwritten
                hidden_RD = head.rows(chunk.rows[part])
                logits_RV = head.logits(hidden_RD)
            keep = _live_rows(g[part], None if g_entropy is None else g_entropy[part])
            if keep is not None:
                part, hidden_RD, logits_RV = part.start + keep, hidden_RD[keep], move_up(logits_RV, keep)
            stats.differentiate(part, logits_RV, g, g_entropy)
            grads.add(chunk.rows[part], hidden_RD, logits_RV)
    return loss.float(), logps, entropy if want_entropy else entropy.new_empty(0), *grads.finish()


def _derivatives(
    objective: Objective, stats: _RowStats, chunk: Chunk, need: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The chunk's loss, and its derivatives by log-probs and entropies, (R,) or None where there are none."""
    if not need:
        return objective(stats.logps, stats.entropy, chunk), None, None
    with _autograd_inside_an_op(stats.logps.device.type):
        logps = stats.logps.detach().requires_grad_()
        entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_()
        loss = objective(logps, entropy, chunk)
        if not loss.requires_grad:
            return loss, None, None
        inputs = [logps] if entropy is None else [logps, entropy]
        g, *rest = torch.autograd.grad(loss, inputs, allow_unused=True)
    g_entropy = rest[0].contiguous() if rest and rest[0] is not None else None  # autograd gives expanded ones
    return loss.detach(), torch.zeros_like(stats.logps) if g is None else g.contiguous(), g_entropy


def _live_rows(g: Tensor, g_entropy: Tensor | None) -> Tensor | None:
    """Rows that have a gradient, where those without one (clipped) are many. On a GPU only the device knows."""
    if g.device.type != "cpu":
        return None
    live = g != 0 if g_entropy is None else (g != 0) | (g_entropy != 0)
    keep = live.nonzero()[:, 0]
    return keep if keep.shape[0] <= (1 - _DROPPED_SHARE) * g.shape[0] else None


@without_autocast
def _linear_grpo_loss(
    hidden, weight, bias, rows, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale, cu_seqlens,
    want_entropy, need_hidden, need_weight, need_bias, *numbers,
):  # fmt: skip
    transform, options, how = numbers[:3], PolicyOptions(*numbers[3:-4]), HeadOptions(*numbers[-4:])
    inputs = PolicyInputs.of(ids, valid, cu_seqlens, advantages, weights, old_logps, ref_logps)
    return walk(
        hidden, weight, bias, rows, ids.reshape(-1), valid.reshape(-1),
        functools.partial(policy_objective, inputs=inputs, options=options, coef=coef, entropy_scale=entropy_scale),
        inputs.tokens.sequences if options.is_sequence_level else None,
        want_entropy, (need_hidden, need_weight, need_bias), transform, how,
    )  # fmt: skip


def _linear_grpo_loss_fake(hidden, weight, bias, rows, ids, *args):
    coef, want_entropy, need, dtype = args[5], args[8], args[9:12], args[-4]
    logps = coef.new_empty(coef.numel(), dtype=torch.float32)
    entropy = torch.empty_like(logps) if want_entropy else logps.new_empty(0)
    return logps.new_empty(()), logps, entropy, *_fake_grads(hidden, weight, bias, need, dtype)


def _fake_grads(hidden, weight, bias, need, dtype):
    def gradient(tensor, needed):
        if not needed:
            return hidden.new_empty(0)
        return torch.empty_like(tensor, dtype=torch.float32 if dtype == torch.float16 else tensor.dtype)

    return tuple(gradient(*pair) for pair in zip((hidden, weight, bias), need, strict=True))


@without_autocast
def _linear_row_stats(
    hidden, weight, bias, rows, ids, valid, temperature, softcap, logit_scale, want_entropy, unit, *how
):
    """unit "hidden" keeps dlogp/dhidden, (N, D); "logits" dlogp/dlogits, (rows, V), from one chunk; "" nothing."""
    check_ids(ids, valid, weight.shape[0])
    how, transform, rows = HeadOptions(*how), (temperature, softcap, logit_scale), _all_or(rows, ids)
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, (unit == "hidden", False, False))
    whole = [torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(4)]
    logits_RV = head.workspace(0)
    for chunk in plan(rows, rows.shape[0] if unit == "logits" else how.rows_per_chunk):
        stats = _RowStats(chunk.rows, ids, valid, want_entropy, transform, how.backend)
        everything = slice(0, chunk.rows.shape[0])
        hidden_RD = head.rows(chunk.rows)
        logits_RV = head.logits(hidden_RD)
        stats.collect(everything, logits_RV)
        for vector, values in zip(whole, (stats.logps, stats.entropy, stats.row_max, stats.row_sum), strict=True):
            if values is not None:
                vector[chunk.rows] = values
        if unit:
            stats.differentiate(everything, logits_RV, torch.ones_like(stats.logps), None)
        if unit == "hidden":
            grads.add(chunk.rows, hidden_RD, logits_RV)
    logps, entropy, row_max, row_sum = whole
    units = logits_RV if unit == "logits" else grads.finish()[0]
    return logps, entropy if want_entropy else entropy.new_empty(0), row_max, row_sum, units


def _linear_row_stats_fake(hidden, weight, bias, rows, ids, valid, t, c, s, want_entropy, unit, *how):
    logps, row_max, row_sum = (torch.empty(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(3))
    entropy = torch.empty_like(logps) if want_entropy else logps.new_empty(0)
    how = HeadOptions(*how)
    units = hidden.new_empty(0)
    if unit == "hidden":
        units = torch.empty_like(hidden, dtype=torch.float32 if how.dtype == torch.float16 else hidden.dtype)
    elif unit == "logits":
        num_rows = ids.shape[0] if rows is None else rows.shape[0]
        units = hidden.new_empty((num_rows, weight.shape[0]), dtype=how.logits_dtype)
    return logps, entropy, row_max, row_sum, units


@without_autocast
def _linear_row_grad(
    hidden, weight, bias, rows, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, need_hidden, need_weight,
    need_bias, temperature, softcap, logit_scale, *how,
):  # fmt: skip
    how, transform = HeadOptions(*how), (temperature, softcap, logit_scale)
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, (need_hidden, need_weight, need_bias))
    rows = _all_or(rows, ids)
    keep = _live_rows(g[rows], None if g_entropy is None else g_entropy[rows])
    for chunk in plan(rows if keep is None else rows[keep], how.rows_per_chunk):
        stats = _RowStats(chunk.rows, ids, valid, False, transform, how.backend)
        stats.recall(logps, entropy, row_max, row_sum)
        hidden_RD = head.rows(chunk.rows)
        logits_RV = head.logits(hidden_RD)
        g_R, g_entropy_R = (None if v is None else v[chunk.rows] for v in (g, g_entropy))
        stats.differentiate(slice(0, chunk.rows.shape[0]), logits_RV, g_R, g_entropy_R)
        grads.add(chunk.rows, hidden_RD, logits_RV)
    return tuple(grads.finish())


def _linear_row_grad_fake(hidden, weight, bias, *args):
    return _fake_grads(hidden, weight, bias, args[9:12], args[-4])


@without_autocast
def _linear_unit_grad(hidden, weight, bias, rows, valid, units, g, need_hidden, need_weight, need_bias, *how):
    """Gradients from units = dlogp/dlogits (rows, V) and g (N,): two GEMMs."""
    how = HeadOptions(*how)
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, (need_hidden, need_weight, need_bias))
    done = 0
    for chunk in plan(_all_or(rows, g), how.rows_per_chunk):
        scaled_RV = head.workspace(chunk.rows.shape[0])
        torch.mul(units[done : done + len(scaled_RV)], g[chunk.rows][:, None], out=scaled_RV)
        grads.add(chunk.rows, head.rows(chunk.rows), scaled_RV)
        done += len(scaled_RV)
    return tuple(grads.finish())


def _linear_unit_grad_fake(hidden, weight, bias, *args):
    return _fake_grads(hidden, weight, bias, args[4:7], args[-4])


linear_grpo_loss = define(
    "linear_grpo_loss",
    f"({_HEAD}, Tensor advantages, Tensor? weights, Tensor? old_logps, Tensor? ref_logps, Tensor coef, "
    f"Tensor? entropy_scale, Tensor? cu_seqlens, bool want_entropy, {_NEED}, {_TRANSFORM}, {_POLICY}, {_TAIL})"
    f" -> (Tensor loss, Tensor logps, Tensor entropy, {_GRADS})",
    _linear_grpo_loss,
    _linear_grpo_loss_fake,
)
linear_row_stats = define(
    "linear_row_stats",
    f"({_HEAD}, {_TRANSFORM}, bool want_entropy, str unit, {_TAIL})"
    " -> (Tensor logps, Tensor entropy, Tensor row_max, Tensor row_sum, Tensor units)",
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
linear_unit_grad = define(
    "linear_unit_grad",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? rows, Tensor valid, Tensor units, Tensor g, "
    f"{_NEED}, {_TAIL}) -> ({_GRADS})",
    _linear_unit_grad,
    _linear_unit_grad_fake,
)
