"""The core table's cells: one factor varied at a time from a base, and the tensors of a cell.

A cell is named in a GPU's size; `scaled` makes of it what a machine's memory, or a CPU's patience, allows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import grpo_fast as gf

EPSILON = 0.2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """tokens: of all sequences together. masked, dead: the share of a sequence's tokens, and of sequences.

    Each sequence costs a peer that takes one at a time (Liger) a pass over the weight's gradient, so `scaled` leaves
    fewer where there are fewer tokens.
    """

    name: str
    vocab: int = 151936
    hidden: int = 1024
    tokens: int = 4096
    sequences: int = 32
    masked: float = 0.0
    dead: float = 0.0
    frozen: bool = False
    level: str = "token"
    beta: float = 0.0
    entropy_coef: float = 0.0

    def scaled(self, divisor: int) -> "Cell":
        sequences = self.sequences if divisor < 8 else 8
        return replace(self, tokens=max(self.tokens // divisor, sequences), sequences=sequences)

    @property
    def has_logits_path(self) -> bool:
        """Whether the loss from logits is another problem than the base's."""
        return self.hidden == 1024 and not self.frozen


CORE = (
    Cell(name="base"),
    *(Cell(name=f"V={v}", vocab=v) for v in (32768, 49152, 128256, 262144)),
    *(Cell(name=f"D={d}", hidden=d) for d in (576, 2048, 4096)),
    *(Cell(name=f"N={n}", tokens=n) for n in (1024, 16384, 32768)),
    *(Cell(name=f"masked {share:.0%}", masked=share) for share in (0.3, 0.6)),
    *(Cell(name=f"dead {share:.0%}", dead=share) for share in (0.2, 0.4, 0.66)),
    Cell(name="frozen", frozen=True),
    Cell(name="frozen, dead 40%", frozen=True, dead=0.4),
    Cell(name="sequence level", level="sequence"),
    Cell(name="beta 0.04", beta=0.04),
    Cell(name="entropy", entropy_coef=0.01),
)
QUICK = ("base", "V=32768", "masked 30%", "dead 40%", "frozen")
# Two factors at once: every vocabulary with every width, and what real steps look like.
FULL = (
    *CORE,
    *(Cell(name=f"V={v}, D={d}", vocab=v, hidden=d) for v in (32768, 49152, 128256, 262144) for d in (576, 2048, 4096)),
    *(Cell(name=f"V={v}, dead 40%", vocab=v, dead=0.4) for v in (32768, 49152, 128256, 262144)),
    Cell(name="masked 60%, dead 40%", masked=0.6, dead=0.4),
    Cell(name="masked 60%, dead 40%, beta 0.04", masked=0.6, dead=0.4, beta=0.04),
)


class Problem:
    """A cell's tensors: B sequences of a prompt of one token and C of completion, every position a row of hidden."""

    def __init__(self, cell: Cell, device: torch.device, dtype: torch.dtype) -> None:
        self.cell = cell
        B, C = cell.sequences, cell.tokens // cell.sequences
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng)

        self.weight = torch.nn.Parameter(
            (normal(cell.vocab, cell.hidden) * 2 / cell.hidden**0.5).to(device, dtype), requires_grad=not cell.frozen
        )
        self.hidden = normal(B, C + 1, cell.hidden).to(device, dtype)
        self.ids = torch.randint(0, cell.vocab, (B, C + 1), generator=rng).to(device)
        live = torch.arange(B) >= round(cell.dead * B)
        self.advantages = (normal(B) * live).to(device)
        valid = torch.arange(C) < C - round(cell.masked * C)
        self.mask = valid.expand(B, C).contiguous().to(device)
        skips_dead = cell.beta == cell.entropy_coef == 0
        self.live_rows = int(valid.sum()) * (int(live.sum()) if skips_dead else B)
        with torch.no_grad():
            logps = gf.linear_token_logprobs(self.hidden[:, :-1], self.weight, self.targets)
        self.old_logps = logps + 0.1 * normal(B, C).to(device)
        self.ref_logps = logps + 0.1 * normal(B, C).to(device) if cell.beta else None

    @property
    def targets(self) -> Tensor:
        """(B, C), the completion."""
        return self.ids[:, 1:]

    def shorter(self) -> "Problem":
        """The same with one token less a sequence: a length that nothing was compiled for."""
        other = object.__new__(Problem)
        vars(other).update(vars(self))
        other.hidden, other.ids = self.hidden[:, :-1].contiguous(), self.ids[:, :-1].contiguous()
        other.mask, other.old_logps = self.mask[:, :-1].contiguous(), self.old_logps[:, :-1].contiguous()
        other.ref_logps = None if self.ref_logps is None else self.ref_logps[:, :-1].contiguous()
        return other

    def options(self) -> dict[str, object]:
        """Of grpo_fast's losses."""
        cell = self.cell
        return {
            "old_logps": self.old_logps, "ref_logps": self.ref_logps, "epsilon": EPSILON, "beta": cell.beta,
            "entropy_coef": cell.entropy_coef, "importance_sampling_level": cell.level,
        }  # fmt: skip

    def objective(self, logps: Tensor, entropy: Tensor | None = None) -> Tensor:
        """The textbook's loss of log-probs (B, C), for whoever has no loss of their own."""
        cell, mask = self.cell, self.mask
        count = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = logps - self.old_logps
        if cell.level == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / count
        ratio, advantages = log_ratio.exp(), self.advantages[:, None]
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
        if self.ref_logps is not None:
            gap = self.ref_logps - logps
            loss = loss + cell.beta * (gap.exp() - gap - 1)
        total = (loss * mask / count).sum() / len(mask)
        if entropy is None:
            return total
        return total - cell.entropy_coef * (entropy * mask).sum() / mask.sum()
