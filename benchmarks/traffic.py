"""Bytes that forward and backward of the loss move for a logit, counted as Triton's interpreter runs the kernels.

    python -m benchmarks traffic

Every load and store of our kernels and of the peers' (TRL, Liger, where installed) is counted, byte by byte. What a
launch asks for twice comes from L2 the second time, if the row still is there, and another launch has to bring it anew:
so `device` counts what every launch touches once, and `asked` all of it. csrc/cuda is counted where its source runs on
the CPU, as for sm_90. bfloat16, gradient in the logits' place where an implementation can.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
TOKENS, V = 2, 32768


@dataclass
class Meter:
    """What has been counted, in bytes."""

    asked: int = 0
    device: int = 0
    _launch: dict[str, list[np.ndarray]] = field(default_factory=lambda: {"read": [], "written": []})

    def note(self, kind: str, pointers, mask) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.asked += addresses.size * size
        self._launch[kind].append(np.stack([addresses, np.full_like(addresses, size)], -1).reshape(-1, 2))

    def end_of_launch(self) -> None:
        for accesses in self._launch.values():
            if accesses:
                self.device += int(np.unique(np.concatenate(accesses), axis=0)[:, 1].sum())
                accesses.clear()


def metered() -> Meter:
    """A meter of every kernel that is interpreted from now on."""
    from triton.runtime import interpreter

    meter = Meter()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def counted_load(self, pointers, mask, *rest):
        meter.note("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        meter.note("written", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counted_call(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        meter.end_of_launch()
        return result

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    executor.__call__ = counted_call
    return meter


def _triton() -> None:
    import grpo_fast as gf

    leaf = torch.zeros(1, TOKENS, V, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    old = torch.full((1, TOKENS), -10.0)
    out = gf.grpo_loss(leaf * 1, ids, torch.ones(1), old_logps=old, inplace=True, backend="triton")
    out.loss.backward()


def _of_interpreter() -> dict[str, dict[str, float]]:
    """In a process with TRITON_INTERPRET=1."""
    from . import xray

    calls = {"triton": _triton}
    for name, (_, _, call) in xray.PEERS.items():
        calls[name] = functools.partial(call, torch.bfloat16, V, TOKENS)
    meter, found = metered(), {}
    for name, call in calls.items():
        meter.asked = meter.device = 0
        try:
            call()
        except ImportError as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        found[name] = {kind: getattr(meter, kind) / (TOKENS * V) for kind in ("asked", "device")}
    return found


def _of_cuda() -> dict[str, float] | None:
    """csrc/cuda's grpo_loss, or None without a C++ compiler or a checkout's tests."""
    path = ROOT / "tests/support/cuda_on_host.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("cuda_on_host", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ops = module.on_host(90)
    if ops is None:
        return None
    logits = torch.zeros(1, TOKENS, V, dtype=torch.bfloat16)
    ids, valid = torch.zeros(1, TOKENS, dtype=torch.int64), torch.ones(1, TOKENS, dtype=torch.uint8)
    ones, losses, logps = torch.ones(1, TOKENS), torch.empty(1, TOKENS), torch.empty(1, TOKENS)
    ops.grpo_loss(
        logits, ids, valid, ones, None, None, None, ones, None, losses, logps, None, logits, 1.0, 0.0, 1.0,
        0.8, 1.2, float("inf"), 0.0, False,
    )  # fmt: skip
    moved = sum(ops.last_bytes) / (TOKENS * V)
    return {"asked": moved, "device": moved}


def counted() -> dict[str, dict[str, float]]:
    """Name -> {asked, device}: bytes a logit."""
    command = [sys.executable, "-m", "benchmarks", "traffic", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True
    )
    print(done.stderr, end="", file=sys.stderr)
    done.check_returncode()
    found = json.loads(done.stdout.splitlines()[-1])
    cuda = _of_cuda()
    return found if cuda is None else {**found, "cuda": cuda}


def bytes_per_logit() -> dict[str, float]:
    """Name -> bytes from and to device memory."""
    return {name: moved["device"] for name, moved in counted().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().json:
        print(json.dumps(_of_interpreter()))
        return
    for name, moved in counted().items():
        print(f"{name:8} {moved['device']:.2f} bytes a logit from and to device memory, {moved['asked']:.2f} asked for")


if __name__ == "__main__":
    main()
