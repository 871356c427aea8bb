"""TRL's GRPOTrainer on grpo_fast's fused head: the same arguments, loss, gradients and logged metrics, fewer products.

`from grpo_fast.integrations.trl import GRPOTrainer` takes the place of `from trl import GRPOTrainer`. A trainer class
of one's own becomes `class MyTrainer(FastGRPOMixin, trl.GRPOTrainer)`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_fast.forward import find_linear_head
from grpo_fast.heads import head_weight
from grpo_fast.ops import LinearGRPOLoss, linear_grpo_loss, linear_token_logprobs

try:
    import trl
except ModuleNotFoundError as error:
    if error.name != "trl":  # TRL is there, something that it needs is not
        raise
    raise ImportError(
        "grpo_fast.integrations.trl: needs TRL, which is not installed. Run: pip install 'grpo-fast[trl]'"
    ) from error

# What is overridden here is private to TRL, so a version that no test has seen may differ without an error.
if trl.__version__.split(".")[:2] != ["1", "16"]:
    raise ImportError(
        f"grpo_fast.integrations.trl: expected TRL 1.16, got {trl.__version__}. Run: pip install 'trl>=1.16,<1.17'"
    )

from trl.trainer.utils import FusedCausalLMOutput

_INSTEAD = ", or train with trl.GRPOTrainer"
_PER_TOKEN_LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def _refuse_split(model) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise NotImplementedError(f"model: expected on one device, got {sorted(map(str, devices))}{_INSTEAD}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotImplementedError(f"model: expected whole parameters, got DTensors. Shard nothing{_INSTEAD}")


def _loss_options(args: trl.GRPOConfig) -> dict:
    return {
        "loss_type": args.loss_type,
        "epsilon": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "delta": args.delta,
        "beta": args.beta,
        "importance_sampling_level": args.importance_sampling_level,
        "use_bias_correction_kl": args.use_bias_correction_kl,
        "temperature": args.temperature,
    }


def _refuse_config(args: trl.GRPOConfig) -> None:
    entropy_bonus = args.entropy_coef != 0 or args.use_adaptive_entropy
    for refused, what in (
        (args.use_liger_kernel, "use_liger_kernel: set it to False"),
        (args.torch_compile, "torch_compile: set it to False"),
        (
            entropy_bonus and args.top_entropy_quantile < 1,
            "top_entropy_quantile: with an entropy bonus, set it to 1.0",
        ),
    ):
        if refused:
            raise NotImplementedError(f"{what}{_INSTEAD}")
    try:
        LinearGRPOLoss(**_loss_options(args), entropy_coef=args.entropy_coef)
    except ValueError as error:  # names the option and what it may be
        raise ValueError(f"{error}{_INSTEAD}") from error


@contextlib.contextmanager
def _own_forward(layer, in_fp32: bool):
    """Without the forward that TRL's cast_lm_head_to_fp32 has given the head."""
    patched = vars(layer).pop("forward", None) if in_fp32 else None
    try:
        yield
    finally:
        if patched is not None:
            layer.forward = patched


