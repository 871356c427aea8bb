"""Writes the README's tables from benchmarks/results: python -m benchmarks.report. Numbers are never typed by hand."""

import argparse
import csv
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    table = [header, ("---",) * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def loss_table() -> str:
    """Forward and backward of the loss from logits, one line a variant."""
    results = rows("bench_grpo_loss.csv")
    header = (
        "logits", "variant", "median ms", "against the fastest peer", "of the roof", "peak above the input",
        "gradient error",
    )  # fmt: skip
    lines = [
        (
            f"({r['tokens']}, {r['vocab']}) {r['dtype']}", r["variant"], r["median_ms"],
            f"{r['times_faster_than_best_peer']}x", r["share_of_roof"], r["peak_above_input"], r["gradient_error"],
        )
        for r in results
    ]  # fmt: skip
    first = results[0]
    made = (
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, trl {first['trl']}, {first['rounds']} "
        f"interleaved rounds, {first['date']}. The roof is one in-place read and write of the same tensor, measured in "
        "the same run; errors are max|a-b|/max|b| against float64."
    )
    return f"{markdown(header, lines)}\n\n{made}"


def head_table() -> str:
    """The fused lm_head, forward and backward: grpo_fast's line of each case, with what its peers need beside it."""
    results = rows("bench_linear_grpo_loss.csv") + rows("bench_linear_grpo_loss_small_workspace.csv")
    case_of = ("vocab", "hidden", "sequences", "prompt", "completion", "dead", "head", "workspace_mib")
    variants = {(*(r[name] for name in case_of), r["variant"]): r for r in results}
    header = (
        "V x D", "sequences", "prompt + completion", "advantage 0", "head", "workspace MiB", "median ms", "TRL / ours",
        "Liger / ours", "plain PyTorch / ours", "of the bare GEMMs (with new gradients)", "peak MiB", "TRL", "Liger",
        "plain", "worst error",
    )  # fmt: skip
    lines = []
    for *case, name in variants:
        if name != "grpo_fast":
            continue
        ours = variants[*case, name]
        peers = [variants.get((*case, peer)) for peer in ("trl", "liger", "plain")]
        speeds = (f"{ours[f'times_faster_than_{peer}']}x".replace("-x", "-") for peer in ("trl", "liger", "plain"))
        errors = (ours[f"{part}_error"] for part in ("loss", "dhidden", "dweight"))
        lines.append((
            f"{ours['vocab']} x {ours['hidden']}", ours["sequences"], f"{ours['prompt']} + {ours['completion']}",
            ours["dead"], ours["head"], ours["workspace_mib"], ours["median_ms"], *speeds,
            f"{ours['share_of_gemms']} ({ours['share_of_gemms_new_gradients']})", ours["peak_mib"],
            *(peer["peak_mib"] if peer else "-" for peer in peers), max((e for e in errors if e != "-"), key=float),
        ))  # fmt: skip
    first = results[0]
    made = (
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, trl {first['trl']}, liger-kernel "
        f"{first['liger-kernel']}, float32, {first['rounds']} interleaved rounds, {first['date']}. Peaks are above the "
        "inputs. Every peer is given the rows it multiplies in its own trainer on a CPU; "
        "`benchmarks/bench_linear_grpo_loss.py` says which and where that is written."
    )
    return f"{markdown(header, lines)}\n\n{made}"


# What the project set out for, TRL / ours by (cell, dead, phase).
STEP_TARGETS = {
    ("small", "0", "rollout"): "1.3", ("small", "0", "update"): "1.9", ("small", "0", "step"): "1.8",
    ("medium", "0", "rollout"): "1.3", ("medium", "0", "update"): "2.6", ("medium", "0", "step"): "2.4",
    ("medium", "0.5", "update"): "5", ("medium", "0.5", "step"): "3.5",
    ("long", "0", "rollout"): "1.3",
}  # fmt: skip


def train_step_table() -> str:
    """A training step by phases, ours beside TRL's."""
    results = rows("bench_train_step.csv")
    sides = {(r["cell"], r["dead"], r["phase"], r["side"]): r for r in results}
    header = (
        "G, P, C", "layers", "groups dead", "phase", "seconds", "TRL", "TRL / ours", "target", "by FLOPs",
        "tokens through the layers", "TRL", "rows of the head", "TRL", "peak MiB", "TRL",
    )  # fmt: skip
    lines = []
    for (cell, dead, phase, side), ours in sides.items():
        if side != "grpo_fast":
            continue
        trl = sides[cell, dead, phase, "trl"]
        lines.append((
            f"{ours['group']}, {ours['prompt']}, {ours['completion']}", ours["layers"], f"{float(dead):.0%}", phase,
            ours["seconds"], trl["seconds"], f"{ours['trl_over_this']}x", STEP_TARGETS.get((cell, dead, phase), "-"),
            f"{ours['predicted']}x", ours["trunk_tokens"], trl["trunk_tokens"], ours["head_rows"], trl["head_rows"],
            ours["peak_mib"], trl["peak_mib"],
        ))  # fmt: skip
    first = results[0]
    made = (
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, "
        f"trl {first['trl']}, float32, {first['groups']} groups, {first['rounds']} interleaved rounds, {first['date']}."
    )
    return f"{markdown(header, lines)}\n\n{made}"


def demo_table() -> str:
    """The offline demo by seed."""
    header = ("seed", "held-out accuracy before", "after", "rise", "seconds")
    names = ("seed", "accuracy_before", "accuracy_after", "rise", "seconds")
    return markdown(header, [tuple(row[name] for name in names) for row in rows("demo_seeds.csv")])


CORE_PEERS = ("trl", "liger", "torch.compile", "torch")


def core_table() -> str:
    """The core table of a CPU: grpo_fast's time, and everybody else's over it."""
    results = [row for row in rows("core_cpu.csv") if not row["skipped"]]
    header = (
        "cell", "from", "variant", "tokens", "ms", *(f"{peer} / ours" for peer in CORE_PEERS), "of the bare GEMMs",
        "of a copy", "peak MiB", "least of the peers'", "error",
    )  # fmt: skip
    lines = []
    for path in ("hidden", "logits"):
        for cell in dict.fromkeys(row["cell"] for row in results if row["path"] == path):
            found = {row["variant"]: row for row in results if (row["cell"], row["path"]) == (cell, path)}
            peers = {name: row for name, row in found.items() if not name.startswith("grpo_fast")}
            for name, ours in found.items():
                if name in peers:
                    continue
                times = [
                    f"{float(peers[p]['median_ms']) / float(ours['median_ms']):.2f}x" if p in peers else "-"
                    for p in CORE_PEERS
                ]
                least = min(int(row["peak_mib"]) for row in peers.values())
                lines.append((
                    cell, path, name, ours["tokens"], ours["median_ms"], *times, ours["share_of_gemms"],
                    ours["share_of_copy"], ours["peak_mib"], str(least), ours["error"],
                ))  # fmt: skip
    first = results[0]
    made = (
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, trl {first['trl']}, liger-kernel "
        f"{first['liger-kernel']}, {first['dtype']}, {first['date']}; tokens are a thirty-second of a GPU's."
    )
    return f"{markdown(header, lines)}\n\n{made}"


def xray_table() -> str:
    """The kernels' machine code, compiled offline, and what it leaves possible."""
    names = ("kernel", "sm", "registers", "stack", "spills", "instructions", "mufu", "load", "store")
    header = (*names[:5], "instructions per logit", "MUFU per logit", "load bits", "store bits")
    shown = [row for row in rows("xray.csv") if row["dtype"] == "bfloat16" and row["sm"] != "80"]
    return markdown(header, [tuple(row[name] for name in names) for row in shown])


def bounds_table() -> str:
    """The walls of forward and backward, modelled."""
    walls = ("memory_ms", "issue_ms", "mufu_ms", "bound_by")
    names = ("gpu", "tokens", "vocabulary", "kernels", "bytes_per_logit", *walls)
    header = ("GPU", *names[1:4], "bytes per logit", "memory ms", "issue ms", "MUFU ms", "bound by")
    return markdown(
        header, [tuple(row[name] for name in names) for row in rows("bounds.csv") if row["shape"] == "Qwen3"]
    )


def fill(text: str, section: str, content: str) -> str:
    """`text` with what stands between the section's two markers replaced, and nothing else."""
    pattern = rf"(<!-- {section}: begin -->\n).*?(<!-- {section}: end -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text, flags=re.DOTALL)
    assert count == 1, f"README.md has {count} sections {section}"
    return filled


TABLES = (
    ("demo", demo_table),
    ("train_step", train_step_table),
    ("core", core_table),
    ("benchmarks", loss_table),
    ("head", head_table),
    ("xray", xray_table),
    ("bounds", bounds_table),
)


def filled(text: str) -> str:
    for section, table in TABLES:
        text = fill(text, section, table())
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
