"""Generation: which distribution, where a completion ends, which mode, which random state."""

import pytest
import torch
from tiny_models import BOS, EOS, PAD, make_model, make_tokenizer

from grpo_fast.modes import enable_gradient_checkpointing, update_mode
from grpo_fast.rollout import Rollout, RolloutEngine, SamplingOptions, eos_token_ids, until_eos
from grpo_fast.rollout.transformers import TransformersRollout

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]  # of 3 and 9 tokens: left padding is at work


@pytest.fixture(params=[True, False], ids=["groups", "generate"])
def share_prompts(request):
    """Both ways to sample: in groups that share their prompt, and by model.generate."""
    return request.param


def greedy(model, prompt, steps):
    """Unpadded, without a cache, one row at a time."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
        if ids[-1] == EOS:
            break
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_padded_greedy_equals_single_rows(kind, share_prompts):
    model = make_model(kind).eval()
    rollouts = TransformersRollout(model, share_prompts=share_prompts).generate(
        PROMPTS, SamplingOptions(max_tokens=8, temperature=0), 0
    )
    assert [r.completion_ids for r in rollouts] == [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert [r.prompt_ids for r in rollouts] == [tuple(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_sampled_logprobs_are_those_of_the_distribution_drawn_from(kind, share_prompts):
    model = make_model(kind).eval()
    options = SamplingOptions(n=3, max_tokens=6, temperature=0.6, logprobs=True)
    for rollout in TransformersRollout(model, share_prompts=share_prompts).generate(PROMPTS, options, 0):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        full = (model(ids).logits[0].double() / 0.6).log_softmax(-1)
        start = len(rollout.prompt_ids) - 1  # token t of the completion is predicted at P - 1 + t
        expected = [full[start + t, token].item() for t, token in enumerate(rollout.completion_ids)]
        assert rollout.logprobs == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_sampled_logprobs_are_renormalised_under_top_k_and_top_p(share_prompts):
    model = make_model().eval()
    options = SamplingOptions(n=8, max_tokens=1, top_k=3, top_p=0.8, logprobs=True)
    top = model(torch.tensor([PROMPTS[0]])).logits[0, -1].double().softmax(-1).topk(3)
    probabilities = top.values / top.values.sum()  # top-p acts on what top-k left
    kept = 1 + (probabilities.cumsum(0) < 0.8).sum().item()
    expected = (probabilities[:kept] / probabilities[:kept].sum()).log()
    allowed = dict(zip(top.indices.tolist()[:kept], expected.tolist(), strict=True))
    for rollout in TransformersRollout(model, share_prompts=share_prompts).generate(PROMPTS[:1], options, 0):
        assert rollout.logprobs[0] == pytest.approx(allowed[rollout.completion_ids[0]], abs=1e-5)


def test_distribution_follows_temperature(llama, share_prompts):
    logits = llama.eval()(torch.tensor([PROMPTS[0]])).logits[0, -1].detach()
    expected = (logits / 0.5).softmax(-1)
    options = SamplingOptions(n=4000, max_tokens=1, temperature=0.5)
    drawn = [
        r.completion_ids[0]
        for r in TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS[:1], options, 3)
    ]
    observed = torch.bincount(torch.tensor(drawn), minlength=len(expected)) / len(drawn)
    assert (observed - expected).abs().max() < 4 * 0.5 / len(drawn) ** 0.5


def test_checkpoint_generation_defaults_do_not_leak(llama, share_prompts):
    options = SamplingOptions(n=2, max_tokens=12, temperature=1.0)
    expected = TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS, options, 0)
    config = llama.generation_config
    config.repetition_penalty, config.top_k, config.temperature, config.top_p = 5.0, 2, 0.1, 0.3
    config.do_sample, config.min_new_tokens, config.no_repeat_ngram_size = False, 9, 2
    config.suppress_tokens, config.max_length, config.num_return_sequences = list(range(30)), 4, 1
    assert TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS, options, 0) == expected
    assert llama.generation_config is config
    assert config.repetition_penalty == 5.0


def test_global_random_state_is_untouched_and_seeds_decide(llama, share_prompts):
    engine, options = TransformersRollout(llama, share_prompts=share_prompts), SamplingOptions(n=4, max_tokens=6)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = engine.generate(PROMPTS, options, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    assert engine.generate(PROMPTS, options, 1) == first
    assert engine.generate(PROMPTS, options, 2) != first


def test_other_devices_random_states_are_left_alone(llama, monkeypatch, share_prompts):
    """torch.manual_seed would seed every GPU, of which only the model's own is restored."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS, SamplingOptions(max_tokens=2), 5)
    assert seeded == []


