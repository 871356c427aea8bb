"""Log-probs (and entropy) of given tokens straight from hidden states and the lm_head weight."""

from __future__ import annotations

from torch import Tensor

from grpo_fast.ops.inputs import check_flags
from grpo_fast.ops.linear_inputs import differentiable_logprobs, head_inputs, mask_on_host, select
from grpo_fast.ops.options import LogitTransform
from grpo_fast.types import TokenLogprobs


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    workspace_bytes: int | None = None,
    fp32_logits: bool = False,
    save_unit_grads: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | TokenLogprobs:
    """token_logprobs of hidden @ weight.T + bias without the logits, for any loss downstream (DPO, PPO, your own).

    GEMMs of 2*N*V*D FLOP each, forward and backward together, over the unmasked rows: 1 without gradients; 2 with a
    frozen weight and bias (dlogp/dhidden is kept, the size of hidden, and the backward scales its rows); 4 with a
    trainable weight (the logits are computed again), or 3 with save_unit_grads. Where the loss is known at the call,
    linear_policy_loss needs 3 and 2, an entropy bonus included.

    Args:
        hidden: [B, T, D] or [N, D], fp32, bf16 or fp16 (fp64, also of the weight, on the reference backend): what goes
            into the lm_head, so after the final norm. Row t belongs to token t of token_ids; nothing is shifted.
        weight: [V, D], the lm_head's; head_weight gives it, LoRA and FSDP2 included. Under autocast, or with unequal
            dtypes, the GEMMs run in autocast's dtype or the promoted one; gradients have their parameter's dtype.
        mask: see token_logprobs. Where hidden is on a GPU, one on the CPU saves counting it there (a host sync).
        token_ids, temperature, softcap, logit_scale, return_entropy, backend: see token_logprobs. The gradient
            of the entropy, where it is used, computes the logits again.
        bias: [V], added to the logits first.
        workspace_bytes: size of the logits chunk; the result depends on it to rounding only. Default: 1 GiB on a GPU;
            512 MiB on the CPU, which keeps it for the next call (see release_workspace). There a bf16 or fp16 chunk has
            an fp32 copy beside it for the weight's gradient, and with fp16 or fp32_logits the weight has one, too.
        fp32_logits: keep the chunk in fp32 where the GEMMs are bf16: products accumulate in fp32 anyway, and are then
            not rounded to bf16 before the softmax. Twice the workspace per row, and a bf16 copy for the gradients.
        save_unit_grads: keep dlogp/dlogits, [rows, V] in the logits' dtype, until the backward.

    Returns, Raises: see token_logprobs.
    """
    check_flags(fp32_logits=fp32_logits, save_unit_grads=save_unit_grads, return_entropy=return_entropy)
    transform = LogitTransform(temperature, softcap, logit_scale)
    tokens, how = head_inputs(hidden, weight, bias, token_ids, mask, None, None, workspace_bytes, fp32_logits, backend)
    selection = select(tokens.valid, mask is None, mask_on_host(mask))
    logps, entropy = differentiable_logprobs(
        hidden, weight, bias, selection, tokens, transform, return_entropy, how, save_unit_grads=save_unit_grads
    )
    if return_entropy:
        return TokenLogprobs(logps.reshape(tokens.shape), entropy.reshape(tokens.shape))
    return logps.reshape(tokens.shape)
