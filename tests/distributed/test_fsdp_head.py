"""B53: the fused head on two gloo ranks, FSDP2 with data of their own or tensor parallel, equals one process."""

import importlib.util

import fsdp_rank
import pytest
from ranks import run_ranks

WITH_PEFT = importlib.util.find_spec("peft") is not None


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(fsdp_rank.every_case, WITH_PEFT)


@pytest.fixture(params=[False, True], ids=["full", "lora"])
def lora(request):
    if request.param and not WITH_PEFT:
        pytest.skip("peft is not installed")
    return request.param


def assert_equal_to_one_process(got, lora=False):
    expected = fsdp_rank.one_process(lora)
    assert any("lm_head" in name for name in expected)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert (got[name] - gradient).abs().max() <= 1e-9 * gradient.abs().max(), name


def test_head_weight_of_a_sharded_head(ranks, lora):
    """Gathered outside of any sharded module's forward; accumulated over two backwards."""
    for results in ranks:
        assert_equal_to_one_process(results["head_weight", lora], lora)


def test_the_loss_inside_the_sharded_modules_forward(ranks, lora):
    for results in ranks:
        assert_equal_to_one_process(results["inside", lora], lora)


def test_what_the_error_says_about_fsdp_is_right(ranks):
    for results in ranks:
        messages = results["recipe"]["messages"]
        for name in ("weight", "bias", "hidden"):
            assert messages[name].startswith(f"{name}: expected a plain tensor, got a DTensor")
            assert f'    {name}.full_tensor(grad_placements=[Partial("avg")])\n' in messages[name]
            assert f"    {name}.full_tensor()\n" in messages[name]
        assert messages["logprobs"] == messages["weight"]
        assert "the Linear has a DTensor for its weight" in messages["head_weight"]
        assert "fully_shard on the head by itself" in messages["head_weight"]
        assert_equal_to_one_process(results["recipe"]["gradients"])


def test_what_the_error_says_about_tensor_parallelism_is_right(ranks):
    for results in ranks:
        assert_equal_to_one_process(results["tensor parallel"])
