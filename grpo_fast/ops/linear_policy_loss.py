"""Any token loss written in PyTorch, straight from hidden states and the lm_head weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.ops import backends, linear_library
from grpo_fast.ops.head import Chunk
from grpo_fast.ops.head_walk import walk
from grpo_fast.ops.inputs import Sequences, Tokens, check_scores, make_tokens
from grpo_fast.ops.linear_autograd import FusedLinearLoss
from grpo_fast.ops.linear_inputs import (
    check_head,
    differentiable_logprobs,
    head_options,
    mask_on_host,
    promised,
    select,
    wants_gradient,
)
from grpo_fast.ops.objective import scalar_divisor
from grpo_fast.ops.options import LogitTransform
from grpo_fast.ops.token_logprobs import dtype_name
from grpo_fast.types import LossMetrics, LossOutput

ALIGN = ("token", "sequence")
_GIVEN = ("logps", "entropy", "mask")  # names of the objective's that are not the user's to choose


@dataclass(frozen=True)
class _UserObjective:
    """Calls the user's function with a chunk's share of the inputs, in the layout that `align` promises."""

    function: Callable[..., Tensor]
    per_token: dict[str, Tensor]  # (B, T) each
    per_sequence: dict[str, Tensor]  # (B,) or (B, 1) each
    scored: Tensor  # (B, T) bool
    sequences: Sequences
    divisor: Tensor
    by_sequence: bool
    with_entropy: bool

    def __call__(self, logps: Tensor, entropy: Tensor | None, chunk: Chunk) -> Tensor:
        losses, mask = self.losses(logps, entropy, chunk)
        return torch.where(mask, losses, 0.0).sum() / self.divisor

    def losses(self, logps: Tensor, entropy: Tensor | None, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The function's per-token losses, and which of them count."""
        sequences, take, place = chunk.of(self.sequences)
        layout = sequences.padded(chunk.longest) if self.by_sequence else lambda vector: vector[0]
        mask = layout(take(self.scored))
        inputs = {n: torch.where(mask, layout(take(v)), v.new_zeros(())) for n, v in self.per_token.items()}
        if self.by_sequence:
            first, last = chunk.sequences
            inputs |= {name: values[first:last] for name, values in self.per_sequence.items()}
        entropy = layout(place(entropy)) if self.with_entropy else None
        return self.call(layout(place(logps)), entropy, mask, inputs), mask

    def call(self, logps: Tensor, entropy: Tensor | None, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if self.by_sequence:
            inputs = inputs | {"mask": mask}
        if self.with_entropy:
            inputs = inputs | {"entropy": entropy}
        with torch.autocast(logps.device.type, enabled=False):  # log-probs are fp32, whatever the products are
            losses = self.function(logps, **inputs)
        if not isinstance(losses, Tensor) or losses.shape != logps.shape:
            got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"objective: expected one loss per token, shape {list(logps.shape)} as logps, got {got}")
        return losses

    def rehearse(self) -> None:
        """Call the function with two tokens of zeros, before anything expensive happens."""
        shape = (1, 2) if self.by_sequence else (2,)
        mask = torch.ones(shape, dtype=torch.bool, device=self.scored.device)
        inputs = {name: values.new_zeros(shape) for name, values in self.per_token.items()}
        inputs |= {name: values.new_zeros((1, *values.shape[1:])) for name, values in self.per_sequence.items()}
        with torch.enable_grad():
            logps = torch.zeros(shape, device=mask.device, requires_grad=True)
            entropy = torch.zeros_like(logps, requires_grad=True) if self.with_entropy else None
            losses = self.call(logps, entropy, mask, inputs)
        if not losses.requires_grad and not torch.is_inference_mode_enabled():
            raise ValueError("objective: its result does not depend on logps; is something detached, or in no_grad?")


def _split_inputs(inputs: Mapping[str, Tensor], tokens: Tokens, by_sequence: bool) -> tuple[dict, dict]:
    """Inputs per token, (B, T), and per sequence, (B,) or (B, 1) as they are."""
    per_token, per_sequence = {}, {}
    for name, value in inputs.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _GIVEN:
            raise ValueError(f"inputs: expected argument names other than {', '.join(_GIVEN)}, got {name!r}")
        if not isinstance(value, Tensor):
            raise ValueError(
                f"inputs[{name!r}]: expected a tensor, got {type(value).__name__}; bind constants to the objective "
                "with functools.partial"
            )
        label = f"inputs[{name!r}]"
        whole = tokens.broadcast(label, value, value.dtype)
        shapes = [(tokens.sequences.num,), (tokens.sequences.num, 1)]
        if by_sequence and value.shape in (shapes[:1] if tokens.sequences.cu_seqlens is not None else shapes):
            per_sequence[name] = value.to(tokens.ids.device, non_blocking=True)
        else:
            per_token[name] = whole
    return per_token, per_sequence


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
            Constants are bound with functools.partial. It is called once more beforehand, with zeros, to check it.
        inputs: name -> tensor, constants: [B, T] (packed [N]), or [B] or [B, 1]; 0 wherever the mask is.
        align: "token" or "sequence".
        denominator: what the sum is divided by, a 0-d tensor or an int; default: this call's valid tokens.
        live_rows: int64 flat indices of the tokens to score, a superset of those with a gradient. They, or a mask on
            the CPU, save the one host synchronisation that a mask on a GPU costs; align="sequence" costs one anyway.
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
    transform = LogitTransform(temperature, softcap, logit_scale)
    check_scores("hidden", hidden, cu_seqlens is not None)
    check_head(hidden, weight, bias)
    tokens = make_tokens("hidden", hidden, token_ids, mask, cu_seqlens)
    dtype = linear_library.gemm_dtype(hidden, weight)
    name = backends.choose(backend, hidden.device.type, dtype_name(dtype))
    how = head_options(hidden, weight, workspace_bytes, fp32_logits, name)
    if live_rows is None:
        selection = select(tokens.valid, mask is None, mask_on_host(mask))
    else:
        selection = promised(live_rows, torch.zeros_like(tokens.valid), tokens.valid)
    scored = selection.mask
    per_token, per_sequence = _split_inputs(inputs, tokens, align == "sequence")
    like = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
    divisor = scalar_divisor("denominator", tokens.valid.sum() if denominator is None else denominator, like)
    user = _UserObjective(
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
    if name != "reference" and wants_gradient(hidden, weight, bias) and not torch.compiler.is_compiling():
        loss, logps, entropy = FusedLinearLoss.apply(
            hidden.flatten(0, -2), weight, bias, _walk, name, selection, tokens.ids, user, want_entropy, transform, how
        )
        logps, entropy = logps.reshape(shape), entropy.reshape(shape) if want_entropy else None
    else:
        logps, entropy = differentiable_logprobs(
            hidden, weight, bias, selection, tokens, transform, want_entropy, how, entropy_grad=with_entropy
        )
        rows = torch.arange(scored.numel(), device=scored.device) if selection.rows is None else selection.rows
        span = ((0, tokens.sequences.num), (0, scored.numel())) if user.by_sequence else ()
        flat = [None if v is None else v.reshape(-1)[rows] for v in (logps, entropy)]
        loss = user(*flat, Chunk(rows, *span))
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
