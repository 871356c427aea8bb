"""From the shapes users pass to the one shape the backends see: logits [B,T,V] and contiguous vectors [B,T].

Letters: B sequences, T tokens of a sequence, N packed tokens, V vocabulary, D hidden. Packed input travels as one row
of N tokens; `Sequences` alone knows where its sequences begin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """How tokens group into sequences. `cu_seqlens` is None for padded input, where every row is a sequence."""

    num: int  # B
    shape: tuple[int, int]  # of the token vectors: (B, T), or (1, N) when packed
    cu_seqlens: Tensor | None = None  # (B+1,)
    index: Tensor | None = None  # (N,), the sequence of each packed token

    @classmethod
    def packed(cls, cu_seqlens: Tensor, num_tokens: int) -> Sequences:
        position = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        index = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
        return cls(cu_seqlens.shape[0] - 1, (1, num_tokens), cu_seqlens, index)

    def narrow(self, first: int, last: int, start: int, stop: int) -> Sequences:
        """Sequences first .. last-1, whose tokens are start .. stop-1 of the flat ones."""
        if self.cu_seqlens is None:
            return Sequences(last - first, (last - first, self.shape[1]))
        cu_seqlens, index = self.cu_seqlens[first : last + 1] - start, self.index[start:stop] - first
        return Sequences(last - first, (1, stop - start), cu_seqlens, index)

    def padded(self, longest: int | None = None) -> Callable[[Tensor], Tensor]:
        """A function that takes vectors of these sequences to (B, longest), 0 in the padding."""
        if self.cu_seqlens is None:
            return lambda vector: vector
        starts = self.cu_seqlens.long()
        if longest is None:
            longest = int((starts[1:] - starts[:-1]).max()) if self.num else 0
        column = torch.arange(self.shape[1], device=starts.device) - starts[self.index]
        return lambda vector: vector.new_zeros(self.num, longest).index_put((self.index, column), vector[0])

    def sum(self, values_BT: Tensor) -> Tensor:
        """Sum over each sequence, (B,); of a mask the int64 count. Ordered, so deterministic."""
        if self.cu_seqlens is None:
            return values_BT.sum(1)
        if values_BT.dtype == torch.bool:
            ends = torch.nn.functional.pad(values_BT[0].cumsum(0), (1, 0))[self.cu_seqlens.long()]
            return ends[1:] - ends[:-1]
        if values_BT.numel() == 0:
            return values_BT.sum() + values_BT.new_zeros(self.num)
        return torch.segment_reduce(values_BT[0], "sum", offsets=self.cu_seqlens.long(), axis=0)

    def expand(self, values_B: Tensor) -> Tensor:
        """A value of each sequence at each of its tokens, in the token vectors' shape."""
        if self.cu_seqlens is None:
            return values_B[:, None].expand(self.shape)
        return values_B[self.index][None]

    def per_token(self, name: str, value: Tensor) -> Tensor:
        """advantages or sampling_weights in any accepted shape, expanded to the token vectors' shape."""
        batch, length = self.num, self.shape[1]
        if self.cu_seqlens is None:
            if value.shape == (batch,):
                value = value[:, None]
            if value.shape not in ((batch, 1), (batch, length)):
                raise ValueError(
                    f"{name}: expected shape [{batch}], [{batch}, 1] or [{batch}, {length}], got {list(value.shape)}"
                )
            return value.expand(batch, length)
        if value.shape == (batch,):  # also when B == N: [N, 1] says per token
            return self.expand(value)
        if value.shape in ((length,), (length, 1)):
            return value.reshape(1, length)
        raise ValueError(f"{name}: expected shape [{batch}], [{length}] or [{length}, 1], got {list(value.shape)}")


