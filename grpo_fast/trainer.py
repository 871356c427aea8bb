"""GRPO: sample a group of completions per prompt, compare them with each other, update (arXiv 2402.03300)."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from grpo_fast.advantages import group_advantages
from grpo_fast.batching import MicroBatch, make_micro_batches
from grpo_fast.checkpoint import prune_checkpoints, save_checkpoint
from grpo_fast.config import GRPOConfig
from grpo_fast.environment import check_environment, default_device
from grpo_fast.evaluate import evaluate
from grpo_fast.forward import PaddedForward
from grpo_fast.metrics import (
    MetricsLog,
    PhaseTimer,
    batch_metrics,
    completion_metrics,
    peak_memory_gib,
    progress_line,
    reset_peak_memory,
    reward_metrics,
    sample_records,
)
from grpo_fast.model import load_model_config, load_policy, load_tokenizer
from grpo_fast.modes import enable_gradient_checkpointing
from grpo_fast.prompts import EncodedPrompt, PromptSource, decode_completion
from grpo_fast.reference_model import frozen_copy, reference_dtype
from grpo_fast.rewards import Rewards, Scores, check_columns
from grpo_fast.rollout import Rollout, RolloutEngine, SamplingOptions
from grpo_fast.rollout.transformers import TransformersRollout, eos_token_ids
from grpo_fast.update import GRPOUpdate

_logger = logging.getLogger(__name__)
_SEED_STRIDE = 1_000_003  # step k samples with seed * stride + k: runs with neighbouring seeds share none
_EVAL_SEED = 500_000  # offset of the seed that evaluations sample with, always the same


class GRPOTrainer:
    """Trains a causal language model with group-relative policy optimization.

    Everything a run depends on is in the constructor's arguments and in `state_dict()`; step k's sampling
    seed and learning rate are functions of k.

    Args:
        model: a causal language model of transformers on its device, or a path to load it from.
        reward_funcs: callables or names (`grpo_fast.rewards.resolve_reward`), one or several; None:
            args.reward.funcs.
        args: the configuration. `args.data` beyond prompt columns and lengths, and `args.model` beyond
            gradient_checkpointing and reference_dtype, are for whoever loads data and model.
        train_dataset: rows with a prompt (a string or messages); other columns go to the reward functions.
        eval_dataset: held-out rows.
        processing_class: the tokenizer; None loads the one that belongs to the model.
        rollout: the engine that samples; None is `TransformersRollout`.

    Attributes:
        prompts, rollout, rewards, reference, update: the components of a step, replaceable.
        global_step: steps done.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        reward_funcs: Sequence[str | Callable] | str | Callable | None,
        args: GRPOConfig,
        train_dataset: Sequence[dict],
        eval_dataset: Sequence[dict] | None = None,
        processing_class=None,
        rollout: RolloutEngine | None = None,
    ) -> None:
        check_environment(args, None if isinstance(model, str) else model.device)
        self.rewards = Rewards(args.reward.funcs if reward_funcs is None else reward_funcs, args.reward.weights)
        if isinstance(model, str):
            args = dataclasses.replace(args, model=dataclasses.replace(args.model, path=model))
            config = load_model_config(args)
            processing_class = processing_class or load_tokenizer(args)
        else:
            config = model.config
        self.args = args
        self.tokenizer = processing_class or AutoTokenizer.from_pretrained(config.name_or_path)
        self.prompts = self._prompt_source(config, train_dataset, shuffle=args.data.shuffle_dataset)
        self.eval_prompts = []
        if eval_dataset:
            self.eval_prompts = self._prompt_source(config, eval_dataset, shuffle=False).first(args.eval.num_prompts)
        # All that the data can get wrong is known by now, before the weights are read.
        self.model = model = load_policy(args, config, default_device()) if isinstance(model, str) else model
        if args.model.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self.eos_ids = eos_token_ids(model, self.tokenizer)
        self.rollout = rollout or TransformersRollout(model, self.tokenizer)
        self.update = GRPOUpdate(self._make_forward(model), args)
        level = logging.INFO if self.update.forward.head else logging.WARNING
        _logger.log(level, "%s: %s", type(model).__name__, self.update.forward.reason)
        self.reference = None
        if args.loss.beta > 0:
            dtype = reference_dtype(args.model.reference_dtype, model.dtype, model.device)
            forward = self.update.forward
            self.reference = self._make_forward(frozen_copy(model, dtype), head=(forward.head, forward.reason))
        self.metrics = MetricsLog(args.log)
        self.global_step = 0
        self.num_tokens = 0

    def _prompt_source(self, config: PreTrainedConfig, rows: Sequence[dict], *, shuffle: bool) -> PromptSource:
        data = self.args.data
        check_columns(rows, data.prompt_column)
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return PromptSource(
            rows,
            self.tokenizer,
            prompt_column=data.prompt_column,
            max_prompt_length=data.max_prompt_length,
            room=positions and positions - self.args.rollout.max_completion_length,
            overlong=data.overlong_prompt,
            shuffle=shuffle,
            seed=self.args.seed,
            chat_template_kwargs=data.chat_template_kwargs,
        )

    def _make_forward(self, model: PreTrainedModel, **head) -> PaddedForward:
        return PaddedForward(model, temperature=self.args.rollout.temperature, backend=self.args.loss.backend, **head)

    def train(self) -> dict[str, float]:
        """Run the remaining steps, with evaluations and checkpoints; returns the last metrics of both."""
        args, metrics = self.args, {}
        evaluation = self.evaluate() if self.global_step == 0 else {}
        bar = tqdm(total=args.max_steps, initial=self.global_step, disable=not args.log.progress, desc="GRPO")
        try:
            while self.global_step < args.max_steps:
                metrics = self.step()
                bar.update()
                bar.set_postfix_str(progress_line(metrics))
                last = self.global_step == args.max_steps
                if last or (args.eval.eval_steps and self.global_step % args.eval.eval_steps == 0):
                    evaluation = self.evaluate()
        finally:
            bar.close()
            self.metrics.close()
        if args.log.plot:
            self.metrics.plot()
        return metrics | evaluation

    def step(self) -> dict[str, float]:
        """One iteration of the algorithm; returns its metrics, which are also logged."""
        args, timer = self.args, PhaseTimer(self.model.device)
        reset_peak_memory(self.model.device)
        prompts = self.prompts.draw(args.batch.prompts_per_step)
        with timer("rollout"):
            rollouts = self.generate(prompts)
        with timer("reward"):
            scores = self.score(prompts, rollouts)
        advantages = group_advantages(
            scores.total, args.rollout.num_generations, scale=args.loss.scale_rewards, std=args.loss.advantage_std
        )
        masks = args.rollout.mask_truncated_completions
        lengths = [0 if masks and rollout.truncated else len(rollout.completion_ids) for rollout in rollouts]
        batches = self.make_batches(rollouts, advantages, lengths)
        with timer("reference"):
            ref_logps = self.reference_logps(batches)
        with timer("update"):
            metrics = self.update(batches, ref_logps, lengths, self.global_step)
            self.rollout.sync(self.model)
        self.global_step += 1
        tokens = sum(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts)
        self.num_tokens += tokens
        try:
            with timer("save"):
                self._save_if_due()
        finally:  # the step is done, whatever becomes of its checkpoint
            metrics |= reward_metrics(scores, self.rewards.names, args.rollout.num_generations)
            metrics |= completion_metrics(rollouts) | batch_metrics(batches) | timer.metrics(tokens)
            self._log(metrics, prompts, rollouts, scores, advantages)
        return metrics

    def generate(self, prompts: Sequence[EncodedPrompt]) -> list[Rollout]:
        """A group of completions for every prompt, in order; equal prompts are groups of their own."""
        options = self.args.rollout
        sampling = SamplingOptions(
            n=options.num_generations,
            max_tokens=options.max_completion_length,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            max_rows=options.max_rows,
        )
        seed = self.args.seed * _SEED_STRIDE + self.global_step
        return self.rollout.generate([prompt.ids for prompt in prompts], sampling, seed)

    def score(self, prompts: Sequence[EncodedPrompt], rollouts: Sequence[Rollout]) -> Scores:
        """Rewards of the rollouts of `prompts`, equally many for each."""
        column = self.args.data.prompt_column
        rows = [prompt.row for prompt in prompts for _ in range(len(rollouts) // len(prompts))]
        names = {name: None for row in rows for name in row if name != column}
        texts = [self._text(rollout) for rollout in rollouts]
        completions = [
            text if isinstance(row[column], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        ids = [list(rollout.completion_ids) for rollout in rollouts]
        columns = {name: [row.get(name) for row in rows] for name in names}
        return self.rewards.score([row[column] for row in rows], completions, ids, columns)

    def _text(self, rollout: Rollout) -> str:
        return decode_completion(self.tokenizer, rollout.completion_ids, self.eos_ids)

    def make_batches(self, rollouts: Sequence[Rollout], advantages: Tensor, lengths: Sequence[int]) -> list[MicroBatch]:
        """The step's micro-batches, on the model's device."""
        return make_micro_batches(
            rollouts,
            advantages,
            lengths,
            max_tokens=self.args.batch.max_tokens_per_micro_batch,
            pad_id=self.tokenizer.pad_token_id or 0,
            device=self.model.device,
        )

    def reference_logps(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """The reference's log-probs of every micro-batch's tokens, or None for each without a reference."""
        if self.reference is None:
            return [None] * len(batches)
        return [self.reference.logprobs(batch) for batch in batches]

    def _log(
        self,
        metrics: dict[str, float],
        prompts: Sequence[EncodedPrompt],
        rollouts: Sequence[Rollout],
        scores: Scores,
        advantages: Tensor,
    ) -> None:
        """Add the run's counters to the step's metrics; write them, and some completions, if it is time."""
        metrics["num_tokens"] = float(self.num_tokens)
        metrics["epoch"] = self.prompts.epochs
        metrics["peak_memory_gib"] = peak_memory_gib(self.model.device)
        if self.prompts.dropped:
            metrics["prompts_dropped"] = float(self.prompts.dropped)
        if self.global_step % self.args.log.logging_steps:
            return
        self.metrics.write(self.global_step, metrics)
        if not self.args.log.log_completions:
            return
        samples = sample_records(
            [prompt.row[self.args.data.prompt_column] for prompt in prompts],
            [self._text(rollout) for rollout in rollouts],
            [self.rewards.by_name(row) for row in scores.by_function],
            advantages,
            rollouts,
            self.args.log.num_completions_to_print,
        )
        self.metrics.write_samples(self.global_step, samples)

    def evaluate(self) -> dict[str, float]:
        """Sample and score the held-out prompts, and log the result; {} without any."""
        if not self.eval_prompts:
            return {}
        options = self.args.eval
        sampling = SamplingOptions(
            n=options.num_generations_eval,
            max_tokens=self.args.rollout.max_completion_length,
            temperature=options.temperature,
            max_rows=self.args.rollout.max_rows,
        )
        seed = self.args.seed * _SEED_STRIDE + _EVAL_SEED
        metrics = evaluate(self.rollout, self.score, self.eval_prompts, sampling, seed)
        self.metrics.write(self.global_step, metrics)
        return metrics

    def _save_if_due(self) -> None:
        every, last = self.args.save.save_steps, self.global_step == self.args.max_steps
        if last or (every and self.global_step % every == 0):
            self.save()

    def save(self) -> Path:
        """Write the model and tokenizer as a checkpoint that `from_pretrained` loads."""
        folder = Path(self.args.log.output_dir) / f"checkpoint-{self.global_step}"
        save_checkpoint(folder, self.model, self.tokenizer)
        prune_checkpoints(folder.parent, self.args.save.save_total_limit)
        return folder

    def state_dict(self) -> dict:
        """What, besides the weights and the constructor's arguments, decides how the run goes on."""
        return {
            "global_step": self.global_step,
            "num_tokens": self.num_tokens,
            "prompts": self.prompts.state_dict(),
            "optimizer": self.update.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was taken; the weights are the caller's to restore."""
        self.global_step, self.num_tokens = state["global_step"], state["num_tokens"]
        self.prompts.load_state_dict(state["prompts"])
        self.update.optimizer.load_state_dict(state["optimizer"])
        self.rollout.sync(self.model)
        self.metrics.continues = True