def test_rows_are_generated_in_parts_and_come_back_in_order(llama, share_prompts):
    options = SamplingOptions(n=3, max_tokens=5, temperature=0)
    whole = TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS, options, 0)
    parts = TransformersRollout(llama, share_prompts=share_prompts).generate(
        PROMPTS, SamplingOptions(n=3, max_tokens=5, temperature=0, max_rows=2), 0
    )
    assert parts == whole
    assert [r.prompt_ids for r in parts] == [tuple(prompt) for prompt in PROMPTS for _ in range(3)]


def test_eos_ids_are_the_generation_configs_and_the_tokenizers(llama):
    llama.generation_config.eos_token_id = [7, 9]
    assert eos_token_ids(llama, make_tokenizer()) == (EOS, 7, 9)
    llama.generation_config.eos_token_id = 50256  # another model's default: no id of this vocabulary
    assert eos_token_ids(llama) == ()


def test_any_eos_ends_a_completion_and_stays_in_it():
    assert until_eos([5, 6, 9, 0, 0], (7, 9)) == ((5, 6, 9), True)
    assert until_eos([9, 9, 9], (7, 9)) == ((9,), True)
    assert until_eos([5, 0, 0, 0], (7, 9)) == ((5, 0, 0, 0), False)  # pads that were sampled are tokens
    assert until_eos([], (7,)) == ((), False)


class Forced(TransformersRollout):
    """Generation replaced by given sequences."""

    def __init__(self, model, tokenizer, sampled):
        super().__init__(model, tokenizer, share_prompts=False)
        self.model.generate = lambda input_ids, **_: torch.cat([input_ids, torch.tensor(sampled)], dim=1)


def test_first_eos_is_kept_when_pad_is_eos(llama):
    tokenizer = make_tokenizer(pad="<eos>")
    assert tokenizer.pad_token_id == EOS
    engine = Forced(llama, tokenizer, [[5, 6, EOS, EOS, EOS, EOS], [5, 6, 7, 8, 9, 10]])
    rollouts = engine.generate(PROMPTS, SamplingOptions(max_tokens=6), 0)
    assert [r.completion_ids for r in rollouts] == [(5, 6, EOS), (5, 6, 7, 8, 9, 10)]
    assert [r.truncated for r in rollouts] == [False, True]


def test_several_eos_ids_are_not_truncated(llama):
    llama.generation_config.eos_token_id = [7, 9]
    rollouts = Forced(llama, None, [[5, 9, PAD, PAD], [7, PAD, PAD, PAD]]).generate(
        PROMPTS, SamplingOptions(max_tokens=4), 0
    )
    assert [(r.completion_ids, r.truncated) for r in rollouts] == [((5, 9), False), ((7,), False)]


def test_generation_stops_at_any_eos_by_itself(llama, share_prompts):
    first = TransformersRollout(llama, share_prompts=share_prompts).generate(
        PROMPTS, SamplingOptions(max_tokens=5, temperature=0), 0
    )
    llama.generation_config.eos_token_id = [EOS, first[0].completion_ids[2]]
    second = TransformersRollout(llama, share_prompts=share_prompts).generate(
        PROMPTS, SamplingOptions(max_tokens=5, temperature=0), 0
    )
    expected = until_eos(first[0].completion_ids, llama.generation_config.eos_token_id)
    assert (second[0].completion_ids, second[0].truncated) == (expected[0], False)


def test_gradient_checkpointing_and_dropout_do_not_change_rollouts(share_prompts):
    fresh = make_model("gpt2").eval()
    options = SamplingOptions(max_tokens=8, temperature=0, logprobs=True)
    expected = TransformersRollout(fresh, share_prompts=share_prompts).generate(PROMPTS, options, 0)
    model = make_model("gpt2")
    enable_gradient_checkpointing(model)
    model.train()
    model.transformer.h[1].eval()
    flags = [module.training for module in model.modules()]
    calls = []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    assert TransformersRollout(model, share_prompts=share_prompts).generate(PROMPTS, options, 0) == expected
    assert [module.training for module in model.modules()] == flags
    assert model.transformer.h[0].gradient_checkpointing
    assert calls[-1]["input_ids"].numel() == 2  # a token of each row: the cache was on


