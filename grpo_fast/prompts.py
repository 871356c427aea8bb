"""Prompts: from data rows to token ids, and in which order they are drawn.

Prompts are measured and refused in token ids, never cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Prompt = str | list[dict]


def encode_prompt(tokenizer, prompt: Prompt, chat_template_kwargs: dict | None = None) -> list[int]:
    """Token ids of a prompt, with at most one beginning-of-sequence id.

    A plain string is encoded with the special tokens its tokenizer adds. Messages go through the chat
    template with the generation prompt (an assistant message at the end is continued instead); templates
    write their own special tokens, so none are added.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        continues = prompt[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            prompt,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **(chat_template_kwargs or {}),
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [
        bos,
        bos,
    ]:  # text that spells the token out, to a tokenizer that adds it
        ids = ids[1:]
    return ids


def decode_completion(tokenizer, ids: Sequence[int], eos_ids: Sequence[int]) -> str:
    """The text of sampled ids without special tokens and without the end-of-sequence token; '' for none."""
    if ids and ids[-1] in eos_ids:  # not every tokenizer declares all of them special
        ids = ids[:-1]
    return tokenizer.decode(list(ids), skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A data row and its prompt's token ids."""

    row: dict
    ids: list[int]


class PromptSource:
    """Draws prompts from a list of rows, epoch after epoch, each epoch in a seeded order of its own.

    The position is two integers: the same seed and position give the same prompts, whatever happened before.

    Args:
        rows: dicts with `prompt_column`, and any other columns.
        tokenizer: see `encode_prompt`.
        prompt_column: the column that holds the prompt.
        max_prompt_length: longest prompt in tokens, None for no limit.
        room: tokens that the model's positions leave for a prompt, None for no limit.
        overlong: "error" refuses a longer prompt here, before anything is trained; "drop" leaves it out and
            counts it.
        shuffle: False keeps the rows' order.
        seed: of the order.
        chat_template_kwargs: see `encode_prompt`.

    Attributes:
        dropped: how many rows were left out as over-long.
        longest: tokens of the longest prompt; None if there is no limit, and nobody measured.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer,
        *,
        prompt_column: str = "prompt",
        max_prompt_length: int | None = None,
        room: int | None = None,
        overlong: str = "error",
        shuffle: bool = True,
        seed: int = 0,
        chat_template_kwargs: dict | None = None,
    ) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.prompt_column = prompt_column
        self.shuffle = shuffle
        self.seed = seed
        self.chat_template_kwargs = chat_template_kwargs
        if len(rows) == 0:
            raise ValueError("train_dataset: expected at least one row, got none")
        if prompt_column not in rows[0]:
            raise ValueError(
                f"data.prompt_column: expected a column of the data, {sorted(rows[0])}, got {prompt_column!r}"
            )
        self.longest: int | None = None
        self.kept = self._within(max_prompt_length, room, overlong)
        self.dropped = len(rows) - len(self.kept)
        self.epoch, self.position = 0, 0
        self._order = self._epoch_order()

    def _within(self, max_prompt_length: int | None, room: int | None, overlong: str) -> list[int]:
        limits = [limit for limit in (max_prompt_length, room) if limit is not None]
        if not limits:
            return list(range(len(self.rows)))
        limit = min(limits)
        lengths = [len(self.encode(row).ids) for row in self.rows]
        too_long = [index for index, length in enumerate(lengths) if length > limit]
        if too_long and (overlong == "error" or len(too_long) == len(lengths)):
            name = "data.max_prompt_length" if limit == max_prompt_length else "room left by max_completion_length"
            raise ValueError(
                f"{name}: {len(too_long)} of {len(lengths)} prompts exceed {limit} tokens, row {too_long[0]} first; "
                f"the longest has {max(lengths)}. Raise the limit, or set data.overlong_prompt=drop with "
                f"data.max_prompt_length={limit}"
            )
        self.longest = max(length for length in lengths if length <= limit)
        return [index for index, length in enumerate(lengths) if length <= limit]

    def encode(self, row: dict) -> EncodedPrompt:
        """The row with its prompt's ids."""
        return EncodedPrompt(row, encode_prompt(self.tokenizer, row[self.prompt_column], self.chat_template_kwargs))

    def first(self, count: int) -> list[EncodedPrompt]:
        """The first `count` prompts in the rows' order, or as many as there are."""
        return [self.encode(self.rows[index]) for index in self.kept[:count]]

    def _epoch_order(self) -> list[int]:
        if not self.shuffle:
            return self.kept
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return [self.kept[index] for index in torch.randperm(len(self.kept), generator=generator).tolist()]

    def draw(self, count: int) -> list[EncodedPrompt]:
        """The next `count` prompts; an epoch's end may fall inside."""
        drawn = []
        while len(drawn) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            drawn.append(self.encode(self.rows[self._order[self.position]]))
            self.position += 1
        return drawn

    @property
    def epochs(self) -> float:
        """Passes over the data so far, the fraction included."""
        return self.epoch + self.position / len(self._order)

    def state_dict(self) -> dict:
        """The position in the data."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was taken."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order()
