"""linear_grpo_loss, forward and backward, against TRL, Liger, plain PyTorch and bare GEMMs.

    python -m benchmarks bench_linear_grpo_loss [--quick] [--rounds 3] [--heads 49152x576 151936x1024]
                                                [--batches 1:0 128:0 128:0.4] [--sequences 8] [--peers trl]

The whole table takes half an hour on two cores. What less workspace costs is in another file of results:
--heads 49152x576 --batches 1:0 --workspace-mib 16 --peers trl liger --output bench_linear_grpo_loss_small_workspace

Every variant gets the same hidden states [B, P + C, D], the output of a graph as from a model, the same weight, tokens,
advantages and old log-probs, and hands back the gradient of all of hidden and, where the head is trainable, of the
weight. A batch is named by its prompts' length and the share of its sequences whose advantage is 0 (rounded to whole
sequences). A prompt of 1 token is the least there is: something has to predict the first token of a completion.

What each of them multiplies, from its source, and held to it by the column `gemms` (measured: the FLOPs of all matrix
products over 2 V D times the rows named here):

* grpo_fast: the completions' rows with a gradient, 3 GEMMs, 2 with a frozen head.
* TRL 1.16: B (P + C - 1) rows on a CPU. GRPOTrainer labels prompts -100 (trl/trainer/grpo_trainer.py:1496) and its head
  drops these positions only on devices with Triton, cuda and xpu; elsewhere every position but the last goes in
  (trl/trainer/utils.py:1618, 1642). So what prompts cost TRL here says nothing about a GPU. There are 4 GEMMs, 3 with a
  frozen head, since the backward makes the logits again (trl/kernels/chunked_logprob.py:356, 425), in tiles of 4096
  tokens x 32768 of the vocabulary; the entropy is asked for in every forward (trl/trainer/grpo_trainer.py:1072).
* Liger 0.8.5: B C rows, 4 or 3 GEMMs, one sequence at a time (chunk_size 1, liger_kernel/chunked_loss/
  fused_linear_ppo.py:381) in tiles of 4096 of the vocabulary (:9). TRL, while it used it, gave it the C hidden states
  that predict (trl/trainer/grpo_trainer.py:1336 and 2885 of 1.9.0), compiled, which is the default.
* plain PyTorch: B C rows, 3 or 2 GEMMs, all logits in memory.

Nobody but grpo_fast leaves out sequences whose advantage is 0. The roof is the bare GEMMs of the rows with a gradient,
at once or in grpo_fast's chunks, whichever is faster in this run, into memory that is there (`share_of_gemms`), or with
the gradients in new memory (`share_of_gemms_new_gradients`): a step hands its gradients away, so every variant has to
make new ones, and on a CPU a fresh page costs more than the arithmetic on it. 49152 x 576 is SmolLM2-135M's head and
151936 x 1024 Qwen3-0.6B's. Where the profiler announces itself on stderr, KINETO_LOG_LEVEL=99 silences it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import grpo_fast as gf

from .bench_grpo_loss import FromModel
from .harness import Variant, interleave, load_average, peak_bytes, print_table, write_csv
from .linear_peers import Batch, Loss, bare_gemms, losses, policy_loss

COMPLETION = 64
WORKSPACE_MIB = 512  # linear_grpo_loss's default on a CPU, handed to it, since the bare GEMMs take its chunks
CHECKED = 16  # rows of hidden and of the weight compared with float64
NEW_GRADIENTS = "gemms, new gradients"
PEERS = ("trl", "liger", "liger compiled", "plain")
ERRORS = ("loss_error", "dhidden_error", "dweight_error")


@dataclass
class Case:
    """A batch, its hidden states, and what float64 makes of it."""

    hidden: Tensor  # (B, P + C, D)
    weight: torch.nn.Parameter  # (V, D)
    batch: Batch
    loss: Tensor
    rows: Tensor  # (CHECKED,) completion rows, of B * C
    dhidden: Tensor  # (CHECKED, D)
    vocab: Tensor  # (CHECKED,) rows of the weight
    dweight: Tensor  # (CHECKED, D)

    @property
    def live_hidden(self) -> Tensor:
        return self.hidden[self.batch.live, self.batch.predicting].flatten(0, 1)

    def variant(self, name: str, loss: Loss, trainable: bool) -> Variant:
        def prepare() -> None:
            self.weight.requires_grad_(trainable)
            self.weight.grad = None

        return Variant(name, partial(self.step, loss), prepare)

    def step(self, loss: Loss) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forward and backward: the loss and the gradients of hidden and weight."""
        sink: list[Tensor] = []
        hidden = FromModel.apply(torch.zeros(1, requires_grad=True), self.hidden, sink)
        value = loss(hidden, self.weight, self.batch)
        value.backward()
        return value.detach(), sink[0], self.weight.grad

    def errors(self, loss: Tensor, dhidden: Tensor, dweight: Tensor | None) -> dict[str, str]:
        """max|a - b| / max|b| against float64."""

        def error(got: Tensor, want: Tensor) -> str:
            return f"{((got.double() - want).abs().max() / want.abs().max()).item():.1e}"

        completion = dhidden[:, self.batch.predicting].flatten(0, 1)
        found = (
            error(loss, self.loss),
            error(completion[self.rows], self.dhidden),
            "-" if dweight is None else error(dweight[self.vocab], self.dweight),
        )
        return dict(zip(ERRORS, found, strict=True))


