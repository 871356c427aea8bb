"""The autograd side of the lm_head path, as autograd.py is of the logits path. Differentiable once.

`how` is what every head op ends with: HeadOptions.
"""

from __future__ import annotations

import torch

from grpo_fast.ops import linear_library
from grpo_fast.ops.autograd import differentiable_once, scale_grad


class LinearRowLogprobs(torch.autograd.Function):
    """hidden, weight, bias -> (logps, entropy); the gradient arrives in the backward.

    With weight and bias frozen, dlogp/dhidden is kept and the backward scales its rows: 2 GEMMs in all. Otherwise the
    logits are computed again, 4 GEMMs, unless dlogp/dlogits may be kept (`save_unit_grads`), 3. Neither helps an
    entropy that is differentiated too (`entropy_grad`): one kept gradient is not enough for two upstream ones.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, rows, ids, valid, transform, want_entropy, entropy_grad, save_unit_grads, how
    ):  # fmt: skip
        need = ctx.needs_input_grad[:3]
        unit = ""
        if not entropy_grad and any(need):
            if not any(need[1:]):
                unit = "hidden"
            elif save_unit_grads:
                unit = "logits"
        logps, entropy, row_max, row_sum, units = linear_library.linear_row_stats(
            hidden, weight, bias, rows, ids, valid, *transform, want_entropy, unit, *how
        )
        recomputes = unit != "hidden" or want_entropy
        saved = (hidden, weight, bias, rows, ids, row_max, row_sum, logps, entropy)
        ctx.save_for_backward(valid, units, *(v if recomputes else None for v in saved))
        ctx.args = (transform, want_entropy, unit, how)
        ctx.dtypes = [None if v is None else v.dtype for v in (hidden, weight, bias)]
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, g_logps, g_entropy):
        transform, want_entropy, unit, how = ctx.args
        valid, units, hidden, weight, bias, rows, ids, row_max, row_sum, logps, entropy = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        # What comes upstream to a token that was not scored may be NaN, and is nobody's gradient.
        upstream = (g_logps, g_entropy if want_entropy else None)
        g, g_entropy = (None if v is None else torch.where(valid, v, 0.0) for v in upstream)
        if g is None:
            g = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
        if g_entropy is None:
            entropy = None
        if g_entropy is None and unit == "hidden":
            grads = (units * g[:, None], None, None)
        elif g_entropy is None and unit == "logits":
            grads = linear_library.linear_unit_grad(hidden, weight, bias, *need, rows, valid, units, g, *how)
        else:
            grads = linear_library.linear_row_grad(
                hidden, weight, bias, *need, rows, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy,
                *transform, *how,
            )  # fmt: skip
        return *_in_dtypes(grads, ctx.dtypes, need), *[None] * 8


class FusedLinearLoss(torch.autograd.Function):
    """hidden, weight, bias -> (loss, logps, entropy) with their gradients formed in the forward by `walk`.

    walk(hidden, weight, bias, need_hidden, need_weight, need_bias, *args) is linear_library's op, or what else
    calls head_walk.walk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, walk, backend, *args):
        need = ctx.needs_input_grad[:3]
        loss, logps, entropy, *grads = walk(hidden, weight, bias, *need, *args)
        ctx.save_for_backward(*grads)
        ctx.args = (need, backend, len(args))
        ctx.dtypes = [None if v is None else v.dtype for v in (hidden, weight, bias)]
        ctx.mark_non_differentiable(logps, entropy)
        return loss, logps, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx, g_loss, *_):
        need, backend, num_args = ctx.args
        grads = [
            scale_grad(grad, g_loss, False, backend) if needed else None
            for grad, needed in zip(ctx.saved_tensors, need, strict=True)
        ]
        return *_in_dtypes(grads, ctx.dtypes, need), *[None] * (2 + num_args)


def _in_dtypes(grads, dtypes, need):
    """float16 gradients arrive in float32, and a product with g is float32 too."""
    return [grad.to(dtype) if n else None for grad, dtype, n in zip(grads, dtypes, need, strict=True)]
