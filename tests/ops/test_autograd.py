"""What users may do with the loss and its inputs: upstream gradients, retained graphs, in place, second derivatives."""

import problems
import pytest
import torch
from allocations import Allocations

import grpo_fast as gf

BACKENDS = problems.backends_here()
FUSED = [b for b in BACKENDS if b != "reference"]


def setup(dtype=torch.float32, seed=0):
    problem = problems.make(dtype=dtype, seed=seed)
    logits = problem.pop("logits")
    return logits, problem | {"beta": 0.1}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("upstream", [1.0, 3.7, -1.0, 65536.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_upstream_scales_exactly(backend, upstream, dtype):
    """B36. A power of two is exact; any other within one rounding of the dtype."""
    logits, kwargs = setup(dtype)
    plain, scaled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    gf.grpo_loss(plain, **kwargs, backend=backend).loss.backward()
    (gf.grpo_loss(scaled, **kwargs, backend=backend).loss * upstream).backward()
    expected = plain.grad.double() * upstream
    if upstream in (1.0, -1.0, 65536.0, 0.0):
        assert torch.equal(scaled.grad.double(), expected)
    else:
        # One rounding of the dtype; plain autograd rounds at several places on the way.
        epsilon = torch.finfo(dtype).eps * (1 if backend != "reference" else 8)
        assert ((scaled.grad.double() - expected).abs() <= epsilon * expected.abs()).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_retained_graph_gives_the_same_twice(backend):
    logits, kwargs = setup()
    leaf = logits.clone().requires_grad_()
    loss = gf.grpo_loss(leaf, **kwargs, backend=backend).loss
    first = torch.autograd.grad(loss * 3, leaf, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss * 3, leaf, retain_graph=True)[0].clone()
    third = torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(first, second)
    assert torch.allclose(third * 3, first, rtol=1e-6)


@pytest.mark.parametrize("backend", FUSED)
def test_double_backward_is_refused(backend):
    """B44."""
    logits, kwargs = setup()
    for function in (
        lambda x: gf.grpo_loss(x, **kwargs, backend=backend).loss,
        lambda x: gf.grpo_loss(x, **kwargs, reduction="none", backend=backend).loss.sum(),
        lambda x: gf.token_logprobs(x, kwargs["token_ids"], kwargs["mask"], backend=backend).sum(),
    ):
        leaf = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            grad.square().sum().backward()


def test_reference_is_differentiable_twice():
    logits, kwargs = setup(torch.float64)
    leaf = logits[:1, :2].clone().requires_grad_()
    small = {k: v[:1, :2] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    assert torch.autograd.gradgradcheck(lambda x: gf.grpo_loss(x, **small).loss, leaf)
    assert torch.autograd.gradcheck(lambda x: gf.grpo_loss(x, **small, entropy_coef=0.1).loss, leaf)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_of_place_leaves_the_logits_alone(backend):
    """B37: a second use of the logits is right, and their bits are untouched."""
    logits, kwargs = setup()
    kwargs["old_logps"] = None
    leaf = logits.clone().requires_grad_()
    (gf.grpo_loss(leaf, **kwargs, backend=backend).loss + leaf.square().mean()).backward()
    assert torch.equal(leaf.detach(), logits)
    alone = logits.clone().requires_grad_()
    gf.grpo_loss(alone, **kwargs, backend=backend).loss.backward()
    assert torch.allclose(leaf.grad, alone.grad + 2 * logits / logits.numel(), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
class TestInPlace:
    def test_second_use_of_the_logits_is_an_error(self, backend):
        """B37: the version counter tells autograd that the values are gone."""
        logits, kwargs = setup()
        leaf = logits.clone().requires_grad_()
        z = leaf * 1
        other = z.square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (gf.grpo_loss(z, **kwargs, inplace=True, backend=backend).loss + other).backward()

    def test_model_ending_in_a_saved_output_is_an_error(self, backend):
        logits, kwargs = setup()
        leaf = logits.clone().requires_grad_()
        loss = gf.grpo_loss(torch.softmax(leaf, -1), **kwargs, inplace=True, backend=backend).loss
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_gradient_lies_in_the_logits(self, backend):
        logits, kwargs = setup()
        leaf = logits.clone().requires_grad_()
        z = leaf * 1
        gf.grpo_loss(z, **kwargs, inplace=True, backend=backend).loss.backward()
        assert torch.equal(z.detach(), leaf.grad)

    def test_second_backward_raises(self, backend):
        logits, kwargs = setup()
        leaf = logits.clone().requires_grad_()
        loss = gf.grpo_loss(leaf * 1, **kwargs, inplace=True, backend=backend).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_leaf_and_overlap_are_refused(self, backend):
        logits, kwargs = setup()
        with pytest.raises(ValueError, match="leaf that requires grad"):
            gf.grpo_loss(logits.clone().requires_grad_(), **kwargs, inplace=True, backend=backend)
        with pytest.raises(ValueError, match="overlaps itself"):
            gf.grpo_loss(logits[:, :1].expand(3, 7, 37), **kwargs, inplace=True, backend=backend)
        windows = torch.zeros(3 * 7 * 37).as_strided((3, 7, 37), (7 * 30, 30, 1))
        with pytest.raises(ValueError, match="overlaps itself"):
            gf.token_logprobs(windows, kwargs["token_ids"], inplace=True, backend=backend)

    def test_nothing_is_written_without_a_gradient(self, backend):
        logits, kwargs = setup()
        kept = logits.clone()
        first = gf.grpo_loss(kept, **kwargs, inplace=True, backend=backend)
        with torch.no_grad():
            leaf = kept.requires_grad_()
            gf.grpo_loss(leaf, **kwargs, inplace=True, backend=backend)
            gf.token_logprobs(leaf, kwargs["token_ids"], inplace=True, backend=backend)
        assert torch.equal(kept.detach(), logits)
        assert not first.loss.requires_grad

    @pytest.mark.parametrize("upstream", [1.0, 0.3])
    def test_slices_of_a_wider_buffer(self, backend, upstream):
        """In place in a padded vocabulary: the gaps keep their bits."""
        logits, kwargs = setup()
        wide = torch.full((3, 7, 64), 7.0)
        wide[..., :37] = logits
        view = problems.as_non_leaf(wide)
        (gf.grpo_loss(view[..., :37], **kwargs, inplace=True, backend=backend).loss * upstream).backward()
        expected = logits.clone().requires_grad_()
        (gf.grpo_loss(expected, **kwargs, backend=backend).loss * upstream).backward()
        assert torch.allclose(wide[..., :37], expected.grad, rtol=1e-5, atol=1e-9)
        assert (wide[..., 37:] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_gradients_survive_loss_scaling(backend):
    """Unscaled they would be denormal or 0 in fp16: the scale must come in before the rounding."""
    logits, kwargs = setup(torch.float16)
    kwargs["denominator"] = 10**6
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (gf.grpo_loss(leaf, **kwargs, backend=backend).loss * 2.0**18).backward()
    (gf.grpo_loss(exact, **kwargs).loss * 2.0**18).backward()
    assert problems.relative_error(leaf.grad, exact.grad) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_loss_carries_a_graph(backend):
    logits, kwargs = setup()
    out = gf.grpo_loss(logits.requires_grad_(), **kwargs, return_entropy=True, backend=backend)
    assert out.loss.requires_grad
    assert not any(t.requires_grad for t in (out.logps, out.entropy, out.scored, out.metrics.sums))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["advantages", "old_logps", "ref_logps", "sampling_weights", "denominator"])
def test_constants_may_not_require_grad(backend, name):
    logits, kwargs = setup()
    kwargs[name] = kwargs.get(name, torch.tensor(3.0)).clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{name}.*detach"):
        gf.grpo_loss(logits, **kwargs, backend=backend)


@pytest.mark.parametrize("backend", FUSED)
def test_gradient_needs_no_second_copy(backend):
    """In place: nothing of the logits' size is allocated. Out of place: the gradient alone."""
    logits = torch.randn(4, 8, 4096)
    ids, advantages = torch.randint(0, 4096, (4, 8)), torch.randn(4)
    size = logits.numel() * 4
    for inplace, budget in ((True, 0), (False, 1)):
        leaf = logits.clone().requires_grad_()
        z = leaf * 1
        with Allocations() as seen:
            loss = gf.grpo_loss(z, ids, advantages, inplace=inplace, backend=backend).loss
            (grad,) = torch.autograd.grad(loss, z)
        assert grad.shape == z.shape
        assert seen.large(size) == budget, f"inplace={inplace}: {seen.large(size)} tensors of the logits' size"


@pytest.mark.parametrize("upstream", [1.00390625 - 2.0**-10, 3.7])
@pytest.mark.skipif(problems.INTERPRETED, reason="the interpreter truncates to bf16")
@pytest.mark.parametrize("backend", FUSED)
def test_bf16_upstream_is_not_rounded_first(backend, upstream):
    """The upstream is fp32 whatever the gradient's dtype: one rounding, of the product."""
    logits, kwargs = setup(torch.bfloat16)
    plain, scaled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    gf.grpo_loss(plain, **kwargs, backend=backend).loss.backward()
    (gf.grpo_loss(scaled, **kwargs, backend=backend).loss * upstream).backward()
    assert torch.equal(scaled.grad, (plain.grad.float() * upstream).bfloat16())


@pytest.mark.parametrize("options", [{}, {"loss_type": "cispo", "epsilon_high": 2.0}], ids=["fused", "two sweeps"])
@pytest.mark.parametrize("backend", FUSED)
def test_in_place_is_seen_by_every_other_user_of_the_logits(backend, options):
    """Whoever saved the logits before raises, however the backwards follow each other; and a second backward raises."""
    logits, kwargs = setup()
    z = logits.clone().requires_grad_() * 1
    other = z.square().sum()
    loss = gf.grpo_loss(z, **kwargs, **options, inplace=True, backend=backend).loss
    if options:  # formed in the backward
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    z = logits.clone().requires_grad_() * 1
    loss = gf.grpo_loss(z, **kwargs, **options, inplace=True, backend=backend).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_of_any_layout(backend):
    """.sum() sends an expanded gradient, a transposed product a strided one."""
    logits, kwargs = setup()
    ids, mask = kwargs["token_ids"], kwargs["mask"]
    weights = torch.randn(ids.shape[1], ids.shape[0])

    def grad(upstream_of):
        leaf = logits.clone().requires_grad_()
        upstream_of(gf.token_logprobs(leaf, ids, mask, return_entropy=True, backend=backend)).backward()
        return leaf.grad

    for field in (0, 1):
        ones = grad(lambda out, field=field: (out[field] * torch.ones(ids.shape)).sum())
        assert ones.abs().sum() > 0
        assert torch.equal(grad(lambda out, field=field: out[field].sum()), ones)
        strided = grad(lambda out, field=field: (out[field].t() * weights).sum())
        assert torch.equal(strided, grad(lambda out, field=field: (out[field] * weights.t().contiguous()).sum()))
