"""The non-tensor arguments of the losses, checked once."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from grpo_fast.ops.inputs import check_flags

LOSS_TYPES = ("grpo", "luspo", "dr_grpo", "bnpo", "dapo", "cispo")
LEVELS = ("token", "sequence")


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's scalars among them


def _positive(name: str, value) -> None:
    if not (_is_number(value) and 0 < value < math.inf):
        greedy = name == "temperature" and _is_number(value) and value == 0
        hint = "; greedy sampling is scored with temperature=1.0" if greedy else ""
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}{hint}")


def _non_negative(name: str, value) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")


@dataclass(frozen=True)
class LogitTransform:
    """z = softcap * tanh(logit * logit_scale / softcap) / temperature, each step only where it is given."""

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float | None = None

    def __post_init__(self):
        _positive("temperature", self.temperature)
        for name in ("softcap", "logit_scale"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))

    def as_floats(self) -> tuple[float, float, float]:
        """(temperature, softcap or 0, logit_scale or 1), as the backends take them."""
        return float(self.temperature), float(self.softcap or 0.0), float(self.logit_scale or 1.0)


@dataclass(frozen=True)
class PolicyOptions:
    """Everything about the objective that is not a tensor. Names are TRL's."""

    loss_type: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    max_completion_length: int | None = None

    def __post_init__(self):
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type: expected one of {', '.join(LOSS_TYPES)}, got {self.loss_type!r}")
        if self.importance_sampling_level not in LEVELS:
            raise ValueError(
                f'importance_sampling_level: expected "token" or "sequence", got {self.importance_sampling_level!r}'
            )
        check_flags(use_bias_correction_kl=self.use_bias_correction_kl)
        _non_negative("beta", self.beta)
        _non_negative("entropy_coef", self.entropy_coef)
        if self.is_cispo:
            self._check_cispo()
        else:
            self._check_clip()
        length = self.max_completion_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"max_completion_length: expected a positive integer, got {length!r}")

    def _check_clip(self):
        _non_negative("epsilon", self.epsilon)
        if self.epsilon > 1:
            raise ValueError(f"epsilon: expected a number in [0, 1], got {self.epsilon!r}")
        if self.epsilon_high is not None:
            _non_negative("epsilon_high", self.epsilon_high)
        if self.delta is not None and not (self.clip_high < self.delta < math.inf):
            raise ValueError(
                f"delta: expected None or a finite number > 1 + epsilon_high = {self.clip_high:g}, got {self.delta!r}"
            )

    def _check_cispo(self):
        if self.epsilon_high is None or not (1 <= self.epsilon_high < math.inf):
            raise ValueError(
                'epsilon_high: with loss_type="cispo" it is the cap of the ratio itself and must be given, '
                f"a finite number >= 1, got {self.epsilon_high!r}"
            )
        if self.delta is not None:
            raise ValueError(f'delta: loss_type="cispo" has none, expected None, got {self.delta!r}')

    @property
    def is_cispo(self) -> bool:
        return self.loss_type == "cispo"

    @property
    def is_sequence_level(self) -> bool:
        return self.importance_sampling_level == "sequence"

    @property
    def has_dead_tokens(self) -> bool:
        """Whether a token without an advantage has no gradient: KL and an entropy bonus reach every valid one."""
        return self.beta == 0 and self.entropy_coef == 0

    @property
    def clip_low(self) -> float:
        return 1.0 - self.epsilon

    @property
    def clip_high(self) -> float:
        """Upper bound of the ratio; the cap of the ratio for cispo."""
        if self.is_cispo:
            return float(self.epsilon_high)
        return 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def delta_bound(self) -> float:
        return math.inf if self.delta is None else float(self.delta)

    @property
    def log_bounds(self) -> tuple[float, float, float]:
        """Logs of clip_low, clip_high and delta: the clip compares log-ratios, which cannot overflow."""
        low = math.log(self.clip_low) if self.clip_low > 0 else -math.inf
        high = math.log(self.clip_high)
        return low, high, math.inf if self.delta is None else math.log(self.delta)

    def as_fields(self) -> tuple:
        """Every field in order, as the head's op takes them."""
        high = None if self.epsilon_high is None else float(self.epsilon_high)
        delta = None if self.delta is None else float(self.delta)
        return (
            self.loss_type, float(self.epsilon), high, delta, float(self.beta), self.importance_sampling_level,
            self.use_bias_correction_kl, float(self.entropy_coef), self.max_completion_length,
        )  # fmt: skip

    def as_floats(self) -> tuple[float, float, float, float, bool]:
        """(clip_low, clip_high, delta, beta, bias_correction), as the backends take them."""
        return (
            self.clip_low,
            self.clip_high,
            self.delta_bound,
            float(self.beta),
            bool(self.use_bias_correction_kl),
        )
