"""The lm_head + GRPO losses that bench_linear_grpo_loss compares: ours, TRL's, Liger's, plain PyTorch and bare GEMMs.

Each loss takes (hidden, weight, batch) and returns a 0-d tensor with a graph. Peers are called, not rewritten: TRL's
GRPO loss is GRPOTrainer's own method on a stand-in for the trainer, over a stand-in for the model whose backbone
returns the benchmark's hidden states. All of them compute loss_type "grpo" with epsilon 0.2.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import grpo_fast as gf

EPSILON = 0.2


@dataclass(frozen=True)
class Batch:
    """B sequences of P prompt and C completion tokens; every token is real."""

    ids: Tensor  # (B, P + C)
    advantages: Tensor  # (B,)
    old_logps: Tensor  # (B, C)
    valid: Tensor | None = None  # (B, C) bool; None: all of the completion
    ref_logps: Tensor | None = None  # (B, C), where beta is not 0

    @property
    def completion(self) -> int:
        return self.old_logps.shape[1]

    @property
    def prompt(self) -> int:
        return self.ids.shape[1] - self.completion

    @property
    def predicting(self) -> slice:
        """Positions of a sequence that predict its completion."""
        return slice(self.prompt - 1, -1)

    @property
    def mask(self) -> Tensor:
        """(B, C) int64, as the peers want it."""
        return torch.ones_like(self.ids[:, self.prompt :]) if self.valid is None else self.valid.long()

    @property
    def live(self) -> Tensor:
        """Sequences with a gradient, (B,) bool."""
        return self.advantages != 0


Loss = Callable[[Tensor, Tensor, Batch], Tensor]


def policy_loss(logps: Tensor, batch: Batch) -> Tensor:
    """The textbook: mean over sequences of the mean over tokens of the clipped objective."""
    ratio = torch.exp(logps - batch.old_logps)
    advantages = batch.advantages[:, None]
    gain = torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    return -gain.mean(1).mean()


def plain_loss(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    """PyTorch's autograd over the logits of the completions."""
    logits = hidden[:, batch.predicting] @ weight.t()
    logps = logits.log_softmax(-1).gather(-1, batch.ids[:, batch.prompt :, None])[..., 0]
    return policy_loss(logps, batch)


