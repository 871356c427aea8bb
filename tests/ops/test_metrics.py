import math

import problems
import pytest
import torch

import grpo_fast as gf

BACKENDS = problems.backends_here()
KEYS = {
    "kl", "entropy", "ratio/mean", "ratio/min", "ratio/max", "clip_ratio/low_mean", "clip_ratio/high_mean",
    "clip_ratio/region_mean", "cispo_clip_ratio",
}  # fmt: skip


def run(log_ratios, advantages, mask=None, backend=None, **options):
    """A problem whose log-ratios are given: uniform logits over 4 tokens."""
    log_ratios = torch.tensor(log_ratios)
    old = -math.log(4) - log_ratios
    ids = torch.zeros(log_ratios.shape, dtype=torch.int64)
    logits = torch.zeros(*log_ratios.shape, 4, requires_grad=True)
    return gf.grpo_loss(logits, ids, torch.tensor(advantages), mask, old_logps=old, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_ratios_by_side(backend):
    """low needs A < 0 below the bound, high A > 0 above it; the delta cap is in neither."""
    out = run([[0.5, -0.5, 0.5, -0.5, 0.0, 3.0]], [[1.0, 1.0, -1.0, -1.0, 1.0, -1.0]], delta=4.0, backend=backend)
    means = out.metrics.means()
    assert set(means) == KEYS
    assert means["clip_ratio/low_mean"].item() == pytest.approx(1 / 6)
    assert means["clip_ratio/high_mean"].item() == pytest.approx(1 / 6)
    assert means["clip_ratio/region_mean"].item() == pytest.approx(2 / 6)
    assert means["ratio/max"].item() == pytest.approx(math.exp(3), rel=1e-5)
    assert means["ratio/min"].item() == pytest.approx(math.exp(-0.5), rel=1e-5)


def test_sums_combine_exactly():
    """B109: 3 of 12 and 3 of 4 tokens clipped is 6 of 16, not the mean of the means."""
    a = run([[1.0] * 3 + [0.0] * 9], [1.0])
    b = run([[1.0] * 3 + [0.0] * 1], [1.0])
    assert sum([a.metrics, b.metrics]).means()["clip_ratio/high_mean"].item() == 0.375
    whole = a.metrics + b.metrics
    assert whole.means()["ratio/max"].item() == pytest.approx(math.e)
    assert whole.clip_count == 16


def test_sequence_level_counts_sequences():
    out = run(
        [[1.0, 1.0, 1.0], [0.0, 0.0, 9.0], [0.0, 0.0, 0.0]], [1.0, 1.0, 1.0],
        torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]), importance_sampling_level="sequence",
    )  # fmt: skip
    means = out.metrics.means()
    assert means["clip_ratio/high_mean"] == 0.5
    assert means["ratio/mean"].item() == pytest.approx((math.e + 1) / 2)
    assert out.metrics.clip_count == 2


def test_cispo_has_its_own_ratio():
    means = run([[1.0, 0.0]], [1.0], loss_type="cispo", epsilon_high=1.5).metrics.means()
    assert means["cispo_clip_ratio"] == 0.5
    assert means["clip_ratio/region_mean"] == 0


def test_kl_and_entropy_when_not_asked_for():
    """B166: 0, never NaN. With ref_logps and beta = 0 the kl is still reported."""
    means = run([[0.0]], [1.0]).metrics.means()
    assert means["kl"] == means["entropy"] == 0
    ref = torch.tensor([[-math.log(4) + 0.1]])
    means = run([[0.0]], [1.0], ref_logps=ref, return_entropy=True).metrics.means()
    assert means["kl"].item() == pytest.approx(math.exp(0.1) - 1.1, rel=1e-4)
    assert means["entropy"].item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_tokens_count_as_unclipped(backend):
    """Heads drop dead tokens: clip ratios keep them in the count, ratio and kl do not."""
    hidden, weight = torch.zeros(1, 4, 3, requires_grad=True), torch.zeros(4, 3)
    old = torch.full((1, 4), -math.log(4) - 1)
    out = gf.linear_grpo_loss(
        hidden, weight, torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[1.0, 0.0, 0.0, 0.0]]), old_logps=old,
        backend=backend,
    )  # fmt: skip
    means = out.metrics.means()
    assert out.scored.tolist() == [[True, False, False, False]]
    assert means["clip_ratio/high_mean"] == 0.25
    assert means["ratio/mean"].item() == pytest.approx(math.e)
    assert out.metrics.scored_tokens == 1
    assert out.metrics.tokens == 4


