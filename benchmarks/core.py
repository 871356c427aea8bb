"""The core table: the loss, from logits and from hidden states, against every peer installed, one factor at a time.

    python -m benchmarks [--quick | --full] [--cells base "dead 40%"] [--fresh] [--output NAME]

Runs on the GPU where there is one (bfloat16), else on the CPU (float32, fewer tokens). All variants of a cell get the
same tensors, as the output of a graph, and hand their gradients back; they run interleaved, in a new order each round.
Rows are written as a cell's path ends, and a run that was stopped goes on behind the last; --fresh starts over, and so
does a run on another device, torch or commit than the file's.

Columns: bytes is the least that the path has to move (from logits: read once, gradient written once; from hidden
states: inputs read, gradients written), gb_per_s that over the median, share_of_copy against a copy in the same run,
share_of_gemms the bare matrix products of the rows with a gradient over the median. error: the largest of the loss and
the gradients, as max|a-b|/max|b| against float64. first_ms: the first call in this process, new_length_ms: one call at
a length that nothing was compiled for. Memory is beyond the inputs.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import grpo_fast as gf

from . import contenders
from .bench_grpo_loss import FromModel
from .cells import CORE, FULL, QUICK, Problem
from .harness import RESULTS, Variant, call, interleave, machine, peak_bytes, print_table, read_csv, synchronize, timed
from .linear_peers import bare_gemms

ROUNDS = 9
LABELS = {"hidden": "from hidden states", "logits": "from logits"}
SHOWN = (
    "variant", "median_ms", "iqr", "times_faster_than_best_peer", "share_of_copy", "share_of_gemms", "peak_mib",
    "error", "first_ms",
)  # fmt: skip
COPY = 2**26  # elements that are copied to tell the memory's bandwidth


class LossPath:
    """One of a cell's two problems: how a contender is called on it, what is exact, and what it has to move."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parameter = torch.zeros(1, device=problem.hidden.device, requires_grad=True)

    def variant(self, name: str, contender: Callable) -> Variant:
        return Variant(name, partial(self.step, contender), self.prepare)


class LogitsPath(LossPath):
    name = "logits"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        with torch.no_grad():
            self.source = problem.hidden[:, :-1] @ problem.weight.t()
        self.logits = self.source.clone()
        self.bytes = 2 * self.logits.numel() * self.logits.element_size()

    def prepare(self) -> None:
        self.logits.copy_(self.source)

    def step(self, contender: contenders.FromLogits) -> tuple[Tensor, ...]:
        sink: list[Tensor] = []
        loss = contender(self.problem, FromModel.apply(self.parameter, self.logits, sink))
        loss.backward()
        return loss.detach(), sink[0]

    def exact(self) -> tuple[Tensor, ...]:
        """By the reference in float64, some sequences at a time: the loss is their sum with one denominator."""
        problem, loss, gradients = self.problem, 0.0, []
        tokens = problem.mask.sum()
        for b in range(len(problem.ids)):
            part = slice(b, b + 1)
            logits = self.source[part].double().requires_grad_()
            options = problem.options() | {"old_logps": problem.old_logps[part]}
            if problem.ref_logps is not None:
                options["ref_logps"] = problem.ref_logps[part]
            out = gf.grpo_loss(
                logits, problem.targets[part], problem.advantages[part], problem.mask[part], **options,
                denominator=len(problem.ids), entropy_denominator=tokens,
            )  # fmt: skip
            loss = loss + out.loss.detach()
            gradients.append(torch.autograd.grad(out.loss, logits)[0].float())
        return loss, torch.cat(gradients)

    def contenders(self) -> dict[str, Callable]:
        return {n: lambda c=c: c for n, c in contenders.from_logits(self.logits.device).items()}


