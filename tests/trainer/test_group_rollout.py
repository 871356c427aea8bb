"""Rollouts in groups: tokens are those of model.generate, a prompt is read once, rows that ended make room."""

import pytest
import torch
from architectures import MODELS, VOCAB, make_architecture
from one_thread import one_thread  # noqa: F401
from tiny_models import EOS, make_model
from transformers import MambaConfig, MambaForCausalLM

from grpo_fast.ops.backends import unavailable_reason
from grpo_fast.rollout import SamplingOptions, eos_token_ids, packed
from grpo_fast.rollout.cached_attention import Step
from grpo_fast.rollout.decoding import GroupDecoder
from grpo_fast.rollout.transformers import TransformersRollout

# Of 3 to 17 tokens: padding where prompts are side by side, and windows of 5 that leave parts of all but one.
RNG = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, VOCAB, (length,), generator=RNG).tolist() for length in (7, 3, 17, 7, 11)]


def engines(model):
    return TransformersRollout(model), TransformersRollout(model, share_prompts=False)


def ids(rollouts):
    return [rollout.completion_ids for rollout in rollouts]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[2:3]], ids=["ragged", "single"])
@pytest.mark.parametrize("eos", [[2], [2, 7, 9, 11, 30, 31]], ids=["one end", "several"])
def test_greedy_tokens_are_those_of_generate(name, prompts, eos):
    model = make_architecture(name).eval()
    model.generation_config.eos_token_id = eos
    groups, generate = engines(model)
    assert groups.share_prompts
    options = SamplingOptions(max_tokens=24, temperature=0, logprobs=True)
    got, expected = groups.generate(prompts, options, 0), generate.generate(prompts, options, 0)
    assert ids(got) == ids(expected)
    assert [r.truncated for r in got] == [r.truncated for r in expected]
    for own, other in zip(got, expected, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@torch.no_grad()
def test_log_probs_are_those_of_the_model(name, kernel, monkeypatch):
    if not kernel:  # as on a GPU, or without the extension
        monkeypatch.setattr("grpo_fast.rollout.cached_attention._has_kernel", lambda query, cache: False)
    model = make_architecture(name).eval()
    options = SamplingOptions(n=3, max_tokens=20, temperature=0.7, logprobs=True)
    for rollout in TransformersRollout(model).generate(PROMPTS, options, 0):
        row = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        full = (model(row, use_cache=False).logits[0].double() / 0.7).log_softmax(-1)
        start = len(rollout.prompt_ids) - 1
        expected = [full[start + t, token].item() for t, token in enumerate(rollout.completion_ids)]
        assert rollout.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 7, 19])
def test_the_batch_does_not_change_a_completion(max_rows):
    """Whatever is beside a row, and whether a group is whole, in parts, or waits: its tokens are the same."""
    model = make_architecture("mistral with windows", torch.float64)
    model.generation_config.eos_token_id = list(range(2, 12))  # rows end at all times
    engine = TransformersRollout(model)
    whole = engine.generate(PROMPTS, SamplingOptions(n=4, max_tokens=15, logprobs=True), 3)
    options = SamplingOptions(n=4, max_tokens=15, max_rows=max_rows, logprobs=True)
    parts = engine.generate(PROMPTS, options, 3)
    assert len({len(completion) for completion in ids(whole)}) > 5
    assert ids(parts) == ids(whole)
    for one, other in zip(parts, whole, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert (one.prompt_ids, one.truncated) == (other.prompt_ids, other.truncated)


def test_rows_of_a_group_are_drawn_independently():
    engine = TransformersRollout(make_architecture("llama"))
    rollouts = engine.generate([PROMPTS[0]] * 2, SamplingOptions(n=8, max_tokens=8), 0)
    assert len(set(ids(rollouts))) == 16


class Fed:
    """How many tokens went into the model, call by call."""

    def __init__(self, model):
        self.counts = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: self.counts.append(args[0].numel()))


def test_a_prompt_is_read_once_and_nothing_is_padded():
    model = make_architecture("llama")
    model.generation_config.eos_token_id = None
    engine, fed = TransformersRollout(model), Fed(model)
    engine.generate(PROMPTS, SamplingOptions(n=6, max_tokens=4), 0)
    assert fed.counts == [sum(map(len, PROMPTS)), 30, 30, 30]  # the last token sampled is not fed


