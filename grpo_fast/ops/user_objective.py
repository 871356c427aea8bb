"""An objective that the user wrote: what it is called with, and what is made sure of before anything expensive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.ops.head import Chunk
from grpo_fast.ops.inputs import Sequences, Tokens, check_tensor

_GIVEN = ("logps", "entropy", "mask")  # names of the objective's that are not the user's to choose


@dataclass  # not frozen: torch 2.11 cannot trace the making of a frozen one with a function in it
class UserObjective:
    """Calls the user's function with a chunk's share of the inputs, in the layout that `align` promises."""

    function: Callable[..., Tensor]
    per_token: dict[str, Tensor]  # (B, T) each
    per_sequence: dict[str, Tensor]  # (B,) or (B, 1) each
    scored: Tensor  # (B, T) bool
    sequences: Sequences
    divisor: Tensor
    by_sequence: bool
    with_entropy: bool

    def __call__(self, logps: Tensor, entropy: Tensor | None, chunk: Chunk) -> Tensor:
        losses, mask = self.losses(logps, entropy, chunk)
        return torch.where(mask, losses, 0.0).sum() / self.divisor

    def losses(self, logps: Tensor, entropy: Tensor | None, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The function's per-token losses, and which of them count."""
        sequences, take, place = chunk.of(self.sequences)
        layout = sequences.padded(chunk.longest) if self.by_sequence else lambda vector: vector[0]
        mask = layout(take(self.scored))
        inputs = {n: torch.where(mask, layout(take(v)), v.new_zeros(())) for n, v in self.per_token.items()}
        if self.by_sequence:
            first, last = chunk.sequences
            inputs |= {name: values[first:last].clone() for name, values in self.per_sequence.items()}
        entropy = layout(place(entropy)) if self.with_entropy else None
        return self.call(layout(place(logps)), entropy, mask, inputs), mask

    def call(self, logps: Tensor, entropy: Tensor | None, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if self.by_sequence:
            inputs = inputs | {"mask": mask}
        if self.with_entropy:
            inputs = inputs | {"entropy": entropy}
        with torch.autocast(logps.device.type, enabled=False):  # log-probs are fp32, whatever the products are
            losses = self.function(logps, **inputs)
        if not isinstance(losses, Tensor) or losses.shape != logps.shape:
            got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            hint = "; a loss per sequence is spread by (loss / length)[:, None].expand_as(logps)" * self.by_sequence
            raise ValueError(
                f"objective: expected one loss per token, not reduced, in logps' shape (here {list(logps.shape)}), got "
                f"{got}{hint}"
            )
        return losses

    def rehearse(self) -> None:
        """Call the function with a few made-up tokens, before anything expensive happens."""
        self._check_signature()
        both = self._made_up(slice(0, 2))
        if torch.is_inference_mode_enabled():
            return
        if not both.requires_grad:
            raise ValueError("objective: its result does not depend on logps; is something detached, or in no_grad?")
        if both.device.type != "cpu":  # comparing would wait for the device
            return
        alone = torch.cat([self._made_up(slice(i, i + 1)) for i in range(2)])
        if not torch.allclose(both, alone, equal_nan=True):
            one = "sequence" if self.by_sequence else "token"
            raise ValueError(
                f"objective: its loss of a {one} depends on other {one}s, which may be in another chunk; put what it "
                "needs of them into inputs or denominator"
            )

    def _check_signature(self) -> None:
        names = [*self.per_token, *self.per_sequence, *["mask"] * self.by_sequence, *["entropy"] * self.with_entropy]
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # some callables have none
            return
        try:
            signature.bind(None, **dict.fromkeys(names))
        except TypeError as error:
            call = ", ".join(["logps", *(f"{name}=..." for name in names)])
            raise ValueError(f"objective: is called as objective({call}), but {error}") from None

    def _made_up(self, part: slice) -> Tensor:
        """The function's losses of some of two tokens, or of two sequences of two."""
        shape = (2, 2) if self.by_sequence else (2,)
        device = self.scored.device

        def numbers(values: Tensor, shape: tuple) -> Tensor:
            made = values.new_zeros(shape)
            if made.is_floating_point():
                made += torch.arange(1, made.numel() + 1, device=device).view(shape) / 8
            return made[part]

        with torch.enable_grad():
            logps = numbers(torch.zeros((), device=device), shape).neg().requires_grad_()
            entropy = logps.detach().neg().requires_grad_() if self.with_entropy else None
            inputs = {name: numbers(values, shape) for name, values in self.per_token.items()}
            inputs |= {name: numbers(values, (2, *values.shape[1:])) for name, values in self.per_sequence.items()}
            mask = torch.ones(logps.shape, dtype=torch.bool, device=device)
            losses = self.call(logps, entropy, mask, inputs)
        _refuse_other_leaves(losses, (logps, entropy))
        return losses


def _refuse_other_leaves(losses: Tensor, allowed: tuple[Tensor | None, ...]) -> None:
    """A parameter that the function brought along would silently get no gradient."""
    nodes, seen = [losses.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not tensor for tensor in allowed):
            raise ValueError(
                f"objective: uses a tensor of shape {list(leaf.shape)} that requires grad and would get none; detach "
                "it, or take linear_token_logprobs and a loss of its result"
            )
        nodes += [parent for parent, _ in node.next_functions]


def split_inputs(inputs: Mapping[str, Tensor], tokens: Tokens, by_sequence: bool) -> tuple[dict, dict]:
    """Inputs per token, (B, T), and per sequence, (B,) or (B, 1) as they are."""
    if not isinstance(inputs, Mapping):
        raise ValueError(f"inputs: expected a dict of tensors by argument name, got {type(inputs).__name__}")
    per_token, per_sequence = {}, {}
    for name, value in inputs.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _GIVEN:
            raise ValueError(f"inputs: expected argument names other than {', '.join(_GIVEN)}, got {name!r}")
        label = f"inputs[{name!r}]"
        check_tensor(label, value, "; bind constants to the objective with functools.partial")
        whole = tokens.broadcast(label, value, value.dtype)
        shapes = [(tokens.sequences.num,), (tokens.sequences.num, 1)]
        if by_sequence and value.shape in (shapes[:1] if tokens.sequences.cu_seqlens is not None else shapes):
            per_sequence[name] = value.to(tokens.ids.device, non_blocking=True)
        else:
            per_token[name] = whole
    return per_token, per_sequence
