"""The benchmarks of a checkout, one module each.

python -m benchmarks [NAME] [ARGUMENTS]

Without a NAME, core runs; --static stands for xray, what can be told without running anything.
`python -m benchmarks NAME --help` shows a benchmark's own arguments.
"""

import ast
import runpy
import sys
from pathlib import Path

NAMES = (
    "core",
    "bench_grpo_loss",
    "bench_linear_grpo_loss",
    "bench_train_step",
    "xray",
    "traffic",
    "demo_seeds",
    "report",
)


def overview() -> str:
    """This module's text and the first line of each benchmark's, read without importing them."""
    lines = []
    for name in NAMES:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        lines.append(f"  {name:22} {ast.get_docstring(ast.parse(source)).splitlines()[0]}")
    return "\n".join([__doc__, *lines])


def main(arguments: list[str]) -> None:
    """Runs the benchmark that `arguments` name, with the rest of them."""
    name, rest = NAMES[0], arguments
    if arguments and arguments[0] in ("--help", "-h"):
        print(overview())
        return
    if arguments and arguments[0] == "--static":
        name, rest = "xray", arguments[1:]
    elif arguments and not arguments[0].startswith("-"):
        name, rest = arguments[0], arguments[1:]
    if name not in NAMES:
        raise SystemExit(f"benchmarks: expected one of {', '.join(NAMES)}, got {name}")
    sys.argv = [f"benchmarks.{name}", *rest]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
