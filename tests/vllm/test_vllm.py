"""The vLLM engine on vLLM itself: whose distribution it samples, and what it knows of the weights after a sync."""

import importlib.util
import random

import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_fast.rollout import RolloutEngine, SamplingOptions
from grpo_fast.rollout.transformers import TransformersRollout

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
SIZES = {  # vLLM's attention on a CPU wants heads of 32 or more
    "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with tied head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral with windows": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "gemma2 with windows and soft caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=24, query_pre_attn_scalar=32)
    ),
    "gemma3 with windows": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=32,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2)
    ),
}
# Longer than a block of the cache and than the windows, and short ones; two are equal.
PROMPTS = [[(7 * i) % 58 + 3 for i in range(40)], [5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [5, 6, 7]]


def make(name="llama", seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    scramble(model)
    return model


@torch.no_grad()
def scramble(model, size=0.1):
    """Move every weight, so that attention and logits are far from uniform."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * size)


def engine_of(model, **options):
    from grpo_fast.rollout.vllm import VLLMRollout

    return VLLMRollout(model, **{"max_rows": 16, **options})


@torch.no_grad()
def logps_of(model, rollout, temperature=1.0):
    """The model's own log-probs of a rollout's tokens, by one unpadded row in float64."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    logps = (model(ids, use_cache=False).logits[0].double() / temperature).log_softmax(-1)
    start = len(rollout.prompt_ids) - 1
    return [logps[start + t, token].item() for t, token in enumerate(rollout.completion_ids)]


def tolerance(name):
    return 1e-2 if "soft caps" in name else 2e-4  # vLLM's tanh on a CPU is an approximation


GREEDY = SamplingOptions(max_tokens=12, temperature=0, logprobs=True)
SAMPLED = SamplingOptions(n=3, max_tokens=8, temperature=0.6, logprobs=True)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_log_probs_are_the_models(name):
    model = make(name)
    engine = engine_of(model)
    rollouts = engine.generate(PROMPTS, GREEDY, 0)
    expected = TransformersRollout(model).generate(PROMPTS, GREEDY, 0)
    assert [(r.prompt_ids, r.completion_ids, r.truncated) for r in rollouts] == [
        (r.prompt_ids, r.completion_ids, r.truncated) for r in expected
    ]
    for rollout in engine.generate(PROMPTS, SAMPLED, 1):
        assert rollout.logprobs == pytest.approx(logps_of(model, rollout, 0.6), abs=tolerance(name))


@pytest.mark.parametrize("name", MODELS)
def test_after_a_sync_it_samples_from_the_new_weights(name):
    model = make(name)
    engine = engine_of(model)
    before = engine.generate(PROMPTS, SAMPLED, 1)
    scramble(model)
    assert engine.generate(PROMPTS, SAMPLED, 1) == before  # not before it is told
    engine.sync(model)
    after = engine.generate(PROMPTS, SAMPLED, 1)  # whose prompts are in the prefix cache, computed with old weights
    assert after != before
    for rollout in after:
        assert rollout.logprobs == pytest.approx(logps_of(model, rollout, 0.6), abs=tolerance(name))


def test_it_is_an_engine_whose_seeds_decide_and_that_leaves_the_process_alone():
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    model = make()
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    engine = engine_of(model)
    first = engine.generate(PROMPTS, SAMPLED, 1)
    assert engine.generate(PROMPTS, SAMPLED, 1) == first
    assert engine.generate(PROMPTS, SAMPLED, 2) != first
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert torch.get_num_threads() == threads
    assert torch.set_num_threads is set_num_threads
    assert isinstance(engine, RolloutEngine)
    assert not engine.exact
    assert len({r.completion_ids for r in first}) > len(PROMPTS)  # completions of a group differ
    assert [r.completion_ids for r in first[3:6]] != [r.completion_ids for r in first[9:]]  # and equal prompts' do


def test_the_distribution_follows_temperature_and_renormalises_what_top_k_and_top_p_keep():
    model = make()
    options = SamplingOptions(n=2000, max_tokens=1, temperature=0.5, top_k=5, top_p=0.8, logprobs=True)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1]])).logits[0, -1].double() / 0.5
    top = logits.softmax(-1).topk(5)
    probabilities = top.values / top.values.sum()
    kept = 1 + (probabilities.cumsum(0) < 0.8).sum().item()
    assert 1 < kept < 5, "the test needs both to cut"
    expected = dict(
        zip(top.indices[:kept].tolist(), (probabilities[:kept] / probabilities[:kept].sum()).tolist(), strict=True)
    )
    counts = dict.fromkeys(expected, 0)
    for rollout in engine_of(model).generate([PROMPTS[1]], options, 0):
        token = rollout.completion_ids[0]
        counts[token] += 1
        assert rollout.logprobs[0] == pytest.approx(numpy.log(expected[token]), abs=1e-4)
    for token, count in counts.items():
        assert abs(count / 2000 - expected[token]) < 4 * 0.5 / 2000**0.5


