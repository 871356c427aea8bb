"""What bench_train_step compares: the phases of grpo_fast's and TRL's steps, and what each puts through the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fast import GRPOTrainer
from grpo_fast.batching import MicroBatches, Trained
from grpo_fast.config import build_config
from grpo_fast.reference import Reference
from grpo_fast.rollout import Rollout, SamplingOptions

GROUPS = 2  # the fewest of which half can be dead
RATE = 1e-12  # moves no float32 weight


@dataclass(frozen=True)
class Cell:
    """The shape of a step: GROUPS prompts of `prompt` tokens, `group` completions each of `completion` tokens."""

    name: str
    group: int
    prompt: int
    completion: int
    layers: int | None = None  # of the model, the first ones; None: all

    @property
    def rows(self) -> int:
        return GROUPS * self.group


@dataclass(frozen=True)
class Work:
    """What a phase of one side puts through the model.

    Attributes:
        trunk_tokens: through the layers, in one direction.
        head_rows: through the head.
        pairs: of a query and a key, in one layer.
        passes: forward 1, with the backward 3: of the layers, the head's are `head_gemms`.
        head_gemms: matrix products of the head's size over head_rows.
    """

    trunk_tokens: int
    head_rows: int
    pairs: int
    passes: int
    head_gemms: int

    def products(self, model: PreTrainedModel) -> int:
        """FLOPs of matrix products."""
        linear = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, nn.Linear))
        head = model.get_output_embeddings().weight.numel()
        return 2 * (self.passes * self.trunk_tokens * linear + self.head_gemms * self.head_rows * head)

    def flops(self, model: PreTrainedModel) -> int:
        """With attention: a product for the scores and one for the values."""
        config = model.config
        width = config.num_attention_heads * getattr(
            config, "head_dim", config.hidden_size // config.num_attention_heads
        )
        return self.products(model) + self.passes * 4 * width * config.num_hidden_layers * self.pairs


def causal_pairs(tokens: int, before: int = 0) -> int:
    """Of so many tokens with themselves, those before each of them, and `before` others."""
    return tokens * (tokens + 1) // 2 + tokens * before


def our_work(cell: Cell, phase: str, dead: float) -> Work:
    groups = GROUPS if phase == "rollout" else GROUPS - round(dead * GROUPS)
    rows, read = groups * cell.group, cell.completion - 1  # the last token predicts nothing
    tokens = groups * cell.prompt + rows * read
    pairs = groups * causal_pairs(cell.prompt) + rows * causal_pairs(read, cell.prompt)
    if phase == "rollout":  # the first token of all completions comes from one row
        return Work(tokens, groups + rows * read, pairs, 1, 1)
    passes = 3 if phase == "update" else 1
    return Work(tokens, rows * cell.completion, pairs, passes, passes)


def trl_work(cell: Cell, phase: str) -> Work:
    length = cell.prompt + cell.completion
    if phase == "rollout":
        return Work(cell.rows * (length - 1), cell.rows * cell.completion, cell.rows * causal_pairs(length - 1), 1, 1)
    is_update = phase == "update"
    passes, gemms = (3, 4) if is_update else (1, 1)
    return Work(cell.rows * length, cell.rows * (length - 1), cell.rows * causal_pairs(length), passes, gemms)


@dataclass(frozen=True)
class Batch:
    """One completion a row: int64 [rows, prompt] and [rows, completion], and float32 advantages [rows]."""

    prompts: Tensor
    completions: Tensor
    advantages: Tensor


def make_batch(cell: Cell, vocab: int, dead: float) -> Batch:
    """Random tokens. The first groups are the dead ones."""
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, vocab, (GROUPS, cell.prompt), generator=rng).repeat_interleave(cell.group, 0)
    completions = torch.randint(4, vocab, (cell.rows, cell.completion), generator=rng)
    advantages = torch.randn(GROUPS, cell.group, generator=rng)
    advantages[: round(dead * GROUPS)] = 0
    return Batch(prompts, completions, advantages.flatten())


def no_reward(completions, **_) -> list[float]:
    """Advantages are given, so nothing is scored."""
    return [0.0] * len(completions)


class Ours:
    """The phases of `grpo_fast.GRPOTrainer`'s step."""

    def __init__(self, model: PreTrainedModel, tokenizer, cell: Cell, folder: str) -> None:
        settings = {
            "rollout": {"num_generations": cell.group, "max_completion_length": cell.completion},
            "batch": {"prompts_per_step": GROUPS},
            "loss": {"beta": 0.0},
            "optim": {"learning_rate": RATE, "weight_decay": 0.0},
            "log": {"output_dir": folder, "progress": False},
        }
        self.trainer = GRPOTrainer(
            model, no_reward, build_config(settings), [{"prompt": "1"}] * GROUPS, None, tokenizer
        )
        self.trainer.reference = Reference(self.trainer.update.forward, nullcontext, "the policy itself")
        self.trainer.collect.rollout.eos_ids = ()
        options = self.trainer.args.rollout
        self.sampling = SamplingOptions(
            n=cell.group, max_tokens=cell.completion, logprobs=options.samples_the_policy, max_rows=options.max_rows
        )

    def rollout(self, batch: Batch) -> list[list[int]]:
        prompts = batch.prompts[:: self.sampling.n].tolist()
        rollouts = self.trainer.collect.rollout.generate(prompts, self.sampling, seed=0)
        return [list(rollout.completion_ids) for rollout in rollouts]

    def _micro_batches(self, batch: Batch) -> tuple[Trained, MicroBatches]:
        rollouts = [
            Rollout(prompt_ids=tuple(prompt), completion_ids=tuple(completion), truncated=True)
            for prompt, completion in zip(batch.prompts.tolist(), batch.completions.tolist(), strict=True)
        ]
        lengths = [len(rollout.completion_ids) for rollout in rollouts]
        trained = Trained.of(rollouts, batch.advantages, lengths, all_move=False)
        return trained, MicroBatches(trained, self.trainer.update.forward.micro_batches, self.trainer.budget)

    def reference(self, batch: Batch) -> Tensor:
        return self.trainer.reference(*self._micro_batches(batch))

    def update(self, batch: Batch) -> tuple[float, float]:
        """Loss, and norm of all gradients."""
        trained, batches = self._micro_batches(batch)
        metrics = self.trainer.update(trained, batches, None, (len(batch.prompts), batch.completions.numel()), 0)
        return metrics["loss"], metrics["grad_norm"]


