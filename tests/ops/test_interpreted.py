"""The public functions on the Triton kernels, in a process of their own: the interpreter is chosen at decoration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# What a backend can get wrong behind the public API; the kernels' own grid is in tests/kernels.
SELECTION = {
    "test_grpo_loss.py": "triton and (loss_and_grad or nothing_valid or layouts or worked or kl or on_policy)",
    "test_token_logprobs.py": "triton and not no_limit",
    "test_autograd.py": "triton and (upstream or InPlace or fp16)",
    "test_determinism.py": "triton and (plain or entropy or sequence or transform)",
    "test_linear_grpo_loss.py": "triton and loss_and_gradients and (plain or entropy or sequence) and padded",
}


@pytest.mark.parametrize("module", SELECTION)
def test_public_functions_on_triton(module):
    if sys.platform != "linux":
        pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", HERE / module]
    result = subprocess.run(
        [*map(str, command), "-k", SELECTION[module]],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
