"""Numbers and gradients of the functions for OpenRLHF against float64; and OpenRLHF's own, where it is installed."""

import sys

import peers
import problems
import pytest
import torch

from grpo_fast.integrations import openrlhf as fast

ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of a gradient


def make(lead, dtype, vocab=37):
    logits = (torch.randn(*lead, vocab, dtype=torch.float64) * 3).to(dtype)
    return logits, torch.randint(0, vocab, lead), torch.randn(lead, dtype=torch.float64)


def gradient(value, leaf, upstream):
    (value.double() * upstream).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2])
@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 1, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_log_probs(lead, dtype, temperature):
    logits, labels, upstream = make(lead, dtype)
    leaf = logits.double().clone().requires_grad_()
    expected = (leaf / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    ours = logits.clone().requires_grad_()
    got = fast.log_probs_from_logits(ours, labels.int(), temperature)
    assert got.shape == lead
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert problems.relative_error(got, expected) < 1e-6
    assert problems.relative_error(gradient(got, ours, upstream), gradient(expected, leaf, upstream)) < ROUNDING[dtype]
    assert torch.equal(ours, logits)  # neither divided by the temperature nor overwritten


@pytest.mark.parametrize("lead", [(6,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_entropy(lead, dtype):
    logits, _, upstream = make(lead, dtype)
    leaf = logits.double().clone().requires_grad_()
    logps = leaf.log_softmax(-1)
    expected = -(logps.exp() * logps).sum(-1)
    ours = logits.clone().requires_grad_()
    got = fast.compute_entropy(ours)
    assert got.shape == lead
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert problems.relative_error(got, expected) < 4e-6
    tolerance = max(ROUNDING[dtype], 4e-6)
    assert problems.relative_error(gradient(got, ours, upstream), gradient(expected, leaf, upstream)) < tolerance


def test_ignored_labels_and_the_last_column():
    """Actor.forward rolls the ids, drops the last column afterwards, and may have -100 there in its own code."""
    logits, labels, _ = make((2, 3), torch.float32)
    labels[:, -1] = -100
    leaf = logits.requires_grad_()
    logps = fast.log_probs_from_logits(leaf, labels)
    logps.sum().backward()
    assert (logps[:, -1] == 0).all()
    assert (leaf.grad[:, -1] == 0).all()
    assert (leaf.grad[:, :-1] != 0).any()


@pytest.fixture(scope="module")
def peer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function: function)  # compute_entropy's decorator
        return peers.load("openrlhf", "openrlhf/models/utils.py", ("deepspeed",))


class TestParity:
    """The same call to both: value, shape, dtype, gradient, signature."""

    def test_signatures(self, peer):
        for name in ("log_probs_from_logits", "compute_entropy"):
            assert peers.parameters(getattr(fast, name)) == peers.parameters(getattr(peer, name)), name

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_log_probs(self, peer, monkeypatch, lead, dtype, temperature):
        monkeypatch.setitem(sys.modules, "flash_attn", None)  # theirs asks for it in every call
        logits, labels, upstream = make(lead, dtype)
        both = []
        for module in (fast, peer):
            leaf = logits.clone().requires_grad_()
            logps = module.log_probs_from_logits(leaf * 1, labels, temperature)
            both.append((logps, gradient(logps, leaf, upstream)))
        (ours, our_grad), (theirs, their_grad) = both
        assert ours.shape == theirs.shape
        assert our_grad.dtype == their_grad.dtype
        if dtype == torch.bfloat16:  # theirs are rounded to bf16, and so are their scaled logits
            assert (ours.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
            assert problems.relative_error(theirs, ours) < 1e-2
            assert problems.relative_error(their_grad, our_grad) < 3e-2
        else:
            assert ours.dtype == theirs.dtype
            assert problems.relative_error(ours, theirs) < 1e-6
            assert problems.relative_error(our_grad, their_grad) < 3e-6

    @pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
    def test_entropy(self, peer, lead):
        logits, _, upstream = make(lead, torch.float32)
        both = []
        for module in (fast, peer):
            leaf = logits.clone().requires_grad_()
            entropy = module.compute_entropy(leaf)
            both.append((entropy, gradient(entropy, leaf, upstream)))
        for ours, theirs in zip(*both, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert problems.relative_error(ours, theirs) < 4e-6

    def test_theirs_divides_the_callers_logits(self, peer):
        """The reason why ours says that it does not: should this fail, the docstring is out of date."""
        logits, labels, _ = make((6,), torch.bfloat16)
        kept = logits.clone()
        peer.log_probs_from_logits(logits, labels, 0.5)
        assert torch.equal(logits, kept / 0.5)
