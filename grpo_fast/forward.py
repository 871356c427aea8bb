"""The model's side of an update: from a micro-batch to its loss or its log-probs.

Where the model's head is a plain linear layer the loss is computed from hidden states and the head's weight,
and no logits exist; otherwise from the logits, in place.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_fast.batching import MicroBatch
from grpo_fast.modes import evaluation_mode
from grpo_fast.ops import grpo_loss, linear_grpo_loss, linear_token_logprobs, token_logprobs
from grpo_fast.types import LossMetrics


@dataclass(frozen=True)
class LinearHead:
    """How to get from hidden states to logits: softcap(logit_scale * (h W^T + bias))."""

    layer: nn.Linear
    softcap: float | None = None
    logit_scale: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.layer(hidden) * (1.0 if self.logit_scale is None else self.logit_scale)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def find_linear_head(model: nn.Module) -> tuple[LinearHead | None, str]:
    """The model's head if the loss can be computed from hidden states, and in words why or why not.

    What the model does between its trunk and its logits is compared on four tokens with what the head would:
    a transformation that the configuration does not name cannot go unnoticed.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        return None, f"loss from logits: the head is a {type(layer).__name__}, not a plain linear layer"
    if model.base_model is model:
        return None, "loss from logits: the model has no trunk of its own below the head"
    config = model.config.get_text_config()
    softcap, scale = getattr(config, "final_logit_softcapping", None), getattr(config, "logit_scale", None)
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / config.logits_scaling
    head = LinearHead(layer, softcap, scale)
    probe = torch.arange(4, device=layer.weight.device)[None] % layer.out_features
    with torch.no_grad(), evaluation_mode(model):
        trunk = model.base_model(input_ids=probe, use_cache=False)
        hidden = getattr(trunk, "last_hidden_state", None)
        expected = model(input_ids=probe, use_cache=False).logits.float()
        got = None if hidden is None or hidden.shape[-1] != layer.in_features else head.logits(hidden).float()
    tolerance = 1e-4 if layer.weight.dtype in (torch.float32, torch.float64) else 2e-2
    if got is None or got.shape != expected.shape or not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
        return None, "loss from logits: what the model does around its head is not named in its configuration"
    return head, "loss from hidden states: the head is a plain linear layer, logits are never materialised"


@dataclass(frozen=True, slots=True)
class UpdateOutput:
    """Loss of a micro-batch (0-d, with a graph), log-probs float [N] of its tokens, and metrics."""

    loss: Tensor
    logps: Tensor
    metrics: LossMetrics


class PaddedForward:
    """One forward of right-padded [prompt, completion] rows, the head on trained tokens only.

    This is a replaceable part: whatever has these two methods can take its place in the trainer.

    Args:
        model: a causal language model of transformers.
        temperature: of the distribution that was sampled from; every log-prob is taken under it.
        backend: as in `grpo_fast.grpo_loss`.
        autocast: dtype of the matrix products; None: bfloat16 for float32 weights on a GPU, else the weights' own.

    Attributes:
        reason: in words, where the loss is computed from and why.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        backend: str | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        if autocast is None and model.device.type == "cuda" and model.dtype == torch.float32:
            autocast = torch.bfloat16
        self.autocast = autocast
        self.options = {"temperature": temperature, "backend": backend}
        self.head, self.reason = find_linear_head(model)

    def loss(self, batch: MicroBatch, *, old_logps: Tensor | None, ref_logps: Tensor | None, **options) -> UpdateOutput:
        """The loss of a micro-batch; old_logps, ref_logps: float [N]; options: of `grpo_fast.grpo_loss`."""
        options = {**self.options, **options, "return_entropy": True}
        with self._autocast():
            if self.head is not None:
                hidden, weight, bias = self._hidden(batch)
                out = linear_grpo_loss(
                    hidden,
                    weight,
                    batch.token_ids,
                    batch.advantages,
                    cu_seqlens=batch.cu_seqlens,
                    old_logps=old_logps,
                    ref_logps=ref_logps,
                    bias=bias,
                    **self._transform(),
                    **options,
                )
                return UpdateOutput(out.loss, out.logps, out.metrics)
            logits, ids, mask, packed = self._logits(batch)
            out = grpo_loss(
                logits,
                ids,
                batch.advantages,
                mask,
                old_logps=_unpack(old_logps, packed, mask),
                ref_logps=_unpack(ref_logps, packed, mask),
                inplace=True,
                **options,
            )
            return UpdateOutput(out.loss, out.logps.flatten()[packed], out.metrics)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs, float [N], of the micro-batch's trained tokens."""
        with self._autocast():
            if self.head is not None:
                hidden, weight, bias = self._hidden(batch)
                return linear_token_logprobs(
                    hidden, weight, batch.token_ids, bias=bias, **self._transform(), **self.options
                )
            logits, ids, mask, packed = self._logits(batch)
            return token_logprobs(logits, ids, mask, **self.options).flatten()[packed]

    def _autocast(self):
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, self.autocast)

    def _transform(self) -> dict:
        return {"softcap": self.head.softcap, "logit_scale": self.head.logit_scale}

    def _hidden(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:  # [N, D], [V, D], [V]
        trunk = self.model.base_model(input_ids=batch.input_ids, use_cache=False)
        hidden = trunk.last_hidden_state.flatten(0, 1).index_select(0, batch.positions)
        return hidden, self.head.layer.weight, self.head.layer.bias

    def _logits(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits [B, K, V] of the last K columns, ids and mask [B, K], flat indices [N] of the True slots.

        The last row predicts nothing and is masked: slicing it off would copy all logits in the backward.
        """
        width, first = batch.input_ids.shape[1], batch.first_column
        kept = {"logits_to_keep": width - first} if self.model._supports_logits_to_keep() else {}
        logits = self.model(input_ids=batch.input_ids, use_cache=False, **kept).logits
        first = width - logits.shape[1]
        packed = batch.positions - (batch.positions // width + 1) * first
        return logits, batch.input_ids.roll(-1, dims=1)[:, first:], batch.predicts[:, first:], packed


def _unpack(values: Tensor | None, packed: Tensor, mask: Tensor) -> Tensor | None:
    """[N] values at the True slots of a [B, K] mask, 0 elsewhere."""
    if values is None:
        return None
    return values.new_zeros(mask.numel()).index_copy(0, packed, values).view(mask.shape)
