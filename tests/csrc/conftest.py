"""The native CPU ops, once per instruction set that this machine has."""

from pathlib import Path

import pytest
import torch

EXTENSION = sorted(Path(__file__).parents[2].glob("grpo_fast/_C*.so"))
ISAS = ("avx512", "avx2", "portable")


@pytest.fixture(scope="session")
def native():
    if not EXTENSION:
        pytest.skip("the C++ extension is not built")
    torch.ops.load_library(EXTENSION[0])
    return torch.ops.grpo_fast_cpu


@pytest.fixture(params=ISAS)
def ops(native, request):
    if request.param not in native.supported_isas().split(","):
        pytest.skip(f"this machine has no {request.param}")
    native.set_isa(request.param)
    assert native.isa() == request.param
    yield native
    native.set_isa("auto")
