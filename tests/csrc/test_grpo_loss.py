"""grpo_loss against float64 autograd: losses, log-probs, entropies and gradients."""

import math

import native_rows as rows
import pytest
import torch

# 1 and 2: degenerate vocabularies. 7, 17: less and just more than one vector. 100: no whole AVX-512 unroll. 509: prime.
# 4097: two blocks and one more. 50257: GPT-2, unaligned rows. 151936: Qwen, 75 blocks.
VOCABULARIES = (1, 2, 7, 17, 100, 509, 4097, 50257, 151936)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(ops, problem, out=None, tolerance=2e-6):
    dtype = problem.logits.dtype
    want = rows.float64_loss(problem)
    got = rows.native_loss(ops, problem, out)
    rows.assert_vector_close(got.logps, want.logps)
    rows.assert_vector_close(got.entropy, want.entropy, tolerance=2e-6)
    rows.assert_vector_close(got.losses, want.losses, tolerance=4e-6)
    rows.assert_gradient_close(got.grad, want.grad, dtype, tolerance)
    assert (got.grad[problem.valid == 0] == 0).all()


@pytest.mark.parametrize("V", VOCABULARIES)
def test_on_policy(ops, V):
    T = 5 if V < 50_000 else 3
    check(ops, rows.make_problem(1, T, V, seed=V))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [17, 509, 4097])
@pytest.mark.parametrize("inplace", [False, True])
def test_off_policy_with_everything_but_entropy(ops, V, dtype, inplace):
    problem = rows.make_problem(3, 4, V, dtype, temperature=0.7, logit_scale=1.5, delta=1.3, beta=0.1)
    problem = rows.off_policy(problem)
    want = rows.float64_loss(problem)
    got = rows.native_loss(ops, problem, problem.logits if inplace else None)
    rows.assert_vector_close(got.losses, want.losses, tolerance=4e-6)
    rows.assert_gradient_close(got.grad, want.grad, dtype)


