"""head_weight: what it returns does what the module does, in values and gradients, or it says why not."""

import problems
import pytest
import torch
from problems import split
from torch import nn

import grpo_fast as gf

WIDTH, VOCAB = 13, 37


def linear(bias=False, dtype=torch.float64):
    return nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)


def lora_layer(base, *, seed=0, adapter_dtype=None, adapters=("default",), **options):
    """peft's layer around `base`, with adapters that are not zero, the base frozen as get_peft_model leaves it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from peft.tuners.lora import LoraModel

    model = nn.ModuleDict({"lm_head": base})
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    config = peft.LoraConfig(target_modules=["lm_head"], **{"r": 3, "lora_alpha": 5, "lora_dropout": 0.0} | options)
    tuner = LoraModel(model, config, adapters[0])
    for name in adapters[1:]:
        tuner.peft_config[name] = config
        tuner.inject_adapter(model, name)
    layer = model["lm_head"]
    layer.set_adapter(list(adapters))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapter_dtype or parameter.dtype)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer


def assert_same(layer, tolerance=1e-12):
    """layer(x) == x @ weight.T + bias."""
    weight, bias = gf.head_weight(layer)
    x = torch.randn(5, WIDTH, dtype=weight.dtype)
    expected = layer(x)
    assert weight.shape == (VOCAB, WIDTH)
    assert problems.relative_error(nn.functional.linear(x, weight, bias), expected) < tolerance


class Named(nn.Linear):
    """A subclass that keeps the forward."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Named])
def test_a_linear_layer_gives_its_own_tensors(kind, bias):
    layer = kind(WIDTH, VOCAB, bias=bias)
    weight, b = gf.head_weight(layer)
    assert weight is layer.weight
    assert b is layer.bias


def test_a_parametrised_weight_is_the_one_in_use():
    layer = nn.utils.parametrizations.weight_norm(linear(bias=True))
    assert_same(layer)
    gf.head_weight(layer)[0].sum().backward()
    assert all(parameter.grad is not None for name, parameter in layer.named_parameters() if "weight" in name)


LORA = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "lora_bias": {"lora_bias": True},
    "two adapters": {"adapters": ("one", "two")},
}


@pytest.mark.filterwarnings("ignore:.*lora_bias.*")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_lora_trains_through_the_fused_loss(options, bias):
    """B50: A and B get the gradient that autograd gives them by way of the layer's logits; W stays without one."""
    layer = lora_layer(linear(bias), **options)
    assert_same(layer)
    problem = problems.make(vocab=VOCAB)
    arguments, options = split(problem, {"beta": 0.1})
    hidden = torch.randn(*problem["token_ids"].shape, WIDTH, dtype=torch.float64, requires_grad=True)
    trained = [hidden, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    expected = torch.autograd.grad(gf.grpo_loss(layer(hidden), **arguments, **options).loss, trained)
    weight, b = gf.head_weight(layer)
    gf.linear_grpo_loss(hidden, weight, **arguments, bias=b, **options).loss.backward()
    assert len(trained) >= 3
    for tensor, gradient in zip(trained, expected, strict=True):
        assert gradient.abs().max() > 1e-6
        assert problems.relative_error(tensor.grad, gradient) < 1e-10
    assert layer.base_layer.weight.grad is None


def test_an_unfrozen_weight_under_lora_is_trained_too():
    layer = lora_layer(linear())
    layer.base_layer.weight.requires_grad_(True)
    gf.head_weight(layer)[0].sum().backward()
    assert torch.equal(layer.base_layer.weight.grad, torch.ones(VOCAB, WIDTH, dtype=torch.float64))


def test_the_scale_and_the_active_adapters_are_those_of_the_moment():
    layer = lora_layer(linear(), adapters=("one", "two"))
    both = gf.head_weight(layer)[0]
    layer.set_adapter("two")
    assert_same(layer)
    two = gf.head_weight(layer)[0]
    layer.scale_layer(2.0)
    assert_same(layer)
    scaled = gf.head_weight(layer)[0]
    base = layer.base_layer.weight
    assert problems.relative_error(scaled - base, 2 * (two - base)) < 1e-12
    assert not torch.allclose(both, two)


def test_an_active_adapter_of_other_layers():
    """It adds nothing here."""
    layer = lora_layer(linear())
    before = gf.head_weight(layer)[0]
    layer._active_adapter = [*layer.active_adapters, "elsewhere"]
    assert torch.equal(gf.head_weight(layer)[0], before)
    assert_same(layer)


def test_a_transposed_base_layer():
    """fan_in_fan_out: Conv1D keeps its weight as [D, V]."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.pytorch_utils import Conv1D

    base = Conv1D(VOCAB, WIDTH).double()
    assert_same(base)
    assert_same(lora_layer(base, fan_in_fan_out=True))


def test_merged_and_disabled_adapters():
    layer = lora_layer(linear())
    original, active = layer.base_layer.weight.clone(), gf.head_weight(layer)[0]
    layer.enable_adapters(False)
    assert gf.head_weight(layer)[0] is layer.base_layer.weight
    assert_same(layer)
    layer.enable_adapters(True)
    layer.merge()
    assert gf.head_weight(layer)[0] is layer.base_layer.weight
    assert_same(layer)
    assert problems.relative_error(layer.base_layer.weight, active) < 1e-12
    layer._disable_adapters = True  # what enable_adapters(False) sets, and leaves the weight merged
    with pytest.raises(ValueError, match=r"disabled but merged.*unmerge"):
        gf.head_weight(layer)
    layer.unmerge()
    assert problems.relative_error(gf.head_weight(layer)[0], original) < 1e-12


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_a_small_adapter_is_not_rounded_away(base, adapter, autocast):
    """The sum is float32, under autocast too; the layer itself agrees to its own dtype's rounding."""
    layer = lora_layer(linear(dtype=base), adapter_dtype=adapter)
    x = torch.randn(5, WIDTH).to(base)
    weight, _ = gf.head_weight(layer)
    assert weight.dtype == torch.float32
    assert problems.relative_error(x.float() @ weight.t(), layer(x)) < 2e-2
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1e-5)
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weight, _ = gf.head_weight(layer)
    delta = weight.double() - layer.base_layer.weight.double()
    assert problems.relative_error(delta, layer.scaling["default"] * b @ a) < 1e-2
    weight.sum().backward()
    assert layer.lora_B["default"].weight.grad.dtype == adapter


