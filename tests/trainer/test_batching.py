"""Micro-batches and denominators."""

import pytest
import torch
from tiny_models import EOS

import grpo_fast as gf
from grpo_fast.batching import denominators, make_micro_batches, pack
from grpo_fast.rollout import Rollout


def rollout(prompt, completion, truncated=False):
    return Rollout(prompt_ids=tuple(prompt), completion_ids=tuple(completion), truncated=truncated)


@pytest.mark.parametrize("max_tokens", [1, 5, 16, 17, 64, 10**9])
def test_pack_keeps_to_the_budget(max_tokens):
    lengths = [5, 8, 1, 3, 8, 2, 7, 8]
    groups = pack(lengths, max_tokens)
    assert sorted(index for group in groups for index in group) == list(range(8))
    order = [lengths[index] for group in groups for index in group]
    assert order == sorted(lengths, reverse=True)  # longest first
    for group in groups:
        assert len(group) == 1 or len(group) * lengths[group[0]] <= max_tokens  # alone if it must be


def test_pack_of_nothing():
    assert pack([], 10) == []


def test_rows_are_aligned_with_the_positions_that_predict_them():
    rollouts = [rollout([10, 11, 12, 13, 14], [20, 21, 22, EOS]), rollout([15], [23, 0])]
    (batch,) = make_micro_batches(rollouts, torch.tensor([0.5, -1.0]), [4, 2], max_tokens=64, pad_id=0)
    assert batch.rows == (0, 1)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21, 22, EOS], [15, 23, 0, 0, 0, 0, 0, 0, 0]]
    # P = 5: token t is predicted at column P - 1 + t
    assert batch.predicts[0].nonzero()[:, 0].tolist() == [4, 5, 6, 7]
    assert batch.predicts[1].nonzero()[:, 0].tolist() == [0, 1]  # a sampled pad id is a token, padding is not
    assert batch.positions.tolist() == [4, 5, 6, 7, 9, 10]
    assert batch.first_column == 0
    assert batch.token_ids.tolist() == [20, 21, 22, EOS, 23, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.advantages.tolist() == [0.5, -1.0]
    assert batch.live_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.tokens == 12


def test_live_rows_leave_out_sequences_without_an_advantage():
    rollouts = [rollout([1], [5, 6, EOS]), rollout([1], [7, EOS]), rollout([1], [8])]
    (batch,) = make_micro_batches(rollouts, torch.tensor([0.5, 0.0, -1.0]), [3, 2, 1], max_tokens=64, pad_id=0)
    assert batch.live_rows.tolist() == [0, 1, 2, 5]


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo"])
def test_denominators_are_those_of_the_loss(loss_type):
    lengths = [4, 2, 3]
    logits, cu_seqlens = torch.randn(9, 7), torch.tensor([0, 4, 6, 9])
    ids, advantages = torch.arange(9) % 7, torch.tensor([1.0, -2.0, 0.5])
    options = {"cu_seqlens": cu_seqlens, "loss_type": loss_type, "entropy_coef": 0.1, "max_completion_length": 5}
    denominator, entropy_denominator = denominators(loss_type, lengths, 5)
    given = {"denominator": denominator, "entropy_denominator": entropy_denominator}
    assert gf.grpo_loss(logits, ids, advantages, **options, **given).loss.item() == pytest.approx(
        gf.grpo_loss(logits, ids, advantages, **options).loss.item(), rel=1e-6
    )


def test_left_out_and_empty_rollouts_make_no_rows():
    rollouts = [rollout([1], []), rollout([1], [5, 6], truncated=True), rollout([1], [7])]
    batches = make_micro_batches(rollouts, torch.arange(3.0), [0, 0, 1], max_tokens=64, pad_id=0)
    assert [batch.rows for batch in batches] == [(2,)]
    assert make_micro_batches(rollouts, torch.arange(3.0), [0, 0, 0], max_tokens=64, pad_id=0) == []


@pytest.mark.parametrize(
    "loss_type, expected",
    [("grpo", 5), ("luspo", 5), ("dr_grpo", 40), ("bnpo", 16), ("dapo", 16), ("cispo", 16)],
)
def test_denominators(loss_type, expected):
    assert denominators(loss_type, [7, 3, 0, 1, 5], 8) == (expected, 16)
