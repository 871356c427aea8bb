"""B41: hidden, weight and bias in any dtypes, under any autocast: right values, gradients in their own dtypes."""

import itertools
import math

import problems
import pytest
import torch
from problems import split

import grpo_fast as gf
from grpo_fast.ops import head

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXES = [*itertools.product(DTYPES, repeat=2)]
# Logits of about 3, rounded in the dtype of the products, by which log-probs and gradients are off.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
OPTIONS = {"grpo": {}, "cispo": {"loss_type": "cispo", "epsilon_high": 5.0}}


def tensors_of(problem, hidden_dtype, weight_dtype, bias_dtype):
    shape, vocab = problem["token_ids"].shape, problem["logits"].shape[-1]
    hidden = torch.randn(*shape, 16).to(hidden_dtype)
    return hidden, (torch.randn(vocab, 16) / 4).to(weight_dtype), torch.randn(vocab).to(bias_dtype)


def name(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda pair: "-".join(map(name, pair)))
@pytest.mark.parametrize("backend", problems.backends_here())
def test_loss_and_gradients_of_any_mix(backend, dtypes, autocast, options):
    gemm = autocast or torch.promote_types(*dtypes)
    problem = problems.make(all_valid=True)
    arguments, _ = split(problem, {})
    arguments["old_logps"] = None
    for bias_dtype in DTYPES:
        leaves = [tensor.requires_grad_() for tensor in tensors_of(problem, *dtypes, bias_dtype)]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = gf.grpo_loss(exact[0] @ exact[1].t() + exact[2], **arguments, **options)
        expected.loss.backward()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out = gf.linear_grpo_loss(
                *leaves[:2], **arguments, bias=leaves[2], workspace_bytes=4 * 37 * 5, backend=backend, **options
            )
        out.loss.backward()
        # Where the bias is of a narrower dtype than the products it is exact all the same.
        tolerance = max(TOLERANCES[gemm], *(torch.finfo(leaf.dtype).eps for leaf in leaves))
        assert problems.relative_error(out.logps * out.scored, expected.logps * out.scored) < tolerance
        for leaf, wanted in zip(leaves, exact, strict=True):
            assert leaf.grad.dtype == leaf.dtype
            assert problems.relative_error(leaf.grad, wanted.grad) < tolerance


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda pair: "-".join(map(name, pair)))
@pytest.mark.parametrize("backend", problems.backends_here())
def test_logprobs_and_entropy_of_any_mix(backend, dtypes, autocast):
    gemm = autocast or torch.promote_types(*dtypes)
    problem = problems.make(all_valid=True)
    leaves = [tensor.requires_grad_() for tensor in tensors_of(problem, *dtypes, torch.float32)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    arguments = {"token_ids": problem["token_ids"], "return_entropy": True}
    expected = gf.token_logprobs(exact[0] @ exact[1].t() + exact[2], **arguments)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        values = gf.linear_token_logprobs(*leaves[:2], bias=leaves[2], backend=backend, **arguments)
    upstream = torch.randn(problem["token_ids"].shape)
    for got in (values, expected):
        (got.logps * upstream + got.entropy).sum().backward()
    tolerance = max(TOLERANCES[gemm], *(torch.finfo(leaf.dtype).eps for leaf in leaves))
    assert problems.relative_error(values.logps, expected.logps) < tolerance
    assert problems.relative_error(values.entropy, expected.entropy) < tolerance
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert problems.relative_error(leaf.grad, wanted.grad) < tolerance


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.bfloat16, torch.float64)], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_float64_stays_float64(dtypes, autocast):
    """As torch's own products under autocast, which takes float32 down and leaves float64 alone."""
    problem = problems.make(all_valid=True)
    arguments, _ = split(problem, {})
    leaves = [tensor.requires_grad_() for tensor in tensors_of(problem, *dtypes, torch.float32)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = gf.grpo_loss(exact[0] @ exact[1].t() + exact[2], **arguments)
    expected.loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = gf.linear_grpo_loss(*leaves[:2], **arguments, bias=leaves[2])
    out.loss.backward()
    assert out.loss.dtype == torch.float64
    assert problems.relative_error(out.logps * out.scored, expected.logps * out.scored) < 1e-12
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert problems.relative_error(leaf.grad, wanted.grad) < max(1e-12, torch.finfo(leaf.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", [b for b in problems.backends_here() if b != "reference"])
def test_logits_may_stay_fp32(backend, dtype):
    """bf16 operands, and nothing rounded to bf16 before the softmax; the gradient's products are bf16 still."""
    problem = problems.make(all_valid=True)
    hidden, weight, _ = tensors_of(problem, dtype, dtype, torch.float32)
    arguments = {"token_ids": problem["token_ids"], "advantages": torch.randn(3)}
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = gf.linear_grpo_loss(*exact, **arguments)
    expected.loss.backward()
    logps = []
    for fp32_logits in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        out = gf.linear_grpo_loss(*leaves, **arguments, fp32_logits=fp32_logits, backend=backend)
        out.loss.backward()
        for leaf, wanted in zip(leaves, exact, strict=True):
            assert leaf.grad.dtype == dtype
            assert problems.relative_error(leaf.grad, wanted.grad) < TOLERANCES[dtype]
        logps.append(out.logps)
        other = gf.linear_token_logprobs(
            hidden, weight, arguments["token_ids"], fp32_logits=fp32_logits, backend=backend
        )
        own = gf.linear_policy_loss(
            hidden, weight, arguments["token_ids"], lambda logps: logps, {}, fp32_logits=fp32_logits, backend=backend
        )
        assert torch.equal(other, out.logps)
        assert torch.equal(own.logps, out.logps)
    assert problems.relative_error(logps[0], expected.logps) < 2e-6
    if dtype == torch.bfloat16:
        assert problems.relative_error(logps[1], expected.logps) > 1e-4


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("backend", [b for b in problems.backends_here() if b != "reference"])
def test_fp32_logits_are_rounded_nowhere(backend, autocast):
    """Of bf16 operands, under autocast too, but neither the products nor a float32 bias are rounded after them."""
    problem = problems.make(all_valid=True)
    operands = torch.float32 if autocast else torch.bfloat16
    hidden, weight, bias = tensors_of(problem, operands, operands, torch.float32)
    exact = hidden.bfloat16().double() @ weight.bfloat16().double().t() + bias.double()
    expected = gf.token_logprobs(exact, problem["token_ids"], return_entropy=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = gf.linear_token_logprobs(
            hidden, weight, problem["token_ids"], bias=bias, fp32_logits=True, return_entropy=True, backend=backend,
            workspace_bytes=4 * 37 * 5,
        )  # fmt: skip
    assert problems.relative_error(values.logps, expected.logps) < 2e-6
    assert problems.relative_error(values.entropy, expected.entropy) < 2e-6


@pytest.mark.parametrize(
    "largest", [0.0, 2.0**-149, 3e-39, 0.75, 1.0, 5.0, 2.0**24 + 2, 3.4e38, 3.4028234e38, math.inf]
)
def test_the_scale_of_float16_products_is_a_power_of_two(largest):
    """At most the largest value, so that dividing by it is exact and gives no more than 2."""
    size = head._power_of_two_below(torch.tensor([0.1 * largest, -largest]))
    assert math.frexp(size.item())[0] == 0.5
    if largest == 0:
        assert size == 1
    elif 2.0**-126 <= largest < math.inf:
        assert size <= largest < 2 * size
