"""Which backend answers, and what is said when one cannot."""

import os

import problems
import pytest
import torch

import grpo_fast as gf
from grpo_fast.ops import backends


def test_the_best_available_backend_is_chosen():
    expected = "cpu" if backends.unavailable_reason("cpu") is None else "reference"
    assert backends.choose(None, "cpu", "float32") == expected
    assert backends.choose(None, "cpu", "float64") == "reference"
    assert backends.choose(None, "meta", "float32") == "reference"


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    """B116: one line with the variable to set, before anything is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not/yet/there"))
    assert backends._unwritable_cache() is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "TRITON_CACHE_DIR" in backends._unwritable_cache()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert ".triton" in backends._unwritable_cache()


def test_without_the_extension_the_reference_answers_and_says_so_once(monkeypatch):
    monkeypatch.setattr(backends, "unavailable_reason", lambda name: None if name == "reference" else "not built")
    backends._say_once.cache_clear()
    with pytest.warns(UserWarning, match="reference backend answers.*not built"):
        assert backends.choose(None, "cpu", "float32") == "reference"
    with pytest.raises(NotImplementedError, match="not built"):
        backends.choose("cpu", "cpu", "float32")


@pytest.mark.skipif("cpu" not in problems.backends_here(), reason="the C++ extension is not built")
def test_the_native_backend_really_runs(monkeypatch):
    """A silent fall back to the reference would pass every comparison with it."""
    called = []
    real = backends.functions("cpu")
    spy = type(real)(**{n: lambda *a, n=n: (called.append(n), getattr(real, n)(*a))[1] for n in vars(real)})
    monkeypatch.setattr(backends, "functions", lambda name: spy if name == "cpu" else pytest.fail(name))
    logits = torch.randn(2, 3, 7, requires_grad=True)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    gf.grpo_loss(logits, ids, torch.ones(2)).loss.backward()
    assert called == ["grpo_loss", "scale_"]
    gf.token_logprobs(logits, ids).sum().backward()
    gf.linear_grpo_loss(torch.randn(2, 3, 4, requires_grad=True), torch.randn(7, 4), ids, torch.ones(2))
    assert called[2:] == ["row_stats", "row_grad"] * 2