OPTIONS = {
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": 0.0625},
    "all transforms": {"temperature": 1.7, "softcap": 3.0, "logit_scale": 0.5},
    "entropy": {"entropy_scale": torch.tensor(0.02)},
    "entropy and transforms": {"entropy_scale": torch.tensor(0.02), "temperature": 0.6, "softcap": 5.0},
    "kl": {"beta": 0.04},
    "bias-corrected kl": {"beta": 0.04, "bias_correction": True},
    "delta": {"delta": 1.25},
    "wide clip": {"clip_low": 0.0, "clip_high": 3.0},
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(ops, name, dtype, inplace):
    problem = rows.off_policy(rows.make_problem(2, 6, 509, dtype, **OPTIONS[name]))
    want = rows.float64_loss(problem)
    got = rows.native_loss(ops, problem, problem.logits if inplace else None)
    rows.assert_vector_close(got.losses, want.losses, tolerance=4e-6)
    rows.assert_vector_close(got.logps, want.logps, tolerance=2e-6)
    rows.assert_vector_close(got.entropy, want.entropy, tolerance=2e-6)
    rows.assert_gradient_close(got.grad, want.grad, dtype, tolerance=4e-6)


def test_entropy_is_optional_and_changes_nothing(ops):
    problem = rows.make_problem(2, 3, 509, entropy_scale=torch.tensor(0.1))
    with_entropy, without = rows.native_loss(ops, problem), rows.native_loss(ops, problem, entropy=False)
    assert torch.equal(with_entropy.grad, without.grad)
    assert torch.equal(with_entropy.losses, without.losses)


def one_token(log_ratio, advantage, **options):
    """A single token with log-prob -ln 2 whose ratio is exp(log_ratio)."""
    return rows.Problem(
        logits=torch.zeros(1, 1, 2),
        ids=torch.zeros(1, 1, dtype=torch.int64),
        valid=torch.ones(1, 1, dtype=torch.uint8),
        advantages=torch.tensor([[float(advantage)]]),
        coef=torch.ones(1, 1),
        old_logps=torch.tensor([[-math.log(2.0) - log_ratio]]),
        **options,
    )


@pytest.mark.parametrize(
    "log_ratio, advantage, options, loss, gradient",
    [
        (0.5, 1, {}, -1.2, 0.0),  # the worked values: min(r A, clip(r) A), four branches
        (-0.5, 1, {}, -0.606531, -0.606531),
        (0.5, -1, {}, 1.648721, 1.648721),
        (-0.5, -1, {}, 0.8, 0.0),
        (3.0, -1, {"delta": 4.0}, 4.0, 0.0),  # delta bounds what clip does not
        (3.0, 1, {"delta": 4.0}, -1.2, 0.0),
        (100.0, 1, {}, -1.2, 0.0),  # the ratio overflows and is not needed
        (200.0, 0, {}, 0.0, 0.0),
        (0.2, 0.48, {"clip_high": 1.3}, -0.586273, -0.586273),
    ],
)
def test_clip_values(ops, log_ratio, advantage, options, loss, gradient):
    got = rows.native_loss(ops, one_token(log_ratio, advantage, **options))
    assert got.losses.item() == pytest.approx(loss, rel=2e-6)
    assert got.grad[0, 0, 0].item() == pytest.approx(gradient / 2, rel=2e-6)
    assert got.grad[0, 0, 1].item() == pytest.approx(-gradient / 2, rel=2e-6)
    if gradient == 0:
        assert (got.grad == 0).all()


@pytest.mark.parametrize("advantage, bound", [(1, "clip_high"), (-1, "clip_low"), (-1, "delta")])
def test_the_gradient_flows_at_the_bound_and_stops_beyond(ops, advantage, bound):
    """The bound is chosen so that its logarithm, rounded to fp32, is the log-ratio; then one step inside of it."""
    log_ratio = -0.2 if bound == "clip_low" else 0.2
    problem = one_token(log_ratio, advantage, clip_low=0.5, clip_high=2.0)
    log_ratio = rows.native_loss(ops, problem).logps - problem.old_logps
    inside = torch.nextafter(log_ratio, torch.tensor(0.0))
    setattr(problem, bound, math.exp(log_ratio.item()))
    assert rows.native_loss(ops, problem).grad[0, 0, 0] == pytest.approx(-advantage * math.exp(log_ratio) / 2, rel=1e-6)
    setattr(problem, bound, math.exp(inside.item()))
    assert (rows.native_loss(ops, problem).grad == 0).all()


@pytest.mark.parametrize("gap", [1e-7, 1e-6, 1e-4, 0.01, 0.0999, 0.1001, 0.4999, 0.5001, 1.0, 1.9, 2.0, 60.0, 80.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_is_right_to_1e_6_whatever_the_gap(ops, gap, sign):
    problem = one_token(0.0, 0.0, beta=1.0)
    logp = rows.native_loss(ops, problem).logps
    problem.ref_logps = logp + sign * gap
    d = (problem.ref_logps - logp).double().item()
    got = rows.native_loss(ops, problem)
    want = math.expm1(d) - d if abs(d) > 1e-3 else d * d / 2 * (1 + d / 3 + d * d / 12)
    assert got.losses.item() == pytest.approx(want, rel=1e-6)
    assert got.grad[0, 0, 0].item() == pytest.approx(-math.expm1(d) / 2, rel=1e-6)


def test_sampling_weights_multiply_the_policy_term_only(ops):
    problem = one_token(0.1, 1.0, beta=0.1, ref_logps=torch.tensor([[-1.0]]))
    plain = rows.native_loss(ops, problem).losses.item()
    problem.beta = 0.0
    policy = rows.native_loss(ops, problem).losses.item()
    problem.beta, problem.weights = 0.1, torch.tensor([[0.25]])
    assert rows.native_loss(ops, problem).losses.item() == pytest.approx(0.25 * policy + plain - policy, rel=1e-6)


def test_dead_tokens_have_statistics_but_no_gradient(ops):
    problem = rows.make_problem(1, 4, 4097, masked=False)
    problem.advantages[0, :2] = 0
    got = rows.native_loss(ops, problem)
    rows.assert_vector_close(got.logps, rows.float64_loss(problem).logps)
    assert (got.grad[0, :2] == 0).all()
    assert (got.grad[0, 2:] != 0).any(-1).all()


def test_a_stale_token_or_garbage_in_a_masked_slot_leaves_the_others_alone(ops):
    problem = rows.off_policy(rows.make_problem(2, 6, 100, beta=0.1))
    before = rows.native_loss(ops, problem)
    gone = problem.valid == 0
    problem.old_logps[gone] = -1e10
    problem.ref_logps[gone] = 1e10
    problem.logits[gone] = math.inf
    after = rows.native_loss(ops, problem)
    for name in ("losses", "logps", "entropy", "grad"):
        assert torch.equal(getattr(before, name), getattr(after, name))