def test_dropout_is_refused_in_training_only():
    layer = lora_layer(linear(), lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"lora_dropout in training mode.*eval\(\)"):
        gf.head_weight(layer)
    assert_same(layer.eval())


@pytest.mark.parametrize("option, variant", [("use_dora", "DoraLinearVariant"), ("alora_invocation_tokens", "ALora")])
def test_variants_of_lora_are_refused_by_name(option, variant):
    layer = lora_layer(linear(), **{option: True if option == "use_dora" else [1]})
    with pytest.raises(ValueError, match=rf"'default' with a {variant}.*grpo_loss"):
        gf.head_weight(layer)


def test_modules_to_save_gives_the_module_in_use():
    pytest.importorskip("peft", reason="peft is not installed")
    from peft.utils.other import ModulesToSaveWrapper

    wrapper = ModulesToSaveWrapper(linear(bias=True), "default")
    with torch.no_grad():
        wrapper.modules_to_save["default"].weight.mul_(2.0)
    assert gf.head_weight(wrapper)[0] is wrapper.modules_to_save["default"].weight
    assert_same(wrapper)
    for active in (["default", "other"], ["other"]):  # of which the other has no copy of its own
        wrapper._active_adapter = active
        assert gf.head_weight(wrapper)[0] is wrapper.original_module.weight
        assert_same(wrapper)
    wrapper.update("other")
    for active in (["default", "other"], ["other", "default"]):  # the first one runs
        wrapper._active_adapter = active
        assert gf.head_weight(wrapper)[0] is wrapper.modules_to_save[active[0]].weight
        assert_same(wrapper)
    wrapper._active_adapter = ["default"]
    wrapper.enable_adapters(False)
    assert gf.head_weight(wrapper)[0] is wrapper.original_module.weight
    assert_same(wrapper)


def test_trainable_tokens_are_refused_by_name():
    pytest.importorskip("peft", reason="peft is not installed")
    from peft import TrainableTokensConfig
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    layer = TrainableTokensLayer(linear(), "default", TrainableTokensConfig(token_indices=[1]))
    with pytest.raises(ValueError, match=r"TrainableTokensLayer is not a plain linear layer.*grpo_loss"):
        gf.head_weight(layer)


class Linear4bit(nn.Linear):
    """As a quantised layer: the weight is packed, and unpacked in the forward."""

    def forward(self, x):
        raise NotImplementedError


class Wrapped(torch.Tensor):
    """As a quantised tensor that says it is floating-point."""


def with_weight(weight):
    layer = linear()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def patched():
    layer = linear()
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    return layer


REFUSED = [
    (lambda: nn.Embedding(VOCAB, WIDTH), "Embedding is not a plain linear layer"),
    (lambda: nn.Sequential(linear()), "Sequential is not a plain linear layer"),
    (lambda: Linear4bit(WIDTH, VOCAB), "Linear4bit is not a plain linear layer"),
    (patched, "Linear is not a plain linear layer"),
    (lambda: with_weight(torch.zeros(VOCAB, WIDTH, dtype=torch.int8)), "int8.*floating-point"),
    (lambda: with_weight(torch.zeros(VOCAB, WIDTH).to(torch.float8_e4m3fn)), "float8.*floating-point"),
    (lambda: with_weight(torch.zeros(0)), r"\[0\], not floating-point \[V, D\]"),
    (lambda: with_weight(torch.zeros(VOCAB, WIDTH).as_subclass(Wrapped)), "weight of type Wrapped"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message.split()[0] for _, message in REFUSED])
def test_what_no_weight_describes_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=f"layer: .*{message}.*grpo_loss"):
        gf.head_weight(make())


def test_lora_on_a_quantised_layer_is_refused_by_the_layer_below():
    layer = lora_layer(linear())
    layer.base_layer = Linear4bit(WIDTH, VOCAB)
    with pytest.raises(ValueError, match="Linear4bit is not a plain"):
        gf.head_weight(layer)


def test_what_is_no_head_at_all():
    model = torch.nn.Linear(2, 3)
    model.get_output_embeddings = lambda: None
    with pytest.raises(gf.heads.UnsupportedHead, match=r"whole model.*get_output_embeddings\(\)"):
        gf.head_weight(model)
    with pytest.raises(ValueError, match="layer: expected the lm_head's module, got Tensor"):
        gf.head_weight(torch.ones(3, 2))
