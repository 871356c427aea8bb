"""The policy loss of GRPO and its relatives straight from hidden states and the lm_head weight."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_fast.ops import linear_library
from grpo_fast.ops.inputs import Sequences, Tokens, check_flags
from grpo_fast.ops.linear_autograd import FusedLinearLoss
from grpo_fast.ops.linear_inputs import (
    Selection,
    differentiable_logprobs,
    head_inputs,
    mask_on_host,
    promised,
    select,
    wants_gradient,
)
from grpo_fast.ops.objective import PolicyInputs
from grpo_fast.ops.options import LogitTransform, PolicyOptions
from grpo_fast.ops.policy import Problem, evaluate, make_problem
from grpo_fast.types import LossOutput


def _live_tokens(inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    """Valid tokens whose gradient can be non-zero, (B, T) bool."""
    valid, sequences = inputs.tokens.valid, inputs.tokens.sequences
    if not options.has_dead_tokens:
        return valid
    live = inputs.weighted_advantages != 0
    if options.is_sequence_level:
        live = sequences.expand(sequences.sum(live) > 0)
    return valid & live


def _known_on_host(mask, advantages, sampling_weights, shape: tuple, options: PolicyOptions):
    """Valid and live tokens from what the caller has on the CPU, None where that is not enough (or packed)."""
    given = [t for t in (mask, advantages, sampling_weights) if t is not None]
    if len(shape) != 2 or any(t.device.type != "cpu" for t in given):
        return mask_on_host(mask), None
    valid = torch.ones(shape, dtype=torch.bool) if mask is None else mask != 0
    tokens = Tokens(valid, valid, Sequences(shape[0], shape), shape)
    weighted = [tokens.broadcast("", t, torch.float32) for t in (advantages, sampling_weights)]
    return valid, _live_tokens(PolicyInputs(tokens, valid, *weighted, None, None), options)


def _fused(hidden, weight, bias, live: Selection, dead: Selection | None, problem: Problem, transform, how):
    """Loss and gradients of the live tokens; log-probs of the dead ones, if any, beside them."""
    inputs = problem.inputs
    tokens, shape = inputs.tokens, inputs.tokens.ids.shape
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss, logps, entropy = FusedLinearLoss.apply(
        flat, weight, bias, linear_library.linear_grpo_loss, how.backend, live.rows, tokens.ids, live.mask,
        inputs.advantages, inputs.weights, inputs.old_logps, inputs.ref_logps if problem.options.beta > 0 else None,
        problem.coef, problem.entropy_scale, tokens.sequences.cu_seqlens, problem.want_entropy,
        *transform.as_floats(), *problem.options.as_fields(), *how,
    )  # fmt: skip
    if dead is not None:
        with torch.no_grad():
            dead_logps, dead_entropy, *_ = linear_library.linear_row_stats(
                flat, weight, bias, dead.rows, tokens.ids.reshape(-1), dead.mask.reshape(-1), *transform.as_floats(),
                problem.want_entropy, "", *how,
            )  # fmt: skip
        logps = logps + dead_logps
        entropy = entropy + dead_entropy if problem.want_entropy else entropy
    return loss, logps.reshape(shape), entropy.reshape(shape) if problem.want_entropy else None


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    live_rows: Tensor | None = None,
    score_dead_rows: bool = False,
    workspace_bytes: int | None = None,
    fp32_logits: bool = False,
    cu_seqlens: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_weights: Tensor | None = None,
    loss_type: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    use_bias_correction_kl: bool = False,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_completion_length: int | None = None,
    denominator: Tensor | int | None = None,
    entropy_denominator: Tensor | int | None = None,
    reduction: str = "sum",
    return_entropy: bool = False,
    backend: str | None = None,
) -> LossOutput:
    """grpo_loss of hidden @ weight.T + bias, without [N, V]: 3 GEMMs with a trainable head, 2 with a frozen one.

    The gradients are formed in the forward, chunk by chunk, the weight's accumulated in fp32. Sequence level makes
    chunks of whole sequences: the logits of a sequence that does not fit into workspace_bytes are computed twice.
    reduction="none" does not know its gradient in the forward: see linear_token_logprobs for its cost.
    Tokens whose gradient is known to be zero are dropped before any GEMM: masked ones always; with beta == 0 and no
    entropy bonus also those with advantage * sampling_weight == 0 (at sequence level, whole such sequences). They keep
    their place in every denominator; `out.scored` is False and logps and entropy are 0 there. On the CPU rows that turn
    out to be clipped skip the gradient's GEMMs too.

        hidden = model.base_model(input_ids).last_hidden_state  # [B, T, D], after the final norm
        weight, bias = grpo_fast.head_weight(model.get_output_embeddings())
        targets, mask = input_ids.roll(-1, 1), completion_mask.roll(-1, 1)  # row t predicts token t + 1
        mask[:, -1] = 0
        out = grpo_fast.linear_grpo_loss(hidden, weight, targets, advantages, mask, bias=bias, old_logps=old_logps)

    Args:
        hidden, weight, bias, workspace_bytes, fp32_logits: see linear_token_logprobs.
        live_rows: int64 flat indices of the tokens to score, each once, a superset of those with a gradient. On a GPU
            the rows to score are counted, which waits for it, unless they are all, or live_rows names them, or mask,
            advantages and sampling_weights are still on the CPU (padded batches). Under torch.compile only live_rows
            drops rows. Checked on the CPU, trusted on a GPU. (Sequence level waits once more, to make its chunks.)
        score_dead_rows: compute logps and entropy of unmasked dead tokens too, for one GEMM over them (three, on a GPU
            with live_rows, which then names them as well).
        The rest: see grpo_loss.

    Returns, Raises: see grpo_loss.
    """
    check_flags(score_dead_rows=score_dead_rows, fp32_logits=fp32_logits, return_entropy=return_entropy)
    options = PolicyOptions(
        loss_type, epsilon, epsilon_high, delta, beta, importance_sampling_level, use_bias_correction_kl, entropy_coef,
        max_completion_length,
    )  # fmt: skip
    transform = LogitTransform(temperature, softcap, logit_scale)
    tokens, how = head_inputs(
        hidden, weight, bias, token_ids, mask, cu_seqlens, cu_seqlens is not None, workspace_bytes, fp32_logits, backend
    )
    problem = make_problem(
        tokens, options, torch.promote_types(how.dtype, torch.float32), advantages=advantages, old_logps=old_logps,
        ref_logps=ref_logps, sampling_weights=sampling_weights, denominator=denominator,
        entropy_denominator=entropy_denominator, reduction=reduction, return_entropy=return_entropy,
    )  # fmt: skip
    in_forward = reduction == "sum" and how.backend != "reference" and wants_gradient(hidden, weight, bias)
    valid, live = tokens.valid, _live_tokens(problem.inputs, options)
    on_host = (None, None)
    if hidden.device.type != "cpu":
        on_host = _known_on_host(mask, advantages, sampling_weights, tokens.shape, options)
    dead = None
    if live_rows is not None:
        selection = promised(live_rows, valid if score_dead_rows else live, valid)
    elif not (score_dead_rows and options.has_dead_tokens):
        selection = select(live, mask is None and not options.has_dead_tokens, on_host[1])
    elif in_forward and not torch.compiler.is_compiling():
        selection = select(live, False, on_host[1])
        dead = select(valid & ~live, False, None if on_host[1] is None else on_host[0] & ~on_host[1])
    else:
        selection = select(valid, mask is None, on_host[0])
    scored = selection.mask if dead is None else valid
    problem = dataclasses.replace(problem, inputs=dataclasses.replace(problem.inputs, scored=scored))
    fused = None
    if in_forward:
        fused = lambda: _fused(hidden, weight, bias, selection, dead, problem, transform, how)  # noqa: E731
    return evaluate(
        problem,
        fused,
        lambda: differentiable_logprobs(
            hidden, weight, bias, selection, tokens, transform, problem.want_entropy, how,
            entropy_grad=options.entropy_coef > 0,
        ),
    )  # fmt: skip