def fused_loss(workspace_bytes: int) -> Loss:
    """grpo_fast, as the README shows it: all positions go in, the mask names those that predict a completion."""

    def loss(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        mask = torch.zeros(batch.ids.shape, dtype=torch.bool)
        mask[:, batch.predicting] = True
        old_logps = torch.zeros(batch.ids.shape)
        old_logps[:, batch.predicting] = batch.old_logps
        return gf.linear_grpo_loss(
            hidden, weight, batch.ids.roll(-1, 1), batch.advantages, mask, old_logps=old_logps, epsilon=EPSILON,
            workspace_bytes=workspace_bytes, backend="cpu",
        ).loss  # fmt: skip

    return loss


class _Model(nn.Module):
    """What add_fused_lm_head needs of a causal language model; the backbone's output is set from outside."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(get_text_config=SimpleNamespace)

    def forward(self, **inputs):
        raise NotImplementedError("only the fused head is called")

    def base_model(self, **inputs):
        return SimpleNamespace(last_hidden_state=self.hidden)

    def get_output_embeddings(self):
        return SimpleNamespace(weight=self.weight, bias=None)


def trl_loss(level: str = "token", beta: float = 0.0) -> Loss:
    """GRPOTrainer._compute_loss on add_fused_lm_head, with the outputs that the trainer asks for, without autocast."""
    trainer_class = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True, mixed_precision="no")
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(report_to=[], delta=None, use_bias_correction_kl=False),
        state=SimpleNamespace(global_step=0),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        loss_type="grpo",
        importance_sampling_level=level,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
        beta=beta,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
    )
    trainer._get_per_token_logps_and_entropies = partial(trainer_class._get_per_token_logps_and_entropies, trainer)
    model = _Model()
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(model, outputs=("log_probs", "entropy"))

    def loss(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        model.hidden, model._parameters["weight"] = hidden, weight
        prompt, completion = batch.ids[:, : batch.prompt], batch.ids[:, batch.prompt :]
        value = trainer_class._compute_loss(
            trainer,
            model,
            {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": completion,
                "completion_mask": batch.mask,
                "advantages": batch.advantages,
                "old_per_token_logps": batch.old_logps,
                "ref_per_token_logps": batch.ref_logps,
            },
        )
        model.hidden = None
        return value

    return loss


def liger_loss(compiled: bool, level: str = "token", beta: float = 0.0) -> Loss:
    """LigerFusedLinearGRPOLoss, fed as TRL did while it used it: the hidden states that predict the completion."""
    module = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=beta, compiled=compiled, use_ref_model=beta != 0, epsilon_low=EPSILON, epsilon_high=EPSILON,
        loss_type="grpo", importance_sampling_level=level,
    )  # fmt: skip

    def loss(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        completion = batch.ids[:, batch.prompt :]
        value, _ = module(
            hidden[:, batch.predicting], weight, completion, batch.mask, batch.advantages,
            ref_per_token_logps=batch.ref_logps, old_per_token_logps=batch.old_logps,
        )  # fmt: skip
        return value

    return loss


def bare_gemms(
    hidden_ND: Tensor, weight: Tensor, trainable: bool, rows_per_chunk: int, new_gradients: bool = False
) -> Callable[[], None]:
    """The GEMMs of a fused head and nothing else, over the rows that have a gradient, into memory that is there.

    new_gradients: those of hidden and weight are new memory, as whatever is handed to an optimizer is in every step.
    """
    weight = weight.detach()
    count = hidden_ND.shape[0]
    logits_RV = hidden_ND.new_empty(min(count, rows_per_chunk), weight.shape[0])

    def gradients() -> tuple[Tensor, Tensor | None]:
        return torch.empty_like(hidden_ND), torch.empty_like(weight) if trainable else None

    kept = None if new_gradients else gradients()

    def run() -> None:
        dhidden_ND, dweight_VD = kept or gradients()
        for start in range(0, count, rows_per_chunk):
            hidden_RD = hidden_ND[start : start + rows_per_chunk]
            logits = logits_RV[: hidden_RD.shape[0]]
            torch.mm(hidden_RD, weight.t(), out=logits)
            torch.mm(logits, weight, out=dhidden_ND[start : start + rows_per_chunk])
            if trainable:
                torch.addmm(dweight_VD, logits.t(), hidden_RD, beta=float(start > 0), out=dweight_VD)

    return run


def kernels_without_a_gpu() -> dict[str, str]:
    """Peers whose kernels do not run on this machine: name -> what they said to eight small rows."""
    hidden, weight, ids = torch.randn(8, 64), torch.randn(128, 64), torch.arange(8)
    probes = {
        "liger fused linear cross entropy": (
            "liger_kernel.transformers",
            lambda module: module.LigerFusedLinearCrossEntropyLoss()(weight, hidden, ids),
        ),
        "cut-cross-entropy": (
            "cut_cross_entropy",
            lambda module: module.linear_cross_entropy(hidden, weight, ids, impl="cce"),
        ),
    }
    refused = {}
    for name, (module, call) in probes.items():
        try:
            call(importlib.import_module(module))
            refused[name] = "runs here, yet this benchmark has no variant of it: it has no policy loss"
        except (ImportError, RuntimeError) as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return refused


def losses(workspace_bytes: int) -> dict[str, Loss]:
    """Every loss that can be made here, by name; says which peers are missing and why."""
    found: dict[str, Loss] = {"grpo_fast": fused_loss(workspace_bytes)}
    peers = {"trl": trl_loss, "liger": partial(liger_loss, False), "liger compiled": partial(liger_loss, True)}
    for name, make in peers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"skipped {name}: {error}")
    for name, reason in kernels_without_a_gpu().items():
        print(f"skipped {name}: {reason}")
    return found | {"plain": plain_loss}
