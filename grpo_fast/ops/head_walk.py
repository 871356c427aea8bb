"""One walk over a head's chunks: logits -> row statistics -> objective -> row gradient in place -> the other two GEMMs.

The objective sees log-probs (and entropies) of the chunk's tokens and nothing of the vocabulary. Its derivative is
taken by autograd on these short vectors, so every loss that is plain PyTorch goes this way: the built-in ones through
the op `linear_grpo_loss`, a user's by calling `walk` directly. Letters as in head.py.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from grpo_fast.ops import backends
from grpo_fast.ops.head import Chunk, Head, HeadGrads, HeadOptions, Objective, move_up, plan
from grpo_fast.ops.inputs import Sequences
from grpo_fast.ops.library import check_ids

_DROPPED_SHARE = 1 / 16  # of a chunk's rows must have no gradient before they are moved out of the last two products


@contextlib.contextmanager
def _autograd_inside_an_op(device_type: str):
    """Autograd for an op's own use: a compiled graph calls its ops below the autograd keys."""
    key = getattr(torch._C.DispatchKey, f"Autograd{device_type.upper()}")
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key).remove(torch._C.DispatchKey.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    # Hooks of the caller (checkpoint, save_on_cpu) are for what outlives the forward, not for a chunk's few vectors.
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad(), keep:
        yield


class RowStats:
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


def rows_or_all(rows: Tensor | None, ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0], device=ids.device) if rows is None else rows


def walk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    need: tuple[bool, bool, bool],
    rows: Tensor | None,
    ids: Tensor,
    valid: Tensor,
    objective: Objective,
    sequences: Sequences | None,
    want_entropy: bool,
    transform: tuple[float, float, float],
    how: HeadOptions,
) -> tuple[Tensor, ...]:
    """Loss, log-probs, entropies and gradients of one objective: 3 GEMMs, 2 without dweight, 1 without gradients.

    Args:
        need: which of hidden, weight, bias want a gradient.
        hidden: (N, D); ids, valid: (N,); rows: the tokens to score, ascending, None for all.
        objective: makes a 0-d loss of a chunk's log-probs and entropies.
        sequences: given, chunks hold whole ones, and the logits of one longer than a chunk are computed twice.
        want_entropy: give the objective entropies, and return them.

    Returns:
        loss (0-d), logps (N,), entropy (N,) or empty, dhidden, dweight, dbias (see HeadGrads.finish).
    """
    check_ids(ids, valid, weight.shape[0])
    head = Head(hidden, weight, bias, valid, how)
    grads = HeadGrads(head, need)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    logps, entropy = (torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) for _ in range(2))
    chunks = plan(rows_or_all(rows, ids), how.rows_per_chunk, sequences)
    head.workspace(max((min(chunk.rows.shape[0], how.rows_per_chunk) for chunk in chunks), default=0))
    for chunk in chunks:
        stats = RowStats(chunk.rows, ids, valid, want_entropy, transform, how.backend)
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
            keep = rows_with_gradient(g[part], None if g_entropy is None else g_entropy[part])
            if keep is not None and keep.shape[0] == 0:
                continue
            if keep is not None:
                part, hidden_RD, logits_RV = part.start + keep, hidden_RD[keep], move_up(logits_RV, keep)
            stats.differentiate(part, logits_RV, g, g_entropy)
            grads.add(chunk.rows[part], hidden_RD, logits_RV)
    head.close()
    return loss.float(), logps, entropy if want_entropy else entropy.new_empty(0), *grads.finish()


def _derivatives(
    objective: Objective, stats: RowStats, chunk: Chunk, need: bool
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


def rows_with_gradient(g: Tensor, g_entropy: Tensor | None) -> Tensor | None:
    """Rows that have a gradient, where those without one (clipped) are many. On a GPU only the device knows."""
    if g.device.type != "cpu":
        return None
    live = g != 0 if g_entropy is None else (g != 0) | (g_entropy != 0)
    keep = live.nonzero()[:, 0]
    return keep if keep.shape[0] <= (1 - _DROPPED_SHARE) * g.shape[0] else None
