"""What the kernels compile to, ours beside the peers', and what that leaves possible on a GPU. No GPU is needed.

    python -m benchmarks xray [--sm 80 90 100] [--vocabulary 151936] [--csv] [--all-dtypes]

Every row kernel, Triton's and csrc/cuda's (by nvcc), is compiled for sm_80, sm_90 and sm_100: registers, stack, spills,
shared memory, access widths, instructions and special-function instructions (MUFU) a logit, over all sweeps. The peers'
Triton kernels (TRL, Liger, where installed) are compiled by their own code, unchanged, in the same way.

Then, for forward and backward of the loss at named shapes, the least time that each of three walls allows: the bytes to
and from device memory, as counted by `traffic`, over the memory's bandwidth; all instructions over the issue slots (4
warps a cycle and SM); MUFU over theirs (16 a cycle and SM). These are models: no kernel has been timed on a GPU.
"""

import argparse
import contextlib
import csv
import importlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from . import sass, traffic

CUDA_SOURCE = Path(__file__).parent.parent / "csrc/cuda/rows.cu"
SMS = (80, 90, 100)


@dataclass(frozen=True)
class Gpu:
    """From NVIDIA's data sheets; the clock is the highest, in Hz, the bandwidth in bytes a second."""

    sm: int
    multiprocessors: int
    clock: float
    bandwidth: float

    def walls(self, logits: float, bytes_per_logit: float, instructions: float, mufu: float) -> dict[str, float]:
        """Milliseconds by memory, issue slots and MUFU."""
        cycles = 1e3 / (self.multiprocessors * self.clock)
        return {
            "memory": 1e3 * logits * bytes_per_logit / self.bandwidth,
            "issue": logits * instructions / 128 * cycles,
            "mufu": logits * mufu / 16 * cycles,
        }


GPUS = {
    "A100": Gpu(80, 108, 1.41e9, 2.04e12),
    "H100": Gpu(90, 132, 1.98e9, 3.35e12),
    "H200": Gpu(90, 132, 1.98e9, 4.8e12),
    "B200": Gpu(100, 148, 1.965e9, 8.0e12),
}
SHAPES = {"Qwen3": (4096, 151936), "Llama 3": (4096, 128256), "SmolLM2": (8192, 49152)}  # tokens, vocabulary


def ours(dtype: torch.dtype, V: int, sm: int) -> list[sass.Report]:
    return [replace(sass.report(name, dtype, V, sm), kernel=f"triton {name}") for name in sass.kernels()]


def cuda_kernels(dtypes: list[torch.dtype], V: int, sm: int) -> list[sass.Report]:
    """csrc/cuda's through nvcc; none without it."""
    if shutil.which("nvcc") is None:
        print("skipped csrc/cuda: there is no nvcc")
        return []
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "rows.cubin"
        command = ["nvcc", "-std=c++20", "-O3", f"-arch=sm_{sm}", "-cubin", CUDA_SOURCE, "-o", cubin]
        subprocess.run(command, check=True)
        return of_cuda(sass.read(cubin.read_bytes()), dtypes, V, sm)


def of_cuda(codes: list[sass.Code], dtypes: list[torch.dtype], V: int, sm: int) -> list[sass.Report]:
    """Of csrc/cuda's kernels those that run on rows which a cluster can hold, or, before sm_90, on any."""
    mangled = {torch.float32: "f", torch.bfloat16: "NS0_4BF16E", torch.float16: "NS0_3F16E"}
    flag = {False: "Lb0E", True: "Lb1E"}
    staged = sm >= 90
    found = []
    for dtype in dtypes:
        for name, kernel, softcap, entropy in (
            ("grpo_loss", "grpo_loss_kernel", False, False),
            ("grpo_loss entropy", "grpo_loss_kernel", False, True),
            ("grpo_loss softcap", "grpo_loss_kernel", True, False),
            ("row_stats", "row_stats_kernel", False, False),
            ("row_grad", "row_grad_kernel", False, False),
        ):
            tail = flag[staged] if kernel == "grpo_loss_kernel" else ""
            pattern = f"{kernel}I{mangled[dtype]}{flag[softcap]}{flag[entropy]}{tail}E"
            (code,) = (c for c in codes if pattern in c.name)
            warps = 8 if tail == flag[True] else 32
            found.append(sass.examine(f"cuda {name}", code, dtype, V, sm, warps))
    return found