def test_flags_are_restored_after_an_error(llama, share_prompts):
    llama.train()
    config = llama.generation_config

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    llama.generate = fail
    llama.lm_head.register_forward_pre_hook(fail)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS, SamplingOptions(max_tokens=4), 0)
    assert llama.training
    assert llama.generation_config is config
    assert torch.equal(torch.get_rng_state(), state)


def test_update_mode_checkpoints_without_dropout():
    model = make_model("gpt2")
    enable_gradient_checkpointing(model)
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        expected = model.eval()(ids).logits
    model.train()
    forwards = []
    model.transformer.h[0].attn.register_forward_hook(lambda *_: forwards.append(1))
    with update_mode(model):
        logits = model(ids, use_cache=False).logits
        logits.sum().backward()
    assert torch.equal(logits, expected)
    assert len(forwards) == 2  # once more in the backward
    assert all(module.training for module in model.modules())


def test_lengths_are_checked(llama, share_prompts):
    engine = TransformersRollout(llama, share_prompts=share_prompts)
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at least one token"):
        engine.generate([[5], []], SamplingOptions(max_tokens=4), 0)
    with pytest.raises(ValueError, match=r"100 \+ 64 tokens exceed the model's 128 positions.*=28 or less"):
        engine.generate([[5] * 100], SamplingOptions(max_tokens=64), 0)
    assert engine.generate([], SamplingOptions(), 0) == []


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 has no buffers
def test_sampling_from_a_copy_follows_the_policy_only_when_synced(kind):
    model = make_model(kind)
    options = SamplingOptions(max_tokens=6, temperature=0)
    engine = TransformersRollout(model, copy_dtype=torch.float32)
    before = engine.generate(PROMPTS, options, 0)
    assert before == TransformersRollout(model).generate(PROMPTS, options, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    assert engine.generate(PROMPTS, options, 0) == before
    engine.sync(model)
    after = engine.generate(PROMPTS, options, 0)
    assert after == TransformersRollout(model).generate(PROMPTS, options, 0) != before
    half = TransformersRollout(model, copy_dtype=torch.bfloat16)
    half.sync(model)
    assert half.model.dtype == torch.bfloat16
    assert torch.equal(half.model.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))


def test_interface(llama):
    assert isinstance(TransformersRollout(llama), RolloutEngine)
    assert Rollout(prompt_ids=(BOS,), completion_ids=(), truncated=False).logprobs is None
    with pytest.raises(ValueError, match="with `generate`, got LlamaModel"):
        TransformersRollout(llama.model)


def test_logprobs_end_with_the_completion(llama, share_prompts):
    """A row that ends early is padded by generate(), its log-probs are not."""
    options = SamplingOptions(n=16, max_tokens=12, temperature=3.0, logprobs=True)
    rollouts = TransformersRollout(llama, share_prompts=share_prompts).generate(PROMPTS, options, 0)
    assert len({len(rollout.completion_ids) for rollout in rollouts}) > 1
    assert all(len(rollout.logprobs) == len(rollout.completion_ids) for rollout in rollouts)


def test_the_models_positions_may_be_filled_exactly(llama, share_prompts):
    prompt = [5] * 124
    (rollout,) = TransformersRollout(llama, share_prompts=share_prompts).generate(
        [prompt], SamplingOptions(max_tokens=4), 0
    )
    assert 1 <= len(rollout.completion_ids) <= 4
    with pytest.raises(ValueError, match="positions"):
        TransformersRollout(llama, share_prompts=share_prompts).generate([prompt], SamplingOptions(max_tokens=5), 0)


def test_eos_ids_outside_the_vocabulary_are_ignored(llama):
    size = llama.get_input_embeddings().num_embeddings
    llama.generation_config.eos_token_id = [-1, size - 1, size]
    assert eos_token_ids(llama) == (size - 1,)
