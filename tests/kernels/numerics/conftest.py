"""The kernels under test: Triton's, and those of csrc/cuda, whose source runs on the CPU where there is no GPU."""

import kernel_oracle
import pytest
from cuda_on_host import on_host

from grpo_fast.ops import backends

IMPLEMENTATIONS = {"triton": None, "cuda, sm_80": 80, "cuda, sm_90": 90}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Its name."""
    capability = IMPLEMENTATIONS[request.param]
    if capability is None:
        chosen = backends.functions("triton")
    elif kernel_oracle.DEVICE == "cuda":
        if capability == 80 or backends.unavailable_reason("cuda"):
            pytest.skip("on a GPU the extension runs, as that GPU needs it")
        chosen = backends.functions("cuda")
    else:
        chosen = on_host(capability)
        if chosen is None:
            pytest.skip("there is no C++ compiler")
    for name in ("row_stats", "row_grad", "grpo_loss", "scale_"):
        setattr(kernel_oracle.kernels, name, getattr(chosen, name))
    return request.param
