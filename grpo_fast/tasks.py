"""Built-in tasks: seeded generators of prompts with answers.

A task is a function of the split and keyword arguments that returns rows with `prompt` and `answer`. Its
held-out split does not depend on how much is trained on, and the two splits share no problem.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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
    earlier_turns: Sequence[dict[str, str]] = (),
    train_size: int = 10_000,
    eval_size: int = 500,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Sums of `terms` numbers from 0 to `max_value`; the answer is the sum in decimal.

    A held-out sum is not trained on in another order of its terms either.

    Args:
        split: which of the two splits.
        terms: numbers to add.
        max_value: the largest of them.
        template: the prompt, with {sum} for the numbers joined by `separator`.
        separator: between the numbers.
        digits: numbers are padded with zeros to this width.
        conversational: prompts are a user message rather than plain text.
        earlier_turns: messages that come before it in every conversational prompt, such as a solved example.
        train_size: size of the training split, less where there are fewer problems.
        eval_size: size of the held-out split.
        seed: of the order of the problems.
    """
    for name, value, least in (
        ("terms", terms, 2),
        ("max_value", max_value, 1),
        ("digits", digits, 1),
        ("train_size", train_size, 1),
        ("eval_size", eval_size, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"data.task_args.{name}: expected an integer >= {least}, got {value!r}")
    if earlier_turns and not conversational:
        raise ValueError("data.task_args.earlier_turns: means nothing without conversational. Set it to true")
    if "{sum}" not in template:
        raise ValueError(f"data.task_args.template: expected text with {{sum}}, got {template!r}")
    base = max_value + 1
    problems = ([p // base**place % base for place in range(terms)] for p in _shuffled(base**terms, seed))
    held_out = list(islice(problems, eval_size))
    unordered = {tuple(sorted(numbers)) for numbers in held_out}
    trained = list(islice((p for p in problems if tuple(sorted(p)) not in unordered), train_size))
    if not trained:
        expected = f"fewer, since the task has {base**terms} sums in all"
        raise ValueError(f"data.task_args.eval_size: expected {expected}, got {eval_size}")

    def prompt(numbers: list[int]) -> Any:
        text = template.replace("{sum}", separator.join(f"{number:0{digits}d}" for number in numbers))
        return [*earlier_turns, {"role": "user", "content": text}] if conversational else text

    chosen = held_out if split == "eval" else trained
    return [{"prompt": prompt(numbers), "answer": str(sum(numbers))} for numbers in chosen]


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """Yields the numbers below `count` in a seeded order, lazily where there are too many to list."""
    rng = random.Random(seed)
    if count <= 1_000_000:
        yield from rng.sample(range(count), count)
        return
    seen = set()
    while len(seen) < count:
        number = rng.randrange(count)
        if number not in seen:
            seen.add(number)
            yield number


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {"addition": addition}
