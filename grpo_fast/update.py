"""The GRPO update: optimizer steps on one rollout, the same however it is split into micro-batches."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.batching import MicroBatch, denominators
from grpo_fast.config import GRPOConfig
from grpo_fast.forward import PaddedForward
from grpo_fast.modes import update_mode
from grpo_fast.optim import learning_rate, make_optimizer
from grpo_fast.types import LossMetrics

_NOT_THE_LOSS = ("num_iterations", "scale_rewards", "advantage_std", "backend")  # of section loss


def _nothing() -> LossMetrics:
    return LossMetrics(torch.zeros(len(LossMetrics.FIELDS)), torch.tensor(math.inf), torch.tensor(-math.inf))


class GRPOUpdate:
    """Owns the optimizer; what PPO or DPO do differently is another class with this `__call__`.

    Args:
        forward: the policy's side of the update.
        args: sections loss, optim and rollout are read.
    """

    def __init__(self, forward: PaddedForward, args: GRPOConfig) -> None:
        self.forward = forward
        self.args = args
        self.optimizer = make_optimizer(forward.model, args.optim)
        loss = dataclasses.asdict(args.loss)
        self.loss_options = {name: value for name, value in loss.items() if name not in _NOT_THE_LOSS}

    def __call__(
        self,
        batches: Sequence[MicroBatch],
        ref_logps: Sequence[Tensor | None],
        lengths: Sequence[int],
        step: int,
    ) -> dict[str, float]:
        """loss.num_iterations optimizer steps.

        The first runs on-policy, its ratio is exactly 1; its log-probs are the old ones of those that follow.

        Args:
            batches: micro-batches of whole sequences.
            ref_logps: for each of them the reference's log-probs, float [N], or None without a reference.
            lengths: trained tokens of every completion of the step, 0 for one left out.
            step: steps done before: each was `num_iterations` optimizer steps, by which the learning rate goes.

        Returns:
            loss and grad_norm (before clipping), means over the iterations; learning_rate of the last; the loss's
            metrics over all iterations. No completion with a token to train on: no optimizer step, and zeros.
        """
        iterations = self.args.loss.num_iterations
        rates = [self._learning_rate(step * iterations + iteration) for iteration in range(iterations)]
        if not batches:
            names = ("loss", "grad_norm", *self._reported(_nothing().means()))
            return dict.fromkeys(names, 0.0) | {"learning_rate": rates[-1]}
        counts = denominators(self.args.loss.loss_type, lengths, self.args.rollout.max_completion_length)
        denominator, entropy_denominator = torch.tensor(counts, device=batches[0].input_ids.device).unbind()
        old_logps: list[Tensor | None] = [None] * len(batches)
        losses, norms, metrics = [], [], []
        self.optimizer.zero_grad()  # whatever the caller left behind
        with update_mode(self.forward.model):
            for iteration in range(iterations):
                for index, batch in enumerate(batches):
                    out = self.forward.loss(
                        batch,
                        old_logps=old_logps[index],
                        ref_logps=ref_logps[index],
                        denominator=denominator,
                        entropy_denominator=entropy_denominator,
                        **self.loss_options,
                    )
                    out.loss.backward()
                    losses.append(out.loss.detach())
                    metrics.append(out.metrics)
                    if iteration == 0 and iterations > 1:
                        old_logps[index] = out.logps
                norms.append(self._optimizer_step(rates[iteration]))
        values = {
            "loss": torch.stack(losses).sum() / iterations,
            "grad_norm": torch.stack(norms).mean(),
            **self._reported(sum(metrics).means()),
        }
        numbers = torch.stack([value.float() for value in values.values()]).tolist()  # the one host sync
        return dict(zip(values, numbers, strict=True)) | {"learning_rate": rates[-1]}

    def _learning_rate(self, optimizer_step: int) -> float:
        total = self.args.max_steps * self.args.loss.num_iterations
        return learning_rate(self.args.optim, optimizer_step, total)

    def _optimizer_step(self, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.args.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _reported(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """What means something: no KL without a reference, and the clip ratio of the loss in use."""
        cispo = self.args.loss.loss_type == "cispo"
        absent = {name for name in means if "clip_ratio" in name and name.startswith("cispo") != cispo}
        if self.args.loss.beta == 0:
            absent.add("kl")
        return {name: value for name, value in means.items() if name not in absent}
