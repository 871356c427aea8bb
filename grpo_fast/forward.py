"""The model's side of an update: from a micro-batch to its loss or its log-probs.

Completions of a prompt share it in one packed row, where the model's attention can be ours; otherwise each has a
padded row. Where the model's head is a linear layer, LoRA on it included, the loss is computed from hidden states and
the head's weight, and no logits exist; otherwise from the logits, in place.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_fast.attention.interface import own_attention
from grpo_fast.attention.support import shared_prefix_refusal
from grpo_fast.batching import MicroBatch, Trained, padded_micro_batches, shared_prefix_micro_batches
from grpo_fast.heads import UnsupportedHead, head_weight
from grpo_fast.lora import inner_model
from grpo_fast.modes import evaluation_mode, update_mode
from grpo_fast.ops import grpo_loss, linear_grpo_loss, linear_token_logprobs, token_logprobs
from grpo_fast.types import LossMetrics


@dataclass(frozen=True)
class LinearHead:
    """How a plain linear layer's output becomes logits: softcap(logit_scale * (h W^T + bias))."""

    softcap: float | None = None
    logit_scale: float | None = None

    def logits(self, output: Tensor) -> Tensor:
        logits = output if self.logit_scale is None else output * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


_PROBED_LOGITS = (0.3, 3.0, 30.0, 300.0)  # largest of each probed row: usual softcaps, 20 to 50, bend the last ones


def find_linear_head(model: nn.Module) -> tuple[LinearHead | None, str]:
    """The model's head if the loss can be computed from hidden states, and in words why or why not.

    What the model makes of four hidden states of different sizes is compared with what the head would: a scale, a cap
    or a term that the configuration does not name shows. What depends on other inputs, or on training mode, does not.
    """
    try:
        with evaluation_mode(model), torch.no_grad():  # the mode of updates
            weight, bias = head_weight(model.get_output_embeddings())
    except UnsupportedHead as refusal:
        return None, f"loss from logits: {refusal.reason}"
    if model.base_model is model:
        return None, "loss from logits: the model has no trunk of its own below the head"
    config = model.config.get_text_config()
    softcap, scale = getattr(config, "final_logit_softcapping", None), getattr(config, "logit_scale", None)
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / config.logits_scaling
    head = LinearHead(softcap, scale)
    if not _describes(head, weight, bias, model):
        return None, "loss from logits: what the model does around its head is not named in its configuration"
    return head, "loss from hidden states: the head is a linear layer, logits are never materialised"


