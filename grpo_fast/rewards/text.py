"""Rewards that read the completion: exact match, numeric match, format, length.

Each is a small frozen dataclass, so that it is configurable, picklable and can be named in a recipe.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

# a sign counts unless it follows a word or a bracket: 10-7 ends with 7; thousands may be grouped by commas
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?")


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion, a string or a list of messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def last_number(text: str) -> Decimal | None:
    """The last number in the text ("1,234.50", "-3", "2e5"), None without one that arithmetic can hold."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except ArithmeticError:  # an absurd exponent
        return None


@dataclass(frozen=True)
class ExactMatch:
    """1.0 where the completion without surrounding white space equals the column's value, else 0.0."""

    column: str = "answer"

    def __call__(self, prompts, completions, completion_ids, **columns) -> list[float]:
        answers = _column(columns, self.column, "exact_match")
        return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answers, strict=True)]


@dataclass(frozen=True)
class NumericMatch:
    """1.0 where the completion's last number equals the column's last number within `tolerance`, else 0.0.

    Raises ValueError where the column holds no number.
    """

    column: str = "answer"
    tolerance: float = 0.0

    def __call__(self, prompts, completions, completion_ids, **columns) -> list[float]:
        return [
            self._match(last_number(text_of(completion)), answer)
            for completion, answer in zip(completions, _column(columns, self.column, "numeric_match"), strict=True)
        ]

    def _match(self, got: Decimal | None, answer) -> float:
        expected = last_number(str(answer))
        if expected is None:
            raise ValueError(f"numeric_match: column {self.column!r}: expected a number, got {answer!r}")
        try:
            return float(got is not None and abs(got - expected) <= Decimal(str(self.tolerance)))
        except ArithmeticError:  # an absurd exponent overflows the difference
            return 0.0


@dataclass(frozen=True)
class RegexFormat:
    """1.0 where the completion without surrounding white space matches `pattern` as a whole, else 0.0.

    Dots match line ends.
    """

    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>"

    def __call__(self, prompts, completions, completion_ids, **columns) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length and beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13). Lengths are sampled token ids.
    """

    max_length: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_length:
            raise ValueError(
                f"length_penalty: expected 0 < buffer <= max_length, got {self.buffer} and {self.max_length}"
            )

    def __call__(self, prompts, completions, completion_ids, **columns) -> list[float]:
        start = self.max_length - self.buffer
        return [-min(max(len(ids) - start, 0) / self.buffer, 1.0) for ids in completion_ids]


def _column(columns: dict, name: str, function: str) -> list:
    if name not in columns:
        raise ValueError(f"{function}: expected a data column {name!r}, got {sorted(columns)}")
    return columns[name]
