"""What every benchmark shares: interleaved timing, peak memory, the machine's description, tables and CSV.

Variants run in one process, round by round and in a new order each round, so that a busy moment of the machine meets
all of them; medians are compared, minima and the interquartile range are shown beside them.
"""

from __future__ import annotations

import csv
import ctypes
import gc
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Variant:
    """`run()` is what is timed; `prepare()` restores its input before each call, untimed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


def call(variant: Variant) -> tuple[float, object]:
    """Seconds of one call, until the device has done it, and its result."""
    variant.prepare()
    synchronize()
    start = time.perf_counter()
    result = variant.run()
    synchronize()
    return time.perf_counter() - start, result


def timed(variant: Variant) -> float:
    """Seconds of one call."""
    return call(variant)[0]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleave(variants: list[Variant], rounds: int, seed: int = 0, warm_up: bool = True) -> None:
    """One untimed call of each (compilation, first touch), then `rounds` timed ones in shuffled order."""
    for variant in variants if warm_up else ():
        variant.prepare()
        variant.run()
    order, rng = list(variants), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        for variant in order:
            variant.seconds.append(timed(variant))


def peak_bytes(variant: Variant) -> int:
    """Memory at its highest during one call, minus that before it, in bytes: a GPU's, or what is resident (Linux only).

    Linux keeps the high-water mark (VmHWM) and resets it when 5 is written to clear_refs; free heap is given back
    first, so that memory reused from an earlier call is counted.
    """
    variant.prepare()
    gc.collect()
    if torch.cuda.is_available():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = variant.run()
        synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = variant.run()
    peak = _status("VmHWM")
    del result
    return max(peak - before, 0)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def machine() -> dict[str, str]:
    """Device, threads, versions, commit and date, as columns of a CSV."""
    versions = ["torch", "trl", "liger-kernel", "triton"]
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "cuda": f"{torch.version.cuda}" if on_gpu else "-",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: _version(name) for name in versions},
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if commit.returncode:
        return "-"
    dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def read_csv(name: str) -> list[dict[str, str]]:
    """The rows of benchmarks/results/<name>.csv; none where there is no such file."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_csv(name: str, rows: list[dict[str, object]]) -> Path:
    """Writes benchmarks/results/<name>.csv; rows without the machine's columns, from this run, get them."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    about = machine()
    columns = [*(column for column in rows[0] if column not in about), *about]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows({**about, **row} for row in rows)
    return path


def print_table(rows: list[dict[str, object]]) -> None:
    header = list(rows[0])
    cells = [[str(row[key]) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    for line in [header, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print(flush=True)


def load_average() -> str:
    """One-minute load at the start, since another process on these cores spoils a comparison."""
    return f"{os.getloadavg()[0]:.1f}"
