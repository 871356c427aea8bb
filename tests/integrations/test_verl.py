"""Numbers and gradients of the functions for verl against float64; and verl's own, where it is installed."""

import subprocess
import sys

import peers
import problems
import pytest
import torch

from grpo_fast.integrations import verl as fast

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of a gradient
FROM_LABELS = {
    "logprobs_from_logits": {},
    "logprobs_from_logits without inplace": {"inplace_backward": False},
    "logprobs_from_logits_flash_attn": {},
    "logprobs_from_logits_v2": {},
    "logprobs_from_logits_naive": {},
}
SHAPES = [(6,), (2, 3), (1, 6), (2, 1, 3), (0,), ()]


def make_logits(lead, dtype, vocab=37):
    return (torch.randn(*lead, vocab, dtype=torch.float64) * 3).to(dtype)


def exact(logits, labels, temperature=1.0):
    """(leaf, log-probs, entropy) in float64; labels of -100 give 0."""
    leaf = logits.double().clone().requires_grad_()
    logps = (leaf / temperature).log_softmax(-1)
    chosen = logps.gather(-1, labels.long().clamp(min=0)[..., None])[..., 0]
    return leaf, torch.where(labels == -100, 0.0, chosen), -(logps.exp() * logps).sum(-1)


def gradient(value, leaf, upstream):
    (value.double() * upstream).sum().backward()
    return leaf.grad


