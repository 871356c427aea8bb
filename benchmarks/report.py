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


def demo_table() -> str:
    """The offline demo by seed."""
    header = ("seed", "held-out accuracy before", "after", "rise", "seconds")
    names = ("seed", "accuracy_before", "accuracy_after", "rise", "seconds")
    return markdown(header, [tuple(row[name] for name in names) for row in rows("demo_seeds.csv")])


def sass_table() -> str:
    """The Triton kernels' machine code, compiled offline."""
    names = ("kernel", "dtype", "sm", "registers", "stack", "spills", "instructions", "mufu", "load", "store")
    header = (*names[:6], "instructions per logit", "MUFU per logit", "load bits", "store bits")
    shown = [row for row in rows("sass.csv") if row["dtype"] == "bfloat16"]
    return markdown(header, [tuple(row[name] for name in names) for row in shown])


def fill(text: str, section: str, content: str) -> str:
    """`text` with what stands between the section's two markers replaced, and nothing else."""
    pattern = rf"(<!-- {section}: begin -->\n).*?(<!-- {section}: end -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text, flags=re.DOTALL)
    assert count == 1, f"README.md has {count} sections {section}"
    return filled


def filled(text: str) -> str:
    for section, table in (("demo", demo_table), ("benchmarks", loss_table), ("sass", sass_table)):
        text = fill(text, section, table())
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
