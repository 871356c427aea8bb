"""Rows that share their prompts give what a row for every completion gives: loss, log-probs and every gradient."""

import importlib

import pytest
import torch
from architectures import MODELS, VOCAB, make_architecture
from one_thread import one_thread  # noqa: F401

from grpo_fast.batching import Trained
from grpo_fast.forward import PolicyForward
from grpo_fast.modes import enable_gradient_checkpointing
from grpo_fast.rollout import Rollout

# Prompts of 3 to 11 tokens; completions that are empty, of one token, ragged, and far apart in length.
GROUPS = ((7, (4, 0, 1, 9)), (3, (1, 1, 2, 3)), (11, (0, 0, 0, 0)), (9, (12, 1, 6, 5)))
LOSS = {"loss_type": "grpo", "beta": 0.3, "epsilon": 0.2, "denominator": torch.tensor(16)}


def _rms_norm(layer, x):
    plus = 1.0 if type(layer).__name__.startswith("Gemma") else 0.0
    eps = layer.eps if plus else layer.variance_epsilon
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (plus + layer.weight)


@pytest.fixture(autouse=True)
def nothing_is_rounded_to_float32(monkeypatch):
    """Norms and the softmax of transformers are float32 in a float64 model, too; here they are float64."""
    for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for found in (value for key, value in vars(module).items() if key.endswith("RMSNorm")):
            monkeypatch.setattr(found, "forward", _rms_norm)
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim))


def make_trained():
    rng = torch.Generator().manual_seed(1)
    rollouts = []
    for prompt_length, lengths in GROUPS:
        prompt = tuple(torch.randint(3, VOCAB, (prompt_length,), generator=rng).tolist())
        for length in lengths:
            ids = tuple(torch.randint(3, VOCAB, (length,), generator=rng).tolist())
            rollouts.append(Rollout(prompt_ids=prompt, completion_ids=ids, truncated=False))
    advantages = torch.randn(len(rollouts), generator=rng)
    return Trained.of(rollouts, advantages, [len(r.completion_ids) for r in rollouts], all_move=True)


def outcome(model, *, share_prompts, max_tokens=10_000):
    """The loss, log-probs of all tokens, and the gradients of every parameter."""
    trained = make_trained()
    forward = PolicyForward(model, temperature=0.9, share_prompts=share_prompts)
    dtype = model.dtype
    ref = torch.randn(trained.tokens, dtype=dtype, generator=torch.Generator().manual_seed(2)) - 4
    old = torch.randn(trained.tokens, dtype=dtype, generator=torch.Generator().manual_seed(3)) * 0.1 - 4
    logps, loss = torch.zeros(trained.tokens, dtype=dtype), 0.0
    model.zero_grad()
    with forward.mode():
        for batch in forward.micro_batches(trained, max_tokens):
            out = forward.loss(batch, ref_logps=ref[batch.places], old_logps=old[batch.places], **LOSS)
            out.loss.backward()
            loss = loss + out.loss.detach()
            logps[batch.places] = forward.logprobs(batch).to(dtype)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss, logps, gradients


def relative(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


def assert_same(got, expected, tolerance):
    assert relative(got[0], expected[0]) <= tolerance
    assert relative(got[1], expected[1]) <= tolerance
    assert got[2].keys() == expected[2].keys()
    largest = max(gradient.abs().max() for gradient in expected[2].values())
    for name, gradient in expected[2].items():
        # A bias of keys moves no softmax: its gradient is nothing but rounding, of what the others' are made of.
        size = max(gradient.abs().max(), 1e-4 * largest)
        assert (got[2][name] - gradient).abs().max() <= tolerance * size, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_loss_log_probs_and_every_gradient(name, dtype, tolerance):
    model = make_architecture(name, dtype)
    expected = outcome(model, share_prompts=False)
    assert_same(outcome(model, share_prompts=True), expected, tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma2 with windows and soft caps", "gpt2 with dropout"])
@pytest.mark.parametrize("max_tokens", [1, 17, 40])
def test_any_budget(name, max_tokens):
    model = make_architecture(name, torch.float64)
    expected = outcome(model, share_prompts=False)
    for share_prompts in (True, False):
        assert_same(outcome(model, share_prompts=share_prompts, max_tokens=max_tokens), expected, 1e-10)


@pytest.mark.parametrize("name", ["llama", "gpt2 with dropout"])
def test_gradient_checkpointing(name):
    model = make_architecture(name, torch.float64)
    expected = outcome(model, share_prompts=False)
    enable_gradient_checkpointing(model)
    assert_same(outcome(model, share_prompts=True), expected, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_these_models_are_served_and_each_prompt_is_fed_once(name):
    forward = PolicyForward(make_architecture(name, torch.float32))
    assert forward.share_prompts, forward.rows_reason
    (batch,) = forward.micro_batches(make_trained(), 10_000)
    # The last token of a completion predicts nothing; a prompt without any completion to train is left out.
    assert batch.input_ids.numel() == sum(
        prompt + sum(max(length - 1, 0) for length in lengths) for prompt, lengths in GROUPS if any(lengths)
    )