class TestFromLogits:
    @pytest.mark.parametrize("name", FROM_LABELS)
    @pytest.mark.parametrize("lead", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
    def test_logprobs(self, name, lead, dtype):
        logits = make_logits(lead, dtype)
        labels = torch.randint(0, 37, lead, dtype=torch.int32)
        if labels.numel() > 1:
            labels.view(-1)[1] = -100
        upstream = torch.randn(lead, dtype=torch.float64)
        leaf, expected, _ = exact(logits, labels)
        ours = logits.clone().requires_grad_()
        got = getattr(fast, name.split()[0])(ours * 1, labels, **FROM_LABELS[name])
        assert got.shape == lead
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert problems.relative_error(got, expected) < 1e-6
        grad = gradient(got, ours, upstream)
        assert grad.dtype == dtype
        assert problems.relative_error(grad, gradient(expected, leaf, upstream)) < ROUNDING[dtype]
        assert (grad[labels == -100] == 0).all()

    @pytest.mark.parametrize("name", ["entropy_from_logits", "entropy_from_logits_with_chunking"])
    @pytest.mark.parametrize("lead", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
    def test_entropy(self, name, lead, dtype):
        logits = make_logits(lead, dtype)
        upstream = torch.randn(lead, dtype=torch.float64)
        leaf, _, expected = exact(logits, torch.zeros(lead, dtype=torch.int64))
        ours = logits.clone().requires_grad_()
        got = getattr(fast, name)(ours)
        assert got.shape == lead
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert problems.relative_error(got, expected) < 4e-6
        assert problems.relative_error(gradient(got, ours, upstream), gradient(expected, leaf, upstream)) < max(
            ROUNDING[dtype], 4e-6
        )

    def test_impossible_tokens(self):
        """0 log 0 is 0; the usual logsumexp - sum(p * logit) gives NaN."""
        logits = torch.tensor([[-torch.inf, 5.0, 5.0], [2.0, -torch.inf, -torch.inf]], requires_grad=True)
        entropy = fast.entropy_from_logits(logits)
        assert torch.allclose(entropy, torch.tensor([2.0, 1.0]).log(), atol=1e-6)
        entropy.sum().backward()
        assert (logits.grad == 0).all()

    def test_flat_labels_of_padded_logits(self):
        logits, labels = make_logits((2, 3), torch.float32), torch.randint(0, 37, (6,))
        got = fast.logprobs_from_logits(logits, labels)
        assert torch.equal(got, fast.logprobs_from_logits(logits, labels.view(2, 3)))
        with pytest.raises(ValueError, match=r"labels: expected \[2, 3\]"):
            fast.logprobs_from_logits(logits, labels[:5])
        with pytest.raises(ValueError, match=r"\[0, 37\)|37"):
            fast.logprobs_from_logits(logits, labels + 37)

    def test_the_gradient_takes_the_logits_place(self):
        values, labels = make_logits((2, 3), torch.float32), torch.randint(0, 37, (2, 3))
        leaf, expected, _ = exact(values, labels)
        logits = problems.as_non_leaf(values)
        fast.logprobs_from_logits(logits, labels).sum().backward()
        expected.sum().backward()
        assert problems.relative_error(values, leaf.grad) < 3e-6

    @pytest.mark.parametrize("kind", ["leaf", "view of a leaf", "expanded", "strided rows", "constant"])
    def test_what_must_not_be_overwritten_is_not(self, kind):
        """A plain call with the default inplace_backward: values stay, the gradient is right."""
        base = make_logits((2, 4), torch.float32)
        leaf = base.clone().requires_grad_(kind != "constant")
        make = {
            "leaf": lambda x: x,
            "constant": lambda x: x,
            "view of a leaf": lambda x: x[:, :-1],
            "expanded": lambda x: (x[:, :1] * 1).expand(2, 4, 37),
            "strided rows": lambda x: (x * 1).transpose(-1, -2).contiguous().transpose(-1, -2),
        }[kind]
        logits = make(leaf)
        before = logits.detach().clone()
        labels = torch.randint(0, 37, logits.shape[:-1])
        got = fast.logprobs_from_logits(logits, labels)
        true_leaf = base.double().requires_grad_()
        true_logps = make(true_leaf).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        assert problems.relative_error(got, true_logps) < 1e-6
        if kind != "constant":
            got.sum().backward()
            true_logps.sum().backward()
            assert problems.relative_error(leaf.grad, true_leaf.grad) < 3e-6
        assert torch.equal(logits, before)
        assert torch.equal(leaf, base)

    def test_no_grad(self):
        leaf = make_logits((2, 3), torch.bfloat16).requires_grad_()
        before = leaf.detach().clone()
        with torch.no_grad():
            assert not fast.logprobs_from_logits(leaf, torch.zeros(2, 3, dtype=torch.int64)).requires_grad
        assert torch.equal(leaf, before)

    def test_entropy_and_logprobs_of_the_same_logits(self):
        """verl's engines ask for the entropy first, and then for log-probs with inplace_backward=False."""
        logits, labels = make_logits((6,), torch.float32), torch.randint(0, 37, (6,))
        leaf, logps, entropy = exact(logits, labels)
        (logps - 0.1 * entropy).sum().backward()
        ours = logits.clone().requires_grad_()
        shared = ours * 1
        bonus = fast.entropy_from_logits(shared)
        (fast.logprobs_from_logits(shared, labels, inplace_backward=False) - 0.1 * bonus).sum().backward()
        assert problems.relative_error(ours.grad, leaf.grad) < 3e-6

    def test_a_use_of_overwritten_logits_is_no_silent_error(self):
        ours = make_logits((6,), torch.float32).requires_grad_()
        shared = ours * 1
        logps = fast.logprobs_from_logits(shared, torch.zeros(6, dtype=torch.int64))
        squares = shared.square()  # saves the logits, and its backward runs after
        logps.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()

    def test_compiled_and_checkpointed(self):
        """As verl's engines wrap the entropy."""
        logits = make_logits((6,), torch.float32).requires_grad_()
        expected = fast.entropy_from_logits(logits)
        compiled = torch.compile(fast.entropy_from_logits, dynamic=True, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(logits), expected)
        (grad,) = torch.autograd.grad(expected.sum(), logits)
        again = torch.utils.checkpoint.checkpoint(fast.entropy_from_logits, logits, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(again.sum(), logits)[0], grad)


def linear_problem(lead, dtype, vocab=37, width=16):
    hidden = torch.randn(*lead, width, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, vocab, lead)


def exact_linear(hidden, weight, labels, temperature):
    """(hidden leaf, weight leaf, log-probs, entropy) in float64, logits rounded as the head's are: in bf16."""
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h @ w.t()
    if hidden.dtype == torch.bfloat16:
        logits = logits + (logits.bfloat16().double() - logits).detach()  # straight through
    logps = (logits / temperature).log_softmax(-1)
    chosen = logps.gather(-1, labels.long().clamp(min=0)[..., None])[..., 0]
    return h, w, torch.where(labels == -100, 0.0, chosen), -(logps.exp() * logps).sum(-1)


def close(actual, expected, dtype, factor=1.0):
    return problems.relative_error(actual, expected) < factor * max(ROUNDING[dtype], 4e-6)


class TestFromHidden:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("lead", [(6,), (2, 3), (1, 6), (0,)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("entry", ["linear_cross_entropy", "FusedLinearForPPO"])
    def test_numbers_and_gradients(self, entry, lead, dtype, temperature):
        hidden, weight, labels = linear_problem(lead, dtype)
        ours_h, ours_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if entry == "linear_cross_entropy":
            logps, entropy = fast.linear_cross_entropy(ours_h, ours_w, labels.int(), temperature, "none")
            shape = (labels.numel(),)  # flat, as verl's kernels return it
        else:
            logps, entropy = fast.FusedLinearForPPO()(ours_h, ours_w, labels.int(), temperature=temperature)
            shape = lead
        assert logps.shape == entropy.shape == shape
        assert logps.dtype == entropy.dtype == torch.float32
        h, w, true_logps, true_entropy = exact_linear(hidden, weight, labels, temperature)
        assert close(logps.view(lead), true_logps, dtype)
        assert close(entropy.view(lead), true_entropy, dtype)
        upstream, other = torch.randn(2, *lead, dtype=torch.float64)
        ((true_logps * upstream).sum() + (true_entropy * other).sum()).backward()
        ((logps.view(lead) * upstream).sum() + (entropy.view(lead) * other).sum()).backward()
        assert ours_h.grad.dtype == ours_w.grad.dtype == dtype
        assert close(ours_h.grad, h.grad, dtype, 3)
        assert close(ours_w.grad, w.grad, dtype, 3)

    @pytest.mark.parametrize("reduction", ["none", "SUM", "mean"])
    def test_reductions(self, reduction):
        hidden, weight, labels = linear_problem((2, 3), torch.float32)
        h, _, true_logps, true_entropy = exact_linear(hidden, weight, labels, 1.0)
        expected = true_logps.flatten() if reduction == "none" else getattr(true_logps, reduction.lower())()
        ours_h = hidden.clone().requires_grad_()
        logps, entropy = fast.linear_cross_entropy(ours_h, weight, labels, 1.0, reduction, None)
        assert logps.shape == expected.shape
        assert close(logps, expected, torch.float32)
        assert close(entropy, true_entropy.flatten(), torch.float32)  # never reduced
        logps.sum().backward()
        expected.sum().backward()
        assert close(ours_h.grad, h.grad, torch.float32)

    @pytest.mark.parametrize("entry", ["linear_cross_entropy", "FusedLinearForPPO"])
    def test_ignored_labels(self, entry):
        """Log-prob 0 without a gradient; the row's entropy stays in the one, and is 0 in the other, as in verl."""
        hidden, weight, labels = linear_problem((6,), torch.float32)
        call = fast.linear_cross_entropy if entry == "linear_cross_entropy" else fast.FusedLinearForPPO()
        _, full_entropy = call(hidden, weight, labels)
        labels[[1, 4]] = -100
        h, w, true_logps, _ = exact_linear(hidden, weight, labels, 1.0)
        ours_h, ours_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps, entropy = call(ours_h, ours_w, labels)
        assert (logps[[1, 4]] == 0).all()
        if entry == "FusedLinearForPPO":
            full_entropy[[1, 4]] = 0
        assert torch.equal(entropy, full_entropy)
        logps.sum().backward()
        true_logps.sum().backward()
        assert (ours_h.grad[[1, 4]] == 0).all()
        assert close(ours_h.grad, h.grad, torch.float32)
        assert close(ours_w.grad, w.grad, torch.float32)

    def test_strides_and_a_frozen_head(self):
        hidden, weight, labels = linear_problem((3, 5), torch.float32)
        sliced = hidden.transpose(0, 1)[1:].requires_grad_()
        logps, _ = fast.linear_cross_entropy(sliced, weight.t().contiguous().t(), labels.t()[1:])
        h, _, true_logps, _ = exact_linear(hidden.transpose(0, 1)[1:], weight, labels.t()[1:], 1.0)
        assert close(logps, true_logps.flatten(), torch.float32)
        logps.sum().backward()
        true_logps.sum().backward()
        assert close(sliced.grad, h.grad, torch.float32)

    def test_errors(self):
        hidden, weight, labels = linear_problem((6,), torch.float32)
        with pytest.raises(ValueError, match="reduction: expected none, sum or mean"):
            fast.linear_cross_entropy(hidden, weight, labels, 1.0, "max")
        with pytest.raises(ValueError, match="impl_backend"):
            fast.FusedLinearForPPO(impl_backend="triton")
        with pytest.raises(ValueError, match="token_ids"):
            fast.FusedLinearForPPO()(hidden, weight, labels[:5])

    def test_a_split_head_is_refused(self, monkeypatch):
        monkeypatch.setattr(torch.distributed, "get_world_size", {"one": 1, "two": 2}.get)
        hidden, weight, labels = linear_problem((6,), torch.float32)
        alone = fast.linear_cross_entropy(hidden, weight, labels)
        assert torch.equal(fast.linear_cross_entropy(hidden, weight, labels, 1.0, "none", "one")[0], alone[0])
        with pytest.raises(NotImplementedError, match="2 ranks share the vocabulary"):
            fast.linear_cross_entropy(hidden, weight, labels, 1.0, "none", "two")


@pytest.fixture(scope="module")
def functional():
    stubs = ("tensordict", "verl", "verl.utils", "verl.utils.device")
    return peers.load("verl", "verl/utils/torch_functional.py", stubs)


@pytest.fixture(scope="module")
def fused():
    return peers.load("verl", "verl/utils/experimental/torch_functional.py")


@pytest.fixture(scope="module")
def kernel():
    return peers.load("verl", "verl/utils/kernel/linear_cross_entropy.py")


class TestParity:
    """The same call to both: value, shape, dtype, gradient, signature."""

    FUNCTIONS = ("logprobs_from_logits", "logprobs_from_logits_v2", "logprobs_from_logits_naive")
    ENTROPIES = ("entropy_from_logits", "entropy_from_logits_with_chunking")

    def test_signatures(self, functional, fused, kernel):
        for name in (*self.FUNCTIONS, *self.ENTROPIES, "logprobs_from_logits_flash_attn"):
            assert peers.parameters(getattr(fast, name)) == peers.parameters(getattr(functional, name)), name
        ours, theirs = fast.FusedLinearForPPO, fused.FusedLinearForPPO
        assert peers.parameters(ours.__init__) == peers.parameters(theirs.__init__)
        assert peers.parameters(ours.forward) == peers.parameters(theirs.forward)
        assert peers.parameters(fast.linear_cross_entropy) == peers.parameters(kernel.LinearCrossEntropy.forward)[1:]

    @pytest.mark.parametrize("name", FUNCTIONS)
    @pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_logprobs(self, functional, name, lead, dtype):
        logits, labels = make_logits(lead, dtype), torch.randint(0, 37, lead)
        upstream = torch.randn(lead, dtype=torch.float64)
        both = []
        for module in (fast, functional):
            leaf = logits.clone().requires_grad_()
            logps = getattr(module, name)(leaf * 1, labels)
            both.append((logps, gradient(logps, leaf, upstream)))
        (ours, our_grad), (theirs, their_grad) = both
        assert ours.shape == theirs.shape
        assert our_grad.dtype == their_grad.dtype
        if dtype == torch.bfloat16:  # theirs are rounded to bf16; with flash-attn they would be fp32 too
            assert (ours.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
            assert problems.relative_error(theirs, ours) < 4e-3
            assert problems.relative_error(their_grad, our_grad) < 2e-2
        else:
            assert ours.dtype == theirs.dtype
            assert problems.relative_error(ours, theirs) < 1e-6
            assert problems.relative_error(our_grad, their_grad) < 3e-6

    # Theirs with chunks takes packed logits only.
    @pytest.mark.parametrize("name, lead", [(name, (6,)) for name in ENTROPIES] + [("entropy_from_logits", (2, 3))])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_entropy(self, functional, name, lead, dtype):
        logits = make_logits(lead, dtype)
        upstream = torch.randn(lead, dtype=torch.float64)
        both = []
        for module in (fast, functional):
            leaf = logits.clone().requires_grad_()
            entropy = getattr(module, name)(leaf)
            both.append((entropy, gradient(entropy, leaf, upstream)))
        (ours, our_grad), (theirs, their_grad) = both
        assert ours.shape == theirs.shape
        loose = 1 if dtype == torch.float32 else 1e4
        assert problems.relative_error(theirs, ours) < 4e-6 * loose
        assert problems.relative_error(their_grad, our_grad) < 4e-6 * loose

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
    @pytest.mark.parametrize("impl_backend", ["torch", "liger"])
    def test_fused_head(self, fused, impl_backend, lead, temperature):
        """Theirs is itself where liger-kernel is not installed, or not for this device."""
        hidden, weight, labels = linear_problem(lead, torch.float32)
        if getattr(fused, "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY", None) and impl_backend == "liger":
            labels.view(-1)[2] = -100
        upstream, other = torch.randn(2, *lead)
        both = []
        for module in (fast, fused):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            # verl's makes its flattened hidden a leaf of its own; a non-leaf is what a model hands it
            layer = module.FusedLinearForPPO(chunk_size=4, impl_backend=impl_backend)
            logps, entropy = layer(h * 1, w, labels, temperature=temperature)
            ((logps * upstream).sum() + (entropy * other).sum()).backward()
            both.append((logps, entropy, h.grad, w.grad))
        for ours, theirs in zip(*both, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert problems.relative_error(ours, theirs) < 4e-6


def test_verl_is_not_imported():
    code = "import sys, grpo_fast.integrations.verl; assert not {'verl', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
