"""Memory from torch.empty is filled with NaN inside the package's ops: an output that nobody wrote shows."""

import pytest
import torch


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
