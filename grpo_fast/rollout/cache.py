"""Keys and values of decoding for groups: every prompt's once, and every row's own behind them.

Letters: n groups, R rows, P tokens of the longest prompt, K key and value heads, D head size.
"""

import torch
from torch import Tensor, nn


class LayerCache:
    """Keys and values of one attention layer; what lies beyond a prompt's or a row's length means nothing."""

    def __init__(self) -> None:
        self.prompt_keys: Tensor | None = None  # [n, K, P, D]
        self.prompt_values: Tensor | None = None
        self.keys: Tensor | None = None  # [R, K, room, D]
        self.values: Tensor | None = None

    def add_prompts(self, keys: Tensor, values: Tensor) -> None:
        self.prompt_keys, self.prompt_values = _joined(self.prompt_keys, keys), _joined(self.prompt_values, values)

    def resize(self, rows: int, room: int) -> None:
        """Room for more rows or longer ones, behind what is there."""
        self.keys = _enlarged(self.keys, self.prompt_keys, rows, room)
        self.values = _enlarged(self.values, self.prompt_values, rows, room)

    def keep(self, groups: Tensor, longest: int, rows: Tensor, room: int) -> None:
        """Leaves out other groups and rows, and what prompts are longer than `longest` and rows than `room`."""
        if len(groups) < len(self.prompt_keys):
            self.prompt_keys = self.prompt_keys[groups, :, :longest]
            self.prompt_values = self.prompt_values[groups, :, :longest]
        self.keys, self.values = self.keys[rows, :, :room], self.values[rows, :, :room]


def _joined(old: Tensor | None, new: Tensor) -> Tensor:
    """Both [n, K, P, D], one after the other, padded to the longer P."""
    if old is None:
        return new
    longest = max(old.shape[2], new.shape[2])
    return torch.cat([nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in (old, new)])


def _enlarged(old: Tensor | None, like: Tensor, rows: int, room: int) -> Tensor:
    if old is not None and old.shape[0] == rows and old.shape[2] == room:
        return old
    new = like.new_zeros(rows, like.shape[1], room, like.shape[3])
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new
