"""Machine code of kernels, read without a GPU: what ptxas gave a kernel, and what its loops do with a logit.

Triton's kernels are compiled by their own launchers against a stand-in for the driver, which names a target and never
launches, so that what is counted is what would run: the same argument types, constants and options. `xray` prints it.

Instructions per logit: those of the innermost loops over full blocks, divided by the logits that one pass of the loop
loads per thread (told by the width of its loads); of a kernel without loops, all of it by what it stores. What a row
costs besides (prologue, last columns, reductions, and the second try of a row whose target is improbable) is not in it.
"""

import contextlib
import math
import re
import subprocess
import tempfile
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CAPABILITIES = (80, 90, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCABULARIES = (2048, 16384, 32768, 151936)  # one for each entry of kernels.launch.LAUNCHES in a 16-bit dtype


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # with its predicate, without operands' encodings


@dataclass(frozen=True)
class Code:
    """A kernel's machine code; registers a thread, stack and static shared memory in bytes."""

    name: str
    instructions: list[Instruction]
    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Report:
    """One compiled kernel; `load` and `store` are the narrowest accesses to logits inside the loops, in bits."""

    kernel: str
    dtype: str
    V: int
    sm: int
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    instructions: float
    mufu: float
    load: int
    store: int


class OfflineDriver:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 163 << 10})

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def offline(capability):
    """Within it, launching a Triton kernel compiles it for sm_<capability> and does no more; CPU tensors will do."""
    run = triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    active = driver._active
    driver.set_active(OfflineDriver(capability))
    triton.JITFunction.run = compile_only
    try:
        yield
    finally:
        triton.JITFunction.run = run
        driver._active = active


def variants(kernel, capability):
    """What has been compiled of a kernel under `offline(capability)`, one entry for each specialisation."""
    return list(kernel.device_caches[capability][0].values())


def _tool(name):
    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


def have_cuobjdump():
    return _tool("cuobjdump").exists()


def _cuobjdump(option, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_tool("cuobjdump")), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read(cubin):
    """The kernels in a cubin, each a `Code`."""
    usage = {
        name: tuple(int(re.search(rf"{key}:(\d+)", line)[1]) for key in ("REG", "STACK", "SHARED"))
        for name, line in re.findall(r"Function (\S+):\n(.*)", _cuobjdump("-res-usage", cubin))
    }
    parts = re.split(r"^\s*Function : (\S+)$", _cuobjdump("-sass", cubin), flags=re.MULTILINE)[1:]
    return [Code(name, _instructions(text), *usage[name]) for name, text in zip(parts[::2], parts[1::2], strict=True)]


def _instructions(text):
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.MULTILINE)
    return [Instruction(int(address, 16), text) for address, text in lines]


def disassemble(cubin):
    """The instructions of a cubin's only kernel."""
    (code,) = read(cubin)
    return code.instructions


def innermost_loops(instructions):
    """Bodies from a backward branch's target to the branch that hold no other such body."""
    spans = []
    for last, instruction in enumerate(instructions):
        branch = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", instruction.text)
        if branch and int(branch[1], 16) < instruction.address:
            first = next(i for i, other in enumerate(instructions) if other.address == int(branch[1], 16))
            spans.append((first, last))
    inner = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [instructions[first : last + 1] for first, last in inner]


def widths(body, opcode):
    """Access widths in bits of the global loads (LDG) or stores (STG) of a loop body."""
    accesses = [match for i in body if (match := re.search(rf"\b{opcode}\S*", i.text))]
    suffixes = [re.search(r"\.[US]?(128|64|16|8)\b", access[0]) for access in accesses]
    return [int(suffix[1]) if suffix else 32 for suffix in suffixes]


def _count(body, opcode):
    return sum(bool(re.search(rf"\b{opcode}\b", i.text)) for i in body)


def _loads(body):
    """Widths of the loads of logits: from device memory or, in whole vectors, from where a bulk copy put them."""
    return widths(body, "LDG") or [width for width in widths(body, "LDS") if width == 128]


def _sweeps(instructions):
    """The loop that reads a row (a statistics sweep: it has exponentials) and the one that reads and writes, if any.

    The masked loops over a row's end are passed over where there are others, and so is a loop for rows that are not
    aligned where the kernel has one for rows that are; of equal sweeps the costlier one counts.
    """
    loops = [body for body in innermost_loops(instructions) if _loads(body)]
    reading = [b for b in loops if not widths(b, "STG") and _count(b, "MUFU")]
    writing = [b for b in loops if widths(b, "STG")]
    for sweep in (reading, writing):
        unmasked = [b for b in sweep if not any(re.search(r"^@.*\bLDG\b", i.text) for i in b)] or sweep
        wide = [b for b in unmasked if min(_loads(b) + widths(b, "STG")) == 128] or unmasked
        if sweep:
            yield max(wide, key=lambda b: len(b) / sum(_loads(b)))


