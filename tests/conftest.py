"""Every test starts from seed 0, and memory from torch.empty is NaN inside the ops: an output nobody wrote shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch, request):
    if request.node.get_closest_marker("real") or "compile" in request.node.nodeid:
        return
    from grpo_fast.ops import library

    def nan(tensor):
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    vectors, grad = library.like_vectors, library.new_grad
    monkeypatch.setattr(library, "like_vectors", lambda *a, **k: [nan(t) for t in vectors(*a, **k)])
    monkeypatch.setattr(library, "new_grad", lambda *a: nan(grad(*a)))