def _patch_forward(model, transform: dict, in_fp32: bool) -> None:
    """Answer `model(..., fused_lm_head=x)` from hidden states: for x = True as TRL's fused head does, with our
    log-probs; for a function x with what it makes of (hidden [B, L, D], weight [V, D], bias [V] or None).

    In the forward, because wrappers such as DistributedDataParallel see nothing that happens beside it; on top of TRL's
    own patch, which goes on to serve every other call.
    """
    inner = model.forward

    @functools.wraps(type(model).forward)  # generate() looks at the signature
    def forward(self, *args, fused_lm_head: bool | Callable = False, labels: Tensor | None = None, **kwargs):
        if not fused_lm_head:
            return inner(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        layer = self.get_output_embeddings()
        with _own_forward(layer, in_fp32):
            weight, bias = head_weight(layer)
        precision = contextlib.nullcontext()
        if in_fp32:  # as TRL's cast_lm_head_to_fp32, which has cast the weight
            hidden, precision = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
        with precision:
            if callable(fused_lm_head):
                return fused_lm_head(hidden, weight, bias)
            targets = labels[:, 1:]
            logps, entropy = linear_token_logprobs(
                hidden[:, :-1],
                weight,
                targets,
                targets != -100,
                bias=bias,
                return_entropy=True,
                **transform,
            )
            return FusedCausalLMOutput(log_probs=logps, entropy=entropy)

    model.forward = types.MethodType(forward, model)


class FastGRPOMixin:
    """Put before trl.GRPOTrainer, or a subclass of it that keeps TRL's loss, in a class's bases.

    Attributes:
        score_dead_rows: True: tokens without a gradient (advantage 0 with beta 0) take part in the forward product, and
            every logged metric is TRL's. False: they cost nothing, and the metrics entropy and clip_ratio are over the
            tokens with a gradient only; loss and gradients are the same.

    Raises (at construction):
        NotImplementedError: an option, wrapper or model that this does not reproduce; trl.GRPOTrainer trains it.
        ValueError: a number that the loss does not accept.
    """

    score_dead_rows: bool = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if trl.GRPOTrainer in order and order.index(trl.GRPOTrainer) < order.index(FastGRPOMixin):
            raise TypeError(f"{cls.__name__}: FastGRPOMixin must come before trl.GRPOTrainer in its bases")

    def __init__(self, *args, **kwargs):
        for config in (*args, *kwargs.values()):  # before TRL loads models
            if isinstance(config, trl.GRPOConfig):
                _refuse_config(config)
        super().__init__(*args, **kwargs)
        self._refuse_unsupported()
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "get_base_model"):  # a PeftModel: adapters sit inside the trunk of the model below
            model = model.get_base_model()
        _refuse_split(model)
        with _own_forward(model.get_output_embeddings(), self.args.cast_lm_head_to_fp32):
            head, reason = find_linear_head(model)
        if head is None:
            raise NotImplementedError(
                f"model: {reason}; give it a linear head that its configuration describes{_INSTEAD}"
            )
        self._transform = {
            "temperature": self.temperature, "softcap": head.softcap, "logit_scale": head.logit_scale,
        }  # fmt: skip
        self._loss_options = _loss_options(self.args) | self._transform
        for patched in (model, self.ref_model):
            if patched is not None:
                _patch_forward(patched, self._transform, self.args.cast_lm_head_to_fp32)

    def _refuse_unsupported(self) -> None:
        for refused, what in (
            (self.is_deepspeed_enabled, "deepspeed: the head may be sharded. Use DistributedDataParallel"),
            (self.is_fsdp_enabled, "fsdp: the head is sharded. Use DistributedDataParallel"),
            (self._is_vlm, "processing_class: a processor of a multimodal model. Pass a tokenizer"),
            (self.aux_loss_enabled, "router_aux_loss_coef: set it to 0.0"),
        ):
            if refused:
                raise NotImplementedError(f"{what}{_INSTEAD}")
        for name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
            if getattr(super(), name).__func__ is not getattr(trl.GRPOTrainer, name):  # it would not be called
                raise NotImplementedError(
                    f"{type(self).__name__}: a base class overrides {name}, which this replaces; leave it out{_INSTEAD}"
                )

    def _compute_loss(self, model, inputs):
        """TRL's loss of a micro-batch. Its own code then logs, from log-probs that exist already."""
        ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]
        first = -1 - ids.shape[1]  # from the end: prompt tuning puts virtual tokens in front
        with self.accelerator.autocast():
            loss, logps, entropy, scored = model(
                input_ids=torch.cat([inputs["prompt_ids"], ids], dim=1),
                attention_mask=torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
                fused_lm_head=lambda hidden, *head: self._head_loss(hidden[:, first:-1], *head, mask, inputs),
            )
        seen = {**inputs, "tool_mask": scored.to(completion_mask.dtype)}
        # Where logps is 0 because nothing was scored, exp(logps - old) may overflow, and inf * mask is NaN.
        seen |= {name: torch.where(scored, inputs[name], 0.0) for name in _PER_TOKEN_LOGPS if name in inputs}
        with torch.no_grad():  # for what it logs: in the model's place stands one that answers with what was computed
            super()._compute_loss(lambda **_: FusedCausalLMOutput(log_probs=logps, entropy=entropy), seen)
        return loss

    def _head_loss(self, hidden, weight, bias, mask, inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(loss, logps, entropy, scored) of completion tokens: hidden [B, T, D], mask [B, T]."""
        ids, options = inputs["completion_ids"], dict(self._loss_options)
        factors = []  # of the policy term alone, as sampling weights are
        if self.use_vllm and self.vllm_importance_sampling_correction:
            factors.append(inputs["importance_sampling_ratio"])
        scores = None
        if self.top_entropy_quantile < 1 or self.off_policy_mask_threshold is not None:
            with torch.no_grad():  # which tokens count depends on the scores of all
                scores = linear_token_logprobs(
                    hidden, weight, ids, mask, bias=bias, return_entropy=True, **self._transform
                )
            factors += self._selections(*scores, mask, inputs)
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        if self._entropy_bonus_enabled:
            waits = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
            options["entropy_coef"] = 0.0 if waits else self.entropy_coef
            options["entropy_denominator"] = mask.sum() * steps
        out = linear_grpo_loss(
            hidden,
            weight,
            ids,
            inputs["advantages"],
            mask,
            bias=bias,
            old_logps=inputs.get("old_per_token_logps"),
            ref_logps=inputs["ref_per_token_logps"] if self.beta > 0 else None,
            sampling_weights=functools.reduce(torch.mul, factors) if factors else None,
            denominator=self._denominator(mask, inputs, steps),
            score_dead_rows=scores is None and (self.score_dead_rows or self._entropy_bonus_enabled),
            return_entropy=scores is None,
            **options,
        )
        if scores is None:
            return out.loss, out.logps, out.entropy, out.scored
        return out.loss, *scores, mask != 0

    def _selections(self, logps, entropy, mask, inputs) -> list[Tensor]:
        """The tokens and sequences that TRL's selecting options leave in the policy term, as factors 0 and 1."""
        factors = []
        if self.off_policy_mask_threshold is not None:
            advantages, old = inputs["advantages"], inputs.get("old_per_token_logps", logps)
            factors.append(
                self.get_off_policy_mask(
                    advantages=advantages[:, None] if advantages.dim() == 1 else advantages,
                    per_token_logps=logps,
                    sampling_per_token_logps=inputs.get("sampling_per_token_logps", old),
                    mask=mask,
                    off_policy_threshold=self.off_policy_mask_threshold,
                )
            )
        if self.top_entropy_quantile < 1:
            factors.append(self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile))
        return factors

    def _denominator(self, mask, inputs, steps: int) -> Tensor | int:
        """What TRL divides the summed loss of a micro-batch by, `steps` micro-batches making an optimizer step."""
        if self.loss_type in ("dapo", "cispo"):  # tokens of a generation batch, for one step's part of it
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            return tokens * steps / self.args.steps_per_generation if self.model.training else tokens
        if self.loss_type == "bnpo":
            return mask.sum().clamp(min=1) * steps
        return len(mask) * steps * (self.max_completion_length if self.loss_type == "dr_grpo" else 1)


class GRPOTrainer(FastGRPOMixin, trl.GRPOTrainer):
    """trl.GRPOTrainer with the loss of grpo_fast: see FastGRPOMixin for what differs, trl.GRPOTrainer for the rest."""