def examine(name, code, dtype, V, capability, warps):
    """Report on one compiled kernel."""
    bits = torch.finfo(dtype).bits
    per_logit, mufu, loads, stores = 0.0, 0.0, [], []
    for body in _sweeps(code.instructions):
        logits = sum(_loads(body)) / bits
        per_logit += len(body) / logits
        mufu += _count(body, "MUFU") / logits
        loads += _loads(body)
        stores += widths(body, "STG")
    if not loads and widths(code.instructions, "STG"):  # one block a program, no loops
        stores = widths(code.instructions, "STG")
        loads = [width for width in widths(code.instructions, "LDG") if width >= min(stores)] or [0]
        per_logit = len(code.instructions) / (sum(stores) / bits)
        mufu = _count(code.instructions, "MUFU") / (sum(stores) / bits)
    spills = _count(code.instructions, "STL") + _count(code.instructions, "LDL")
    return Report(
        name, str(dtype).removeprefix("torch."), V, capability, warps, code.registers, code.stack, spills, code.shared,
        per_logit, mufu, min(loads, default=0), min(stores, default=0),
    )  # fmt: skip


def of_triton(name, compiled, dtype, V, capability):
    """Report on what Triton compiled."""
    (code,) = read(compiled.asm["cubin"])
    return examine(name, code, dtype, V, capability, compiled.metadata.num_warps)


def launch_grpo_loss(dtype, V, T=2, *, weights=False, old=False, ref=False, entropy=False, softcap=0.0, inplace=True):
    """Run the production launcher on tensors of the right kind; inside `offline` only."""
    from grpo_fast.kernels.grpo_loss import grpo_loss

    logits = torch.empty(1, T, V, dtype=dtype)
    ids, valid = torch.zeros(1, T, dtype=torch.int64), torch.ones(1, T, dtype=torch.uint8)
    vector = torch.zeros(1, T)
    out = logits if inplace else torch.empty_like(logits)
    grpo_loss(
        logits, ids, valid, vector, vector if weights else None, vector if old else None, vector if ref else None,
        vector, torch.zeros(()) if entropy else None, vector, vector, vector if entropy else None, out,
        1.0, softcap, 1.0, 0.8, 1.2, math.inf, 0.04 if ref else 0.0, False,
    )  # fmt: skip


def launch_row_stats(dtype, V, T=2, entropy=False):
    from grpo_fast.kernels.row_stats import row_stats

    ids, valid, vector = torch.zeros(1, T, dtype=torch.int64), torch.ones(1, T, dtype=torch.uint8), torch.zeros(1, T)
    logits = torch.empty(1, T, V, dtype=dtype)
    row_stats(logits, ids, valid, vector, vector if entropy else None, vector, vector, 1.0, 0.0, 1.0)


def launch_row_grad(dtype, V, T=2, entropy=False):
    from grpo_fast.kernels.row_grad import row_grad

    ids, valid, vector = torch.zeros(1, T, dtype=torch.int64), torch.ones(1, T, dtype=torch.uint8), torch.zeros(1, T)
    logits = torch.empty(1, T, V, dtype=dtype)
    optional = vector if entropy else None
    row_grad(logits, ids, valid, vector, vector, vector, optional, vector, optional, logits, 1.0, 0.0, 1.0)


def launch_scale(dtype, V, T=2):
    from grpo_fast.kernels.scale import scale_

    scale_(torch.empty(1, T, V, dtype=dtype), torch.ones(()))


@cache
def kernels():
    """Name -> (kernel, launch(dtype, V))."""
    from grpo_fast.kernels import grpo_loss, row_grad, row_stats, scale

    full = {"weights": True, "old": True, "ref": True}
    return {
        "grpo_loss": (grpo_loss._grpo_loss_kernel, lambda d, v: launch_grpo_loss(d, v, **full)),
        "grpo_loss on-policy": (grpo_loss._grpo_loss_kernel, launch_grpo_loss),
        "grpo_loss entropy": (grpo_loss._grpo_loss_kernel, lambda d, v: launch_grpo_loss(d, v, entropy=True, **full)),
        "grpo_loss softcap": (grpo_loss._grpo_loss_kernel, lambda d, v: launch_grpo_loss(d, v, softcap=30.0, **full)),
        "row_stats": (row_stats._row_stats_kernel, launch_row_stats),
        "row_grad": (row_grad._row_grad_kernel, launch_row_grad),
        "scale_": (scale._scale_kernel, launch_scale),
    }


def report(name, dtype, V, capability):
    """Compile one of `kernels()` and examine it."""
    kernel, launch = kernels()[name]
    kernel.device_caches.pop(capability, None)
    with offline(capability):
        launch(dtype, V)
    (compiled,) = variants(kernel, capability)
    return of_triton(name, compiled, dtype, V, capability)


def cells(report):
    return tuple(f"{v:.2f}" if isinstance(v, float) else str(v) for v in astuple(report))


def table(reports):
    return aligned([tuple(field.name for field in fields(Report)), *(cells(r) for r in reports)])


def aligned(rows):
    """Rows of texts as lines with equal columns."""
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, columns, strict=True)) for row in rows)
