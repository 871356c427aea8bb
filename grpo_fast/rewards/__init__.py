"""Reward functions: callables `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.

`prompts` and `completions` are lists of strings, or of message lists for conversational prompts;
`completion_ids` the sampled token ids; every other data column arrives as a list of the same length. None (or
NaN) abstains.
"""

import ast
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.rewards.classifier import ClassifierReward
from grpo_fast.rewards.text import ExactMatch, LengthPenalty, NumericMatch, RegexFormat

SHIPPED = {
    "exact_match": ExactMatch,
    "numeric_match": NumericMatch,
    "regex_format": RegexFormat,
    "length_penalty": LengthPenalty,
}
RESERVED = ("prompts", "completions", "completion_ids")  # argument names no data column may have

_logger = logging.getLogger(__name__)


def resolve_reward(spec: str | Callable) -> Callable:
    """The reward function a recipe names.

    Args:
        spec: a callable (returned as it is); a shipped name, with options if any, as in
            "length_penalty(max_length=256, buffer=64)"; an import path "pkg.mod:fn" or "pkg.mod.fn", where a
            class takes options likewise; or "hf:PATH", a sequence classifier.

    Raises:
        ValueError: naming the spec and what was expected.
    """
    if callable(spec):
        return spec
    if spec.startswith("hf:"):
        return ClassifierReward(spec.removeprefix("hf:"))
    name, options = _parse(spec)
    target = SHIPPED[name] if name in SHIPPED else _import(name)
    if inspect.isclass(target):
        try:
            return target(**(options or {}))
        except TypeError as error:
            raise ValueError(
                f"reward {spec!r}: expected {name}{inspect.signature(target)}, got {options or {}}"
            ) from error
    if options is not None:
        raise ValueError(f"reward {spec!r}: options need a class, got {target!r}")
    if not callable(target):
        raise ValueError(f"reward {spec!r}: expected a callable, got {type(target).__name__}")
    return target


