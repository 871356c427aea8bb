"""The policy loss of GRPO and its relatives straight from hidden states and the lm_head weight."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_fast.ops import backends, linear_library
from grpo_fast.ops.inputs import Sequences, Tokens, check_scores, make_tokens
from grpo_fast.ops.linear_autograd import FusedLinearLoss
from grpo_fast.ops.linear_inputs import (
    check_head,
    check_live_rows,
    differentiable_logprobs,
    head_options,
    mask_on_host,
    row_index,
    wants_gradient,
)
from grpo_fast.ops.objective import PolicyInputs
from grpo_fast.ops.options import LogitTransform, PolicyOptions
from grpo_fast.ops.policy import Problem, evaluate, make_problem
from grpo_fast.ops.token_logprobs import dtype_name
from grpo_fast.types import LossOutput


def _live_tokens(inputs: PolicyInputs, options: PolicyOptions) -> Tensor:
    """Valid tokens whose gradient can be non-zero, (B, T) bool."""
    valid, sequences = inputs.tokens.valid, inputs.tokens.sequences
    if options.beta > 0 or options.entropy_coef > 0:
        return valid
    live = inputs.weighted_advantages != 0
    if options.is_sequence_level:
        live = sequences.expand(sequences.sum(live) > 0)
    return valid & live


def _live_on_host(mask, advantages, sampling_weights, shape: tuple, options: PolicyOptions) -> Tensor | None:
    """The same from what the caller has on the CPU, where that is enough to know (padded batches)."""
    given = [t for t in (mask, advantages, sampling_weights) if t is not None]
    if len(shape) != 2 or any(t.device.type != "cpu" for t in given):
        return None
    valid = torch.ones(shape, dtype=torch.bool) if mask is None else mask != 0
    tokens = Tokens(valid, valid, Sequences(shape[0], shape), shape)
    weighted = [tokens.broadcast("", t, torch.float32) for t in (advantages, sampling_weights)]
    return _live_tokens(PolicyInputs(tokens, valid, *weighted, None, None), options)


def _fused(hidden, weight, bias, rows, live, dead, problem: Problem, transform: LogitTransform, how):
    """Loss and gradients of `live` tokens (`rows` lists them); log-probs of `dead` ones, if any, beside them."""
    inputs = problem.inputs
    tokens, shape = inputs.tokens, inputs.tokens.ids.shape
    flat = hidden.reshape(-1, hidden.shape[-1])
    tensors = (
        rows, tokens.ids, live, inputs.advantages, inputs.weights, inputs.old_logps,
        inputs.ref_logps if problem.options.beta > 0 else None, problem.coef, problem.entropy_scale,
        tokens.sequences.cu_seqlens, problem.want_entropy,
    )  # fmt: skip
    loss, logps, entropy = FusedLinearLoss.apply(
        flat, weight, bias, linear_library.linear_grpo_loss, how.backend, len(tensors),
        *tensors, *transform.as_floats(), *problem.options.as_fields(), *how,
    )  # fmt: skip
    if dead is not None:
        dead_logps, dead_entropy = _forward_only(flat, weight, bias, dead, problem, transform, how)
        logps = logps + dead_logps
        entropy = entropy + dead_entropy if problem.want_entropy else entropy
    return loss, logps.reshape(shape), entropy.reshape(shape) if problem.want_entropy else None


@torch.no_grad()
def _forward_only(flat, weight, bias, dead, problem: Problem, transform: LogitTransform, how):
    logps, entropy, *_ = linear_library.linear_row_stats(
        flat, weight, bias, row_index(dead, False), problem.inputs.tokens.ids.reshape(-1), dead.reshape(-1),
        *transform.as_floats(), problem.want_entropy, "", *how,
    )  # fmt: skip
    return logps, entropy


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

    Args:
        hidden, weight, bias, workspace_bytes, fp32_logits: see linear_token_logprobs.
        live_rows: int64 flat indices of the tokens to score, each once, a superset of those with a gradient. On a GPU
            the rows to score are counted, which waits for it, unless they are all, or live_rows names them, or mask,
            advantages and sampling_weights are still on the CPU (padded batches). Under torch.compile only live_rows
            drops rows. Checked on the CPU, trusted on a GPU. (Sequence level waits once more, to make its chunks.)
        score_dead_rows: compute logps and entropy of unmasked dead tokens too, for one GEMM over them.
        The rest: see grpo_loss.

    Returns, Raises: see grpo_loss.
    """
    options = PolicyOptions(
        loss_type, epsilon, epsilon_high, delta, beta, importance_sampling_level, use_bias_correction_kl, entropy_coef,
        max_completion_length,
    )  # fmt: skip
    transform = LogitTransform(temperature, softcap, logit_scale)
    check_scores("hidden", hidden, cu_seqlens is not None)
    check_head(hidden, weight, bias)
    tokens = make_tokens("hidden", hidden, token_ids, mask, cu_seqlens)
    dtype = linear_library.gemm_dtype(hidden, weight)
    name = backends.choose(backend, hidden.device.type, dtype_name(dtype))
    problem = make_problem(
        tokens, options, torch.promote_types(dtype, torch.float32), advantages=advantages, old_logps=old_logps,
        ref_logps=ref_logps, sampling_weights=sampling_weights, denominator=denominator,
        entropy_denominator=entropy_denominator, reduction=reduction, return_entropy=return_entropy,
    )  # fmt: skip
    how = head_options(hidden, weight, workspace_bytes, fp32_logits, name)
    live = _live_tokens(problem.inputs, options)
    live_rows = check_live_rows(live_rows, tokens.valid if score_dead_rows else live)
    scored = tokens.valid if score_dead_rows else live
    if live_rows is not None and scored is not tokens.valid:
        promised = torch.zeros(live.numel(), dtype=torch.bool, device=live.device).index_fill(0, live_rows, True)
        scored = promised.view(live.shape) & tokens.valid
    problem = dataclasses.replace(problem, inputs=dataclasses.replace(problem.inputs, scored=scored))
    in_forward = reduction == "sum" and name != "reference" and wants_gradient(hidden, weight, bias)
    dead = None
    if in_forward and live_rows is None and scored is not live and not torch.compiler.is_compiling():
        scored, dead = live, scored & ~live
    rows = live_rows
    if live_rows is None and name != "reference":
        on_host = None
        if hidden.device.type != "cpu" and scored is tokens.valid:
            on_host = mask_on_host(mask)
        elif hidden.device.type != "cpu":
            on_host = _live_on_host(mask, advantages, sampling_weights, tokens.shape, options)
        rows = row_index(scored, mask is None and scored is tokens.valid, on_host)
    fused = None
    if in_forward:
        fused = lambda: _fused(hidden, weight, bias, rows, scored, dead, problem, transform, how)  # noqa: E731
    return evaluate(
        problem,
        fused,
        lambda: differentiable_logprobs(
            hidden, weight, bias, rows, tokens, scored, transform, problem.want_entropy, how,
            entropy_grad=options.entropy_coef > 0,
        ),
    )  # fmt: skip
