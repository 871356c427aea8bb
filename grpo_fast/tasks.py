"""Built-in tasks: seeded generators of prompts with answers.

A task is a function of the split and keyword arguments that returns rows with `prompt` and `answer`. All its problems lie
in one seeded order; the held-out split is the first `eval_size` of it and the training split the next `train_size`, so
the two share no problem and neither depends on the size of the training split.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

Split = Literal["train", "eval"]


def addition(
    split: Split,
    *,
    terms: int = 2,
    max_value: int = 99,
    template: str = "{sum}=",
    separator: str = "+",
    digits: int = 1,
    conversational: bool = False,
    train_size: int = 10_000,
    eval_size: int = 500,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Sums of `terms` numbers from 0 to `max_value`; the answer is the sum in decimal.

    Args:
        split: which of the two disjoint splits.
        terms: numbers to add.
        max_value: the largest of them.
        template: the prompt, with {sum} for the numbers joined by `separator`.
        separator: between the numbers.
        digits: numbers are padded with zeros to this width.
        conversational: prompts are a user message rather than plain text.
        train_size: size of the training split, less where there are fewer problems.
        eval_size: size of the held-out split.
        seed: of the order of the problems.
    """
    _at_least("terms", terms, 2)
    _at_least("max_value", max_value, 1)
    if "{sum}" not in template:
        raise ValueError(f"data.task_args.template: expected text with {{sum}}, got {template!r}")
    base = max_value + 1
    rows = []
    for problem in _split(base**terms, split, train_size, eval_size, seed):
        numbers = [problem // base**place % base for place in range(terms)]
        text = template.replace("{sum}", separator.join(f"{number:0{digits}d}" for number in numbers))
        prompt = [{"role": "user", "content": text}] if conversational else text
        rows.append({"prompt": prompt, "answer": str(sum(numbers))})
    return rows


def _split(problems: int, split: Split, train_size: int, eval_size: int, seed: int) -> Sequence[int]:
    """Returns the numbers of the problems of a split, from 0 to problems - 1."""
    _at_least("train_size", train_size, 1)
    _at_least("eval_size", eval_size, 1)
    if eval_size >= problems:
        raise ValueError(
            f"data.task_args.eval_size: expected less than the task's {problems} problems, got {eval_size}. Set fewer"
        )
    order = random.Random(seed).sample(range(problems), min(problems, eval_size + train_size))
    return order[:eval_size] if split == "eval" else order[eval_size:]


def _at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"data.task_args.{name}: expected an integer >= {least}, got {value!r}")


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {"addition": addition}