@dataclass(frozen=True)
class Tokens:
    """Targets and their mask. `valid` decides; whatever sits in masked slots of any tensor must not matter."""

    ids: Tensor  # (B, T) int64
    valid: Tensor  # (B, T) bool
    sequences: Sequences
    shape: tuple[int, ...]  # token_ids' own shape, which results are returned in

    def vector(self, name: str, value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """old_logps or ref_logps: token_ids' shape exactly."""
        if value is None:
            return None
        check_tensor(name, value)
        check_constant(name, value)
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(f"{name}: expected token_ids' shape {list(self.shape)}, got {list(value.shape)}")
        _same_device(name, value, self.ids)
        return value.reshape(self.ids.shape).to(dtype).contiguous()

    def broadcast(self, name: str, value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """advantages or sampling_weights, per sequence or per token."""
        if value is None:
            return None
        check_tensor(name, value)
        check_constant(name, value)
        return self.sequences.per_token(name, _moved(name, value, self.ids)).to(dtype).contiguous()


def check_tensor(name: str, value, hint: str = "") -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}{hint}")


def check_flags(**flags) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_constant(name: str, value: Tensor) -> None:
    if value.requires_grad:
        raise ValueError(f"{name}: is a constant of the loss but requires grad; pass {name}.detach()")


def check_plain(name: str, tensor: Tensor | None) -> None:
    """Refuses a DTensor: what its gradient means to the ranks is not known here."""
    if type(tensor) in (Tensor, torch.nn.Parameter, type(None)):
        return
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise ValueError(
            f"{name}: expected a plain tensor, got a DTensor with placements {list(tensor.placements)}. Pass\n"
            f'    {name}.full_tensor(grad_placements=[Partial("avg")])\n'
            "where each rank has its own data and gradients are averaged (FSDP2; Partial of torch.distributed.tensor, "
            "once per mesh dimension), or\n"
            f"    {name}.full_tensor()\n"
            "where every rank of the mesh has the same data (tensor parallel)"
        )


def check_floating(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"{name}: expected a floating-point dtype (float64, 32, 16 or bfloat16), got {tensor.dtype}")


def _same_device(name: str, value: Tensor, ids: Tensor) -> None:
    if value.device != ids.device:
        raise ValueError(f"{name}: expected device {ids.device} (token_ids'), got {value.device}")


def _moved(name: str, value: Tensor, ids: Tensor) -> Tensor:
    """On token_ids' device, where what the host made may still be on the CPU."""
    if value.device.type == "cpu":
        return value.to(ids.device, non_blocking=True)
    _same_device(name, value, ids)
    return value


def check_scores(name: str, scores: Tensor, rank_packed: bool | None) -> None:
    """logits or hidden: a floating tensor [B,T,.] or, packed, [N,.]."""
    check_tensor(
        name, scores, f"; of a model's output that is .{'logits' if name == 'logits' else 'last_hidden_state'}"
    )
    if scores.dim() not in (2, 3):
        raise ValueError(f"{name}: expected [B, T, .] or packed [N, .], got shape {list(scores.shape)}")
    check_floating(name, scores)
    if rank_packed is True and scores.dim() != 2:
        raise ValueError(f"cu_seqlens: belongs to packed [N, .] {name}, got {name} of shape {list(scores.shape)}")
    if rank_packed is False and scores.dim() != 3:
        raise ValueError(
            f"{name}: 2-D means packed and needs cu_seqlens=[B+1]; got shape {list(scores.shape)} without it "
            "(for one sequence pass cu_seqlens=[0, N], or add a batch axis)"
        )


def make_tokens(name: str, scores: Tensor, token_ids: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tokens:
    """Check token_ids, mask and cu_seqlens against logits or hidden (`scores`, called `name`)."""
    lead = tuple(scores.shape[:-1])
    for other, tensor in (("token_ids", token_ids), ("mask", mask), ("cu_seqlens", cu_seqlens)):
        if other == "token_ids" or tensor is not None:
            check_tensor(other, tensor)
    if tuple(token_ids.shape) != lead:
        raise ValueError(
            f"token_ids: expected shape {list(lead)} to go with {name} of shape {list(scores.shape)}, "
            f"got {list(token_ids.shape)}"
        )
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids: expected int32 or int64, got {token_ids.dtype}")
    _same_device("token_ids", token_ids, scores)
    if mask is not None and tuple(mask.shape) != lead:
        raise ValueError(f"mask: expected token_ids' shape {list(lead)}, got {list(mask.shape)}")
    packed = scores.dim() == 2
    shape = (1, lead[0]) if packed else lead
    ids = token_ids.reshape(shape).to(torch.int64).contiguous()
    if mask is None:
        valid = torch.ones(shape, dtype=torch.bool, device=scores.device)
    else:
        valid = _moved("mask", mask != 0, token_ids).reshape(shape).contiguous()
    if cu_seqlens is None:
        sequences = Sequences(1 if packed else shape[0], shape)
    else:
        sequences = _packed_sequences(cu_seqlens, lead[0], token_ids)
    return Tokens(ids, valid, sequences, lead)


def _packed_sequences(cu_seqlens: Tensor, num_tokens: int, token_ids: Tensor) -> Sequences:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: expected int32 or int64 of shape [B+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    _same_device("cu_seqlens", cu_seqlens, token_ids)
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
            hint = "; these look like lengths: pass their cumsum with a 0 in front" if sum(bounds) == num_tokens else ""
            raise ValueError(
                f"cu_seqlens: expected non-decreasing from 0 to N = {num_tokens}, got {bounds[:8]}...{hint}"
            )
    return Sequences.packed(cu_seqlens, num_tokens)


def rows_of(name: str, scores: Tensor, inplace: bool) -> Tensor:
    """[B,T,.] or [N,.] as [B,T,.] with a unit-stride last axis; a view, except where a copy is allowed and needed."""
    scores_BTV = scores.unsqueeze(0) if scores.dim() == 2 else scores
    if scores_BTV.stride(-1) == 1 or scores_BTV.shape[-1] <= 1:
        return scores_BTV
    if inplace and scores.numel():
        raise ValueError(f"inplace: {name} must have a unit-stride last axis, got strides {scores.stride()}")
    return scores_BTV.clone(memory_format=torch.contiguous_format)  # contiguous() keeps an empty tensor's strides


def check_inplace(logits: Tensor) -> None:
    owner = logits if logits._base is None else logits._base  # a view writes into what it is a view of
    if torch.is_grad_enabled() and owner.requires_grad and owner.is_leaf:
        raise ValueError("inplace: logits is a leaf that requires grad, its values would be lost; pass inplace=False")
    extent = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(
                f"inplace: logits overlaps itself in memory (strides {logits.stride()}); pass inplace=False"
            )
        extent += stride * (size - 1)
