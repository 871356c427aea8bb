"""The reference that the KL term pulls towards: the policy as it was at the start, with little of it kept."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from grpo_fast.batching import MicroBatch, MicroBatches, Trained
from grpo_fast.config import GRPOConfig
from grpo_fast.forward import PolicyForward
from grpo_fast.lora import adapters_change_nothing, adapters_off
from grpo_fast.memory import reference_dtype
from grpo_fast.merged_weights import frozen_copy


class Reference:
    """Log-probs under a model that is not trained.

    Args:
        forward: the model's. It may be the policy's own.
        inside: makes the context in which that model is the reference.
        reason: in words, what the reference is.
    """

    def __init__(self, forward: PolicyForward, inside: Callable[[], AbstractContextManager], reason: str) -> None:
        self.forward, self.inside, self.reason = forward, inside, reason

    def __call__(self, trained: Trained, batches: MicroBatches) -> Tensor:
        """Log-probs of all trained tokens, float32 [trained.tokens], by the policy's own micro-batches."""
        with self.inside(), self.forward.mode():
            logps = torch.zeros(trained.tokens, device=self.forward.model.device)

            def fill(batches: Sequence[MicroBatch]) -> Tensor:
                for batch in batches:
                    logps[batch.places] = self.forward.logprobs(batch).float()
                return logps

            return batches.run(fill)


def make_reference(policy: PolicyForward, args: GRPOConfig) -> Reference | None:
    """The policy as it is now, for as long as it trains; None with loss.beta=0.

    * Adapters that change nothing yet are switched off: nothing is kept.
    * Where less than half of the parameters is trained, those are kept and take their places for the time of a phase.
    * Otherwise a copy is, of model.reference_dtype; with model.reference_offload in the CPU's memory between phases.

    Args:
        policy: of the model that is going to be trained.
        args: sections loss, model and rollout are read.
    """
    if args.loss.beta == 0:
        return None
    model = policy.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if adapters_change_nothing(model):
        return Reference(policy, lambda: adapters_off(model), "reference: the policy with its adapters off")
    size, whole = (sum(parameter.numel() for parameter in some) for some in (trained, model.parameters()))
    if 2 * size < whole:
        start = [(parameter, parameter.detach().clone()) for parameter in trained]
        reason = f"reference: the policy with the {size} parameters it trains as they were at the start"
        return Reference(policy, lambda: _holding(start), reason)
    dtype = reference_dtype(args.model.reference_dtype, model.dtype, model.device)
    forward = policy.of_copy(frozen_copy(model, dtype))
    kept = f"reference: a copy in {str(dtype).removeprefix('torch.')}"
    if not args.model.reference_offload:
        return Reference(forward, lambda: _holding([]), kept)
    device, tensors = model.device, [*forward.model.parameters(), *forward.model.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.cpu()
    return Reference(
        forward,
        lambda: _holding((tensor, tensor.data.to(device)) for tensor in tensors),
        f"{kept}, in the CPU's memory between phases",
    )


@contextmanager
def _holding(values: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the first of every two tensors holds the second's value in place of its own."""
    own: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor, value in values:
            own.append((tensor, tensor.data))
            tensor.data = value
        yield
    finally:
        for tensor, data in own:
            tensor.data = data
