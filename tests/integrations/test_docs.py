"""The named snippets of docs/drop-in.md run, and those that claim to be the same loss have the same gradient."""

import re
import sys
import types
from pathlib import Path

import problems
import pytest
import tiny_models
import torch

import grpo_fast as gf
from grpo_fast.integrations import verl as fast

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/drop-in.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
KINDS = ("llama", "gpt2", "gemma2", "cohere", "granite")


def setting(kind):
    """What the snippets take as given: four right-padded prompts with completions, one of them of advantage 0."""
    model = tiny_models.make_model(kind).eval()
    with torch.no_grad():  # log-probs far from -ln V, and old ones near them
        input_ids = torch.randint(3, len(tiny_models.VOCAB), (4, 9))
        logps = model(input_ids).logits.log_softmax(-1).gather(-1, input_ids.roll(-1, 1)[..., None])[..., 0]
    attention_mask = torch.ones(4, 9, dtype=torch.int64)
    attention_mask[0, 7:] = 0
    completion_mask = attention_mask.clone()
    completion_mask[:, :4] = 0
    return {
        "torch": torch,
        "gf": gf,
        "model": model,
        "reference_model": tiny_models.make_model(kind, seed=1).eval(),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -0.5, 0.0, -1.2]),
        "token_advantages": torch.randn(4, 9),
        "old_logps": logps + 0.2 * torch.randn(4, 9),
    }


def run(names, *blocks):
    """Gradients of the model after the last block."""
    for block in blocks:
        names["model"].zero_grad()
        exec(BLOCKS[block], names)
    return [parameter.grad.clone() for parameter in names["model"].parameters() if parameter.grad is not None]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) > 0
    scale = max(grad.abs().max() for grad in theirs)
    assert scale > 1e-4
    for got, expected in zip(ours, theirs, strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1e-2 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_one_loss_four_ways(kind):
    names = setting(kind)
    expected = run(names, "eager")
    assert_same(run(names, "logits"), expected)
    assert_same(run(names, "transform", "hidden"), expected)
    assert_same(run(names, "live_rows"), expected)
    assert_same(run(names, "accumulation"), expected)


def test_the_transform_matters():
    """Left out, the numbers differ: the advice to compare log-probs once would notice."""
    for kind in ("gemma2", "cohere", "granite"):
        names = setting(kind)
        run(names, "logits", "transform", "hidden")
        right = names["out"].logps
        model, targets = names["model"], names["targets"]
        plain = gf.linear_token_logprobs(
            model.base_model(names["input_ids"]).last_hidden_state, model.get_output_embeddings().weight, targets
        )
        assert (plain - right)[names["mask"].bool() & (names["advantages"] != 0)[:, None]].abs().max() > 0.1, kind


def eager_logps(names, model):
    logits = model(names["input_ids"], attention_mask=names["attention_mask"]).logits[:, :-1].double()
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, names["input_ids"][:, 1:, None])[..., 0]
    return chosen, -(logps.exp() * logps).sum(-1), names["completion_mask"][:, 1:]


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_dpo():
    names = setting("llama")
    got = run(names, "logits", "transform", "dpo")
    sums = []
    for model in (names["model"], names["reference_model"]):
        logps, _, mask = eager_logps(names, model)
        sums.append((logps * mask).sum(-1))
    chosen, rejected = (sums[0] - sums[1].detach()).chunk(2)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    assert problems.relative_error(names["loss"], loss.detach()) < 1e-5
    assert_same(got, gradients(loss, names["model"]))


def test_ppo_both_ways():
    names = setting("llama")
    got = run(names, "logits", "transform", "hidden", "ppo")
    loss = names["loss"]
    fused = run(names, "ppo_fused")
    logps, entropy, mask = eager_logps(names, names["model"])
    ratio = (logps - names["old_logps"][:, :-1]).exp()
    advantages = names["token_advantages"][:, :-1]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = -((gain + 0.01 * entropy) * mask).sum() / mask.sum()
    assert problems.relative_error(loss, expected.detach()) < 1e-5
    assert problems.relative_error(names["out"].loss, expected.detach()) < 1e-5
    grads = gradients(expected, names["model"])
    assert_same(got, grads)
    assert_same(fused, grads)


def test_objectives_of_ones_own():
    names = setting("gemma2")
    run(names, "logits", "transform", "hidden")
    names["ref_logps"] = names["old_logps"] + 0.1
    ours = run(names, "own_token")
    logps, _, mask = eager_logps(names, names["model"])
    ref = names["ref_logps"][:, :-1]
    losses = -names["advantages"][:, None] * logps + 0.05 * (logps - ref) ** 2
    assert_same(ours, gradients((losses * mask).sum() / mask.sum(), names["model"]))

    ours = run(names, "own_sequence")
    logps, _, mask = eager_logps(names, names["model"])
    length = mask.sum(1)
    ratio = (((logps - names["old_logps"][:, :-1]) * mask).sum(1) / length).exp()
    gain = torch.minimum(ratio * names["advantages"], ratio.clamp(0.9, 1.1) * names["advantages"])
    assert_same(ours, gradients(-gain.mean(), names["model"]))


def test_the_module_for_verl(monkeypatch):
    """verl's modules are stand-ins here; that their attributes exist is what `make test-peers` sees."""
    for name in ("verl", "verl.utils", "verl.utils.experimental", "verl.utils.kernel"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    leaves = {}
    for parent, child in (
        ("verl.utils.experimental", "torch_functional"), ("verl.utils.kernel", "linear_cross_entropy"),
        ("verl.utils", "torch_functional"),
    ):  # fmt: skip
        leaves[f"{parent}.{child}"] = types.ModuleType(f"{parent}.{child}")
        monkeypatch.setitem(sys.modules, f"{parent}.{child}", leaves[f"{parent}.{child}"])
        setattr(sys.modules[parent], child, leaves[f"{parent}.{child}"])
    for parent, child in (("verl", "utils"), ("verl.utils", "experimental"), ("verl.utils", "kernel")):
        setattr(sys.modules[parent], child, sys.modules[f"{parent}.{child}"])
    exec(BLOCKS["verl_fast"], {})
    assert leaves["verl.utils.torch_functional"].logprobs_from_logits is fast.logprobs_from_logits
    assert leaves["verl.utils.torch_functional"].entropy_from_logits is fast.entropy_from_logits
    assert leaves["verl.utils.experimental.torch_functional"].FusedLinearForPPO is fast.FusedLinearForPPO
    assert leaves["verl.utils.kernel.linear_cross_entropy"].linear_cross_entropy is fast.linear_cross_entropy


def test_every_named_snippet_is_run():
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in source for name in BLOCKS)
    assert len(BLOCKS) == PAGE.count("```python ")