def test_rows_that_ended_leave_and_others_take_their_place(monkeypatch):
    rows, step = [], GroupDecoder.step
    monkeypatch.setattr(GroupDecoder, "step", lambda self, tokens: rows.append(len(tokens)) or step(self, tokens))
    model = make_architecture("llama")
    model.generation_config.eos_token_id = list(range(2, 12))
    options = SamplingOptions(max_tokens=30, max_rows=16)
    lengths = [len(completion) for completion in ids(TransformersRollout(model).generate(PROMPTS * 8, options, 0))]
    assert max(lengths) > 20
    assert sum(lengths) - len(lengths) <= sum(rows) <= 8 / 7 * sum(lengths)  # ended rows: up to an eighth of the batch
    waits = [count for count in rows if count == 16]
    assert len(waits) > 0.9 * (len(rows) - 30)  # full while others wait, then 30 steps at most


def test_completions_that_end_at_once():
    model = make_architecture("llama")
    model.generation_config.eos_token_id = list(range(VOCAB))
    engine, fed = TransformersRollout(model), Fed(model)
    rollouts = engine.generate(PROMPTS, SamplingOptions(n=3, max_tokens=9), 0)
    assert {len(completion) for completion in ids(rollouts)} == {1}
    assert not any(rollout.truncated for rollout in rollouts)
    assert fed.counts == [sum(map(len, PROMPTS))]


@pytest.mark.parametrize("max_tokens", [1, 2, 63, 64, 65, 66, 110])  # around the room that rows have at first
def test_lengths_around_the_caches_room(max_tokens):
    model = make_model("llama").eval()
    model.generation_config.eos_token_id = None
    groups, generate = engines(model)
    options = SamplingOptions(max_tokens=max_tokens, temperature=0)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    assert ids(groups.generate(prompts, options, 0)) == ids(generate.generate(prompts, options, 0))
    assert {len(completion) for completion in ids(groups.generate(prompts, options, 0))} == {max_tokens}


def test_many_prompts_are_read_in_parts(monkeypatch):
    model = make_architecture("gemma3 with windows")
    options = SamplingOptions(n=2, max_tokens=6, temperature=0)
    expected = TransformersRollout(model).generate(PROMPTS, options, 0)
    monkeypatch.setattr("grpo_fast.rollout.decoding._PREFILL_TOKENS", 12)
    engine, fed = TransformersRollout(model), Fed(model)
    assert ids(engine.generate(PROMPTS, options, 0)) == ids(expected)
    assert fed.counts[:4] == [10, 17, 7, 11]


def test_bfloat16_models_are_sampled_from():
    engine = TransformersRollout(make_architecture("gemma2 with windows and soft caps", torch.bfloat16))
    rollouts = engine.generate(PROMPTS, SamplingOptions(n=2, max_tokens=12, logprobs=True), 0)
    assert all(
        max(rollout.logprobs) <= 0 and len(rollout.logprobs) == len(rollout.completion_ids) for rollout in rollouts
    )


def test_models_without_such_attention_are_sampled_from_by_generate():
    torch.manual_seed(0)
    config = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "eos_token_id": EOS}
    model = MambaForCausalLM(MambaConfig(**config, pad_token_id=0, bos_token_id=1)).eval()
    groups, generate = engines(model)
    assert not groups.share_prompts
    assert "model.generate" in groups.reason
    assert "attention" in groups.reason
    options = SamplingOptions(n=2, max_tokens=5)
    assert groups.generate(PROMPTS[:1], options, 0) == generate.generate(PROMPTS[:1], options, 0)


def test_the_reason_and_whether_it_is_exact_can_be_asked():
    model = make_architecture("llama")
    assert "read once" in TransformersRollout(model).reason
    assert "asked for" in TransformersRollout(model, share_prompts=False).reason
    assert TransformersRollout(model).exact
    assert not TransformersRollout(model, copy_dtype=torch.bfloat16).exact
    assert eos_token_ids(model) == (2,)


def test_a_cpu_decodes_by_the_native_kernel_and_packed_weights(monkeypatch):
    """Not that either is quietly left out; the extension may be missing, but then other tests are skipped, too."""
    if unavailable_reason("cpu"):
        pytest.skip(unavailable_reason("cpu"))
    calls, inner = [], Step._by_kernel
    monkeypatch.setattr(Step, "_by_kernel", lambda *args: (calls.append("kernel"), inner(*args))[1])
    multiply = packed._forward
    monkeypatch.setattr(packed, "_forward", lambda *args: (calls.append("packed"), multiply(*args))[1])
    monkeypatch.setattr(packed, "_LEAST_WEIGHTS", 1)
    model = make_model()
    TransformersRollout(model).generate([[5, 6], [7]], SamplingOptions(n=2, max_tokens=4), 0)
    assert calls.count("kernel") == 3 * len(model.model.layers)  # the first of 4 tokens is the prefill's
    assert calls.count("packed") == 4 * (7 * len(model.model.layers) + 1)
