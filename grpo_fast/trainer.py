"""GRPO: sample a group of completions per prompt, compare them with each other, update (arXiv 2402.03300)."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from grpo_fast import parallel
from grpo_fast.batching import MicroBatches, TokenBudget, Trained
from grpo_fast.checkpoint import prune_checkpoints, save_checkpoint
from grpo_fast.config import GRPOConfig
from grpo_fast.environment import check_environment, default_device
from grpo_fast.evaluate import evaluate
from grpo_fast.experience import SEED_STRIDE, Collector, Experience
from grpo_fast.forward import PolicyForward
from grpo_fast.lora import add_lora
from grpo_fast.metrics import (
    MetricsLog,
    PhaseTimer,
    batch_metrics,
    completion_metrics,
    peak_memory_gib,
    progress_line,
    reset_peak_memory,
    reward_metrics,
)
from grpo_fast.model import load_model_config, load_policy, load_tokenizer
from grpo_fast.modes import enable_gradient_checkpointing
from grpo_fast.prompts import PromptSource
from grpo_fast.reference import make_reference
from grpo_fast.rewards import Rewards, check_columns
from grpo_fast.rollout import RolloutEngine, SamplingOptions, eos_token_ids
from grpo_fast.rollout.engines import make_rollout
from grpo_fast.sampling_correction import sampling_correction
from grpo_fast.update import GRPOUpdate

_logger = logging.getLogger(__name__)
_EVAL_SEED = 500_000  # offset of the seed that evaluations sample with, always the same


class GRPOTrainer:
    """Trains a causal language model with group-relative policy optimization.

    Everything a run depends on is in the constructor's arguments and in `state_dict()`; step k's sampling
    seed and learning rate are functions of k. Under torchrun every process trains on its share of each step's prompts.

    Args:
        model: a causal language model of transformers on its device, or peft's LoRA around one, or a path to load it
            from.
        reward_funcs: callables or names (`grpo_fast.rewards.resolve_reward`), one or several; None:
            args.reward.funcs.
        args: the configuration. `args.data` beyond prompt columns and lengths, and `args.model` beyond
            gradient_checkpointing and the reference's fields, are for whoever loads data and model.
        train_dataset: rows with a prompt (a string or messages); other columns go to the reward functions.
        eval_dataset: held-out rows.
        processing_class: the tokenizer; None loads the one that belongs to the model.
        rollout: the engine that samples; None: the one that args.rollout.engine names.

    Attributes:
        collect, reference, update: the components of a step, replaceable, and so are theirs: collect.rollout,
            collect.rewards, update.forward.
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
        if not isinstance(model, str):
            parallel.check_model(model)
        check_environment(args, None if isinstance(model, str) else model.device)
        rewards = Rewards(args.reward.funcs if reward_funcs is None else reward_funcs, args.reward.weights)
        if isinstance(model, str):
            args = dataclasses.replace(args, model=dataclasses.replace(args.model, path=model))
            config = load_model_config(args)
            processing_class = processing_class or load_tokenizer(args)
        else:
            config = model.config
        self.args = args
        self.tokenizer = processing_class or AutoTokenizer.from_pretrained(config.name_or_path)
        prompts = self._prompt_source(config, train_dataset, shuffle=args.data.shuffle_dataset)
        self.eval_prompts, longest = [], prompts.longest
        if eval_dataset:
            held_out = self._prompt_source(config, eval_dataset, shuffle=False)
            self.eval_prompts = held_out.first(args.eval.num_prompts)
            longest = longest and max(longest, held_out.longest)
        # All that the data can get wrong is known by now, before the weights are read.
        parallel.join(default_device().type if isinstance(model, str) else model.device.type)
        self.model = model = load_policy(args, config, default_device()) if isinstance(model, str) else model
        if args.lora.r:
            self.model = model = add_lora(model, args.lora, args.seed)
        parallel.broadcast(model)
        if args.model.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        forward = PolicyForward(model, temperature=args.rollout.temperature, backend=args.loss.backend)
        rollout = rollout or make_rollout(
            model, self.tokenizer, args, share_prompts=forward.share_prompts, longest_prompt=longest
        )
        self.collect = Collector(prompts, rollout, rewards, self.tokenizer, eos_token_ids(model, self.tokenizer), args)
        self.update = GRPOUpdate(forward, args, sampling_correction(args.rollout, rollout))
        self.reference = make_reference(forward, args)
        notes = [(forward.head, forward.reason), (forward.share_prompts, forward.rows_reason)]
        if self.reference is not None:
            notes.append((True, self.reference.reason))
        for best, reason in notes:
            _logger.log(logging.INFO if best else logging.WARNING, "%s: %s", type(forward.model).__name__, reason)
        self.budget = TokenBudget(args.batch.max_tokens_per_micro_batch)
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

    def train(self) -> dict[str, float]:
        """Run the remaining steps, with evaluations and checkpoints; returns the last metrics of both."""
        args, metrics = self.args, {}
        evaluation = self.evaluate() if self.global_step == 0 else {}
        silent = not args.log.progress or parallel.rank() > 0
        bar = tqdm(total=args.max_steps, initial=self.global_step, disable=silent, desc="GRPO")
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
        if args.log.plot and parallel.rank() == 0:
            self.metrics.plot()
        return metrics | evaluation

    def step(self) -> dict[str, float]:
        """One iteration of the algorithm; returns its metrics, which are also logged."""
        args, timer = self.args, PhaseTimer(self.model.device)
        reset_peak_memory(self.model.device)
        experience = self.collect(self.global_step, timer)
        lengths = experience.lengths(mask_truncated=args.rollout.mask_truncated_completions)
        counted = experience.counted(lengths, dead_groups=args.loss.count_dead_groups)
        all_move = args.loss.beta > 0 or args.loss.entropy_coef > 0
        trained = Trained.of(experience.rollouts, experience.advantages, lengths, all_move=all_move)
        batches = MicroBatches(trained, self.update.forward.micro_batches, self.budget)
        with timer("reference"):
            ref_logps = self.reference(trained, batches) if self.reference else None
        with timer("update"):
            metrics = self.update(trained, batches, ref_logps, (len(counted), sum(counted)), self.global_step)
            self.collect.rollout.sync(self.model)
        self.global_step += 1
        try:
            with timer("save"):
                self._save_if_due()
        finally:  # the step is done, whatever becomes of its checkpoint
            metrics |= self._log(metrics, experience.of_all_processes(), batches, timer)
        return metrics

    def _log(
        self, metrics: dict[str, float], experience: Experience, batches: MicroBatches, timer: PhaseTimer
    ) -> dict[str, float]:
        """All of the step's metrics; written, with some of its completions, if it is time."""
        args, rollouts = self.args, experience.rollouts
        tokens = sum(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts)
        self.num_tokens += tokens
        metrics = metrics | reward_metrics(experience.scores, self.collect.rewards.names, args.rollout.num_generations)
        metrics |= completion_metrics(rollouts) | batch_metrics(batches) | timer.metrics(tokens)
        metrics |= {"num_tokens": float(self.num_tokens), "epoch": self.collect.prompts.epochs}
        metrics["groups_sampled"] = float(experience.groups_sampled)
        metrics["peak_memory_gib"] = peak_memory_gib(self.model.device)
        if self.collect.prompts.dropped:
            metrics["prompts_dropped"] = float(self.collect.prompts.dropped)
        if self.global_step % args.log.logging_steps == 0 and parallel.rank() == 0:
            self.metrics.write(self.global_step, metrics)
            if args.log.log_completions:
                samples = self.collect.records(experience, args.log.num_completions_to_print)
                self.metrics.write_samples(self.global_step, samples)
        return metrics

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
        seed = self.args.seed * SEED_STRIDE + _EVAL_SEED
        metrics = evaluate(self.collect.generate, self.collect.score, self.eval_prompts, sampling, seed)
        if parallel.rank() == 0:
            self.metrics.write(self.global_step, metrics)
        return metrics

    def _save_if_due(self) -> None:
        every, last = self.args.save.save_steps, self.global_step == self.args.max_steps
        if (last or (every and self.global_step % every == 0)) and parallel.rank() == 0:
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
            "prompts": self.collect.prompts.state_dict(),
            "optimizer": self.update.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was taken; the weights are the caller's to restore."""
        self.global_step, self.num_tokens = state["global_step"], state["num_tokens"]
        self.collect.prompts.load_state_dict(state["prompts"])
        self.update.optimizer.load_state_dict(state["optimizer"])
        self.collect.rollout.sync(self.model)
        self.metrics.continues = True
