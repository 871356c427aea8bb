"""Micro-batches and denominators."""

import pytest
import torch
from tiny_models import EOS

import grpo_fast as gf
from grpo_fast.batching import Trained, denominators, padded_micro_batches, shared_prefix_micro_batches
from grpo_fast.rollout import Rollout


def rollout(prompt, completion, truncated=False):
    return Rollout(prompt_ids=tuple(prompt), completion_ids=tuple(completion), truncated=truncated)


LENGTHS = [5, 8, 1, 3, 8, 2, 7, 8]


def trained_of(rollouts, advantages=None, lengths=None, *, all_move=True):
    advantages = torch.ones(len(rollouts)) if advantages is None else torch.tensor(advantages)
    lengths = [len(r.completion_ids) for r in rollouts] if lengths is None else lengths
    return Trained.of(rollouts, advantages, lengths, all_move=all_move)


@pytest.mark.parametrize("max_tokens", [1, 5, 16, 17, 64, 10**9])
def test_padded_rows_keep_to_the_budget(max_tokens):
    rollouts = [rollout([9], [5] * (length - 1)) for length in LENGTHS]
    batches = padded_micro_batches(trained_of(rollouts, lengths=LENGTHS), max_tokens)
    assert sorted(row for batch in batches for row in batch.rows if row != 2) == [0, 1, 3, 4, 5, 6, 7]
    order = [LENGTHS[row] for batch in batches for row in batch.rows]
    assert order == sorted(order, reverse=True)  # longest first
    for batch in batches:
        assert len(batch.rows) == 1 or batch.input_ids.numel() <= max_tokens  # alone if it must be
        assert batch.padding == batch.input_ids.numel() - sum(LENGTHS[row] for row in batch.rows)


@pytest.mark.parametrize("max_tokens", [1, 7, 12, 20, 45, 10**9])
def test_packed_rows_keep_to_the_budget(max_tokens):
    prompts = [[7] * size for size in (6, 1, 3)]
    rollouts = [rollout(prompts[index // 3], [5] * length) for index, length in enumerate([4, 1, 9, 2, 2, 6, 5, 1, 3])]
    batches = shared_prefix_micro_batches(trained_of(rollouts), max_tokens)
    sizes = [batch.input_ids.numel() for batch in batches]
    assert sizes == sorted(sizes, reverse=True)  # largest first
    assert sorted(row for batch in batches for row in batch.rows) == list(range(9))
    for batch in batches:
        assert batch.padding == 0
        owners = {rollouts[row].prompt_ids for row in batch.rows}
        expected = sum(map(len, owners)) + sum(len(rollouts[row].completion_ids) - 1 for row in batch.rows)
        assert batch.input_ids.numel() == expected  # each prompt once
        assert (
            expected <= max_tokens
            or len(batch.rows) == 1
            or all(len(rollouts[row].completion_ids) == 1 for row in batch.rows[1:])
        )
    if max_tokens >= sum(map(len, prompts)) + 33 - 9:
        assert len(batches) == 1


def test_nothing_makes_no_micro_batch():
    for make in (padded_micro_batches, shared_prefix_micro_batches):
        assert make(trained_of([]), 10) == []
        assert make(trained_of([rollout([1], [])]), 10) == []


def test_padded_rows_are_aligned_with_the_positions_that_predict_them():
    rollouts = [rollout([10, 11, 12, 13, 14], [20, 21, 22, EOS]), rollout([15], [23, 0])]
    (batch,) = padded_micro_batches(trained_of(rollouts, [0.5, -1.0]), 64)
    assert batch.rows == (0, 1)
    assert batch.attention is None
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21, 22, EOS], [15, 23, 0, 0, 0, 0, 0, 0, 0]]
    # P = 5: token t is predicted at column P - 1 + t; a sampled pad id is a token, padding is not
    assert batch.predictors.tolist() == [4, 5, 6, 7, 9, 10]
    assert batch.token_ids.tolist() == [20, 21, 22, EOS, 23, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.advantages.tolist() == [0.5, -1.0]
    assert batch.places.tolist() == [0, 1, 2, 3, 4, 5]


def test_packed_rows_have_each_prompt_once_and_no_last_tokens():
    rollouts = [
        rollout([10, 11, 12], [20, 21, 22, EOS]), rollout([10, 11, 12], []), rollout([10, 11, 12], [EOS]),
        rollout([15], [23, 0]),
    ]  # fmt: skip
    (batch,) = shared_prefix_micro_batches(trained_of(rollouts, [0.5, 9.0, 2.0, -1.0]), 64)
    assert batch.rows == (0, 2, 3)
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 22, 15, 23]]
    assert batch.attention.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    # the prompt's last token predicts the first of both completions
    assert batch.predictors.tolist() == [2, 3, 4, 5, 2, 6, 7]
    assert batch.token_ids.tolist() == [20, 21, 22, EOS, EOS, 23, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 7]
    assert batch.advantages.tolist() == [0.5, 2.0, -1.0]
    assert batch.places.tolist() == list(range(7))


