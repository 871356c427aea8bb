"""The sampler's probabilities against the policy's: how far apart they are, and weights that make up for it.

An engine with other kernels, another dtype or older weights samples from other probabilities than the update computes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast import parallel
from grpo_fast.config import RolloutConfig
from grpo_fast.rollout import RolloutEngine


@dataclass(frozen=True, slots=True)
class SamplingCorrection:
    """Weights w = policy / sampler, of the sampled tokens' probabilities, bounded.

    Unbounded they would make the expectation over the sampler's tokens one over the policy's. They multiply the policy
    term (`sampling_weights` of `grpo_fast.grpo_loss`), as constants.

    Attributes:
        mode: "token_truncate" caps w (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework
            Secretly Brings You Off-Policy RL Training"); "token_mask" leaves out tokens beyond the cap.
        clip_max: the cap.
    """

    mode: str = "token_truncate"
    clip_max: float = 3.0

    def weights(self, differences: Tensor) -> Tensor:
        """w of log w, float [N]; 1 where that is NaN, of a token whose sampler did not say."""
        ratio = differences.exp().nan_to_num(nan=1.0, posinf=torch.inf)
        if self.mode == "token_mask":
            return torch.where(ratio <= self.clip_max, ratio, 0.0)
        return ratio.clamp(max=self.clip_max)


def mismatch_metrics(differences: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
    """How far the sampler is from the policy, over all processes, under TRL's names.

    Args:
        differences: policy's minus sampler's log-prob of this process's tokens, nats, float [N]; NaN is left out.
        weights: what `SamplingCorrection` made of them, or None if nothing was corrected.

    Returns:
        sampling/sampling_logp_difference/{mean,max} of the absolute differences; with weights
        sampling/importance_sampling_ratio/{min,mean,max}, too. 0-d tensors, 0 where there are no tokens.
    """
    known = differences.isfinite()
    size = torch.where(known, differences.abs(), 0.0)
    columns = {"sampling_logp_difference": (size, ("mean", "max"))}
    if weights is not None:
        columns["importance_sampling_ratio"] = (torch.where(known, weights, 0.0), ("min", "mean", "max"))
    count = parallel.reduce(known.sum())
    metrics = {}
    for name, (values, kinds) in columns.items():
        lowest = torch.where(known, values, torch.inf)
        found = {
            "min": parallel.reduce(torch.cat([lowest, lowest.new_full((1,), torch.inf)]).min(), "min"),
            "mean": parallel.reduce(values.sum()) / count.clamp(min=1),
            "max": parallel.reduce(torch.cat([values, values.new_zeros(1)]).max(), "max"),
        }
        for kind in kinds:
            metrics[f"sampling/{name}/{kind}"] = torch.where(count > 0, found[kind], 0.0)
    return metrics


def sampling_correction(options: RolloutConfig, engine: RolloutEngine) -> SamplingCorrection | None:
    """The correction that `options` ask for, or that what `engine` samples with needs; None for none."""
    mode = options.importance_sampling_mode
    if mode is None:
        needed = not getattr(engine, "exact", True) and options.samples_the_policy
        mode = "token_truncate" if needed else "none"
    return None if mode == "none" else SamplingCorrection(mode, options.importance_sampling_clip_max)
