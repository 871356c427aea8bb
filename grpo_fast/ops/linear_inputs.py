"""What the public head functions share: checking the head's tensors, and which rows are scored."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.ops import backends
from grpo_fast.ops.head import HeadOptions
from grpo_fast.ops.inputs import Tokens, check_floating, check_plain, check_scores, check_tensor, make_tokens
from grpo_fast.ops.library import check_ids
from grpo_fast.ops.linear_autograd import LinearRowLogprobs
from grpo_fast.ops.linear_library import gemm_dtype
from grpo_fast.ops.options import LogitTransform
from grpo_fast.ops.reference import row_logprobs
from grpo_fast.ops.token_logprobs import dtype_name

# Default workspace of the logits chunk: large enough that the GEMMs run at full speed and the fp32 weight gradient is
# read and written a few times only, small beside the weight and its gradient.
_WORKSPACE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}


def head_options(
    hidden: Tensor, weight: Tensor, workspace_bytes: int | None, fp32_logits: bool, backend: str
) -> HeadOptions:
    if workspace_bytes is None:
        workspace_bytes = _WORKSPACE_BYTES.get(hidden.device.type, 1 << 28)
    elif isinstance(workspace_bytes, bool) or not isinstance(workspace_bytes, int) or workspace_bytes < 1:
        raise ValueError(f"workspace_bytes: expected a positive integer, got {workspace_bytes!r}")
    dtype = gemm_dtype(hidden, weight)
    # float16: the gradient is formed in the logits' place, where a small one must not flush to zero.
    logits_dtype = torch.float32 if fp32_logits or dtype == torch.float16 else dtype
    rows = workspace_bytes // (max(weight.shape[0], 1) * logits_dtype.itemsize)
    return HeadOptions(dtype, logits_dtype, max(1, rows), backend)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_tensor("weight", weight, "; of an lm_head module that is grpo_fast.head_weight(module)[0]")
    if bias is not None:
        check_tensor("bias", bias)
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_plain(name, tensor)
            check_floating(name, tensor)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        hint = "; transposed?" if weight.dim() == 2 and weight.shape[0] == hidden.shape[-1] else ""
        raise ValueError(
            f"weight: expected [V, D={hidden.shape[-1]}] to go with hidden, got {list(weight.shape)}{hint}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected [V={weight.shape[0]}], got {list(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: expected device {hidden.device} (hidden's), got {tensor.device}")


def head_inputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rank_packed: bool | None,
    workspace_bytes: int | None,
    fp32_logits: bool,
    backend: str | None,
) -> tuple[Tokens, HeadOptions]:
    """The arguments that every head function has, checked; rank_packed as in check_scores."""
    check_scores("hidden", hidden, rank_packed)
    check_head(hidden, weight, bias)
    tokens = make_tokens("hidden", hidden, token_ids, mask, cu_seqlens)
    name = backends.choose(backend, hidden.device.type, dtype_name(gemm_dtype(hidden, weight)))
    return tokens, head_options(hidden, weight, workspace_bytes, fp32_logits, name)


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class Selection(NamedTuple):
    """Tokens to score: their flat places in ascending order, None for all, and the same as a mask, (B, T)."""

    rows: Tensor | None
    mask: Tensor


def select(wanted: Tensor, all_wanted: bool, on_host: Tensor | None = None) -> Selection:
    """`on_host` is `wanted` where the CPU knows it; without, counting those of a GPU is the head's one host sync."""
    if all_wanted or torch.compiler.is_compiling():  # a data-dependent length has no place in a static graph
        return Selection(None, wanted)
    rows = (wanted if on_host is None else on_host).reshape(-1).nonzero()[:, 0]
    if rows.shape[0] == wanted.numel():
        return Selection(None, wanted)
    return Selection(rows.to(wanted.device, non_blocking=True), wanted)


def mask_on_host(mask: Tensor | None) -> Tensor | None:
    return mask != 0 if mask is not None and mask.device.type == "cpu" else None


def promised(live_rows: Tensor, needed: Tensor, valid: Tensor) -> Selection:
    """The valid ones of the tokens that the caller names, which must be all `needed` ones (checked on the CPU)."""
    check_tensor("live_rows", live_rows)
    if live_rows.dim() != 1 or live_rows.dtype != torch.int64:
        raise ValueError(f"live_rows: expected int64 of shape [rows], got {live_rows.dtype} {list(live_rows.shape)}")
    if live_rows.device != valid.device and live_rows.device.type != "cpu":
        raise ValueError(f"live_rows: expected device {valid.device} (hidden's) or cpu, got {live_rows.device}")
    count = valid.numel()
    named = torch.zeros(count, dtype=torch.bool, device=live_rows.device)
    if live_rows.device.type == "cpu" and not torch.compiler.is_compiling():
        if live_rows.numel() and not (live_rows.min() >= 0 and live_rows.max() < count):
            raise ValueError(f"live_rows: expected flat token indices in [0, {count}), got {live_rows.tolist()[:8]}...")
        if named.index_fill(0, live_rows, True).sum() != live_rows.shape[0]:
            raise ValueError("live_rows: expected every index once: a token named twice would count twice")
    named = named.index_fill(0, live_rows, True).to(valid.device, non_blocking=True)
    if valid.device.type == "cpu" and not torch.compiler.is_compiling():
        missing = needed.reshape(-1) & ~named
        if missing.any():
            raise ValueError(
                f"live_rows: must name every token with a gradient, misses flat index {missing.nonzero()[0].item()}"
            )
    return Selection(live_rows.sort().values.to(valid.device, non_blocking=True), named.view(valid.shape) & valid)


def differentiable_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    selection: Selection,
    tokens: Tokens,
    transform: LogitTransform,
    want_entropy: bool,
    how: HeadOptions,
    *,
    entropy_grad: bool = False,
    save_unit_grads: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(B, T) log-probs and entropy; see LinearRowLogprobs."""
    (rows, scored), shape = selection, tokens.ids.shape
    if how.backend == "reference":
        if not torch.compiler.is_compiling():
            check_ids(tokens.ids, tokens.valid, weight.shape[0])
        # A masked row's hidden state may be NaN, which 0 * NaN would carry into the weight's gradient.
        clean = torch.where(scored.reshape(-1, 1), hidden.reshape(-1, hidden.shape[-1]), 0.0)
        logits = clean.to(how.dtype) @ weight.to(how.dtype).t()
        logits = logits if bias is None else logits + bias.to(how.dtype)
        return row_logprobs(logits.reshape(*shape, weight.shape[0]), tokens.ids, scored, transform, want_entropy)
    logps, entropy = LinearRowLogprobs.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows, tokens.ids.reshape(-1), scored.reshape(-1),
        transform.as_floats(), want_entropy, entropy_grad, save_unit_grads, how,
    )  # fmt: skip
    return logps.reshape(shape), entropy.reshape(shape) if want_entropy else None
