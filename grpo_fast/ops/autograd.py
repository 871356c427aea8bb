"""The autograd side of the logits path: two Functions, for the two schedules.

Fused: statistics, objective and gradient in the forward; the backward only scales. Two-sweep: statistics in the
forward, gradient in the backward from whatever arrives upstream. Both are differentiable once.
Letters: B sequences, T tokens.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_fast.ops import library


class _RefuseSecondDerivative(torch.autograd.Function):
    """Identity on gradients whose own derivative is not known: torch would take them for constants, silently."""

    @staticmethod
    def forward(ctx, anchor, *grads):
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            'grpo_fast: the fused losses can be differentiated once; backend="reference" has higher derivatives'
        )


def differentiable_once(backward):
    """Decorator of a Function's backward. torch's once_differentiable misses the usual case, a constant upstream."""

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        with torch.no_grad():
            results = backward(ctx, *upstream)
        if not torch.is_grad_enabled():  # the usual backward, without create_graph
            return results
        grads = [result for result in results if result is not None]
        anchor = torch.zeros((), requires_grad=True)
        guarded = iter(_RefuseSecondDerivative.apply(anchor, *grads))
        return tuple(None if result is None else next(guarded) for result in results)

    return wrapper


class RowLogprobs(torch.autograd.Function):
    """logits -> (logps, entropy), (B, T) each."""

    @staticmethod
    def forward(ctx, logits, ids, valid, transform, want_entropy, inplace, backend):
        logps, entropy, row_max, row_sum = library.row_stats(logits, ids, valid, *transform, want_entropy, backend)
        ctx.save_for_backward(logits, ids, valid, row_max, row_sum, logps, entropy)
        ctx.args = (transform, want_entropy, inplace, backend)
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, g_logps, g_entropy):
        transform, want_entropy, inplace, backend = ctx.args
        logits, ids, valid, row_max, row_sum, logps, entropy = ctx.saved_tensors
        g = torch.zeros_like(logps) if g_logps is None else g_logps.contiguous()
        if not want_entropy or g_entropy is None:
            entropy = g_entropy = None
        else:
            g_entropy = g_entropy.contiguous()
        args = (logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, *transform, backend)
        if inplace:
            library.row_grad_(*args)
            bump_version(logits)
            grad = logits.detach()
        else:
            grad = library.row_grad(*args)
        return grad, None, None, None, None, None, None


class FusedLoss(torch.autograd.Function):
    """logits -> (loss, losses, logps, entropy): loss = sum(coef * losses) - entropy_scale * sum(entropy)."""

    @staticmethod
    def forward(
        ctx, logits, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale,
        want_entropy, numbers, inplace, backend,
    ):  # fmt: skip
        args = (
            ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale, want_entropy, *numbers, backend
        )  # fmt: skip
        if inplace:
            losses, logps, entropy = library.grpo_loss_(logits, *args)
            bump_version(logits)
            grad = logits
        else:
            losses, logps, entropy, grad = library.grpo_loss(logits, *args)
        loss = (losses * coef).sum()
        if entropy_scale is not None:
            loss = loss - entropy_scale * entropy.sum()
        ctx.save_for_backward(grad)
        ctx.args = (inplace, backend)
        ctx.mark_non_differentiable(losses, logps, entropy)
        return loss, losses, logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, g_loss, *_):
        inplace, backend = ctx.args
        (grad,) = ctx.saved_tensors
        grad = scale_grad(grad.detach(), g_loss, inplace, backend)
        return grad, *[None] * 12


def scale_grad(grad: Tensor, upstream: Tensor, inplace: bool, backend: str) -> Tensor:
    """grad * upstream. Where nobody needs grad again, in its memory, and without a pass over it when upstream is 1."""
    upstream = upstream.to(torch.promote_types(grad.dtype, torch.float32))
    if inplace or _graph_is_freed():
        library.scale_(grad, upstream, backend)
        bump_version(grad)
        return grad
    return library.scale(grad, upstream, backend)


def bump_version(tensor: Tensor) -> None:
    """An op that mutates its argument must say so, or autograd cannot tell users of the old values."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensor)


def _graph_is_freed() -> bool:
    """Whether this backward is the last one through its graph (retain_graph=False)."""
    # Without this private function of torch every backward takes the copy.
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not torch.compiler.is_compiling() and not keeps_graph()