class TRL:
    """The phases of `trl.GRPOTrainer`'s step."""

    def __init__(self, model: PreTrainedModel, tokenizer, cell: Cell, folder: str) -> None:
        import trl
        from datasets import Dataset

        config = trl.GRPOConfig(
            output_dir=folder, report_to="none", disable_tqdm=True, save_strategy="no", use_cpu=True, bf16=False,
            gradient_checkpointing=False, beta=0.0, loss_type="grpo", learning_rate=RATE, weight_decay=0.0,
            num_generations=cell.group, per_device_train_batch_size=cell.rows, gradient_accumulation_steps=1,
            max_completion_length=cell.completion,
        )  # fmt: skip
        prompts = Dataset.from_dict({"prompt": ["1"] * GROUPS})
        self.trainer = trl.GRPOTrainer(model, no_reward, config, prompts, processing_class=tokenizer)
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.generation_config.eos_token_id = None
        model.generation_config.eos_token_id = None
        self.trainer.eos_token_ids = []
        self.optimizer = self.trainer.create_optimizer()
        self.group = cell.group
        model.train()

    def rollout(self, batch: Batch) -> list[list[int]]:
        return self.trainer._generate_single_turn(batch.prompts.tolist(), None, {}, self.group)[0]

    def reference(self, batch: Batch) -> Tensor:
        ids = torch.cat([batch.prompts, batch.completions], 1)
        with torch.no_grad():
            logps, _, _ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model, ids, torch.ones_like(ids), batch.completions.shape[1]
            )
        return logps

    def update(self, batch: Batch) -> tuple[float, float]:
        """Loss, and norm of all gradients."""
        trainer = self.trainer
        inputs = {
            "prompt_ids": batch.prompts,
            "prompt_mask": torch.ones_like(batch.prompts),
            "completion_ids": batch.completions,
            "completion_mask": torch.ones_like(batch.completions),
            "advantages": batch.advantages,
            "num_items_in_batch": torch.tensor(batch.completions.numel()),
        }
        loss = trainer.compute_loss(trainer.model, inputs)
        trainer.accelerator.backward(loss)
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


SIDES = {"grpo_fast": Ours, "trl": TRL}
