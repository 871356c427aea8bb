"""The policy loss of GRPO and its relatives from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.ops import backends
from grpo_fast.ops.autograd import FusedLoss
from grpo_fast.ops.inputs import check_flags, check_inplace, check_scores, make_tokens, rows_of
from grpo_fast.ops.options import LogitTransform, PolicyOptions
from grpo_fast.ops.policy import Problem, evaluate, make_problem
from grpo_fast.ops.token_logprobs import differentiable_logprobs, dtype_name
from grpo_fast.types import LossOutput


def _fused(logits: Tensor, problem: Problem, transform: LogitTransform, inplace: bool, backend: str):
    inputs = problem.inputs
    vectors = (
        inputs.tokens.ids, inputs.tokens.valid, inputs.advantages, inputs.weights, inputs.old_logps,
        inputs.ref_logps if problem.options.beta > 0 else None,
    )  # fmt: skip
    numbers = (*transform.as_floats(), *problem.options.as_floats())
    loss, _, logps, entropy = FusedLoss.apply(
        logits, *vectors, problem.coef, problem.entropy_scale, problem.want_entropy, numbers, inplace, backend
    )
    return loss, logps, entropy


def grpo_loss(
    logits: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
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
    inplace: bool = False,
    backend: str | None = None,
) -> LossOutput:
    """Clipped policy loss with k3 KL, length normalisation and entropy bonus, in one pass over the logits.

    With r = exp(logp - old) and A the advantage, a token's loss is
    w * -min(min(r, delta) A, clip(r, 1-epsilon, 1+epsilon_high) A) + beta * (e^d - d - 1), d = ref - logp
    (GRPO, https://arxiv.org/abs/2402.03300, equations 3 and 4; DAPO, https://arxiv.org/abs/2503.14476, for the separate
    bounds), and the result is sum(c_t * loss_t) / denominator - entropy_coef * sum(H) / entropy_denominator.
    The softmax is never stored. For fp32 and bf16 at token level the gradient is formed here, in the forward; the
    backward only scales it, and not even that when the upstream gradient is 1. docs/math.md has every formula.

    Args:
        logits: [B, T, V] or, packed, [N, V]; fp32, bf16, fp16 (fp64 on the reference backend); any strides. Row t
            belongs to token t. Pass all rows of a model's output and mask the last one rather than slicing it off:
            the backward of a slice makes a full copy.
        token_ids: [B, T] or [N], int32 or int64. Masked slots may hold anything, here and in every other argument.
        advantages: [B], [B, 1] or [B, T]; packed [B], [N] or [N, 1]. A constant, as are the next four.
        mask: token_ids' shape, bool, int or float; valid where != 0. None: all valid.
        cu_seqlens: [B+1] int32 or int64, 0 .. N, where packed sequences begin; on the logits' device.
        old_logps: token_ids' shape, nats; None is on-policy: the ratio is exactly 1 and the gradient flows.
        ref_logps: token_ids' shape, nats; needed for beta > 0, used for the kl metric otherwise.
        sampling_weights: like advantages, >= 0; correct a sampler's mismatch. They multiply the policy term only.
        loss_type: "grpo" (mean over sequences of the token mean), "luspo", "dr_grpo", "bnpo", "dapo", "cispo".
        epsilon, epsilon_high, delta: clip bounds 1-epsilon, 1+epsilon_high (None: epsilon), and the two-sided cap
            delta > 1+epsilon_high for negative advantages. For cispo, epsilon_high is the cap of the ratio itself.
        beta: weight of the KL term. use_bias_correction_kl multiplies it by the ratio (DeepSeek-V3.2).
        importance_sampling_level: "token", or "sequence" for one length-normalised ratio per sequence (GSPO).
        entropy_coef: weight of the entropy bonus.
        temperature, softcap, logit_scale: see token_logprobs.
        max_completion_length: tokens; the constant length of dr_grpo.
        denominator, entropy_denominator: what the local sums are divided by; 0-d tensors or numbers, 0 counting as 1.
            Give the whole optimizer step's so that accumulated micro-batches equal one large batch. Defaults: this
            call's own.
        reduction: "sum", or "none" for differentiable per-token losses, without c_t and denominators.
        return_entropy: fill `entropy` in the output and the metrics.
        inplace: the logits' memory holds the gradient afterwards (after the backward for fp16, sequence level, cispo,
            reduction="none" and the reference backend) and must not be read.
        backend: None picks the best for the device; "triton", "cpu", "reference".

    Returns:
        LossOutput(loss, logps, entropy, scored, metrics); only the loss carries a graph, differentiable once.

    Raises:
        ValueError: an argument that does not fit, with what was expected.
        NotImplementedError: a backend that cannot serve these tensors, with the reason.
    """
    check_flags(return_entropy=return_entropy, inplace=inplace)
    options = PolicyOptions(
        loss_type, epsilon, epsilon_high, delta, beta, importance_sampling_level, use_bias_correction_kl, entropy_coef,
        max_completion_length,
    )  # fmt: skip
    transform = LogitTransform(temperature, softcap, logit_scale)
    check_scores("logits", logits, cu_seqlens is not None)
    if inplace:
        check_inplace(logits)
    tokens = make_tokens("logits", logits, token_ids, mask, cu_seqlens)
    name = backends.choose(backend, logits.device.type, dtype_name(logits.dtype))
    problem = make_problem(
        tokens, options, torch.promote_types(logits.dtype, torch.float32), advantages=advantages, old_logps=old_logps,
        ref_logps=ref_logps, sampling_weights=sampling_weights, denominator=denominator,
        entropy_denominator=entropy_denominator, reduction=reduction, return_entropy=return_entropy,
    )  # fmt: skip
    rows = rows_of("logits", logits, inplace)
    # fp16 gradients would flush to 0 before a loss scaler has multiplied them: theirs are formed in the backward.
    in_forward = torch.is_grad_enabled() and logits.requires_grad and logits.dtype != torch.float16
    fused = None
    if problem.fits_one_launch and in_forward and name != "reference":
        fused = lambda: _fused(rows, problem, transform, inplace, name)  # noqa: E731
    return evaluate(
        problem,
        fused,
        lambda: differentiable_logprobs(
            rows,
            tokens.ids,
            tokens.valid,
            transform,
            problem.want_entropy,
            inplace and in_backward(rows),
            name,
        ),
    )


def in_backward(rows: Tensor) -> bool:
    """Whether a backward will come that could write into the rows."""
    return torch.is_grad_enabled() and rows.requires_grad