def test_any_of_several_ends_stops_and_is_kept():
    model = make()
    model.generation_config.eos_token_id = None
    free = engine_of(model).generate(PROMPTS, SamplingOptions(n=4, max_tokens=12), 0)
    ends = {free[0].completion_ids[3], free[5].completion_ids[2]}
    model.generation_config.eos_token_id = sorted(ends)
    engine = engine_of(model)
    assert set(engine.eos_ids) == ends
    rollouts = engine.generate(PROMPTS, SamplingOptions(n=4, max_tokens=12, logprobs=True), 0)
    assert sum(not r.truncated for r in rollouts) >= 2
    for rollout, whole in zip(rollouts, free, strict=True):
        cut = next((i + 1 for i, token in enumerate(whole.completion_ids) if token in ends), 12)
        assert rollout.completion_ids == whole.completion_ids[:cut]
        assert rollout.truncated == (whole.completion_ids[cut - 1] not in ends)
        assert len(rollout.logprobs) == cut


def test_an_end_of_the_configuration_that_is_none_of_the_generation_config_does_not_stop():
    model = make()
    model.generation_config.eos_token_id = None
    free = engine_of(model).generate(PROMPTS, SamplingOptions(n=4, max_tokens=12), 0)
    model.config.eos_token_id = free[0].completion_ids[3]
    assert engine_of(model).generate(PROMPTS, SamplingOptions(n=4, max_tokens=12), 0) == free


@pytest.mark.parametrize("name", ["llama", "llama with tied head", "gpt2"])
def test_lora_is_merged_for_vllm_and_stays_apart_in_the_policy(name):
    """B104: the engine serves W + sBA, and the trainer's weights are the same bits."""
    model = get_peft_model(make(name), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    engine = engine_of(model)
    base = engine.generate(PROMPTS, GREEDY, 0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.mul_(1.5)
                before[key] = parameter.clone()
    engine.sync(model)
    rollouts = engine.generate(PROMPTS, SAMPLED, 0)
    for rollout in rollouts:
        assert rollout.logprobs == pytest.approx(logps_of(model, rollout, 0.6), abs=5e-4)
    assert engine.generate(PROMPTS, GREEDY, 0) != base
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_what_cannot_be_is_refused():
    tied = make("llama with tied head")
    with pytest.raises(ValueError, match=r"expected no adapter on a head or embedding that share their weight"):
        engine_of(get_peft_model(tied, LoraConfig(r=2, target_modules=["lm_head"])))
    engine = engine_of(make(), max_model_length=20)
    with pytest.raises(ValueError, match=r"prompts\[1\]: 12 \+ 12 tokens exceed the model's 20 positions"):
        engine.generate([[5], list(range(3, 15))], SamplingOptions(max_tokens=12), 0)
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at least one token id"):
        engine.generate([[]], SamplingOptions(max_tokens=12), 0)
    assert engine.generate([], SamplingOptions(max_tokens=12), 0) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_computes_in_the_models_dtype_and_the_cache_holds_what_max_rows_need(dtype):
    model = make().to(dtype)
    engine = engine_of(model, max_rows=5, max_model_length=50)
    config = engine._llm.llm_engine.vllm_config
    assert config.model_config.dtype == dtype
    blocks = config.cache_config.num_gpu_blocks
    assert 5 * 2 <= blocks <= 5 * 3 + 1
    rollouts = engine.generate([PROMPTS[0]], SamplingOptions(n=11, max_tokens=10), 0)
    assert len(rollouts) == 11
