"""torch.library registration: one op per vocabulary-sized piece of work, so that torch.compile sees a single node.

Every op takes the backend's name; its body calls the backend's function of the same name. Shapes as in backends.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.ops import backends

_LIB = torch.library.Library("grpo_fast", "DEF")
_TRANSFORM = "float temperature, float softcap, float logit_scale"
_OBJECTIVE = "float clip_low, float clip_high, float delta, float beta, bool bias_correction"
_LOSS_INPUTS = (
    "Tensor ids, Tensor valid, Tensor advantages, Tensor? weights, Tensor? old_logps, Tensor? ref_logps, "
    "Tensor coef, Tensor? entropy_scale, bool want_entropy"
)
_GRAD_INPUTS = (
    "Tensor ids, Tensor valid, Tensor row_max, Tensor row_sum, Tensor logps, Tensor? entropy, "
    "Tensor g, Tensor? g_entropy"
)


def define(name: str, schema: str, body, fake) -> torch._ops.OpOverload:
    """Register an op for every device, with its shape function, and return the overload to call."""
    _LIB.define(f"{name}{schema}")
    _LIB.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"grpo_fast::{name}", fake, lib=_LIB)
    return getattr(torch.ops.grpo_fast, name).default


_debug = False


def set_debug(enabled: bool) -> None:
    """Check token ids on a GPU too, which waits for it in every call; else a bad id there gives a NaN log-prob."""
    global _debug
    _debug = enabled


def check_ids(ids: Tensor, valid: Tensor, vocab: int) -> None:
    """ValueError for an id that no column has: on the CPU, and elsewhere where `set_debug` asks for it."""
    if (ids.device.type != "cpu" and not _debug) or ids.numel() == 0:
        return
    bad = valid.bool() & ((ids < 0) | (ids >= vocab))
    if bad.any():
        raise ValueError(f"token_ids: expected ids in [0, {vocab}) at valid positions, got {ids[bad][0].item()}")


def like_vectors(logits: Tensor, count: int, present: bool = True) -> list[Tensor]:
    """`count` new [B,T] vectors; empty ones where the caller wants none (an op's arity is fixed)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    shape = logits.shape[:2] if present else (0,)
    return [logits.new_empty(shape, dtype=dtype) for _ in range(count)]


def new_grad(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _row_stats(logits, ids, valid, temperature, softcap, logit_scale, want_entropy, backend):
    check_ids(ids, valid, logits.shape[-1])
    logps, row_max, row_sum = like_vectors(logits, 3)
    (entropy,) = like_vectors(logits, 1, want_entropy)
    backends.functions(backend).row_stats(
        logits, ids, valid.view(torch.uint8), logps, entropy if want_entropy else None, row_max, row_sum,
        temperature, softcap, logit_scale,
    )  # fmt: skip
    return logps, entropy, row_max, row_sum


def _row_stats_fake(logits, ids, valid, temperature, softcap, logit_scale, want_entropy, backend):
    logps, row_max, row_sum = like_vectors(logits, 3)
    return logps, like_vectors(logits, 1, want_entropy)[0], row_max, row_sum


def _row_grad_into(logits, out, ids, valid, *args):
    *vectors, temperature, softcap, logit_scale, backend = args
    kernel = backends.functions(backend).row_grad
    kernel(logits, ids, valid.view(torch.uint8), *vectors, out, temperature, softcap, logit_scale)


def _row_grad_(logits, *args):
    _row_grad_into(logits, logits, *args)


def _row_grad(logits, *args):
    out = new_grad(logits)
    _row_grad_into(logits, out, *args)
    return out


def _grpo_loss_into(logits, out, ids, valid, *args):
    *vectors, want_entropy = args[:7]
    *numbers, backend = args[7:]
    check_ids(ids, valid, logits.shape[-1])
    losses, logps = like_vectors(logits, 2)
    (entropy,) = like_vectors(logits, 1, want_entropy)
    outputs = (losses, logps, entropy if want_entropy else None, out)
    backends.functions(backend).grpo_loss(logits, ids, valid.view(torch.uint8), *vectors, *outputs, *numbers)
    return losses, logps, entropy


def _grpo_loss_(logits, *args):
    return _grpo_loss_into(logits, logits, *args)


def _grpo_loss(logits, *args):
    out = new_grad(logits)
    return *_grpo_loss_into(logits, out, *args), out


def _grpo_loss_fake_(logits, *args):
    losses, logps = like_vectors(logits, 2)
    return losses, logps, like_vectors(logits, 1, present=args[8])[0]


def _grpo_loss_fake(logits, *args):
    return *_grpo_loss_fake_(logits, *args), new_grad(logits)


def _scale_(grad, scale, backend):
    rows = grad.view((1,) * (3 - grad.dim()) + grad.shape)  # a head's gradients have one or two axes
    backends.functions(backend).scale_(rows, scale)


def _scale(grad, scale, backend):
    out = grad.clone()
    _scale_(out, scale, backend)
    return out


row_stats = define(
    "row_stats",
    f"(Tensor logits, Tensor ids, Tensor valid, {_TRANSFORM}, bool want_entropy, str backend)"
    " -> (Tensor logps, Tensor entropy, Tensor row_max, Tensor row_sum)",
    _row_stats,
    _row_stats_fake,
)
row_grad = define(
    "row_grad",
    f"(Tensor logits, {_GRAD_INPUTS}, {_TRANSFORM}, str backend) -> Tensor",
    _row_grad,
    lambda logits, *args: new_grad(logits),
)
row_grad_ = define(
    "row_grad_",
    f"(Tensor(a!) logits, {_GRAD_INPUTS}, {_TRANSFORM}, str backend) -> ()",
    _row_grad_,
    lambda logits, *args: None,
)
grpo_loss = define(
    "grpo_loss",
    f"(Tensor logits, {_LOSS_INPUTS}, {_TRANSFORM}, {_OBJECTIVE}, str backend)"
    " -> (Tensor losses, Tensor logps, Tensor entropy, Tensor grad)",
    _grpo_loss,
    _grpo_loss_fake,
)
grpo_loss_ = define(
    "grpo_loss_",
    f"(Tensor(a!) logits, {_LOSS_INPUTS}, {_TRANSFORM}, {_OBJECTIVE}, str backend)"
    " -> (Tensor losses, Tensor logps, Tensor entropy)",
    _grpo_loss_,
    _grpo_loss_fake_,
)
scale = define(
    "scale",
    "(Tensor grad, Tensor scale, str backend) -> Tensor",
    _scale,
    lambda grad, s, backend: torch.empty_like(grad),
)
scale_ = define("scale_", "(Tensor(a!) grad, Tensor scale, str backend) -> ()", _scale_, lambda grad, s, backend: None)
