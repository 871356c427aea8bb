"""Run each file of numerics/ (in Triton's interpreter; on a GPU where there is one) and of compiled/ (on any)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NUMERICS = [path.name for path in sorted(HERE.glob("numerics/test_*.py"))]
COMPILED = [path.name for path in sorted(HERE.glob("compiled/test_*.py"))]


def run_file(path, **environment):
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-rs", "--tb=short", "-p", "no:cacheprovider"]
    env = {**os.environ, "KERNEL_TESTS": path.parent.name, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True)
    print(done.stdout)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}", pytrace=False)
    if not re.search(r"\d+ passed", done.stdout):
        pytest.skip("; ".join(re.findall(r"SKIPPED.*", done.stdout)))


@pytest.mark.parametrize("file", NUMERICS)
def test_interpreter(file):
    run_file(HERE / "numerics" / file, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("file", NUMERICS)
def test_gpu(file):
    run_file(HERE / "numerics" / file, TRITON_INTERPRET="0")


@pytest.mark.parametrize("file", COMPILED)
def test_compiled(file):
    run_file(HERE / "compiled" / file, TRITON_INTERPRET="0")
