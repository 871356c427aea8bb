"""A step's experience: prompts, the completions sampled for them, and what those were worth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast import parallel
from grpo_fast.advantages import group_advantages
from grpo_fast.config import GRPOConfig
from grpo_fast.metrics import PhaseTimer
from grpo_fast.prompts import EncodedPrompt, PromptSource, decode_completion
from grpo_fast.rewards import Rewards, Scores
from grpo_fast.rollout import Rollout, RolloutEngine, SamplingOptions

SEED_STRIDE = 1_000_003  # step k samples with seed * stride + k: runs with neighbouring seeds share none
_SPREAD = 0x9E3779B97F4A7C15  # keeps the seeds of processes and of resampling rounds apart


@dataclass(frozen=True, slots=True)
class Experience:
    """Group after group: prompt i has the completions i * G to (i + 1) * G - 1.

    Attributes:
        prompts: [P].
        rollouts: [P * G].
        scores: of the rollouts.
        advantages: float32 [P * G].
        groups_sampled: how many groups were sampled to get these.
    """

    prompts: Sequence[EncodedPrompt]
    rollouts: Sequence[Rollout]
    scores: Scores
    advantages: Tensor
    groups_sampled: int

    def lengths(self, *, mask_truncated: bool) -> list[int]:
        """Tokens of every completion that the loss is for."""
        return [0 if mask_truncated and r.truncated else len(r.completion_ids) for r in self.rollouts]

    def of_all_processes(self) -> "Experience":
        """That of every process, one after the other."""
        if parallel.world_size() == 1:
            return self
        parts = parallel.gather(self)
        scores = [part.scores for part in parts]
        return Experience(
            prompts=[prompt for part in parts for prompt in part.prompts],
            rollouts=[rollout for part in parts for rollout in part.rollouts],
            scores=Scores(*(torch.cat([getattr(s, name) for s in scores]) for name in ("total", "by_function"))),
            advantages=torch.cat([part.advantages for part in parts]),
            groups_sampled=sum(part.groups_sampled for part in parts),
        )

    def counted(self, lengths: Sequence[int], *, dead_groups: bool) -> list[int]:
        """The `lengths` that denominators count: all, or those of groups with an advantage that is not 0."""
        if dead_groups or not self.prompts:
            return list(lengths)
        alive = (self.advantages.view(len(self.prompts), -1) != 0).any(1)
        alive = alive.repeat_interleave(len(self.rollouts) // len(self.prompts)).tolist()
        return [length for length, counts in zip(lengths, alive, strict=True) if counts]


class Collector:
    """Draws prompts, samples a group of completions for each, and scores them.

    Args:
        prompts: where they are drawn from, alike in every process.
        rollout: the engine.
        rewards: what completions are worth.
        tokenizer: decodes completions for the reward functions.
        eos_ids: what ends a completion.
        args: sections rollout, batch, loss and data are read.
    """

    def __init__(
        self, prompts: PromptSource, rollout: RolloutEngine, rewards: Rewards, tokenizer, eos_ids, args: GRPOConfig
    ) -> None:
        self.prompts, self.rollout, self.rewards = prompts, rollout, rewards
        self.tokenizer, self.eos_ids, self.args = tokenizer, eos_ids, args

    def __call__(self, step: int, timer: PhaseTimer) -> Experience:
        """This process's part of a step's experience; advantages compare it with that of the others."""
        args = self.args
        size = args.rollout.num_generations
        prompts = parallel.share(self.prompts.draw(args.batch.prompts_per_step))
        rollouts, scores = self._sample(prompts, self._seed(step, 0), timer)
        sampled = len(prompts)
        for number in range(1, args.rollout.max_resampling_rounds + 1):
            dead = _dead_groups(scores.total, size)
            counts = parallel.gather(len(dead))
            if not sum(counts):
                break
            fresh = self.prompts.draw(sum(counts))
            first = sum(counts[: parallel.rank()])
            fresh = fresh[first : first + len(dead)]
            more = self._sample(fresh, self._seed(step, number), timer)
            sampled += len(fresh)
            prompts, rollouts, scores = _replace(dead, (prompts, rollouts, scores), (fresh, *more), size)
        totals = parallel.gather(scores.total)
        advantages = group_advantages(
            torch.cat(totals), size, scale=args.loss.scale_rewards, std=args.loss.advantage_std
        ).split([len(total) for total in totals])[parallel.rank()]
        return Experience(prompts, rollouts, scores, advantages, sampled)

    def _seed(self, step: int, number: int) -> int:
        seed = self.args.seed * SEED_STRIDE + step
        return (seed + (parallel.rank() * 1000 + number) * _SPREAD) % 2**63

    def _sample(self, prompts: Sequence[EncodedPrompt], seed: int, timer: PhaseTimer) -> tuple[list[Rollout], Scores]:
        options = self.args.rollout
        sampling = SamplingOptions(
            n=options.num_generations,
            max_tokens=options.max_completion_length,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            max_rows=options.max_rows,
            logprobs=options.samples_the_policy,
        )
        with timer("rollout"):
            rollouts = self.generate(prompts, sampling, seed)
        with timer("reward"):
            return rollouts, self.score(prompts, rollouts)

    def generate(self, prompts: Sequence[EncodedPrompt], sampling: SamplingOptions, seed: int) -> list[Rollout]:
        """`sampling.n` completions for every prompt, in order; equal prompts are groups of their own."""
        return self.rollout.generate([prompt.ids for prompt in prompts], sampling, seed)

    def score(self, prompts: Sequence[EncodedPrompt], rollouts: Sequence[Rollout]) -> Scores:
        """Rewards of the rollouts of `prompts`, equally many for each."""
        if not prompts:
            return Scores(torch.empty(0), torch.empty(0, len(self.rewards.names)))
        column = self.args.data.prompt_column
        rows = [prompt.row for prompt in prompts for _ in range(len(rollouts) // len(prompts))]
        names = {name: None for row in rows for name in row if name != column}
        completions = [
            self.text(rollout)
            if isinstance(row[column], str)
            else [{"role": "assistant", "content": self.text(rollout)}]
            for row, rollout in zip(rows, rollouts, strict=True)
        ]
        ids = [list(rollout.completion_ids) for rollout in rollouts]
        columns = {name: [row.get(name) for row in rows] for name in names}
        return self.rewards.score([row[column] for row in rows], completions, ids, columns)

    def text(self, rollout: Rollout) -> str:
        """A completion as the reward functions see it."""
        return decode_completion(self.tokenizer, rollout.completion_ids, self.eos_ids)

    def records(self, experience: Experience, count: int) -> list[dict]:
        """At most `count` of the completions, of as many prompts as possible, as lines of samples.jsonl."""
        rollouts, prompts = experience.rollouts, experience.prompts
        count, total = min(count, len(rollouts)), len(rollouts)
        return [
            {
                "prompt": prompts[index * len(prompts) // total].row[self.args.data.prompt_column],
                "completion": self.text(rollouts[index]),
                "rewards": self.rewards.by_name(experience.scores.by_function[index]),
                "advantage": experience.advantages[index].item(),
                "truncated": rollouts[index].truncated,
            }
            for index in (number * total // count for number in range(count))
        ]


def _dead_groups(rewards: Tensor, size: int) -> list[int]:
    """Indices of groups whose rewards all give the advantage 0."""
    if not len(rewards):
        return []
    return (group_advantages(rewards, size, scale="none").view(-1, size) == 0).all(1).nonzero()[:, 0].tolist()


def _replace(dead: list[int], old: tuple, new: tuple, size: int) -> tuple:
    """(prompts, rollouts, scores) with dead groups of `old` replaced by those of `new` that are not."""
    prompts, rollouts, scores = list(old[0]), list(old[1]), old[2]
    total, by_function = scores.total.clone(), scores.by_function.clone()
    alive = sorted(set(range(len(new[0]))) - set(_dead_groups(new[2].total, size)))
    for group, fresh in zip(dead, alive, strict=False):
        to, source = slice(group * size, (group + 1) * size), slice(fresh * size, (fresh + 1) * size)
        prompts[group], rollouts[to] = new[0][fresh], new[1][source]
        total[to], by_function[to] = new[2].total[source], new[2].by_function[source]
    return prompts, rollouts, Scores(total, by_function)
