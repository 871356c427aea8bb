"""The objectives' values and derivatives against float64 autograd, and the scalar functions under them."""

import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_oracle import DEVICE, error, policy

from grpo_fast.kernels import objectives, primitives


@triton.jit
def _objective_kernel(
    logps, old, ref, advantages, weights, loss, g, n, constants, OBJECTIVE: tl.constexpr, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    value, derivative = OBJECTIVE(
        tl.load(logps + lanes),
        None if old is None else tl.load(old + lanes),
        None if ref is None else tl.load(ref + lanes),
        tl.load(advantages + lanes),
        tl.load(weights + lanes),
        constants,
    )
    tl.store(loss + lanes, value, mask=lanes < n)
    tl.store(g + lanes, derivative, mask=lanes < n)


@triton.jit
def _unary_kernel(x, y, second, FUNCTION: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    value = FUNCTION(tl.load(x + lanes))
    if PAIR:
        tl.store(second + lanes, value[1])
        value = value[0]
    tl.store(y + lanes, value)


def evaluate(objective, logps, old, ref, advantages, weights=None, low=0.8, high=1.2, delta=math.inf, beta=0.0):
    n = 1 << max(0, (len(logps) - 1).bit_length())

    def padded(v):
        return (
            None
            if v is None
            else torch.nn.functional.pad(torch.as_tensor(v, dtype=torch.float32, device=DEVICE), (0, n - len(v)))
        )

    weights = [1.0] * len(logps) if weights is None else weights
    loss, g = torch.zeros(2, n, device=DEVICE)
    constants = objectives.clip_params(low, high, delta, beta)
    vectors = [padded(v) for v in (logps, old, ref, advantages, weights)]
    _objective_kernel[(1,)](*vectors, loss, g, len(logps), constants, OBJECTIVE=objective, BLOCK=n)
    return loss[: len(logps)], g[: len(logps)]


def unary(function, x, pair=False):
    y, second = torch.zeros(2, len(x), device=DEVICE)
    _unary_kernel[(1,)](x, y, second, FUNCTION=function, PAIR=pair, BLOCK=len(x))
    return (y, second) if pair else y


def relative(got, want):
    return ((got.double() - want) / want).abs().max().item()


@pytest.mark.parametrize("with_old", [True, False])
@pytest.mark.parametrize("with_ref, unbiased", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("delta", [math.inf, 1.5])
def test_against_autograd(with_old, with_ref, unbiased, delta):
    logps, old, ref, advantages, weights = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = weights.abs()
    beta = 0.1 if with_ref else 0.0
    x = logps.double().requires_grad_()
    loss, ratio = policy(x, old if with_old else None, advantages.double(), weights, 0.8, 1.3, delta)
    if with_ref:
        d = ref.double() - x
        loss = loss + beta * (ratio if unbiased else 1.0) * (d.exp() - d - 1)
    (want,) = torch.autograd.grad(loss.sum(), x)
    objective = objectives.clip_unbiased_kl if unbiased else objectives.clip
    got, g = evaluate(
        objective,
        logps,
        old if with_old else None,
        ref if with_ref else None,
        advantages,
        weights,
        0.8,
        1.3,
        delta,
        beta,
    )
    assert error(got, loss.detach()) < 1e-6
    assert error(g, want) < 1e-6


def test_sign_table():
    # log-ratio +-0.5, A = +-1, epsilon 0.2
    loss, g = evaluate(objectives.clip, [0.5, -0.5, 0.5, -0.5], [0.0] * 4, None, [1.0, 1.0, -1.0, -1.0])
    assert loss.tolist() == pytest.approx([-1.2, -0.606531, 1.648721, 0.8], rel=1e-6)
    assert g.tolist() == pytest.approx([0.0, -0.606531, 1.648721, 0.0], rel=1e-6)


def test_worked_values():
    loss, g = evaluate(objectives.clip, [math.log(0.6), -2.1], [math.log(0.4), -2.3], None, [1.0, 0.48])
    assert loss.tolist() == pytest.approx([-1.2, -0.576], rel=1e-6)
    assert g.tolist() == [0.0, 0.0]


def test_delta_bounds_negative_advantages_only():
    loss, g = evaluate(objectives.clip, [3.0, 3.0, 1.0], [0.0] * 3, None, [-1.0, 1.0, -1.0], delta=4.0)
    assert loss.tolist() == pytest.approx([4.0, -1.2, math.e], rel=1e-6)
    assert g.tolist() == pytest.approx([0.0, 0.0, math.e], rel=1e-6)


def test_gradient_flows_at_the_bound():
    high, low = (torch.tensor(math.log(r)).item() for r in (1.2, 0.8))
    _, g = evaluate(objectives.clip, [high, low], [0.0, 0.0], None, [1.0, -1.0])
    assert g.tolist() == pytest.approx([-1.2, 0.8], rel=1e-6)


def test_overflowing_ratio():
    # A = 1; A = 0; w = 0; A < 0, whose value itself overflows; A < 0 under delta
    loss, g = evaluate(objectives.clip, [0.0] * 4, [-100.0] * 4, None, [1.0, 0.0, 1.0, -1.0], [1.0, 1.0, 0.0, 1.0])
    assert loss.tolist() == pytest.approx([-1.2, 0.0, 0.0, math.inf])
    assert g.tolist() == [0.0, 0.0, 0.0, math.inf]
    loss, g = evaluate(objectives.clip, [0.0], [-100.0], None, [-1.0], delta=4.0)
    assert (loss.item(), g.item()) == (4.0, 0.0)
    # A < 0 without weight; no KL to multiply
    loss, g = evaluate(objectives.clip, [0.0], [-100.0], None, [-1.0], [0.0])
    assert (loss.item(), g.item()) == (0.0, 0.0)
    loss, g = evaluate(objectives.clip_unbiased_kl, [-1.0], [-101.0], [-1.0], [0.0], beta=0.1)
    assert (loss.item(), g.item()) == (0.0, 0.0)


@pytest.mark.parametrize("d, k3", [(60.0, 1.142007e26), (80.0, 5.540622e34), (200.0, math.inf)])
def test_large_kl_is_never_nan(d, k3):
    loss, g = evaluate(objectives.clip, [-d], None, [0.0], [0.0], beta=1.0)
    assert loss.item() == pytest.approx(k3, rel=1e-6)
    assert g.item() == pytest.approx(-k3, rel=1e-6)


def grid(largest):
    x = torch.logspace(-8, math.log10(largest), 512, dtype=torch.float64).float()
    return torch.cat([x, -x]).to(DEVICE)


def test_k3_and_expm1_are_accurate_relatively():
    x = grid(80.0)
    d = x.double()
    # e^d - d - 1 cancels in float64 too, below 1e-3: its series there.
    want = torch.where(
        d.abs() < 1e-2, d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6)))), torch.expm1(d) - d
    )
    assert relative(unary(primitives.exp_remainder, x), want) < 1e-6
    assert relative(unary(primitives.expm1, x), torch.expm1(d)) < 1e-6


def test_exp_is_accurate_over_its_range():
    x = grid(87.0)
    assert relative(unary(primitives.exp, x), x.double().exp()) < 5e-7
    edge = torch.tensor([88.7, 89.0, 1e30, math.inf, -110.0, -1e30, -math.inf, math.nan], device=DEVICE)
    got = unary(primitives.exp, edge).tolist()
    assert got[0] == pytest.approx(math.exp(torch.tensor(88.7).item()), rel=1e-6)
    assert got[1:7] == [math.inf, math.inf, math.inf, 0.0, 0.0, 0.0]
    assert math.isnan(got[7])


def test_tanh_is_accurate_relatively():
    x = grid(40.0)
    value, derivative = unary(primitives.tanh, x, pair=True)
    assert relative(value, x.double().tanh()) < 1e-6
    assert relative(derivative, 1 / x.double().cosh() ** 2) < 5e-6  # e^-2|x| carries |x| roundings
