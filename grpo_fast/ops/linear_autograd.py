"""The autograd side of the lm_head path, as autograd.py is of the logits path. Differentiable once.

`tail` is what every head op ends with: (gemm_dtype, rows_per_chunk, backend).
"""

from __future__ import annotations

import torch

from grpo_fast.ops import linear_library
from grpo_fast.ops.autograd import differentiable_once, scale_grad


class LinearRowLogprobs(torch.autograd.Function):
    """hidden, weight, bias -> (logps, entropy); the backward recomputes the logits (4 GEMMs in all, 3 if frozen)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, ids, valid, transform, want_entropy, tail):
        logps, entropy, row_max, row_sum = linear_library.linear_row_stats(
            hidden, weight, bias, rows, ids, valid, *transform, want_entropy, *tail
        )
        ctx.save_for_backward(hidden, weight, bias, rows, ids, valid, row_max, row_sum, logps, entropy)
        ctx.args = (transform, want_entropy, tail)
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, g_logps, g_entropy):
        transform, want_entropy, tail = ctx.args
        hidden, weight, bias, rows, ids, valid, row_max, row_sum, logps, entropy = ctx.saved_tensors
        g = torch.zeros_like(logps) if g_logps is None else g_logps.contiguous()
        if not want_entropy or g_entropy is None:
            entropy = g_entropy = None
        else:
            g_entropy = g_entropy.contiguous()
        need = ctx.needs_input_grad[:3]
        grads = linear_library.linear_row_grad(
            hidden, weight, bias, rows, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, *need, *transform,
            *tail,
        )  # fmt: skip
        return *(grad if needed else None for grad, needed in zip(grads, need, strict=True)), *[None] * 6


class FusedLinearLoss(torch.autograd.Function):
    """hidden, weight, bias -> (loss, logps, entropy) with their gradients formed in the forward."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, rows, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale,
        want_entropy, numbers, tail,
    ):  # fmt: skip
        need = ctx.needs_input_grad[:3]
        losses, logps, entropy, *grads = linear_library.linear_grpo_loss(
            hidden, weight, bias, rows, ids, valid, advantages, weights, old_logps, ref_logps, coef, entropy_scale,
            want_entropy, *need, *numbers, *tail,
        )  # fmt: skip
        loss = (losses * coef).sum()
        if entropy_scale is not None:
            loss = loss - entropy_scale * entropy.sum()
        ctx.save_for_backward(*grads)
        dtypes = [t.dtype if n else None for t, n in zip((hidden, weight, bias), need, strict=True)]
        ctx.args = (need, tail[-1], dtypes)
        ctx.mark_non_differentiable(logps, entropy)
        return loss, logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, g_loss, *_):
        need, backend, dtypes = ctx.args
        grads = [
            scale_grad(grad, g_loss, False, backend).to(dtype) if needed else None
            for grad, needed, dtype in zip(ctx.saved_tensors, need, dtypes, strict=True)
        ]
        return *grads, *[None] * 12