def _liger(dtype: torch.dtype, V: int, T: int) -> None:
    """Forward and backward of Liger's GRPO loss, gradient in the logits' place."""
    function = importlib.import_module("liger_kernel.ops.grpo_loss").GrpoLossFunction
    leaf = torch.zeros(1, T + 1, V, dtype=dtype, requires_grad=True)
    ids, ones = torch.zeros(1, T, dtype=torch.int64), torch.ones(1, T)
    loss = function.apply(leaf * 1, ones, None, ids, torch.ones(1), ones, 1.0, 0.0, 0.2, 0.2, True)[0]
    loss.backward()


def _trl(dtype: torch.dtype, V: int, T: int) -> None:
    """Forward and backward of TRL's log-probs and entropy from logits; the loss on them is plain PyTorch."""
    function = importlib.import_module("trl.kernels.logprob_entropy")._LogProbEntropyFunction
    leaf = torch.zeros(1, T, V, dtype=dtype, requires_grad=True)
    logps, _ = function.apply(leaf, torch.zeros(1, T, dtype=torch.int64), 1.0, None)
    logps.sum().backward()


# Name -> (module, its kernels of forward and backward, a call of both).
PEERS = {
    "liger": ("liger_kernel.ops.grpo_loss", ("_grpo_loss_fwd_kernel", "_grpo_loss_bwd_kernel"), _liger),
    "trl": ("trl.kernels.logprob_entropy", ("_forward_kernel", "_backward_kernel"), _trl),
}


def peers(dtype: torch.dtype, V: int, sm: int) -> list[sass.Report]:
    """Those installed, compiled by their own launches."""
    found = []
    for name, (module, kernels, call) in PEERS.items():
        try:
            module = importlib.import_module(module)
        except ImportError as error:
            print(f"skipped {name}: {error}")
            continue
        for kernel in kernels:
            getattr(module, kernel).device_caches.pop(sm, None)
        with sass.offline(sm), contextlib.suppress(NotImplementedError):
            call(dtype, V, 2)
        for kernel, half in zip(kernels, ("forward", "backward"), strict=True):
            (compiled,) = sass.variants(getattr(module, kernel), sm)
            found.append(sass.of_triton(f"{name} {half}", compiled, dtype, V, sm))
    return found


def bounds(reports: list[sass.Report], moved: dict[str, float]) -> list[dict[str, str]]:
    """For every GPU and shape, the walls of forward and backward by each implementation, bf16."""
    parts = {
        "triton": ("triton grpo_loss",),
        "cuda": ("cuda grpo_loss",),
        "liger": ("liger forward", "liger backward"),
        "trl": ("trl forward", "trl backward"),
    }
    by_name = {(r.kernel, r.sm): r for r in reports if r.dtype == "bfloat16"}
    rows = []
    for gpu_name, gpu in GPUS.items():
        for shape, (tokens, V) in SHAPES.items():
            for name, kernels in parts.items():
                found = [by_name[kernel, gpu.sm] for kernel in kernels if (kernel, gpu.sm) in by_name]
                if not found or name not in moved:
                    continue
                instructions, mufu = sum(r.instructions for r in found), sum(r.mufu for r in found)
                walls = gpu.walls(tokens * V, moved[name], instructions, mufu)
                rows.append({
                    "gpu": gpu_name, "shape": shape, "tokens": str(tokens), "vocabulary": str(V), "kernels": name,
                    "bytes_per_logit": f"{moved[name]:.2f}",
                    **{f"{wall}_ms": f"{ms:.3f}" for wall, ms in walls.items()},
                    "bound_ms": f"{max(walls.values()):.3f}", "bound_by": max(walls, key=walls.__getitem__),
                })  # fmt: skip
    return rows


def write(path: Path, header: list[str], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, nargs="+", default=SMS, choices=SMS)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--all-dtypes", action="store_true", help="float16 and float32 beside bfloat16")
    parser.add_argument("--csv", action="store_true", help="write xray.csv and bounds.csv to benchmarks/results")
    args = parser.parse_args()
    dtypes = list(sass.DTYPES) if args.all_dtypes else [torch.bfloat16]
    reports = []
    for sm in args.sm:
        for dtype in dtypes:
            reports += ours(dtype, args.vocabulary, sm)
        reports += cuda_kernels(dtypes, args.vocabulary, sm)
        reports += peers(torch.bfloat16, args.vocabulary, sm)
    print(sass.table(reports), end="\n\n")
    moved = traffic.bytes_per_logit()
    rows = bounds(reports, moved)
    print(sass.aligned([tuple(rows[0]), *(tuple(row.values()) for row in rows)]))
    if args.csv:
        results = Path(__file__).parent / "results"
        write(results / "xray.csv", [f.name for f in fields(sass.Report)], [sass.cells(r) for r in reports])
        write(results / "bounds.csv", list(rows[0]), [tuple(row.values()) for row in rows])


if __name__ == "__main__":
    main()
