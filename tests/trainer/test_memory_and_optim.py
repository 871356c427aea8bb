"""Predicted memory, loading, the optimizer and the learning rate."""

import json

import pytest
import torch
from tiny_models import make_model, make_tokenizer
from transformers import AutoConfig

from grpo_fast.config import GRPOConfig, LossConfig, ModelConfig, OptimConfig
from grpo_fast.memory import (
    GIB,
    available_memory,
    check_memory,
    count_parameters,
    estimate_memory,
    reference_dtype,
)
from grpo_fast.merged_weights import frozen_copy
from grpo_fast.model import load_model_config, load_policy, load_tokenizer, predict_memory
from grpo_fast.optim import learning_rate, make_optimizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])  # gpt2 and gemma2 tie the head to the embedding
def test_parameters_are_counted_from_the_configuration(kind):
    model = make_model(kind)
    assert count_parameters(model.config) == (sum(p.numel() for p in model.parameters()), 0)


def test_estimates():
    fp32 = estimate_memory(10**9, torch.float32, torch.float32, on_gpu=False)
    assert (fp32.training, fp32.reference, fp32.rollout) == (16 * 10**9, 4 * 10**9, 0)
    gpu = estimate_memory(10**9, torch.float32, torch.bfloat16, on_gpu=True)
    assert (gpu.training, gpu.reference, gpu.rollout, gpu.total) == (16 * 10**9, 2 * 10**9, 2 * 10**9, 20 * 10**9)
    assert estimate_memory(10**9, torch.bfloat16, None, on_gpu=True).total == 8 * 10**9
    assert "1000.0 M parameters" in str(gpu)
    assert "rollout copy 1.86 GiB = 18.63 GiB" in str(gpu)


def test_what_cannot_fit_is_refused_with_the_remedy():
    estimate = estimate_memory(10**9, torch.float32, torch.float32, on_gpu=False)
    check_memory(estimate, 20 * 10**9)
    with pytest.raises(MemoryError, match=r"only 16.00 GiB are free; set loss.beta=0 .*, or set model.dtype=bfloat16"):
        check_memory(estimate, 16 * GIB)
    bf16 = estimate_memory(10**9, torch.bfloat16, None, on_gpu=False)
    with pytest.raises(MemoryError, match=r"free; set lora.r=16 \(.*\), or choose a smaller model.path$"):
        check_memory(bf16, GIB)


def test_available_memory():
    assert 2**20 < available_memory(CPU) < 2**50


def test_prediction_follows_the_configuration():
    config = make_model().config
    parameters, _ = count_parameters(config)
    assert predict_memory(GRPOConfig(), config, CPU).total == 20 * parameters
    assert predict_memory(GRPOConfig(loss=LossConfig(beta=0.0)), config, CPU).total == 16 * parameters
    half = GRPOConfig(model=ModelConfig(dtype="bfloat16", reference_dtype="float32"))
    assert predict_memory(half, config, CPU).total == 12 * parameters
    assert predict_memory(GRPOConfig(), config, torch.device("cuda")).total == 20 * parameters  # 16 + 2 + 2


def test_a_model_with_its_own_code_is_counted_only_if_trusted(tmp_path, monkeypatch):
    """As on the hub: config.json names classes in a file beside it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = make_model().config.to_dict() | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    trusted = GRPOConfig(model=ModelConfig(path=str(tmp_path), trust_remote_code=True))
    with pytest.raises(ValueError, match="trust_remote_code"):
        predict_memory(GRPOConfig(), loaded, CPU)
    assert predict_memory(trusted, loaded, CPU).parameters == count_parameters(make_model().config)[0]


@pytest.fixture
def path(tmp_path):
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    "dtype, expected", [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.bfloat16)]
)
def test_load_policy(path, dtype, expected, capsys):
    args = GRPOConfig(model=ModelConfig(path=path, dtype=dtype, attn_implementation="eager"))
    model = load_policy(args, load_model_config(args), CPU)
    assert model.dtype == expected
    assert model.config._attn_implementation == "eager"
    assert load_tokenizer(args).eos_token == "<eos>"
    assert capsys.readouterr().out.startswith("0.0 M parameters: weights, gradients and AdamW")


def test_load_policy_refuses_before_reading_weights(path, monkeypatch):
    monkeypatch.setattr("grpo_fast.model.available_memory", lambda device: 1000)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    args = GRPOConfig(model=ModelConfig(path=path))
    with pytest.raises(MemoryError, match=r"only 0.00 GiB are free"):
        load_policy(args, load_model_config(args), CPU)
    with pytest.raises(ValueError, match=r"model.path: expected a folder or hub name"):
        load_model_config(GRPOConfig())


def test_reference_dtype():
    assert reference_dtype(None, torch.float32, "cpu") == torch.float32
    assert reference_dtype(None, torch.float32, "cuda:0") == torch.bfloat16
    assert reference_dtype("float32", torch.bfloat16, "cuda") == torch.float32


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_frozen_copy(kind):
    model = make_model(kind).train()
    frozen = frozen_copy(model, torch.bfloat16)
    assert not frozen.training
    assert model.training
    for parameter, original in zip(frozen.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, original.to(torch.bfloat16))
        assert not parameter.requires_grad
        assert original.requires_grad
    for buffer, original in zip(frozen.buffers(), model.buffers(), strict=True):
        assert buffer.dtype == original.dtype  # rotary frequencies stay float32
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (frozen.get_output_embeddings().weight is frozen.get_input_embeddings().weight) == tied
    same = frozen_copy(model, model.dtype)
    assert not {p.data_ptr() for p in same.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate(schedule, expected):
    options = OptimConfig(learning_rate=2.0, warmup_steps=2, lr_scheduler_type=schedule)
    assert [learning_rate(options, step, 6) / 2 for step in range(6)] == pytest.approx(expected, abs=1e-6)
    assert all(learning_rate(options, step, 2) >= 0 for step in range(5))


def test_optimizer():
    model = make_model()
    model.lm_head.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimConfig(learning_rate=0.5, weight_decay=0.1))
    decayed, plain = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"], decayed["fused"]) == (0.1, 0.0, True)
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters())) - 1
    with pytest.raises(ValueError, match="expected parameters that require grad"):
        make_optimizer(model.requires_grad_(False), OptimConfig())
