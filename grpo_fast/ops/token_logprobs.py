"""Log-probs (and entropy) of given tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.ops import backends
from grpo_fast.ops.autograd import RowLogprobs
from grpo_fast.ops.inputs import check_flags, check_inplace, check_scores, make_tokens, rows_of
from grpo_fast.ops.library import check_ids
from grpo_fast.ops.options import LogitTransform
from grpo_fast.ops.reference import row_logprobs
from grpo_fast.types import TokenLogprobs


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def differentiable_logprobs(
    logits: Tensor,
    ids: Tensor,
    valid: Tensor,
    transform: LogitTransform,
    want_entropy: bool,
    inplace: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """(B, T, V) logits -> (B, T) log-probs and entropy by the two-sweep schedule."""
    if backend == "reference" and not inplace:
        if not torch.compiler.is_compiling():
            check_ids(ids, valid, logits.shape[-1])
        return row_logprobs(logits, ids, valid, transform, want_entropy)
    logps, entropy = RowLogprobs.apply(logits, ids, valid, transform.as_floats(), want_entropy, inplace, backend)
    return logps, entropy if want_entropy else None


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    return_entropy: bool = False,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor | TokenLogprobs:
    """log softmax(z)[token] for each token, z = softcap*tanh(logits*logit_scale/softcap)/temperature; no softmax kept.

    Position t of the logits belongs to token t: nothing is shifted. Logits returned by a Hugging Face model are scaled
    and capped already; pass neither again. The gradient is formed in the backward (one more sweep of the logits).

    Args:
        logits: [B, T, V] or [N, V], fp32, bf16 or fp16 (fp64 on the reference backend); any strides.
        token_ids: [B, T] or [N], int32 or int64. At masked slots any value.
        mask: token_ids' shape, bool, int or float; valid where != 0. None: all valid.
        temperature, softcap, logit_scale: the distribution that was sampled from; each > 0.
        return_entropy: also give -sum p log p of the same distribution.
        inplace: the backward writes the gradient over the logits, which must not be read after this call.
        backend: None picks the best for the device; "triton", "cpu", "reference".

    Returns:
        Log-probs in nats, fp32 (fp64 for fp64 logits), token_ids' shape, 0 where masked; with return_entropy a named
        tuple (logps, entropy), both differentiable once (any number of times on the reference backend).

    Raises:
        ValueError: shapes or dtypes that do not fit, an id outside [0, V) at a valid slot (on the CPU; NaN on a GPU),
            inplace on a leaf that requires grad or on overlapping memory.
        NotImplementedError: a backend that cannot serve these tensors, with the reason.
    """
    check_flags(return_entropy=return_entropy, inplace=inplace)
    transform = LogitTransform(temperature, softcap, logit_scale)
    check_scores("logits", logits, None)
    if inplace:
        check_inplace(logits)
    tokens = make_tokens("logits", logits, token_ids, mask, None)
    name = backends.choose(backend, logits.device.type, dtype_name(logits.dtype))
    rows = rows_of("logits", logits, inplace)
    logps, entropy = differentiable_logprobs(rows, tokens.ids, tokens.valid, transform, return_entropy, inplace, name)
    if return_entropy:
        return TokenLogprobs(logps.reshape(tokens.shape), entropy.reshape(tokens.shape))
    return logps.reshape(tokens.shape)
