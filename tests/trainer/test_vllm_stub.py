"""How the trainer uses vLLM, on a stand-in for it that shows what would go unnoticed: old prompts, raw log-probs."""

import dataclasses
import json
import sys

import fake_vllm
import pytest
import torch
from tiny_models import make_model

from grpo_fast.config import LoraConfig, RolloutConfig
from grpo_fast.rollout import SamplingOptions
from grpo_fast.rollout.vllm import VLLMRollout
from grpo_fast.trainer import GRPOTrainer

PROMPTS = [[5, 6, 7, 8], [9, 10]]
SAMPLED = SamplingOptions(n=3, max_tokens=6, temperature=0.6, logprobs=True)
ROWS = [{"prompt": f"{i}+{i}="} for i in range(10)]


def varied(prompts, completions, completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture
def vllm(monkeypatch):
    return fake_vllm.install(monkeypatch)


@pytest.fixture
def make_trainer(make_args, tokenizer, vllm):
    def make(model=None, **sections):
        rollout = {"engine": "vllm", "temperature": 0.6, **sections.pop("rollout", {})}
        args = make_args(rollout=rollout, **sections)
        return GRPOTrainer(model or make_model(), varied, args, ROWS, processing_class=tokenizer)

    return make


def logged(trainer):
    path = f"{trainer.args.log.output_dir}/metrics.jsonl"
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("lora", [0, 4])
def test_after_every_update_it_samples_from_the_new_weights(make_trainer, vllm, lora):
    """B103: the same prompts again after an update, also one of adapters alone; B59: at temperature 0.6 w is 1."""
    trainer = make_trainer(
        max_steps=4, lora=LoraConfig(r=lora), batch={"prompts_per_step": 10}, optim={"learning_rate": 3e-2}
    )
    trainer.train()
    (engine,) = vllm.made
    per_step = ["generate", "reload_weights", "reset_prefix_cache"]
    assert engine.calls == ["reload_weights", "reset_prefix_cache", "generate", *per_step * 4]
    for metrics in logged(trainer):
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
        assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)
        assert metrics["clip_ratio/region_mean"] == 0


def test_without_a_reset_the_stand_in_samples_from_old_weights(vllm):
    """What the test above would otherwise not be able to see."""
    model = make_model()
    engine = VLLMRollout(model)
    before = engine.generate(PROMPTS, SAMPLED, 0)
    reset, engine._llm.reset_prefix_cache = engine._llm.reset_prefix_cache, lambda: None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    engine.sync(model)
    assert engine.generate(PROMPTS, SAMPLED, 0) == before
    engine._llm.reset_prefix_cache = reset
    engine.sync(model)
    assert engine.generate(PROMPTS, SAMPLED, 0) != before


def test_raw_log_probs_are_refused_before_the_first_step(make_trainer, vllm):
    """B59: an engine that gives log-probs before the temperature."""
    vllm.honest = False
    with pytest.raises(
        ValueError, match=r"rollout.engine: expected vLLM's log-probs of sampled tokens to be the Llama"
    ):
        make_trainer()


def test_it_is_asked_for_what_the_run_needs(make_trainer, vllm):
    trainer = make_trainer(rollout={"max_rows": 5, "vllm_gpu_memory_utilization": 0.01})
    (engine,) = vllm.made
    longest = max(len(ids) for ids in map(trainer.tokenizer.encode, (row["prompt"] for row in ROWS)))
    expected = {
        "dtype": "float32",
        "max_num_seqs": 5,
        "max_model_len": longest + 6,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
    }
    assert expected.items() <= engine.options.items()
    assert trainer.update.correction.mode == "token_truncate"


def test_rollouts_are_in_order_and_seeds_decide(vllm):
    model = make_model()
    before = torch.get_rng_state()
    engine = VLLMRollout(model)
    rollouts = engine.generate(PROMPTS, SAMPLED, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert [list(rollout.prompt_ids) for rollout in rollouts] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert engine.generate(PROMPTS, SAMPLED, 3) == rollouts
    assert engine.generate(PROMPTS, SAMPLED, 4) != rollouts
    silent = engine.generate(PROMPTS, dataclasses.replace(SAMPLED, logprobs=False), 3)
    assert silent == [dataclasses.replace(rollout, logprobs=None) for rollout in rollouts]
    assert engine.generate([], SAMPLED, 3) == []


def test_a_head_that_is_tied_is_packed_anew(vllm):
    model = make_model(tie_word_embeddings=True)
    VLLMRollout(model).sync(model)
    first = ["reload_weights", "_repack_head", "reset_prefix_cache"]
    assert vllm.made[0].calls == [*first, "generate", *first]


def test_it_sleeps_between_rollouts_where_the_device_is_shared(vllm, monkeypatch):
    """As on a GPU: weights wake for a sync, the cache's memory only for a rollout."""
    model = make_model()
    engine = VLLMRollout(model)
    engine._sleeps = True
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    llm = vllm.made[0]
    llm.calls.clear()
    for _ in range(2):
        engine.generate(PROMPTS, SAMPLED, 0)
        engine.sync(model)
    first = ["generate", "sleep 1", "wake_up ['weights']", "reload_weights", "reset_prefix_cache"]
    assert llm.calls == [*first, "wake_up None", *first]
    assert len(emptied) == 3
    llm.calls.clear()
    engine.generate(PROMPTS, SAMPLED, 0)
    engine.generate(PROMPTS, SAMPLED, 0)  # an evaluation after a rollout
    assert llm.calls == ["wake_up None", "generate", "sleep 1", "wake_up None", "generate", "sleep 1"]


def test_without_vllm_or_with_several_processes_it_is_refused_at_once(make_args, tokenizer, monkeypatch):
    args = make_args(rollout={"engine": "vllm"})

    def make():
        return GRPOTrainer(make_model(), varied, args, ROWS, processing_class=tokenizer)

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rollout.engine: vllm is not installed: pip install 'grpo-fast\[vllm\]'"):
        make()
    monkeypatch.undo()
    fake_vllm.install(monkeypatch)
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"expected one process with vllm, got WORLD_SIZE=2"):
        make()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vllm_max_model_length": 64}, r"rollout.vllm_max_model_length.*rollout.engine=transformers"),
        ({"engine": "vllm", "vllm_gpu_memory_utilization": 1.5}, r"vllm_gpu_memory_utilization: expected .*\(0, 1\)"),
        ({"engine": "vllm", "vllm_max_model_length": 256}, r"more than rollout.max_completion_length=256"),
        ({"engine": "sglang"}, r"rollout.engine"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**options)
