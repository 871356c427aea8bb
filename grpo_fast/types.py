"""What the losses return. Letters: B sequences, T completion tokens, N packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log-probs and entropies of the given tokens, in nats; both differentiable. Shapes as token_ids."""

    logps: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class LossMetrics:
    """Sums, counts and extrema behind the logged metrics, so that micro-batches and ranks combine exactly.

    Add two of them, or `sum([...])` many. Across ranks: all-reduce `sums` by sum, `ratio_min` by min and `ratio_max`
    by max. Nothing here is synchronised with the host; `means()` gives 0-d tensors.

    Attributes:
        sums: [12] float64, in the order of `LossMetrics.FIELDS`.
        ratio_min, ratio_max: 0-d, +inf and -inf where no ratio was counted.
    """

    sums: Tensor
    ratio_min: Tensor
    ratio_max: Tensor

    FIELDS = (
        "tokens",  # valid tokens
        "scored_tokens",  # valid tokens whose log-prob was computed
        "kl_sum",  # plain k3, nats
        "kl_count",
        "entropy_sum",  # nats
        "entropy_count",
        "ratio_sum",
        "ratio_count",  # scored tokens; at sequence level scored sequences
        "low_clipped",
        "high_clipped",
        "cispo_clipped",
        "clip_count",  # valid tokens; at sequence level sequences with a valid token
    )

    @classmethod
    def of(cls, device, ratio_min: Tensor | None = None, ratio_max: Tensor | None = None, **counts) -> LossMetrics:
        """From 0-d tensors by the names in FIELDS; what is not given is 0."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([counts.pop(name, zero).to(torch.float64) for name in cls.FIELDS])
        assert not counts, f"not metrics: {list(counts)}"
        return cls(
            sums,
            torch.full((), torch.inf, device=device) if ratio_min is None else ratio_min,
            torch.full((), -torch.inf, device=device) if ratio_max is None else ratio_max,
        )

    def __getattr__(self, name: str) -> Tensor:
        if name in LossMetrics.FIELDS:
            return self.sums[LossMetrics.FIELDS.index(name)]
        raise AttributeError(name)

    def __add__(self, other: LossMetrics) -> LossMetrics:
        if not isinstance(other, LossMetrics):
            return NotImplemented
        return LossMetrics(
            self.sums + other.sums,
            torch.minimum(self.ratio_min, other.ratio_min),
            torch.maximum(self.ratio_max, other.ratio_max),
        )

    def __radd__(self, other) -> LossMetrics:
        return self if other == 0 else NotImplemented  # sum() starts from 0

    def means(self) -> dict[str, Tensor]:
        """0-d fp32 tensors under TRL's names, always the same keys; 0 where nothing was counted."""
        value = dict(zip(LossMetrics.FIELDS, self.sums.unbind(), strict=True))

        def mean(total, count):
            return torch.where(value[count] > 0, value[total] / value[count].clamp(min=1), 0.0).float()

        any_ratio = value["ratio_count"] > 0
        low, high = mean("low_clipped", "clip_count"), mean("high_clipped", "clip_count")
        return {
            "kl": mean("kl_sum", "kl_count"),
            "entropy": mean("entropy_sum", "entropy_count"),
            "ratio/mean": mean("ratio_sum", "ratio_count"),
            "ratio/min": torch.where(any_ratio, self.ratio_min, 0.0).float(),
            "ratio/max": torch.where(any_ratio, self.ratio_max, 0.0).float(),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "cispo_clip_ratio": mean("cispo_clipped", "clip_count"),
        }


@dataclass(frozen=True)
class LossOutput:
    """Result of grpo_loss, linear_grpo_loss and linear_policy_loss. Only `loss` carries a graph.

    Attributes:
        loss: 0-d, or token_ids' shape with reduction="none"; fp32 (fp64 for fp64 inputs), nats.
        logps: token_ids' shape, log-probs of token_ids under the transformed distribution; 0 where not scored. Keep
            these as `old_logps` of later iterations on the same batch. A head does not score tokens whose advantage is
            0: for other advantages, score_dead_rows=True or linear_token_logprobs makes them complete.
        entropy: token_ids' shape, nats, or None when it was not asked for.
        scored: bool, token_ids' shape: where logps and entropy were computed.
        metrics: see LossMetrics.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    scored: Tensor
    metrics: LossMetrics
