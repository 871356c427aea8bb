import math

import pytest
import torch

import grpo_fast as gf


def test_worked_values():
    assert gf.group_advantages(torch.tensor([1.0, 3, 2, 6]), 4).tolist() == pytest.approx(
        [-1.0690, 0, -0.5345, 1.6035], abs=2e-4
    )
    values = gf.group_advantages(torch.tensor([0.9, 0.7, 0.3, 0.1]), 4, eps=0.0)
    assert values.tolist() == pytest.approx([1.264911, 0.632456, -0.632456, -1.264911], abs=1e-6)


def test_std_definitions():
    """B34: population gives +-1 for [1, 0], sample +-0.707107; eps is added to the std."""
    rewards = torch.tensor([1.0, 0.0])
    assert gf.group_advantages(rewards, 2, eps=0.0).tolist() == [1.0, -1.0]
    assert gf.group_advantages(rewards, 2, std="sample", eps=0.0).tolist() == pytest.approx([0.707107, -0.707107])
    assert gf.group_advantages(rewards, 2).tolist() == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001])


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("std", ["population", "sample"])
def test_equal_rewards_are_exactly_zero(eps, scale, std):
    """B35, B33: no advantage from the rounding of a mean, nor from a group of one."""
    for rewards, size in (
        (torch.full((7,), 0.35), 7),
        (torch.tensor([0.1, 0.7, 1e6]), 1),
        (torch.full((6,), 1e6 + 0.1), 3),
    ):
        assert (gf.group_advantages(rewards, size, scale=scale, std=std, eps=eps) == 0).all()


def test_large_offsets_keep_their_spread():
    """B35."""
    expected = [-1.341641, -0.447214, 0.447214, 1.341641]
    assert gf.group_advantages(1e6 + torch.arange(4.0), 4, eps=0.0).tolist() == pytest.approx(expected, abs=1e-6)
    lone = gf.group_advantages(torch.tensor([0.0] + [0.95] * 7), 8, eps=0.0).tolist()
    assert lone == pytest.approx([-2.645751] + [0.377964] * 7, abs=1e-6)


def test_shift_and_positive_scale_do_not_matter():
    rewards = torch.tensor([1.0, 3, 2, 6], dtype=torch.float64)
    expected = gf.group_advantages(rewards, 4, eps=0.0)
    assert torch.allclose(gf.group_advantages(rewards * 5 - 7, 4, eps=0.0), expected, atol=1e-12)
    assert not torch.allclose(gf.group_advantages(torch.tensor([100.0, 101, 102, 103]), 4), expected.float())


def test_missing_rewards_leave_their_group():
    """B88: NaN and inf take no part and get 0."""
    rewards = torch.tensor([1.0, math.nan, 0.0, 1.0, math.inf, -math.inf, math.nan, 5.0])
    values = gf.group_advantages(rewards, 4, eps=0.0)
    assert values[:4].tolist() == pytest.approx([math.sqrt(0.5), 0, -math.sqrt(2), math.sqrt(0.5)])
    assert values[4:].tolist() == [0, 0, 0, 0]


def test_scales():
    rewards = torch.tensor([[0.0, 1.0], [2.0, 6.0]])
    assert gf.group_advantages(rewards, 2, scale="none").tolist() == [[-0.5, 0.5], [-2, 2]]
    std = rewards.std(unbiased=False).item()
    values = gf.group_advantages(rewards, 2, scale="batch", eps=0.0)
    assert values.flatten().tolist() == pytest.approx([-0.5 / std, 0.5 / std, -2 / std, 2 / std])


def test_dtypes_shapes_and_group_order():
    assert gf.group_advantages(torch.tensor([1, 0, 1, 0]), 2).dtype == torch.float32
    assert gf.group_advantages(torch.tensor([1.0, 0], dtype=torch.float64), 2).dtype == torch.float64
    assert gf.group_advantages(torch.zeros(3, 4), 2).shape == (3, 4)
    assert gf.group_advantages(torch.zeros(0), 4).shape == (0,)
    one = gf.group_advantages(torch.tensor([1.0, 0, 0, 5, 5, 9]), 3)
    assert torch.equal(one[3:], gf.group_advantages(torch.tensor([5.0, 5, 9]), 3)), "groups do not mix"
    assert not gf.group_advantages(torch.rand(4, requires_grad=True), 2).requires_grad


@pytest.mark.parametrize(
    "arguments, options, name",
    [
        ((torch.zeros(7), 2), {}, "group_size=2"),
        ((torch.zeros(4), 0), {}, "group_size"),
        ((torch.zeros(4), 2), {"scale": "groups"}, "scale"),
        ((torch.zeros(4), 2), {"std": "unbiased"}, "std"),
        ((torch.zeros(4), 2), {"eps": -1.0}, "eps"),
    ],
)
def test_errors(arguments, options, name):
    with pytest.raises(ValueError, match=name):
        gf.group_advantages(*arguments, **options)


def test_deviations_are_taken_in_float64():
    """Around 2^24 the mean is no fp32 number; and equal float64 rewards whose mean is rounded give exactly 0."""
    rewards = 2.0**24 + torch.tensor([0.0, 2.0, 4.0, 6.0])
    expected = torch.tensor([-1.341641, -0.447214, 0.447214, 1.341641])
    assert torch.allclose(gf.group_advantages(rewards, 4, eps=0.0), expected, atol=1e-6)
    equal = torch.full((3,), 0.1, dtype=torch.float64)
    assert equal.sum() / 3 != 0.1
    for scale in ("group", "none"):
        assert (gf.group_advantages(equal, 3, scale=scale, eps=0.0) == 0).all()


def test_batch_scale_ignores_missing_rewards():
    """The mean and the deviation of [0, 1, 2, 5] whatever stands beside them."""
    rewards = torch.tensor([0.0, 1.0, math.nan, 2.0, 5.0, math.inf])
    expected = torch.tensor([-0.5, 0.5, 0.0, -1.5, 1.5, 0.0]) / math.sqrt(3.5)
    assert torch.allclose(gf.group_advantages(rewards, 3, scale="batch", eps=0.0), expected)