def _parse(spec: str) -> tuple[str, dict | None]:
    name, opening, rest = spec.partition("(")
    if not opening:
        return name, None
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if call.args:
            raise ValueError("positional")
        return name, {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ValueError(f"reward {spec!r}: expected NAME(option=value, ...) with plain values") from error


def _import(path: str) -> Callable:
    module, _, attribute = path.replace(":", ".").rpartition(".")
    if not module:
        raise ValueError(f"reward {path!r}: expected one of {sorted(SHIPPED)}, an import path pkg.mod:fn, or hf:PATH")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward {path!r}: cannot be imported: {error}") from error


def check_columns(rows: Sequence[dict], prompt_column: str) -> None:
    """Refuses data columns that a reward function could not tell from its arguments.

    Raises:
        ValueError: naming them.
    """
    names = dict.fromkeys(name for row in rows for name in row if name != prompt_column)
    if taken := [name for name in names if name in RESERVED]:
        raise ValueError(f"data: columns {taken} are named like reward functions' arguments. Rename them")


def reward_name(function: Callable) -> str:
    """The name a function has in metrics and errors."""
    for name, shipped in SHIPPED.items():
        if isinstance(function, shipped):
            return name
    return getattr(function, "__name__", None) or type(function).__name__


@dataclass(frozen=True)
class Scores:
    """What a batch of completions earned.

    Attributes:
        total: float32 [rows], weighted sum of the functions that answered; NaN where all abstained.
        by_function: float32 [rows, functions], unweighted; NaN where a function abstained.
    """

    total: Tensor
    by_function: Tensor


class Rewards:
    """Several reward functions with weights, called in order; picklable if the functions are.

    Args:
        functions: callables or specs for `resolve_reward`; at least one.
        weights: one per function, None for 1 each.
    """

    def __init__(
        self, functions: Sequence[str | Callable] | str | Callable, weights: Sequence[float] | None = None
    ) -> None:
        if isinstance(functions, str) or callable(functions):
            functions = [functions]
        self.functions = [resolve_reward(function) for function in functions]
        if not self.functions:
            raise ValueError("reward.funcs: expected at least one reward function, got none. Set e.g. [exact_match]")
        self.weights = [1.0] * len(self.functions) if weights is None else list(map(float, weights))
        if len(self.weights) != len(self.functions):
            raise ValueError(f"reward.weights: expected {len(self.functions)} numbers, got {len(self.weights)}")
        names = [reward_name(function) for function in self.functions]
        self.names = [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
        self._warned: set[str] = set()

    def score(self, prompts: list, completions: list, completion_ids: list, columns: dict[str, list]) -> Scores:
        """Call every function on all rows.

        Raises:
            ValueError: a function returned a wrong number of rewards, or what is no finite number or None.
            RuntimeError: a function raised; the original exception is its cause.
        """
        arguments = dict(zip(RESERVED, (prompts, completions, completion_ids), strict=True)) | columns
        answers = [
            _call(name, function, arguments, len(completions))
            for name, function in zip(self.names, self.functions, strict=True)
        ]
        by_function = torch.tensor(answers, dtype=torch.float32).reshape(len(answers), len(completions)).T
        abstained = by_function.isnan()
        total = (by_function.nan_to_num() * torch.tensor(self.weights)).sum(1)
        nobody = abstained.all(1)
        self._warn_abstained(abstained, nobody)
        return Scores(total.masked_fill(nobody, math.nan), by_function)

    def by_name(self, values: Tensor) -> dict[str, float | None]:
        """A row of `Scores.by_function` by the functions' names, None for an abstention."""
        return {n: None if math.isnan(v) else v for n, v in zip(self.names, values.tolist(), strict=True)}

    def _warn_abstained(self, abstained: Tensor, nobody: Tensor) -> None:
        for name, rows in zip(self.names, abstained.sum(0).tolist(), strict=True):
            if rows and name not in self._warned:
                self._warned.add(name)
                _logger.warning(
                    "reward %s abstained (None or NaN) for %d of %d completions", name, rows, len(abstained)
                )
        if nobody.any() and "" not in self._warned:
            self._warned.add("")
            rows = nobody.nonzero()[:, 0].tolist()
            _logger.warning("no reward function answered for rows %s: left out of their groups, advantage 0", rows)


def _call(name: str, function: Callable, arguments: dict, rows: int) -> list[float]:
    accepted = _accepted(name, function, arguments)
    try:
        result = function(**accepted)
    except Exception as error:
        raise RuntimeError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    if isinstance(result, Tensor) or type(result).__module__ == "numpy":
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise ValueError(
            f"reward function {name}: expected a list of {rows} rewards, got {type(result).__name__} {result!r:.80}"
        )
    if len(result) != rows:
        raise ValueError(f"reward function {name}: expected {rows} rewards, one per completion, got {len(result)}")
    return [_number(name, row, value) for row, value in enumerate(result)]


def _number(name: str, row: int, value) -> float:
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes, list, tuple)):
        raise ValueError(
            f"reward function {name}: row {row}: expected a number or None, got {type(value).__name__} {value!r:.80}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward function {name}: row {row}: expected a number or None, got {value!r:.80}") from error
    if math.isinf(number):
        raise ValueError(f"reward function {name}: row {row}: expected a finite number or None, got {number}")
    return number


def _accepted(name: str, function: Callable, arguments: dict) -> dict:
    """The arguments that the signature has room for: all of them with **columns, else those it names."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = arguments
    else:
        accepted = {key: value for key, value in arguments.items() if key in {p.name for p in parameters}}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [parameter for parameter in required if parameter not in accepted]
    if missing:
        columns = sorted(set(arguments) - set(RESERVED))
        raise ValueError(f"reward function {name}: expected data columns {missing}, got {columns}")
    return accepted