@torch.no_grad()
def _describes(head: LinearHead, weight: Tensor, bias: Tensor | None, model: nn.Module) -> bool:
    """Whether `head` makes of hidden states what the model does, both in float32 at least."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, len(_PROBED_LOGITS), weight.shape[1], generator=rng).to(weight)
    largest = nn.functional.linear(hidden, weight).abs().amax(-1, keepdim=True).clamp(min=1e-6)
    hidden *= torch.tensor(_PROBED_LOGITS).to(weight)[:, None] / largest
    expected = head.logits(nn.functional.linear(hidden, weight, bias))
    got = _logits_from(hidden, model, len(weight))
    if got is None or got.shape != expected.shape:
        return False
    return bool(((got - expected).abs().amax(-1) <= 1e-4 * expected.abs().amax(-1)).all())


def _logits_from(hidden: Tensor, model: nn.Module, vocab: int) -> Tensor | None:
    """The model's logits if its trunk returned `hidden` [1, T, D], all above the trunk in hidden's dtype.

    None for a trunk whose output cannot be replaced.
    """
    trunk, replaced = f"{model.base_model_prefix}.", []
    above = {  # under every name: a tied head is cast, while the embedding it shares stays as it is
        name: tensor.to(hidden.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        if not name.startswith(trunk)
    }

    def replace(module: nn.Module, inputs: tuple, output) -> object:
        found = getattr(output, "last_hidden_state", None)
        if found is not None and found.shape == hidden.shape:
            output.last_hidden_state = hidden.clone()
            replaced.append(True)
        return output

    ids = torch.arange(hidden.shape[1], device=hidden.device)[None] % vocab
    handle = model.base_model.register_forward_hook(replace)
    try:
        with evaluation_mode(model):
            inputs = {"input_ids": ids, "use_cache": False}
            out = torch.func.functional_call(model, above, (), inputs, tie_weights=False)
    finally:
        handle.remove()
    return out.logits if replaced else None


@dataclass(frozen=True, slots=True)
class UpdateOutput:
    """Of a micro-batch: the loss (0-d, with a graph), log-probs and sampling weights of its tokens, float [N]."""

    loss: Tensor
    logps: Tensor
    sampling_weights: Tensor | None
    metrics: LossMetrics


class PolicyForward:
    """One forward of a micro-batch, the head on trained tokens only.

    This is a replaceable part: whatever has `model`, `micro_batches`, `mode`, `loss` and `logprobs` can take its place.

    Args:
        model: a causal language model of transformers, with or without peft's adapters.
        temperature: of the distribution that was sampled from; every log-prob is taken under it.
        backend: as in `grpo_fast.grpo_loss`.
        autocast: dtype of the matrix products; None: bfloat16 for float32 weights on a GPU, else the weights' own.
        head: what `find_linear_head` says of this model or of one that it is a copy of; None asks it.
        share_prompts: whether the completions of a prompt share it in one packed row; None: where the model can.

    Attributes:
        reason: in words, where the loss is computed from and why.
        rows_reason: in words, what rows the model is given and why.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        backend: str | None = None,
        autocast: torch.dtype | None = None,
        head: tuple[LinearHead | None, str] | None = None,
        share_prompts: bool | None = None,
    ) -> None:
        self.model = model = inner_model(model)
        if autocast is None and model.device.type == "cuda" and model.dtype == torch.float32:
            autocast = torch.bfloat16
        self.autocast = autocast
        self.options = {"temperature": temperature, "backend": backend}
        self.head, self.reason = find_linear_head(model) if head is None else head
        refusal = shared_prefix_refusal(model) if share_prompts is None else None
        self.share_prompts = refusal is None if share_prompts is None else share_prompts
        self.rows_reason = "rows without padding, in which completions share their prompt"
        if not self.share_prompts:
            self.rows_reason = f"a padded row for every completion: {refusal or 'asked for'}"

    def of_copy(self, model: nn.Module) -> "PolicyForward":
        """The same for a copy of the model, of whatever dtype, without asking it anything."""
        return PolicyForward(model, head=(self.head, self.reason), share_prompts=self.share_prompts, **self.options)

    def micro_batches(self, trained: Trained, max_tokens: int) -> list[MicroBatch]:
        """What `loss` and `logprobs` take, on the model's device; see `batching`. Nothing to train on makes none."""
        make = shared_prefix_micro_batches if self.share_prompts else padded_micro_batches
        return make(trained, max_tokens, self.model.device)

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """What `loss`, its backward and `logprobs` have to run inside of."""
        attention = own_attention(self.model) if self.share_prompts else contextlib.nullcontext()
        with update_mode(self.model), attention:
            yield

    def loss(
        self,
        batch: MicroBatch,
        *,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        sampling_weights: Tensor | Callable[[Tensor], Tensor] | None = None,
        **options,
    ) -> UpdateOutput:
        """The loss of a micro-batch.

        Args:
            batch: one of `micro_batches`.
            old_logps, ref_logps: float [N].
            sampling_weights: float [N], or what makes them of the tokens' log-probs, float [N]; that costs one product
                of the head's size.
            options: of `grpo_fast.grpo_loss`.
        """
        options |= self.options | {"old_logps": old_logps, "ref_logps": ref_logps, "cu_seqlens": batch.cu_seqlens}
        options["return_entropy"] = True
        with self._autocast():
            if self.head is not None:
                hidden, weight, bias = self._hidden(batch)
                if callable(sampling_weights):
                    sampling_weights = sampling_weights(self._head_logprobs(batch, hidden, weight, bias))
                out = linear_grpo_loss(
                    hidden,
                    weight,
                    batch.token_ids,
                    batch.advantages,
                    bias=bias,
                    # Known without asking a device: completions without a gradient are in no micro-batch.
                    live_rows=torch.arange(len(batch.token_ids), device=batch.token_ids.device),
                    sampling_weights=sampling_weights,
                    **self._transform(),
                    **options,
                )
            else:
                logits = self._logits(batch)
                if callable(sampling_weights):
                    with torch.no_grad():
                        sampling_weights = sampling_weights(token_logprobs(logits, batch.token_ids, **self.options))
                out = grpo_loss(
                    logits,
                    batch.token_ids,
                    batch.advantages,
                    sampling_weights=sampling_weights,
                    inplace=True,
                    **options,
                )
        return UpdateOutput(out.loss, out.logps, sampling_weights, out.metrics)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs, float [N], of the micro-batch's trained tokens."""
        with self._autocast():
            if self.head is not None:
                return self._head_logprobs(batch, *self._hidden(batch))
            return token_logprobs(self._logits(batch), batch.token_ids, **self.options)

    def _autocast(self):
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, self.autocast)

    def _transform(self) -> dict:
        return {"softcap": self.head.softcap, "logit_scale": self.head.logit_scale}

    @torch.no_grad()
    def _head_logprobs(self, batch: MicroBatch, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_token_logprobs(hidden, weight, batch.token_ids, bias=bias, **self._transform(), **self.options)

    def _inputs(self, batch: MicroBatch) -> dict:
        inputs = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.attention is None:
            return inputs
        return inputs | {"position_ids": batch.attention.position_ids, "grpo_fast_attention": batch.attention}

    def _hidden(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:  # [N, D], [V, D], [V]
        trunk = self.model.base_model(**self._inputs(batch))
        hidden = trunk.last_hidden_state.flatten(0, 1).index_select(0, batch.predictors)
        return hidden, *head_weight(self.model.get_output_embeddings())

    def _logits(self, batch: MicroBatch) -> Tensor:  # [N, V]
        inputs = self._inputs(batch)
        if batch.attention is not None and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            return self.model(**inputs, logits_to_keep=batch.predictors).logits[0]
        return self.model(**inputs).logits.flatten(0, 1).index_select(0, batch.predictors)
