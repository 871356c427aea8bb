"""Any token loss written in PyTorch, straight from hidden states and the lm_head weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_fast.ops.head import Chunk
from grpo_fast.ops.head_walk import walk
from grpo_fast.ops.inputs import check_flags
from grpo_fast.ops.linear_autograd import FusedLinearLoss
from grpo_fast.ops.linear_inputs import (
    differentiable_logprobs,
    head_inputs,
    mask_on_host,
    promised,
    select,
    wants_gradient,
)
from grpo_fast.ops.objective import scalar_divisor
from grpo_fast.ops.options import LogitTransform
from grpo_fast.ops.user_objective import UserObjective, split_inputs
from grpo_fast.types import LossMetrics, LossOutput

ALIGN = ("token", "sequence")


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    objective: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    align: str = "token",
    denominator: Tensor | int | None = None,
    with_entropy: bool = False,
    bias: Tensor | None = None,
    live_rows: Tensor | None = None,
    workspace_bytes: int | None = None,
    fp32_logits: bool = False,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    return_entropy: bool = False,
    backend: str | None = None,
) -> LossOutput:
    """sum(objective(logps, **inputs)) / denominator for an objective of your own, as cheap as linear_grpo_loss.

    The objective is called chunk by chunk with that chunk's log-probs and its share of every input, and its derivative
    is taken by autograd on these short vectors, so the gradients of hidden, weight and bias are formed in the forward:
    3 GEMMs with a trainable weight, 2 with a frozen one, 1 without gradients. It must be pure PyTorch and must not mix
    what a chunk does not hold: tokens among each other with align="token", sequences with align="sequence".

        def reinforce(logps, advantages):  # (R,) each
            return -advantages * logps

        out = linear_policy_loss(hidden, weight, token_ids, reinforce, {"advantages": advantages}, mask)

    Args:
        hidden, weight, bias, workspace_bytes, fp32_logits: see linear_token_logprobs.
        token_ids, mask, cu_seqlens, temperature, softcap, logit_scale, backend: see grpo_loss.
        objective: objective(logps, **inputs) -> per-token losses of logps' shape.
            align="token": logps and inputs are [R], the chunk's unmasked tokens.
            align="sequence": logps [b, T] of b whole sequences, padded on the right where packed; inputs per token
            [b, T], per sequence [b] or [b, 1]; and `mask`, bool [b, T]. Losses at masked slots are left out. A
            sequence that does not fit into workspace_bytes has its logits computed twice.
            With with_entropy, also `entropy`, as logps; both are differentiated.
            Constants are bound with functools.partial. Tensors that require grad, other than logps and entropy, are
            refused. It is called a few times beforehand, with a handful of made-up numbers, to check it (on a GPU not
            for mixing, which would wait for the device).
        inputs: name -> tensor, constants: [B, T] (packed [N] or [N, 1]), or [B] or [B, 1]; 0 wherever the mask is.
            Packed with as many sequences as tokens, [N] is per sequence and [N, 1] per token.
        align: "token" or "sequence".
        denominator: what the sum is divided by, a 0-d tensor or a number; default: this call's valid tokens.
        live_rows: int64 flat indices of the tokens to score, each once. They must name every token with a gradient,
            which is not checked here: one that is left out is left out of the loss. They, or a mask on the CPU, save
            the one host synchronisation that a mask on a GPU costs; align="sequence" costs one anyway.
        return_entropy: fill `entropy` in the output and the metrics.

    Returns:
        LossOutput(loss, logps, entropy, scored, metrics), the metrics counting tokens and entropy alone; only the loss
        carries a graph, differentiable once. Under torch.compile the objective is traced and the gradient formed in
        the backward, as linear_token_logprobs does.

    Raises: see grpo_loss; ValueError also for an objective that does not return a loss per token.
    """
    if align not in ALIGN:
        raise ValueError(f'align: expected "token" or "sequence", got {align!r}')
    if not callable(objective):
        raise ValueError(f"objective: expected a function, got {type(objective).__name__}")
    check_flags(with_entropy=with_entropy, fp32_logits=fp32_logits, return_entropy=return_entropy)
    transform = LogitTransform(temperature, softcap, logit_scale)
    tokens, how = head_inputs(
        hidden, weight, bias, token_ids, mask, cu_seqlens, cu_seqlens is not None, workspace_bytes, fp32_logits, backend
    )
    if live_rows is None:
        selection = select(tokens.valid, mask is None, mask_on_host(mask))
    else:
        selection = promised(live_rows, torch.zeros_like(tokens.valid), tokens.valid)
    scored = selection.mask
    per_token, per_sequence = split_inputs(inputs, tokens, align == "sequence")
    like = torch.zeros((), dtype=torch.promote_types(how.dtype, torch.float32), device=hidden.device)
    divisor = scalar_divisor("denominator", tokens.valid.sum() if denominator is None else denominator, like)
    user = UserObjective(
        objective, per_token, per_sequence, scored, tokens.sequences, divisor, align == "sequence", with_entropy
    )
    want_entropy = with_entropy or return_entropy
    if torch.compiler.is_compiling():
        if user.by_sequence and cu_seqlens is not None:
            raise NotImplementedError(
                'align="sequence": packed sequences cannot be compiled, their longest length is unknown; pad them'
            )
    else:
        user.rehearse()
    shape = tokens.ids.shape
    if how.backend != "reference" and wants_gradient(hidden, weight, bias) and not torch.compiler.is_compiling():
        loss, logps, entropy = FusedLinearLoss.apply(
            hidden.flatten(0, -2),
            weight,
            bias,
            _walk,
            how.backend,
            selection,
            tokens.ids,
            user,
            want_entropy,
            transform,
            how,
        )
        logps, entropy = logps.reshape(shape), entropy.reshape(shape) if want_entropy else None
    else:
        logps, entropy = differentiable_logprobs(
            hidden, weight, bias, selection, tokens, transform, want_entropy, how, entropy_grad=with_entropy
        )
        rows = torch.arange(scored.numel(), device=scored.device) if selection.rows is None else selection.rows
        span = ((0, tokens.sequences.num), (0, scored.numel())) if user.by_sequence else ()
        flat = [None if v is None else v.reshape(-1)[rows] for v in (logps, entropy)]
        loss = user(*flat, Chunk(rows, *span)).to(like.dtype)
    logps = logps.detach().reshape(tokens.shape)
    entropy = entropy.detach().reshape(tokens.shape) if want_entropy else None
    counts = {"tokens": tokens.valid.sum(), "scored_tokens": scored.sum()}
    if want_entropy:
        counts |= {"entropy_sum": entropy.sum(), "entropy_count": scored.sum()}
    return LossOutput(loss, logps, entropy, scored.reshape(tokens.shape), LossMetrics.of(hidden.device, **counts))


def _walk(
    hidden, weight, bias, need_hidden, need_weight, need_bias, selection, ids, user, want_entropy, transform, how
):
    with torch.autocast(hidden.device.type, enabled=False):
        return walk(
            hidden, weight, bias, (need_hidden, need_weight, need_bias), selection.rows, ids.reshape(-1),
            selection.mask.reshape(-1), user, user.sequences if user.by_sequence else None, want_entropy,
            transform.as_floats(), how,
        )  # fmt: skip
