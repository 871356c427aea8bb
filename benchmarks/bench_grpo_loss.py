"""grpo_loss, forward and backward, against eager PyTorch, torch.compile and TRL.

    python -m benchmarks.bench_grpo_loss [--quick] [--rounds 7] [--dtype float32 bfloat16] [--vocab 49152 151936]

Every variant gets the same non-leaf logits and hands its gradient to the same place, as in training, where logits come
out of a model. The roof is one in-place read-and-write of the logits, `mul_(1)`: the least that a gradient which
replaces the logits can cost. Bytes: in place 2 V s per row (s the element size), out of place 3 V s, since a store to
memory that is not in the cache reads it first unless it is non-temporal.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

import grpo_fast as gf

from .harness import Variant, interleave, load_average, peak_bytes, print_table, write_csv

B, T = 8, 128  # 1024 tokens
EPSILON = 0.2
CHECKED_ROWS = 64  # rows compared with float64, spread over the batch


class FromModel(torch.autograd.Function):
    """Makes `logits` the output of a graph whose backward keeps the gradient in `sink`."""

    @staticmethod
    def forward(ctx, parameter: Tensor, logits: Tensor, sink: list[Tensor]) -> Tensor:
        ctx.sink = sink
        return logits.new_empty(0).set_(
            logits
        )  # the same memory, yet no view, which autograd would not let us overwrite

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.sink.append(gradient)
        return gradient.new_zeros(1), None, None


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """The textbook clipped objective, mean over tokens of equal weight."""
    ratio = torch.exp(logps - old_logps)
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def eager_loss(logits: Tensor, ids: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    logps = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return policy_loss(logps, old_logps, advantages)


def logsumexp_loss(logits: Tensor, ids: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """The same without a log-softmax of the vocabulary's size: what a compiler fuses best."""
    logits = logits.float()
    logps = logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)
    return policy_loss(logps, old_logps, advantages)


def trl_loss() -> Callable[..., Tensor]:
    selective_log_softmax = importlib.import_module("trl.trainer.utils").selective_log_softmax

    def loss(logits: Tensor, ids: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
        return policy_loss(selective_log_softmax(logits, ids), old_logps, advantages)

    return loss


def fused_loss(inplace: bool) -> Callable[..., Tensor]:
    def loss(logits: Tensor, ids: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
        return gf.grpo_loss(
            logits, ids, advantages, old_logps=old_logps, epsilon=EPSILON, inplace=inplace, backend="cpu"
        ).loss

    return loss


def losses() -> dict[str, Callable[..., Tensor]]:
    found = {
        "grpo_fast in place": fused_loss(inplace=True),
        "grpo_fast": fused_loss(inplace=False),
        "eager": eager_loss,
        "compile": torch.compile(eager_loss),
        "compile logsumexp": torch.compile(logsumexp_loss),
    }
    try:
        found["trl"] = trl_loss()
    except ImportError as error:
        print(f"skipped trl: {error}")
    return found


class Problem:
    """One set of logits for all variants; `restore` undoes what an in-place variant did."""

    def __init__(self, vocab: int, dtype: torch.dtype):
        rng = torch.Generator().manual_seed(0)
        self.source = torch.randn(B, T, vocab, generator=rng).mul_(2).to(dtype)
        self.logits = self.source.clone()
        self.ids = torch.randint(0, vocab, (B, T), generator=rng)
        self.advantages = torch.randn(B, 1, generator=rng).expand(B, T).contiguous()
        picked = self.source.gather(-1, self.ids[..., None])[..., 0].float()
        logps = picked - torch.stack([row.float().logsumexp(-1) for row in self.source])
        self.old_logps = logps + 0.1 * torch.randn(B, T, generator=rng)
        self.parameter = torch.zeros(1, requires_grad=True)

    def restore(self) -> None:
        self.logits.copy_(self.source)

    def step(self, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Forward and backward; the loss and the gradient of the logits."""
        sink: list[Tensor] = []
        logits = FromModel.apply(self.parameter, self.logits, sink)
        value = loss(logits, self.ids, self.old_logps, self.advantages)
        value.backward()
        return value.detach(), sink[0]

    def float64_gradient(self) -> Tensor:
        """Of CHECKED_ROWS rows, [rows, V]; the tokens do not interact."""
        rows = torch.arange(0, B * T, B * T // CHECKED_ROWS)
        logits = self.source.flatten(0, 1)[rows].double().requires_grad_()
        vectors = (x.flatten()[rows] for x in (self.ids, self.old_logps, self.advantages))
        ids, old_logps, advantages = vectors
        logps = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        (policy_loss(logps, old_logps.double(), advantages.double()) * CHECKED_ROWS / (B * T)).backward()
        return logits.grad

    def error(self, loss: Callable[..., Tensor], want: Tensor) -> float:
        """max|gradient - float64| / max|float64| over the checked rows."""
        self.restore()
        _, gradient = self.step(loss)
        got = gradient.flatten(0, 1)[:: B * T // CHECKED_ROWS].double()
        return ((got - want).abs().max() / want.abs().max()).item()


def measure(vocab: int, dtype: torch.dtype, rounds: int) -> list[dict[str, object]]:
    problem = Problem(vocab, dtype)
    candidates = losses()
    roof = Variant("roof: logits.mul_(1)", lambda: problem.logits.mul_(1))
    variants = [Variant(name, lambda f=f: problem.step(f), problem.restore) for name, f in candidates.items()]
    load = load_average()
    interleave([roof, *variants], rounds)
    peaks = {v.name: peak_bytes(v) for v in variants}
    want = problem.float64_gradient()
    errors = {name: problem.error(f, want) for name, f in candidates.items()}
    fastest_peer = min(v.median for v in variants if not v.name.startswith("grpo_fast"))
    input_bytes = problem.logits.numel() * problem.logits.element_size()
    return [
        {
            "tokens": B * T,
            "vocab": vocab,
            "dtype": str(dtype).removeprefix("torch."),
            "variant": v.name,
            "median_ms": f"{v.median * 1e3:.1f}",
            "min_ms": f"{min(v.seconds) * 1e3:.1f}",
            "iqr": f"{v.spread:.0%}",
            "gb_per_s": f"{2 * input_bytes / v.median / 1e9:.1f}",
            "times_faster_than_best_peer": f"{fastest_peer / v.median:.2f}",
            "share_of_roof": f"{roof.median / v.median:.0%}",
            "peak_above_input": f"{peaks[v.name] / input_bytes:.1%}" if v.name in peaks else "-",
            "gradient_error": f"{errors[v.name]:.1e}" if v.name in errors else "-",
            "rounds": rounds,
            "load_before": load,
        }
        for v in [roof, *variants]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of one small case, no CSV")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--output", default="bench_grpo_loss", help="name of the CSV in benchmarks/results")
    args = parser.parse_args()
    if args.quick:
        args.vocab, args.dtype, args.rounds = [8192], ["float32"], 3

    rows = []
    for dtype in args.dtype:
        for vocab in args.vocab:
            rows.append(measure(vocab, getattr(torch, dtype), args.rounds))
            print_table(rows[-1])
    if not args.quick:
        print(write_csv(args.output, [row for case in rows for row in case]))


if __name__ == "__main__":
    main()