def cases(
    vocab: int, hidden_size: int, count: int, batches: list[tuple[int, float]], completion_length: int
) -> Iterator[Case]:
    """One weight and one set of completions for all of them; float64 sees these once."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(vocab, hidden_size, generator=rng) * 2 / hidden_size**0.5)
    hidden = torch.randn(count, max(prompt for prompt, _ in batches) + completion_length, hidden_size, generator=rng)
    ids = torch.randint(0, vocab, hidden.shape[:2], generator=rng)
    completion = hidden[:, -completion_length - 1 : -1].flatten(0, 1).double()
    targets = ids[:, -completion_length:].flatten()
    rows = torch.arange(0, targets.numel(), targets.numel() // CHECKED)[:CHECKED]
    some_vocab = torch.cat([targets[rows[: CHECKED // 2]], torch.arange(0, vocab, vocab // CHECKED)])[:CHECKED]

    weight64 = weight.detach().double()
    logps, some_probs, means = [], [], []  # of 64 rows at a time, a fraction of the logits' float64
    for start in range(0, targets.numel(), 64):
        part = slice(start, start + 64)
        log_softmax = (completion[part] @ weight64.t()).log_softmax(-1)
        logps.append(log_softmax.gather(-1, targets[part, None])[:, 0])
        some_probs.append(log_softmax[:, some_vocab].exp())
        checked = rows[(rows >= start) & (rows < start + 64)] - start
        means.append(log_softmax[checked].exp() @ weight64)
    logps, some_probs = torch.cat(logps).view(count, completion_length), torch.cat(some_probs)
    directions = weight64[targets[rows]] - torch.cat(means)  # d logp / d hidden
    del weight64
    old_logps = (logps + 0.1 * torch.randn(logps.shape, generator=rng)).float()
    advantages = torch.randn(count, generator=rng)

    for prompt, share in batches:
        live = torch.arange(count) >= round(share * count)
        length = prompt + completion_length
        batch = Batch(ids[:, -length:].contiguous(), advantages * live, old_logps)
        exact_logps = logps.clone().requires_grad_()
        exact = Batch(batch.ids, batch.advantages.double(), old_logps.double())
        loss = policy_loss(exact_logps, exact)
        loss.backward()
        dlogps = exact_logps.grad.flatten()
        hits = (targets[:, None] == some_vocab).double()
        yield Case(
            hidden[:, -length:].contiguous(), weight, batch, loss.detach(), rows, dlogps[rows, None] * directions,
            some_vocab, (dlogps[:, None] * (hits - some_probs)).t() @ completion,
        )  # fmt: skip


def profiled(variant: Variant) -> tuple[int, object]:
    """The FLOPs of every matrix product in one call, from the shapes the profiler saw; and what the call returned."""
    variant.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        result = variant.run()
    flops = 0
    for event in profile.events():
        if event.name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_"):
            first = int("add" in event.name)  # what is added to; behind the factors there may be an out=
            (*many, m, k), (*_, n) = event.input_shapes[first : first + 2]
            flops += 2 * math.prod(many) * m * k * n
    return flops, result


def gemm_rows(name: str, batch: Batch) -> int:
    """Rows of hidden that a variant multiplies; the module's docstring says why."""
    sequences, positions = batch.ids.shape
    if name == "trl":
        return sequences * (positions - 1)
    if name == "grpo_fast" or name.startswith("gemms"):
        return int(batch.live.sum()) * batch.completion
    return sequences * batch.completion


def examine(case: Case, variant: Variant, is_loss: bool) -> tuple[int, int, dict[str, str]]:
    """FLOPs, peak bytes and errors, from two calls; the first one compiles what there is to compile."""
    flops, result = profiled(variant)
    errors = case.errors(*result) if is_loss else dict.fromkeys(ERRORS, "-")
    del result
    gf.release_workspace()  # what is kept between calls counts
    return flops, peak_bytes(variant), errors


