"""Evaluation on held-out prompts."""

from collections.abc import Callable, Sequence

import torch

from grpo_fast import parallel
from grpo_fast.prompts import EncodedPrompt
from grpo_fast.rewards import Scores
from grpo_fast.rollout import Rollout, SamplingOptions


def evaluate(
    generate: Callable[[Sequence[EncodedPrompt], SamplingOptions, int], list[Rollout]],
    score: Callable[[Sequence[EncodedPrompt], Sequence[Rollout]], Scores],
    prompts: Sequence[EncodedPrompt],
    options: SamplingOptions,
    seed: int,
) -> dict[str, float]:
    """Sample `options.n` completions of every prompt and score them, each process those of its share of the prompts.

    Returns:
        eval/reward: mean weighted reward.
        eval/accuracy: mean of the first reward function.
        eval/pass@k, k = options.n: mean over prompts of the best completion by the first function, which for
            rewards of 0 and 1 is the share of prompts solved at least once.
        eval/mean_length: of completions, in tokens.
        Abstentions are left out of the means.
    """
    prompts = parallel.share(prompts)
    rollouts = generate(prompts, options, seed + parallel.rank())
    scores = score(prompts, rollouts)
    first = torch.cat(parallel.gather(scores.by_function))[:, 0]
    total = torch.cat(parallel.gather(scores.total))
    lengths = [length for part in parallel.gather([len(r.completion_ids) for r in rollouts]) for length in part]
    best = first.nan_to_num(nan=float("-inf")).view(-1, options.n).amax(1)
    return {
        "eval/reward": total.nanmean().item(),
        "eval/accuracy": first.nanmean().item(),
        f"eval/pass@{options.n}": best[best.isfinite()].mean().item(),
        "eval/mean_length": sum(lengths) / len(lengths),
    }
