"""The policy loss, and the log-probs it needs, straight from hidden states and the lm_head weight."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_fast.ops import backends
from grpo_fast.ops.inputs import Tokens, check_plain, check_scores, make_tokens
from grpo_fast.ops.library import check_ids
from grpo_fast.ops.linear_autograd import FusedLinearLoss, LinearRowLogprobs
from grpo_fast.ops.linear_library import gemm_dtype
from grpo_fast.ops.options import LogitTransform, PolicyOptions
from grpo_fast.ops.policy import Problem, evaluate, make_problem
from grpo_fast.ops.reference import row_logprobs
from grpo_fast.ops.token_logprobs import dtype_name
from grpo_fast.types import LossOutput, TokenLogprobs

# Default workspace of the logits chunk: large enough that the GEMMs run at full speed and the fp32 weight gradient is
# read and written a few times only, small beside the weight and its gradient.
_WORKSPACE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def _tail(workspace_bytes: int | None, hidden: Tensor, weight: Tensor, backend: str) -> tuple[torch.dtype, int, str]:
    """(gemm_dtype, rows_per_chunk, backend), the last arguments of every head op."""
    if workspace_bytes is None:
        workspace_bytes = _WORKSPACE_BYTES.get(hidden.device.type, 1 << 28)
    elif isinstance(workspace_bytes, bool) or not isinstance(workspace_bytes, int) or workspace_bytes < 1:
        raise ValueError(f"workspace_bytes: expected a positive integer, got {workspace_bytes!r}")
    dtype = gemm_dtype(hidden, weight)
    return dtype, max(1, workspace_bytes // (max(weight.shape[0], 1) * dtype.itemsize)), backend


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        check_plain(name, tensor)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: expected [V, D={hidden.shape[-1]}] to go with hidden, got {list(weight.shape)}")
    if not weight.is_floating_point():
        raise ValueError(f"weight: expected a floating-point dtype, got {weight.dtype}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected [V={weight.shape[0]}], got {list(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: expected device {hidden.device} (hidden's), got {tensor.device}")


def _differentiable_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    tokens: Tokens,
    scored: Tensor,
    transform: LogitTransform,
    want_entropy: bool,
    tail: tuple[torch.dtype, int, str],
) -> tuple[Tensor, Tensor | None]:
    shape = tokens.ids.shape
    if tail[-1] == "reference":
        if not torch.compiler.is_compiling():
            check_ids(tokens.ids, tokens.valid, weight.shape[0])
        # A masked row's hidden state may be NaN, which 0 * NaN would carry into the weight's gradient.
        clean = torch.where(scored.reshape(-1, 1), hidden.reshape(-1, hidden.shape[-1]), 0.0)
        logits = clean.to(tail[0]) @ weight.to(tail[0]).t()
        logits = logits if bias is None else logits + bias.to(tail[0])
        return row_logprobs(logits.reshape(*shape, weight.shape[0]), tokens.ids, scored, transform, want_entropy)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logps, entropy = LinearRowLogprobs.apply(
        flat, weight, bias, rows, tokens.ids.reshape(1, -1), scored.reshape(1, -1), transform.as_floats(), want_entropy,
        tail,
    )  # fmt: skip
    return logps.reshape(shape), entropy.reshape(shape) if want_entropy else None


def _fused(hidden, weight, bias, rows, problem: Problem, transform: LogitTransform, tail):
    inputs, shape = problem.inputs, problem.inputs.tokens.ids.shape
    vectors = (
        inputs.tokens.ids, inputs.scored, inputs.advantages, inputs.weights, inputs.old_logps,
        inputs.ref_logps if problem.options.beta > 0 else None, problem.coef,
    )  # fmt: skip
    flat = [None if v is None else v.reshape(1, -1) for v in vectors]
    numbers = (*transform.as_floats(), *problem.options.as_floats())
    loss, logps, entropy = FusedLinearLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows, *flat, problem.entropy_scale, problem.want_entropy,
        numbers, tail,
    )  # fmt: skip
    return loss, logps.reshape(shape), entropy.reshape(shape) if problem.want_entropy else entropy


def _scored_tokens(problem: Problem, live_rows: Tensor | None, score_dead_rows: bool) -> Tensor:
    """Valid tokens whose gradient can be non-zero (all valid ones where dead rows are scored too), (B, T) bool."""
    inputs, options = problem.inputs, problem.options
    valid, sequences = inputs.tokens.valid, inputs.tokens.sequences
    if score_dead_rows or options.beta > 0 or options.entropy_coef > 0:
        return valid
    if live_rows is not None:
        promised = torch.zeros(valid.numel(), dtype=torch.bool, device=valid.device)
        return promised.index_fill(0, live_rows, True).view(valid.shape) & valid
    live = inputs.weighted_advantages != 0
    if options.is_sequence_level:
        live = sequences.expand(sequences.sum(live) > 0)
    return valid & live


def _check_live_rows(live_rows: Tensor | None, problem: Problem, score_dead_rows: bool) -> None:
    if live_rows is None:
        return
    if live_rows.dim() != 1 or live_rows.dtype != torch.int64:
        raise ValueError(f"live_rows: expected int64 of shape [rows], got {live_rows.dtype} {list(live_rows.shape)}")
    if live_rows.device.type != "cpu" or torch.compiler.is_compiling():
        return
    count = problem.inputs.tokens.valid.numel()
    if live_rows.numel() and not (live_rows.min() >= 0 and live_rows.max() < count):
        raise ValueError(f"live_rows: expected flat token indices in [0, {count}), got {live_rows.tolist()[:8]}...")
    promised = torch.zeros(count, dtype=torch.bool).index_fill(0, live_rows, True)
    if promised.sum() != live_rows.shape[0]:
        raise ValueError("live_rows: expected every index once: a token named twice would count twice")
    missing = _scored_tokens(problem, None, score_dead_rows).reshape(-1) & ~promised
    if missing.any():
        raise ValueError(
            f"live_rows: must name every token with a gradient, misses flat index {missing.nonzero()[0].item()}"
        )


def _row_index(scored: Tensor, all_scored: bool) -> Tensor | None:
    """Flat indices of the scored tokens; None for all. On a GPU this is the one host synchronisation of the head."""
    if all_scored or torch.compiler.is_compiling():  # a data-dependent length has no place in a static graph
        return None
    rows = scored.reshape(-1).nonzero()[:, 0]
    return None if rows.shape[0] == scored.numel() else rows


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    workspace_bytes: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | TokenLogprobs:
    """token_logprobs of hidden @ weight.T + bias without the logits: chunk by chunk, recomputed in the backward.

    Args:
        hidden: [B, T, D] or [N, D], fp32, bf16 or fp16 (fp64 on the reference backend).
        weight: [V, D], the lm_head's. Under autocast, or with unequal dtypes, the GEMMs run in autocast's dtype or the
            promoted one; gradients have their parameter's dtype.
        token_ids, mask, temperature, softcap, logit_scale, return_entropy, backend: see token_logprobs.
        bias: [V], added to the logits first.
        workspace_bytes: size of the logits chunk; the result depends on it to rounding only. On the CPU a bf16 or fp16
            chunk has an fp32 copy beside it for the weight's gradient, and that gradient one [V, D] summand.

    Returns, Raises: see token_logprobs.
    """
    transform = LogitTransform(temperature, softcap, logit_scale)
    check_scores("hidden", hidden, None)
    _check_head(hidden, weight, bias)
    tokens = make_tokens("hidden", hidden, token_ids, mask, None)
    name = backends.choose(backend, hidden.device.type, dtype_name(gemm_dtype(hidden, weight)))
    rows = None if name == "reference" else _row_index(tokens.valid, mask is None)
    logps, entropy = _differentiable_logprobs(
        hidden, weight, bias, rows, tokens, tokens.valid, transform, return_entropy,
        _tail(workspace_bytes, hidden, weight, name),
    )  # fmt: skip
    if return_entropy:
        return TokenLogprobs(logps.reshape(tokens.shape), entropy.reshape(tokens.shape))
    return logps.reshape(tokens.shape)


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

    At token level the gradients of hidden, weight and bias are formed in the forward, chunk by chunk, the weight's
    accumulated in fp32. Sequence level, cispo, reduction="none" recompute the logits in the backward (one GEMM more).
    Tokens whose gradient is known to be zero are dropped before any GEMM: masked ones always; with beta == 0 and no
    entropy bonus also those with advantage * sampling_weight == 0 (at sequence level, whole such sequences). They keep
    their place in every denominator; `out.scored` is False and logps and entropy are 0 there.

    Args:
        hidden, weight, bias, workspace_bytes: see linear_token_logprobs.
        live_rows: int64 flat indices of the tokens to score, each once, a superset of those with a gradient: saves the
            one host synchronisation on a GPU, which happens where a mask is given or dead rows may be dropped, and
            drops rows under torch.compile too. Checked on the CPU, trusted on a GPU.
        score_dead_rows: compute logps and entropy of unmasked dead tokens too.
        The rest: see grpo_loss.

    Returns, Raises: see grpo_loss.
    """
    options = PolicyOptions(
        loss_type, epsilon, epsilon_high, delta, beta, importance_sampling_level, use_bias_correction_kl, entropy_coef,
        max_completion_length,
    )  # fmt: skip
    transform = LogitTransform(temperature, softcap, logit_scale)
    check_scores("hidden", hidden, cu_seqlens is not None)
    _check_head(hidden, weight, bias)
    tokens = make_tokens("hidden", hidden, token_ids, mask, cu_seqlens)
    dtype = gemm_dtype(hidden, weight)
    name = backends.choose(backend, hidden.device.type, dtype_name(dtype))
    problem = make_problem(
        tokens, options, torch.promote_types(dtype, torch.float32), advantages=advantages, old_logps=old_logps,
        ref_logps=ref_logps, sampling_weights=sampling_weights, denominator=denominator,
        entropy_denominator=entropy_denominator, reduction=reduction, return_entropy=return_entropy,
    )  # fmt: skip
    _check_live_rows(live_rows, problem, score_dead_rows)
    scored = _scored_tokens(problem, live_rows, score_dead_rows)
    problem = dataclasses.replace(problem, inputs=dataclasses.replace(problem.inputs, scored=scored))
    rows = live_rows
    if live_rows is None and name != "reference":
        rows = _row_index(scored, mask is None and scored is tokens.valid)
    tail = _tail(workspace_bytes, hidden, weight, name)
    wants_grad = any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    fused = None
    if problem.is_token_level and torch.is_grad_enabled() and wants_grad and name != "reference":
        fused = lambda: _fused(hidden, weight, bias, rows, problem, transform, tail)  # noqa: E731
    return evaluate(
        problem,
        fused,
        lambda: _differentiable_logprobs(
            hidden, weight, bias, rows, tokens, scored, transform, problem.want_entropy, tail
        ),
    )