class HiddenPath(LossPath):
    name = "hidden"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        weight, size = problem.weight, problem.weight.element_size()
        self.bytes = size * (2 * problem.hidden.numel() + weight.numel() * (1 if problem.cell.frozen else 2))

    def prepare(self) -> None:
        self.problem.weight.grad = None

    def step(self, contender: contenders.FromHidden) -> tuple[Tensor, ...]:
        sink: list[Tensor] = []
        hidden = FromModel.apply(self.parameter, self.problem.hidden, sink)
        loss = contender(self.problem, hidden, self.problem.weight)
        loss.backward()
        weight = self.problem.weight
        return (loss.detach(), sink[0]) if weight.grad is None else (loss.detach(), sink[0], weight.grad)

    def exact(self) -> tuple[Tensor, ...]:
        problem = self.problem
        hidden = problem.hidden.double().requires_grad_()
        weight = problem.weight.detach().double().requires_grad_(problem.weight.requires_grad)
        out = gf.linear_grpo_loss(
            hidden[:, :-1], weight, problem.targets, problem.advantages, problem.mask, **problem.options()
        )
        out.loss.backward()
        return tuple(x for x in (out.loss.detach(), hidden.grad, weight.grad) if x is not None)

    def contenders(self) -> dict[str, Callable]:
        return contenders.from_hidden(self.problem.cell, self.problem.hidden.device)

    def gemms(self) -> Variant:
        problem = self.problem
        rows = problem.hidden[:, :-1].flatten(0, 1)[: problem.live_rows].contiguous()
        chunk = max(1, (2 << 30 if rows.is_cuda else 512 << 20) // (4 * problem.cell.vocab))
        return Variant("bare GEMMs", bare_gemms(rows, problem.weight, not problem.cell.frozen, chunk))


def error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    def of(a: Tensor, b: Tensor) -> float:
        if a.numel() > 2**24:  # some rows tell as much
            a, b = a.flatten(0, -2)[::16], b.flatten(0, -2)[::16]
        return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()

    return max(of(a, b) for a, b in zip(got, want, strict=True))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of the best of some copies."""
    source, target = torch.ones(2, COPY, device=device)
    variant = Variant("copy", lambda: target.copy_(source))
    timed(variant)
    return 2 * source.numel() * source.element_size() / min(timed(variant) for _ in range(5))


def fits(path: LossPath) -> bool:
    """Whether there is memory for what is exact: float64 of the weight and its gradient, beside the variants'."""
    if path.problem.hidden.is_cuda:
        return True
    return 32 * path.problem.weight.numel() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def measure(path: LossPath, budget: float, copy: float) -> list[dict[str, str]]:
    """A path's rows; about `budget` seconds of timed calls, one round at least."""
    problem, cell = path.problem, path.problem.cell
    want = path.exact() if fits(path) else None
    variants, first, errors, skipped = [], {}, {}, []
    for name, make in path.contenders().items():
        # Whatever a peer's kernels, compiler or imports have against this machine is the peer's row, not our end.
        try:
            variant = path.variant(name, make())
            first[name], result = call(variant)
            errors[name] = f"{error(result, want):.1e}" if want else "-"
            del result
        except Exception as reason:
            said = str(reason).strip().splitlines() or [""]
            skipped.append((name, f"{type(reason).__name__}: {said[0][:100]}"))
            continue
        variants.append(variant)
    del want
    gc.collect()
    roof = path.gemms() if isinstance(path, HiddenPath) else None
    peaks, start = {}, time.perf_counter()
    for variant in variants:
        gf.release_workspace()  # what is kept between calls counts
        peaks[variant.name] = peak_bytes(variant)
    if roof:
        timed(roof)
    once = time.perf_counter() - start
    timings = [*variants, *([roof] if roof else [])]
    interleave(timings, min(ROUNDS, max(1, round(budget / once))), warm_up=False)
    shorter = type(path)(problem.shorter())
    new_length = {}
    for variant in variants:
        contender = variant.run.args[0]
        new_length[variant.name] = timed(shorter.variant(variant.name, contender))
    peers = [v.median for v in variants if not v.name.startswith("grpo_fast")]
    about = {
        "cell": cell.name, "path": path.name, "vocab": cell.vocab, "hidden": cell.hidden, "tokens": cell.tokens,
        "masked": cell.masked, "dead": cell.dead, "head": "frozen" if cell.frozen else "trainable", "level": cell.level,
        "beta": cell.beta, "entropy_coef": cell.entropy_coef,
        "dtype": str(problem.hidden.dtype).removeprefix("torch."),
    }  # fmt: skip
    rows = []
    for v in variants:
        rate = path.bytes / v.median
        rows.append({
            **about, "variant": v.name, "median_ms": f"{v.median * 1e3:.2f}", "min_ms": f"{min(v.seconds) * 1e3:.2f}",
            "iqr": f"{v.spread:.0%}" if len(v.seconds) > 1 else "-", "rounds": len(v.seconds),
            "times_faster_than_best_peer": f"{min(peers) / v.median:.2f}" if peers else "-",
            "bytes": path.bytes, "gb_per_s": f"{rate / 1e9:.1f}", "share_of_copy": f"{rate / copy:.0%}",
            "share_of_gemms": f"{roof.median / v.median:.0%}" if roof else "-",
            "peak_mib": f"{peaks[v.name] / 2**20:.0f}", "error": errors[v.name],
            "first_ms": f"{first[v.name] * 1e3:.1f}", "new_length_ms": f"{new_length[v.name] * 1e3:.1f}", "skipped": "",
        })  # fmt: skip
    empty = dict.fromkeys(rows[0], "")
    return rows + [{**empty, **about, "variant": name, "skipped": reason} for name, reason in skipped]


def paths(problem: Problem, done: set[tuple[str, str]]) -> Iterator[LossPath]:
    cell = problem.cell
    if (cell.name, "hidden") not in done:
        yield HiddenPath(problem)
    if cell.has_logits_path and (cell.name, "logits") not in done:
        yield LogitsPath(problem)


def divisor(device: torch.device, quick: bool) -> int:
    """By how much the tokens of every cell are fewer here: those of the longest need ten times their logits' bytes."""
    if device.type == "cpu":
        return 64 if quick else 32
    divisor, memory = 1, torch.cuda.get_device_properties(device).total_memory
    while 10 * 2 * 32768 // divisor * 151936 > memory:
        divisor *= 2
    return divisor


def append(name: str, rows: list[dict[str, str]], about: dict[str, str]) -> None:
    path = RESULTS / f"{name}.csv"
    is_new = not path.exists()
    RESULTS.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        if is_new:
            writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


def plot(name: str) -> None:
    """The fastest peer over grpo_fast's fastest, by cell and path."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in read_csv(name) if not row["skipped"]]
    names = list(dict.fromkeys(row["cell"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(names) + 1.2))
    for offset, path in zip((-0.2, 0.2), LABELS, strict=True):
        best: dict[str, float] = {}
        for row in rows:
            times = row["times_faster_than_best_peer"]
            if row["path"] == path and row["variant"].startswith("grpo_fast") and times != "-":
                best[row["cell"]] = max(best.get(row["cell"], 0.0), float(times))
        places = [names.index(cell) + offset for cell in best]
        axes.barh(places, list(best.values()), height=0.38, label=LABELS[path])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("fastest peer's time / grpo_fast's, forward and backward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    pyplot.close(figure)
    print(RESULTS / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="five small cells, three minutes on two cores")
    extent.add_argument("--full", action="store_true", help="factors combined, too")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in FULL], metavar="NAME")
    parser.add_argument("--budget", type=float, help="seconds of timed calls a cell and path")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file of results holds")
    parser.add_argument("--output", help="name of the CSV in benchmarks/results")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = torch.cuda.get_device_name().split()[-1].lower() if device.type == "cuda" else "cpu"
    name = args.output or f"core_{kind}" + ("_quick" if args.quick else "")
    cells = FULL if args.full or args.cells else CORE
    if args.quick:
        cells = [cell for cell in CORE if cell.name in QUICK]
    if args.cells:
        cells = [cell for cell in cells if cell.name in args.cells]
    budget = args.budget or (3.0 if device.type == "cuda" else 4.0 if args.quick else 20.0)
    about = machine()
    old = read_csv(name)
    if args.fresh or any(row[key] != about[key] for row in old for key in ("device", "torch", "commit")):
        (RESULTS / f"{name}.csv").unlink(missing_ok=True)
        old = []
    done = {(row["cell"], row["path"]) for row in old}
    torch._dynamo.config.recompile_limit = 256  # beyond it torch.compile would quietly run what it was given
    with tempfile.TemporaryDirectory() as folder:  # so that first calls compile
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        copy = copy_bandwidth(device)
        print(f"{about['device']}: copies {copy / 1e9:.1f} GB/s; results in {RESULTS / name}.csv")
        for cell in cells:
            if {(cell.name, "hidden"), (cell.name, "logits")} <= done:
                continue
            problem = Problem(cell.scaled(divisor(device, args.quick)), device, dtype)
            for path in paths(problem, done):
                rows = measure(path, budget, copy)
                append(name, rows, about)
                print(f"{cell.name}, {LABELS[path.name]}")
                print_table([{key: row[key] for key in SHOWN} for row in rows if not row["skipped"]])
                for row in rows:
                    if row["skipped"]:
                        print(f"  skipped {row['variant']}: {row['skipped']}")
            del problem
            gc.collect()
            synchronize()
    plot(name)


if __name__ == "__main__":
    main()
