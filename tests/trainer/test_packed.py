"""Packed weights for decoding: the same products, and layers that are afterwards what they were."""

import pytest
import torch
from torch import nn

from grpo_fast.rollout.packed import packed_linears


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "large": nn.Linear(300, 257),
            "without bias": nn.Linear(256, 512, bias=False),
            "small": nn.Linear(30, 20),
            "bfloat16 layer": nn.Linear(300, 257, dtype=torch.bfloat16),
        }
    )
    return model.requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 7, 256, 257])
def test_products_are_the_same(model, rows):
    large, bare = model["large"], model["without bias"]
    x, y = torch.randn(1, 300, rows).transpose(1, 2), torch.randn(rows, 256)
    want = large(x), bare(y), model["bfloat16 layer"](x.bfloat16())
    with packed_linears(model, rows):
        assert {name for name, layer in model.items() if "forward" in vars(layer)} == {"large", "without bias"}
        got = large(x), bare(y), model["bfloat16 layer"](x.bfloat16())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[2], want[2])


def test_layers_are_restored_whatever_happens_inside(model):
    large, x = model["large"], torch.randn(4, 300)

    def fail():
        with packed_linears(model, 4), packed_linears(model, 4):  # nothing is packed twice
            assert "forward" in vars(large)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any("forward" in vars(layer) for layer in model.values())
    large.weight.mul_(2)
    with packed_linears(model, 4):
        torch.testing.assert_close(large(x), nn.functional.linear(x, large.weight, large.bias))


def test_what_is_not_a_plain_linear_layer_stays(model):
    class Own(nn.Linear):
        pass

    large = model["large"]
    large.forward = lambda x: x
    layers = nn.ModuleList([Own(300, 257), large, nn.Conv1d(300, 257, 1)])
    with packed_linears(layers, 4):
        assert [("forward" in vars(layer)) for layer in layers] == [False, True, False]
        assert large(1) == 1
    assert large(1) == 1
    with torch.autocast("cpu"), packed_linears(model, 4):
        assert "forward" not in vars(model["without bias"])