def measure(case: Case, candidates: dict[str, Loss], rounds: int, workspace_bytes: int) -> list[dict[str, object]]:
    vocab, hidden_size = case.weight.shape
    roofs, variants = {}, {}
    for trainable in (True, False):
        for name, loss in candidates.items():
            if trainable or name != "liger compiled":
                variants[name, trainable] = case.variant(name, loss, trainable)
        rows, chunk = case.live_hidden.shape[0], max(1, workspace_bytes // (4 * vocab))
        for name, size, new in (
            ("gemms at once", rows, False),
            ("gemms in chunks", chunk, False),
            (NEW_GRADIENTS, rows, True),
        ):
            roofs[name, trainable] = Variant(name, bare_gemms(case.live_hidden, case.weight, trainable, size, new))
    every = {**roofs, **variants}
    load = load_average()
    checked = {key: examine(case, v, key[0] in candidates) for key, v in every.items()}
    interleave(list(every.values()), rounds, warm_up=False)

    table = []
    for (name, trainable), v in every.items():
        roof = min(r.median for (other, kind), r in roofs.items() if kind == trainable and other != NEW_GRADIENTS)
        rows = gemm_rows(name, case.batch)
        row: dict[str, object] = {
            "vocab": vocab,
            "hidden": hidden_size,
            "sequences": case.batch.ids.shape[0],
            "prompt": case.batch.prompt,
            "completion": case.batch.completion,
            "dead": f"{1 - case.batch.live.float().mean().item():.1%}",
            "head": "trainable" if trainable else "frozen",
            "variant": name,
            "median_ms": f"{v.median * 1e3:.0f}",
            "min_ms": f"{min(v.seconds) * 1e3:.0f}",
            "iqr": f"{v.spread:.0%}",
        }
        for peer in ("trl", "liger", "plain"):
            theirs = variants.get((peer, trainable))
            row[f"times_faster_than_{peer}"] = f"{theirs.median / v.median:.2f}" if theirs else "-"
        flops, peak, errors = checked[name, trainable]
        row |= {
            "share_of_gemms": f"{roof / v.median:.0%}",
            "share_of_gemms_new_gradients": f"{roofs[NEW_GRADIENTS, trainable].median / v.median:.0%}",
            "gemm_rows": rows,
            "gemms": f"{flops / (2 * vocab * hidden_size * rows):.2f}",
            "peak_mib": f"{peak / 2**20:.0f}",
            **errors,
        }
        table.append({**row, "workspace_mib": workspace_bytes >> 20, "rounds": rounds, "load_before": load})
    return table


def head_shape(text: str) -> tuple[int, int]:
    """ "49152x576" -> (49152, 576): vocabulary and hidden size."""
    vocab, hidden_size = text.split("x")
    return int(vocab), int(hidden_size)


def batch_shape(text: str) -> tuple[int, float]:
    """ "128:0.4" -> (128, 0.4): prompt length and share of sequences without an advantage."""
    prompt, dead = text.split(":")
    if int(prompt) < 1:
        raise argparse.ArgumentTypeError(f"expected a prompt of at least 1 token, got {prompt}")
    return int(prompt), float(dead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of one small case, no CSV")
    parser.add_argument("--rounds", type=int, default=3)
    heads = [(vocab, hidden_size) for vocab in (49152, 151936) for hidden_size in (576, 1024)]
    parser.add_argument("--heads", type=head_shape, nargs="+", default=heads, metavar="VxD")
    batches = [(prompt, dead) for prompt in (1, 128) for dead in (0.0, 0.4)]
    parser.add_argument("--batches", type=batch_shape, nargs="+", default=batches, metavar="PROMPT:DEAD")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--workspace-mib", type=int, default=WORKSPACE_MIB, help="grpo_fast's")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=("trl", "liger", "plain"))
    parser.add_argument("--output", default="bench_linear_grpo_loss", help="name of the CSV in benchmarks/results")
    args = parser.parse_args()
    if args.quick:
        args.heads, args.batches, args.rounds = [(8192, 256)], [(32, 0.4)], 3

    candidates = {
        n: loss for n, loss in losses(args.workspace_mib << 20).items() if n == "grpo_fast" or n in args.peers
    }
    rows = []
    for vocab, hidden_size in args.heads:
        for case in cases(vocab, hidden_size, args.sequences, args.batches, COMPLETION):
            rows.append(measure(case, candidates, args.rounds, args.workspace_mib << 20))
            print_table(rows[-1])
    if not args.quick:
        print(write_csv(args.output, [row for case in rows for row in case]))


if __name__ == "__main__":
    main()