def test_what_nothing_would_move_is_left_out_and_counted():
    rollouts = [rollout([1], [5, 6, EOS]), rollout([1], [7, EOS]), rollout([1], [8]), rollout([1], [9, 9])]
    trained = trained_of(rollouts, [0.5, 0.0, -1.0, 0.0], [3, 2, 1, 0], all_move=False)
    assert trained.rows == (0, 2)
    assert trained.starts == (0, 3, 3, 4)
    assert (trained.tokens, trained.unmoved_tokens, trained.unmoved_rows) == (4, 2, 1)
    for make in (padded_micro_batches, shared_prefix_micro_batches):
        batches = make(trained, 1)
        assert sorted(place for batch in batches for place in batch.places.tolist()) == [0, 1, 2, 3]
    assert trained_of(rollouts, [0.5, 0.0, -1.0, 0.0], [3, 2, 1, 0]).rows == (0, 1, 2)


def test_sampled_logps_stand_beside_their_tokens():
    """B160: an engine that says too little leaves the rest unknown, one that says too much is cut."""
    rollouts = [
        Rollout(prompt_ids=(1,), completion_ids=(5, 6, 7), truncated=False, logprobs=logprobs)
        for logprobs in ((-1.0, -2.0, -3.0), (-4.0,), None, (-5.0, -6.0, -7.0, -8.0))
    ]
    trained = trained_of(rollouts)
    logps = trained.sampled_logps()
    assert logps.isnan().nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8]
    assert logps[~logps.isnan()].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    assert trained.has_sampled_logps()
    assert not trained_of(rollouts[2:3]).has_sampled_logps()


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo"])
def test_denominators_are_those_of_the_loss(loss_type):
    lengths = [4, 2, 3]
    logits, cu_seqlens = torch.randn(9, 7), torch.tensor([0, 4, 6, 9])
    ids, advantages = torch.arange(9) % 7, torch.tensor([1.0, -2.0, 0.5])
    options = {"cu_seqlens": cu_seqlens, "loss_type": loss_type, "entropy_coef": 0.1, "max_completion_length": 5}
    denominator, entropy_denominator = denominators(loss_type, len(lengths), sum(lengths), 5)
    given = {"denominator": denominator, "entropy_denominator": entropy_denominator}
    assert gf.grpo_loss(logits, ids, advantages, **options, **given).loss.item() == pytest.approx(
        gf.grpo_loss(logits, ids, advantages, **options).loss.item(), rel=1e-6
    )


@pytest.mark.parametrize(
    "loss_type, expected",
    [("grpo", 5), ("luspo", 5), ("dr_grpo", 40), ("bnpo", 16), ("dapo", 16), ("cispo", 16)],
)
def test_denominators(loss_type, expected):
    assert denominators(loss_type, 5, 16, 8) == (expected, 16)
