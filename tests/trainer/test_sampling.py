"""Drawing tokens by inverting the cumulative distribution."""

import pytest
import torch

from grpo_fast.rollout import SamplingOptions
from grpo_fast.rollout.sampling import draw

SAMPLE = SamplingOptions()
VOCABULARIES = [1, 2, 255, 256, 257, 1000, 50257]  # around the block of 256, and a real one


def uniforms(count, seed=0):
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_are_the_first_whose_cumulative_probability_exceeds_the_number(vocab):
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(1)) * 4
    numbers = uniforms(64)
    ids, logps = draw(logits, numbers, SAMPLE)
    log_probs = logits.double().log_softmax(-1)
    cumulative = log_probs.exp().cumsum(-1)
    rows = torch.arange(64)
    assert (cumulative[rows, ids] > numbers - 1e-6).all()
    assert (cumulative[rows, ids] - log_probs.exp()[rows, ids] < numbers + 1e-6).all()
    assert torch.allclose(logps.double(), log_probs[rows, ids], atol=1e-5)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_ends_of_the_interval_are_tokens(vocab):
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    ids, logps = draw(logits, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64), SAMPLE)
    assert ids.tolist() == [0, vocab - 1]
    assert logps.isfinite().all()


def test_tokens_without_probability_are_never_drawn():
    logits = torch.zeros(1000, 700)
    allowed = torch.tensor([3, 300, 301, 640])
    masked = torch.full_like(logits, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    numbers = torch.linspace(0, 1 - 2**-53, 1000, dtype=torch.float64)
    ids, logps = draw(masked, numbers, SAMPLE)
    assert set(ids.tolist()) == set(allowed.tolist())
    assert torch.bincount(ids)[allowed].tolist() == pytest.approx([250] * 4, abs=1)
    assert torch.allclose(logps, torch.tensor(0.25).log().expand(1000))


def test_the_tail_of_a_large_vocabulary_keeps_its_share():
    """Behind one likely token 200000 share 1 %: each adds to the sum less than its rounding in float32."""
    logits = torch.zeros(1, 200_001)
    logits[0, 0] = torch.tensor(99.0 * 200_000).log()
    ids, _ = draw(logits.expand(4000, -1), torch.linspace(0.99, 1 - 2**-53, 4000, dtype=torch.float64), SAMPLE)
    assert ids.min() <= 1
    assert torch.allclose(ids.double(), torch.linspace(0, 200_000, 4000, dtype=torch.float64), atol=60)


def test_top_k_top_p_and_temperature_shape_the_distribution():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).log_softmax(-1).repeat(20_000, 1)
    options = SamplingOptions(temperature=0.5, top_k=3, top_p=0.9)
    ids, logps = draw(logits, uniforms(20_000), options)
    expected = (logits[0, :2].double() / 0.5).softmax(-1)  # 0.867 and 0.117 of the three that top-k leaves: 0.98
    assert torch.allclose(torch.bincount(ids) / 20_000, expected.float(), atol=0.01)
    assert torch.allclose(logps.exp(), expected.float()[ids], atol=1e-6)


def test_greedy_takes_the_first_of_the_largest_and_its_untempered_log_prob():
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 1.0, 1.0, 1.0]])
    ids, logps = draw(logits, torch.zeros(2, dtype=torch.float64), SamplingOptions(temperature=0, top_k=1))
    assert ids.tolist() == [1, 0]
    assert torch.allclose(logps, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_rows_beyond_a_chunk_are_drawn_alike(monkeypatch):
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(1))
    expected = draw(logits, uniforms(10), SAMPLE)
    monkeypatch.setattr("grpo_fast.rollout.sampling._CHUNK", 900)
    for got, value in zip(draw(logits, uniforms(10), SAMPLE), expected, strict=True):
        assert torch.equal(got, value)
