"""Who computes the loss in the core table: grpo_fast, plain PyTorch, torch.compile of it, and the peers installed.

Peers are called, not rewritten. From hidden states, a contender takes (problem, hidden, weight); from logits, (problem,
logits); both give the loss with its graph. What fails to import or to run here is left out, with what it said. Those
with kernels for GPUs alone are asked on a GPU. Liger's fused linear cross entropy takes no weight of a token, so it
cannot be part of a policy loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import grpo_fast as gf

from . import linear_peers
from .cells import EPSILON, Cell, Problem

FromHidden = Callable[[Problem, Tensor, Tensor], Tensor]
FromLogits = Callable[[Problem, Tensor], Tensor]


class NotTheirs(Exception):
    """A loss that a peer does not have."""


def _entropy(logps_V: Tensor) -> Tensor:
    return -(logps_V.exp() * logps_V).sum(-1)


# --- From logits (B, C, V).


def _ours_from_logits(problem: Problem, logits: Tensor, *, inplace: bool, backend: str | None) -> Tensor:
    out = gf.grpo_loss(
        logits, problem.targets, problem.advantages, problem.mask, **problem.options(), inplace=inplace, backend=backend
    )
    return out.loss


def _plain_from_logits(problem: Problem, logits: Tensor) -> Tensor:
    logps_V = logits.float().log_softmax(-1)
    logps = logps_V.gather(-1, problem.targets[..., None])[..., 0]
    return problem.objective(logps, _entropy(logps_V) if problem.cell.entropy_coef else None)


def _logsumexp_from_logits(problem: Problem, logits: Tensor) -> Tensor:
    """Without a log-softmax of the vocabulary's size, which a compiler fuses best."""
    logits = logits.float()
    logps = logits.gather(-1, problem.targets[..., None])[..., 0] - logits.logsumexp(-1)
    return problem.objective(logps, _entropy(logits.log_softmax(-1)) if problem.cell.entropy_coef else None)


def _trl_from_logits(problem: Problem, logits: Tensor) -> Tensor:
    utils = importlib.import_module("trl.trainer.utils")
    logps = utils.selective_log_softmax(logits, problem.targets)
    return problem.objective(logps, utils.entropy_from_logits(logits) if problem.cell.entropy_coef else None)


def _trl_triton(problem: Problem, logits: Tensor) -> Tensor:
    function = importlib.import_module("trl.kernels.logprob_entropy")._LogProbEntropyFunction
    logps, entropy = function.apply(logits, problem.targets.contiguous(), 1.0, None)
    return problem.objective(logps, entropy if problem.cell.entropy_coef else None)


def _liger_triton(problem: Problem, logits: Tensor) -> Tensor:
    if problem.cell.entropy_coef:
        raise NotTheirs("it has no entropy bonus")
    function = importlib.import_module("liger_kernel.ops.grpo_loss").GrpoLossFunction
    extended = torch.nn.functional.pad(logits, (0, 0, 0, 1))  # it wants a row more than it uses
    return function.apply(
        extended, problem.old_logps, problem.ref_logps, problem.targets.contiguous(), problem.advantages,
        problem.mask.int(), 1.0, problem.cell.beta, EPSILON, EPSILON, True, "grpo", None, True, problem.cell.level,
    )[0]  # fmt: skip


def _quack(problem: Problem, logits: Tensor) -> Tensor:
    if problem.cell.entropy_coef:
        raise NotTheirs("it gives no entropy")
    module = importlib.import_module("quack.cross_entropy")
    losses = module.cross_entropy(logits.flatten(0, 1), problem.targets.flatten(), reduction="none")
    return problem.objective(-losses.view_as(problem.targets))


def _flash_attn(problem: Problem, logits: Tensor) -> Tensor:
    if problem.cell.entropy_coef:
        raise NotTheirs("it gives no entropy")
    module = importlib.import_module("flash_attn.ops.triton.cross_entropy")
    losses, _ = module.cross_entropy_loss(logits.flatten(0, 1), problem.targets.flatten())
    return problem.objective(-losses.view_as(problem.targets))


def from_logits(device: torch.device) -> dict[str, FromLogits]:
    found: dict[str, FromLogits] = {
        "grpo_fast in place": partial(_ours_from_logits, inplace=True, backend=None),
        "grpo_fast": partial(_ours_from_logits, inplace=False, backend=None),
    }
    if device.type == "cuda":
        found["grpo_fast cuda in place"] = partial(_ours_from_logits, inplace=True, backend="cuda")
        found |= {"trl triton": _trl_triton, "liger triton": _liger_triton, "quack": _quack, "flash-attn": _flash_attn}
    compiled = torch.compile(_logsumexp_from_logits, dynamic=True)
    return found | {"trl": _trl_from_logits, "torch.compile": compiled, "torch": _plain_from_logits}


# --- From hidden states (B, C + 1, D), the last of which predicts nothing.


def _ours_from_hidden(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    out = gf.linear_grpo_loss(
        hidden[:, :-1], weight, problem.targets, problem.advantages, problem.mask, **problem.options()
    )
    return out.loss


def _plain_from_hidden(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    return _plain_from_logits(problem, hidden[:, :-1] @ weight.t())


def _logsumexp_from_hidden(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    return _logsumexp_from_logits(problem, hidden[:, :-1] @ weight.t())


def _trl_from_hidden(cell: Cell) -> FromHidden:
    if cell.entropy_coef:
        raise NotTheirs("its entropy bonus is added by its trainer")
    loss = linear_peers.trl_loss(level=cell.level, beta=cell.beta)

    def run(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        return loss(hidden, weight, _batch(problem))

    return run


def _liger_from_hidden(cell: Cell) -> FromHidden:
    if cell.entropy_coef:
        raise NotTheirs("it has no entropy bonus")
    loss = linear_peers.liger_loss(compiled=False, level=cell.level, beta=cell.beta)

    def run(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        return loss(hidden, weight, _batch(problem))

    return run


def _batch(problem: Problem) -> linear_peers.Batch:
    return linear_peers.Batch(problem.ids, problem.advantages, problem.old_logps, problem.mask, problem.ref_logps)


def _cut_cross_entropy(impl: str) -> FromHidden:
    module = importlib.import_module("cut_cross_entropy")

    def run(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        losses = module.linear_cross_entropy(hidden[:, :-1], weight, problem.targets, reduction="none", impl=impl)
        return problem.objective(-losses)

    return run


def _verl() -> FromHidden:
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def run(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        logps, entropy = function(hidden[:, :-1].flatten(0, 1), weight, problem.targets.flatten(), 1.0, "none")
        entropy = entropy.view_as(problem.targets) if problem.cell.entropy_coef else None
        return problem.objective(logps.view_as(problem.targets), entropy)

    return run


def from_hidden(cell: Cell, device: torch.device) -> dict[str, Callable[[], FromHidden]]:
    """Name -> what makes the contender."""
    found: dict[str, Callable[[], FromHidden]] = {
        "grpo_fast": lambda: _ours_from_hidden,
        "trl": partial(_trl_from_hidden, cell),
        "liger": partial(_liger_from_hidden, cell),
    }
    if device.type == "cuda":
        found["verl"] = _verl
    if device.type == "cuda" and not cell.entropy_coef:
        found |= {"cce": partial(_cut_cross_entropy, "cce"), "cce exact": partial(_cut_cross_entropy, "cce_exact")}
    return found | {
        "torch.compile": lambda: torch.compile(_logsumexp_from_hidden, dynamic=True),
        "torch": lambda: _plain_from_hidden,
    }
