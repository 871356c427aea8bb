"""The GRPO update: optimizer steps on one rollout, the same however it is split into micro-batches."""

import dataclasses

import torch
from torch import Tensor, nn

from grpo_fast import parallel
from grpo_fast.batching import MicroBatch, MicroBatches, Trained, denominators
from grpo_fast.config import GRPOConfig
from grpo_fast.forward import PolicyForward, UpdateOutput
from grpo_fast.optim import learning_rate, make_optimizer, with_learning_rate
from grpo_fast.sampling_correction import SamplingCorrection, mismatch_metrics
from grpo_fast.types import LossMetrics

_NOT_THE_LOSS = ("num_iterations", "scale_rewards", "advantage_std", "count_dead_groups", "backend")  # of section loss


class _Known:
    """What is known of the step's trained tokens, in flat arrays, and what the first iteration adds to it."""

    def __init__(
        self, trained: Trained, ref_logps: Tensor | None, correction: SamplingCorrection | None, model: nn.Module
    ) -> None:
        device, dtype = model.device, torch.promote_types(model.dtype, torch.float32)
        self.ref_logps = ref_logps
        self.sampled = None
        if any(parallel.gather(trained.has_sampled_logps())):  # processes agree on what they will reduce
            self.sampled = trained.sampled_logps().to(device)
        self.correction = correction if self.sampled is not None else None
        self.logps = torch.zeros(trained.tokens, dtype=dtype, device=device)  # of the first iteration
        self.weights = None if self.correction is None else torch.ones(trained.tokens, device=device)
        self.is_first = True

    def of(self, batch: MicroBatch) -> dict:
        """Arguments of `PolicyForward.loss` for a micro-batch."""
        arguments = {} if self.ref_logps is None else {"ref_logps": self.ref_logps[batch.places]}
        if not self.is_first:
            arguments["old_logps"] = self.logps[batch.places]
        if self.correction is not None:
            weights = self.weights[batch.places]
            arguments["sampling_weights"] = weights if not self.is_first else lambda logps: self._weigh(batch, logps)
        return arguments

    def _weigh(self, batch: MicroBatch, logps: Tensor) -> Tensor:
        self.logps[batch.places] = logps.to(self.logps)
        weights = self.correction.weights(logps - self.sampled[batch.places])
        self.weights[batch.places] = weights.to(self.weights)
        return weights

    def note(self, batch: MicroBatch, out: UpdateOutput) -> None:
        """Keep the first iteration's log-probs; with a correction they are, those of tokens it leaves out included."""
        if self.is_first and self.correction is None:
            self.logps[batch.places] = out.logps.to(self.logps)


class GRPOUpdate:
    """Owns the optimizer; what PPO or DPO do differently is another class with this `__call__`.

    Args:
        forward: the policy's side of the update.
        args: sections loss, optim and rollout are read.
        correction: for tokens that were sampled from other probabilities than the policy's; None: none.
    """

    def __init__(self, forward: PolicyForward, args: GRPOConfig, correction: SamplingCorrection | None = None) -> None:
        args = dataclasses.replace(args, optim=with_learning_rate(args.optim, forward.model))
        self.forward, self.args, self.correction = forward, args, correction
        self.optimizer = make_optimizer(forward.model, args.optim)
        loss = dataclasses.asdict(args.loss)
        self.loss_options = {name: value for name, value in loss.items() if name not in _NOT_THE_LOSS}

    def __call__(
        self,
        trained: Trained,
        batches: MicroBatches,
        ref_logps: Tensor | None,
        counted: tuple[int, int],
        step: int,
    ) -> dict[str, float]:
        """loss.num_iterations optimizer steps.

        The first runs on-policy, its ratio is exactly 1; its log-probs are the old ones of those that follow.

        Args:
            trained: this process's completions.
            batches: of them.
            ref_logps: the reference's log-probs, float [trained.tokens], or None without a reference.
            counted: sequences and tokens of this process that denominators count.
            step: steps done before: each was `num_iterations` optimizer steps, by which the learning rate goes.

        Returns:
            loss and grad_norm (before clipping), means over the iterations; learning_rate of the last; the loss's
            metrics over all iterations; how far the sampler was from the policy. Where no process has a token to train
            on: no optimizer step, and zeros.
        """
        iterations, device = self.args.loss.num_iterations, self.forward.model.device
        sequences, tokens, to_train = parallel.sum_counts(*counted, trained.tokens)
        counts = denominators(self.args.loss.loss_type, sequences, tokens, self.args.rollout.max_completion_length)
        counts = dict(zip(("denominator", "entropy_denominator"), torch.tensor(counts, device=device), strict=True))
        known = _Known(trained, ref_logps, self.correction, self.forward.model)
        losses, norms, metrics = [], [], []
        for iteration in range(iterations):
            rate = self._learning_rate(step * iterations + iteration)
            metrics.append(self._unmoved(trained))
            if not to_train:
                continue
            with self.forward.mode():
                loss, of_loss = batches.run(lambda batches: self._backward(batches, known, counts))
            losses.append(loss)
            metrics.append(of_loss)
            norms.append(self._optimizer_step(rate))
            known.is_first = False
        nothing = [torch.zeros((), device=device)]
        values = {
            "loss": parallel.reduce(torch.stack(losses or nothing).mean()),
            "grad_norm": torch.stack(norms or nothing).mean(),
            **self._reported(parallel.sum_metrics(sum(metrics)).means()),
        }
        if known.sampled is not None:
            values |= mismatch_metrics(known.logps - known.sampled, known.weights)
        numbers = torch.stack([value.float() for value in values.values()]).tolist()  # the one host sync
        return dict(zip(values, numbers, strict=True)) | {"learning_rate": rate}

    def _backward(self, batches: list[MicroBatch], known: _Known, counts: dict) -> tuple[Tensor, LossMetrics]:
        """Gradients of this process's part of the loss, from zero; the part and its metrics."""
        self.optimizer.zero_grad()
        device = self.forward.model.device
        loss, metrics = torch.zeros((), device=device), LossMetrics.of(device)
        for batch in batches:
            out = self.forward.loss(batch, **known.of(batch), **counts, **self.loss_options)
            out.loss.backward()
            known.note(batch, out)
            loss, metrics = loss + out.loss.detach(), metrics + out.metrics
        return loss, metrics

    def _unmoved(self, trained: Trained) -> LossMetrics:
        """What is counted of completions that are in no micro-batch because nothing would move them."""
        by_sequence = self.args.loss.importance_sampling_level == "sequence"
        clips = trained.unmoved_rows if by_sequence else trained.unmoved_tokens
        device = self.forward.model.device
        return LossMetrics.of(
            device,
            tokens=torch.tensor(trained.unmoved_tokens, device=device),
            clip_count=torch.tensor(clips, device=device),
        )

    def _learning_rate(self, optimizer_step: int) -> float:
        total = self.args.max_steps * self.args.loss.num_iterations
        return learning_rate(self.args.optim, optimizer_step, total)

    def _optimizer_step(self, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        parallel.sum_gradients(parameters)
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