def test_worked_kl_values():
    """KL([.5,.5] || [.25,.75]) = 0.144, reversed 0.131: the k3 estimator's expectation is the KL."""
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    for a, b, expected in ((p, q, 0.144), (q, p, 0.131)):
        total = 0.0
        for token in range(2):
            out = gf.grpo_loss(
                a.log()[None, None], torch.tensor([[token]]), torch.zeros(1), ref_logps=b.log()[token].reshape(1, 1),
                beta=1.0,
            )  # fmt: skip
            total += a[token] * out.loss
        assert total.item() == pytest.approx(expected, abs=5e-4)


def test_extrema_combine():
    """Whichever of two micro-batches holds the extremum."""
    low, high = run([[-0.3, 0.1]], [[1.0, 1.0]]), run([[0.2, 0.7]], [[1.0, 1.0]])
    for parts in ((low, high), (high, low)):
        means = sum(part.metrics for part in parts).means()
        assert means["ratio/min"] == pytest.approx(math.exp(-0.3), rel=1e-6)
        assert means["ratio/max"] == pytest.approx(math.exp(0.7), rel=1e-6)


@pytest.mark.parametrize("low, high", [(0.2, 0.7), (-0.7, -0.2)])
def test_metrics_without_ratios_leave_the_extrema(low, high):
    """An objective of one's own has no ratio: its metrics are added like any other."""
    hidden, weight, ids = torch.randn(1, 2, 4), torch.randn(6, 4), torch.randint(0, 6, (1, 2))
    own = gf.linear_policy_loss(hidden, weight, ids, lambda logps: -logps, {}).metrics
    for total in (own + run([[low, high]], [[1.0, 1.0]]).metrics, run([[low, high]], [[1.0, 1.0]]).metrics + own):
        assert total.means()["ratio/min"] == pytest.approx(math.exp(low), rel=1e-6)
        assert total.means()["ratio/max"] == pytest.approx(math.exp(high), rel=1e-6)
    assert own.means()["ratio/min"] == own.means()["ratio/max"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_sequences_count_as_unclipped(backend):
    """Sequence level, head: a sequence without an advantage is not scored, but it counts in the clip ratio."""
    hidden, weight, ids = torch.randn(3, 2, 4), torch.randn(6, 4), torch.randint(0, 6, (3, 2))
    logps = gf.linear_token_logprobs(hidden, weight, ids, backend=backend)
    out = gf.linear_grpo_loss(
        hidden, weight, ids, torch.tensor([1.0, 0.0, 1.0]), old_logps=logps - torch.tensor([[0.5], [0.5], [0.0]]),
        importance_sampling_level="sequence", backend=backend,
    )  # fmt: skip
    means = out.metrics.means()
    assert means["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    assert means["ratio/mean"] == pytest.approx((math.exp(0.5) + 1) / 2, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_averages_over_scored_tokens(backend):
    """beta 0: the head drops the token without an advantage, whose KL is unknown."""
    hidden, weight, ids = torch.randn(1, 3, 4), torch.randn(6, 4), torch.randint(0, 6, (1, 3))
    logps = gf.linear_token_logprobs(hidden, weight, ids, backend=backend)
    out = gf.linear_grpo_loss(
        hidden, weight, ids, torch.tensor([[1.0, 0.0, 1.0]]), ref_logps=logps + torch.tensor([[1.0, 5.0, 1.0]]),
        backend=backend,
    )  # fmt: skip
    assert out.metrics.means()["kl"] == pytest.approx(math.e - 2, rel=1e-5)


def test_counts_are_exact_beyond_float32():
    count = torch.tensor(2**24 + 1)
    metrics = gf.LossMetrics.of(count.device, tokens=count)
    assert (metrics + metrics).tokens.item() == 2**25 + 2
