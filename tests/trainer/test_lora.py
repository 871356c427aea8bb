"""LoRA: what is trained, what the reference is, what a checkpoint holds, and what engines and files get of it."""

import copy
import importlib.util
import json
import sys

import pytest
import torch
from tiny_models import EOS, ScriptedRollout, make_model, make_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from grpo_fast import GRPOTrainer
from grpo_fast.checkpoint import save_checkpoint
from grpo_fast.cli import app
from grpo_fast.config import GRPOConfig, LoraConfig, ModelConfig, OptimConfig, load_config
from grpo_fast.lora import adapter_layers, adapters_change_nothing, adapters_off, add_lora, inner_model
from grpo_fast.memory import count_parameters, estimate_memory
from grpo_fast.merged_weights import frozen_copy, merged_weights, unties
from grpo_fast.model import load_model_config, load_policy, predict_memory
from grpo_fast.optim import with_learning_rate
from grpo_fast.rollout import SamplingOptions
from grpo_fast.rollout.transformers import TransformersRollout

peft = pytest.importorskip("peft", reason="peft is not installed")

ROWS = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)]
CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 20, 21], [9, 8, 7, 22, 23]])


def odd_sums(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(args, model=None, **options):
    return GRPOTrainer(
        make_model() if model is None else model, odd_sums, args, ROWS, None, make_tokenizer(), **options
    )


def moved(model, seed=1):
    """The model with adapters that do something."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=rng)
    return model


def adapted(kind="llama", *, wrapped=True, r=4, target_modules="all-linear", dtype=torch.float32, **options):
    model = moved(add_lora(make_model(kind, **options).to(dtype), LoraConfig(r=r, target_modules=target_modules), 0))
    return model if wrapped else inner_model(model)


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def plain_logits(kind, weights, **options):
    """Logits of a model made anew that is given `weights` by name, all of them."""
    model = make_model(kind, seed=7, **options)
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected
    if missing:
        assert missing == ["lm_head.weight"]
        assert model.config.tie_word_embeddings
    return logits(model)


def test_added_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    model = make_model()
    before, state = logits(model), torch.get_rng_state()
    model = add_lora(model, LoraConfig(r=4), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(model), before)
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"default"}
    assert len(adapter_layers(model)) == 2 * 7  # every linear layer of both, but not the head
    scales = {layer.scaling["default"] for layer in adapter_layers(model)}
    assert scales == {2.0}  # alpha = 2 r
    again = add_lora(make_model(), LoraConfig(r=4), 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    other = add_lora(make_model(), LoraConfig(r=4), 4)
    assert not torch.equal(next(p for n, p in model.named_parameters() if "lora_A" in n),
                           next(p for n, p in other.named_parameters() if "lora_A" in n))  # fmt: skip


def test_options_of_the_adapters():
    model = add_lora(make_model(), LoraConfig(r=4, alpha=6, target_modules=["q_proj"], use_rslora=True), 0)
    assert [layer.scaling["default"] for layer in adapter_layers(model)] == [3.0, 3.0]
    with pytest.raises(ValueError, match=r"lora.target_modules: .*magic"):
        add_lora(make_model(), LoraConfig(r=4, target_modules=["magic"]), 0)
    with pytest.raises(ValueError, match=r"lora.r: expected a model without adapters"):
        add_lora(model, LoraConfig(r=4), 0)


def test_adapters_of_a_bfloat16_model_are_float32():
    model = add_lora(make_model().to(torch.bfloat16), LoraConfig(r=2), 0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    "override, said",
    [
        ("lora.r=-1", "lora.r: expected a number >= 0"),
        ("lora.alpha=8", "lora.alpha: 8.0 means nothing with lora.r=0. Set lora.r"),
        ("lora.use_rslora=true", "lora.use_rslora: True means nothing with lora.r=0"),
        ("lora.target_modules=[q_proj]", "lora.target_modules: ['q_proj'] means nothing with lora.r=0"),
        ("lora={r: 4, alpha: 0}", "lora.alpha: expected a number > 0, got 0.0"),
        ("lora={r: 4, target_modules: []}", "lora.target_modules: expected at least one name"),
        ("lora={r: 4, target_modules: 3}", "lora.target_modules: expected a string or a list of: a string, got 3"),
        ("lora.rank=3", "lora.rank: unknown key"),
        ("model.reference_offload=1", "model.reference_offload: expected true or false"),
    ],
)
def test_settings_that_cannot_be(override, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below, without regular expressions
        load_config(None, [override])
    assert said in str(error.value)


@pytest.mark.parametrize("field", ["reference_dtype=bfloat16", "reference_offload=true"])
@pytest.mark.parametrize("without", ["loss.beta=0", "lora.r=4"])
def test_settings_of_a_copy_need_a_copy(field, without):
    with pytest.raises(ValueError, match=f"model.{field.split('=')[0]}: .* means nothing with {without.split('=')[0]}"):
        load_config(None, [f"model.{field}", without])


def test_default_learning_rates():
    plain, lora = make_model(), adapted()
    assert with_learning_rate(OptimConfig(), plain).learning_rate == 1e-6
    assert with_learning_rate(OptimConfig(), lora).learning_rate == 1e-5
    assert with_learning_rate(OptimConfig(learning_rate=0.0), lora).learning_rate == 0.0


def test_the_default_rate_reaches_the_optimizer(make_args):
    def rate(**options):
        args = make_args(optim={"learning_rate": None}, **options)
        return make_trainer(args).step()["learning_rate"]

    assert rate() == 1e-6
    assert rate(lora=LoraConfig(r=2)) == 1e-5


def test_peft_is_asked_for_before_anything_else(make_args, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ImportError, match=r"lora.r: peft is not installed: pip install 'grpo-fast\[peft\]'"):
        GRPOTrainer("no/such/model", odd_sums, make_args(lora=LoraConfig(r=2)), ROWS)


def test_a_wrapped_model_is_refused(make_args):
    wrapped = nn.DataParallel(make_model())
    with pytest.raises(
        ValueError, match=r"expected the bare model, got one wrapped in DataParallel. Pass model.module"
    ):
        make_trainer(make_args(), wrapped)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_moves_the_adapters_alone_and_starts_at_the_reference(make_args, kind):
    trainer = make_trainer(
        make_args(max_steps=3, loss={"beta": 0.04}, lora=LoraConfig(r=4), optim={"learning_rate": 0.1}),
        make_model(kind),
    )
    assert trainer.reference.reason == "reference: the policy with its adapters off"
    assert trainer.reference.forward is trainer.update.forward
    before = values(trainer.model)
    first = trainer.step()
    assert first["kl"] == pytest.approx(0, abs=1e-9)  # adapters that change nothing
    last = trainer.train()
    assert last["kl"] > 1e-6
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora" in name}
    assert all(p.requires_grad == ("lora" in name) for name, p in trainer.model.named_parameters())
    optimized = [p for group in trainer.update.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in optimized) == sum(p.numel() for n, p in before.items() if "lora" in n)


def test_adapters_off_restores_what_required_gradients():
    model = adapted()
    frozen = {name for name, _ in model.named_parameters() if "lora_A" in name}  # as LoRA-FA has it
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    base, with_adapters = logits(make_model()), logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), with_adapters)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


def test_adapters_that_were_off_stay_off():
    model = adapted()
    adapter_layers(model)[0].enable_adapters(False)
    with adapters_off(model):
        pass
    assert [layer.disable_adapters for layer in adapter_layers(model)] == [True] + [False] * 13


def test_what_changes_nothing():
    fresh = add_lora(make_model(), LoraConfig(r=2), 0)
    assert adapters_change_nothing(fresh)
    assert not adapters_change_nothing(make_model())
    assert not adapters_change_nothing(adapted())
    inner_model(fresh).model.norm.weight.requires_grad_(True)  # which switching adapters off would not bring back
    assert not adapters_change_nothing(fresh)
    whole = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert not adapters_change_nothing(peft.get_peft_model(make_model(), whole))
    merged = add_lora(make_model(), LoraConfig(r=2), 0)
    merged.merge_adapter()
    assert not adapters_change_nothing(merged)


def of_trained_tokens(trainer, seen):
    """Has `seen` filled with what the reference of `trainer` makes of every step, beside the trained tokens."""
    reference = trainer.reference

    def call(trained, batches):
        seen.append((trained, reference(trained, batches)))
        return seen[-1][1]

    trainer.reference = call


def whole_module():
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    return peft.get_peft_model(make_model(), config)


def half_frozen():
    model = make_model()
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    model.lm_head.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: add_lora(make_model(), LoraConfig(r=2), 0), "the policy with its adapters off"),
        (adapted, "parameters it trains as they were at the start"),
        (whole_module, "parameters it trains as they were at the start"),
        (half_frozen, "parameters it trains as they were at the start"),
        (make_model, "a copy in float32"),
    ],
    ids=["fresh adapters", "trained adapters", "modules_to_save", "frozen layers", "all weights"],
)
def test_the_reference_is_the_policy_of_the_start(make_args, make, reason):
    """After steps that moved the policy its log-probs are those of a copy made before them."""
    model = make()
    kept = copy.deepcopy(model)
    script = [[5, 6, EOS], [7, 8, 9, 10], [11], [12, 13, EOS]] * 2
    trainer = make_trainer(make_args(max_steps=3, loss={"beta": 0.02}), model, rollout=ScriptedRollout(script))
    assert reason in trainer.reference.reason
    seen, required = [], {name: p.requires_grad for name, p in model.named_parameters()}
    of_trained_tokens(trainer, seen)
    for _ in range(3):
        trainer.step()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == required
    drift = 0.0
    for trained, got in seen[1:]:
        place = 0
        for rollout in trained.rollouts:
            ids, start = torch.tensor([rollout.prompt_ids + rollout.completion_ids]), len(rollout.prompt_ids)
            size = len(rollout.completion_ids)
            chosen = ids[0, start:]
            expected, now = (
                logits(m, ids)[0, start - 1 : -1].log_softmax(-1).gather(1, chosen[:, None])[:, 0]
                for m in (kept, model)
            )
            assert torch.allclose(got[place : place + size], expected, atol=1e-5)
            drift = max(drift, (now - expected).abs().max().item())
            place += size
        assert place == trained.tokens == len(got)
    assert drift > 1e-3  # the policy itself is elsewhere


def test_no_second_copy(make_args):
    """With LoRA the run holds the model once, and the optimizer's state is that of the adapters."""
    trainer = make_trainer(make_args(loss={"beta": 0.04}, lora=LoraConfig(r=2)))
    trainer.step()
    models = [
        trainer.model,
        trainer.collect.rollout.model,
        trainer.reference.forward.model,
        trainer.update.forward.model,
    ]
    storages = {p.untyped_storage().data_ptr(): p.numel() for model in models for p in model.parameters()}
    assert sum(storages.values()) == sum(p.numel() for p in trainer.model.parameters())
    state = sum(t.numel() for entry in trainer.update.optimizer.state.values() for t in entry.values() if t.ndim)
    assert state == 2 * sum(p.numel() for n, p in trainer.model.named_parameters() if "lora" in n)
    assert trainer.collect.rollout.share_prompts
    assert trainer.update.forward.share_prompts


def test_an_offloaded_reference_is_the_same(make_args):
    args = {"loss": {"beta": 0.1}, "max_steps": 2}
    plain = make_trainer(make_args(**args))
    away = make_trainer(make_args(**args, model=ModelConfig(reference_offload=True)))
    assert away.reference.reason == "reference: a copy in float32, in the CPU's memory between phases"
    kept = {name: p.data_ptr() for name, p in away.reference.forward.model.named_parameters()}
    lines = [[trainer.step()["kl"] for _ in range(2)] for trainer in (plain, away)]
    assert lines[0] == lines[1]
    assert lines[0][1] > 0
    assert {name: p.data_ptr() for name, p in away.reference.forward.model.named_parameters()} == kept


def test_an_offloaded_reference_goes_to_the_policys_device(make_args, monkeypatch):
    """A stand-in for a GPU: every tensor of the copy is asked for there once a phase, and is back afterwards."""
    trainer = make_trainer(make_args(loss={"beta": 0.1}, model=ModelConfig(reference_offload=True)))
    model, sent, to = trainer.reference.forward.model, [], torch.Tensor.to

    def recorded(self, *args, **options):
        if args and isinstance(args[0], torch.device):
            sent.append(self.data_ptr())
        return to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    with trainer.reference.inside():
        pass
    assert sorted(sent) == sorted(t.data_ptr() for t in (*model.parameters(), *model.buffers()))


KINDS = [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("gemma2", {})]


@pytest.mark.parametrize("kind, options", KINDS, ids=["llama", "tied llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["PeftModel", "injected"])
def test_merged_weights_are_a_plain_models(kind, options, wrapped):
    """B104: W + s B A under the plain model's names; the policy's own tensors are bit by bit what they were."""
    model = adapted(kind, wrapped=wrapped, **options)
    before, expected = values(model), logits(model)
    merged = dict(merged_weights(model))
    names = {name for name, _ in make_model(kind, **options).named_parameters()}
    assert {name for name in merged if name in names} == names
    assert not [name for name in merged if "lora" in name or "base_" in name]
    assert torch.allclose(plain_logits(kind, merged.items(), **options), expected, atol=2e-5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    inner = inner_model(model)
    changed = {id(layer.get_base_layer().weight) for layer in adapter_layers(inner)}
    own = {p.data_ptr() for p in inner.parameters() if id(p) not in changed}
    assert {t.data_ptr() for name, t in merged.items() if t.data_ptr() in own} <= own
    assert not {t.data_ptr() for t in merged.values()} & {
        layer.get_base_layer().weight.data_ptr() for layer in adapter_layers(inner)
    }
    assert not any(t.requires_grad for t in merged.values())


def test_merged_weights_are_summed_in_float32():
    """In bfloat16 an adapter below half a step of the weight would vanish in each of two halves of it."""
    model = adapted(target_modules=["q_proj"], dtype=torch.bfloat16)
    layer = adapter_layers(model)[0]
    delta = layer.scaling["default"] * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    exact = layer.get_base_layer().weight.double() + delta
    got = dict(merged_weights(model))["model.layers.0.self_attn.q_proj.weight"]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.float().to(torch.bfloat16))


def test_a_plain_model_yields_its_own_tensors_each_once():
    model = make_model("gpt2")
    found = list(merged_weights(model))
    assert [name for name, _ in found] == [name for name, _ in model.named_parameters()]
    assert all(tensor.data_ptr() == model.get_parameter(name).data_ptr() for name, tensor in found)


@pytest.mark.parametrize("kind, options", KINDS, ids=["llama", "tied llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("head", [False, True], ids=["layers", "head too"])
def test_frozen_copy_is_plain_and_merged(kind, options, head):
    """B107: an adapter on a tied head leaves the embedding what it was, in the policy and in what is made of it."""
    names = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "gemma2": ["q_proj", "up_proj"]}[kind]
    model = adapted(kind, target_modules=[*names, "lm_head"] if head else names, **options)
    before, expected = values(model), logits(model)
    plain = frozen_copy(model, strict=True)
    assert type(plain) is type(make_model(kind, **options))
    assert not adapter_layers(plain)
    assert torch.allclose(logits(plain), expected, atol=2e-5)
    embedding = inner_model(model).get_input_embeddings().weight
    assert torch.equal(plain.get_input_embeddings().weight, embedding)
    was_tied = make_model(kind, **options).config.tie_word_embeddings
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert tied == plain.config.tie_word_embeddings == (was_tied and not head)
    assert unties(model) == (was_tied and head)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(p.requires_grad for p in plain.parameters())
    assert not {p.data_ptr() for p in plain.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_modules_that_are_trained_whole_are_the_ones_in_use():
    model = moved(whole_module())
    with torch.no_grad():
        inner_model(model).model.norm.modules_to_save["default"].weight.mul_(1.5)
    expected = logits(model)
    assert torch.allclose(logits(frozen_copy(model, strict=True)), expected, atol=2e-5)
    assert torch.allclose(plain_logits("llama", merged_weights(model)), expected, atol=2e-5)
    with model.disable_adapter():
        assert torch.equal(dict(merged_weights(model))["model.norm.weight"], make_model().model.norm.weight)


def test_what_cannot_be_merged_is_refused_by_name():
    dora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], use_dora=True)
    model = moved(peft.get_peft_model(make_model(), dora))
    with pytest.raises(ValueError, match=r"adapters that can be merged, got model.layers.0.self_attn.q_proj: .*Dora"):
        list(merged_weights(model))
    kept = frozen_copy(model)  # as it is, where it need not be plain
    assert torch.equal(logits(kept), logits(model))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="expected a plain model or LoRA's PeftModel"):
        list(merged_weights(peft.get_peft_model(make_model(), prompts)))


@pytest.mark.parametrize("head", [False, True], ids=["layers", "tied head too"])
def test_a_copy_sampled_from_follows_the_policy(head):
    """B104: what samples after a sync is W + s B A of the moment."""
    names = ["c_attn", "lm_head"] if head else ["c_attn"]
    model = adapted("gpt2", target_modules=names)
    rollout = TransformersRollout(model, make_tokenizer(), copy_dtype=torch.float64)
    assert not adapter_layers(rollout.model)
    options = SamplingOptions(n=2, max_tokens=4, logprobs=True, temperature=1.0)
    for seed in range(2):
        moved(model, seed + 5)
        rollout.sync(model)
        for sample in rollout.generate([[5, 6, 7], [8, 9]], options, seed):
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            chosen = torch.tensor(sample.completion_ids)[:, None]
            expected = logits(model, ids)[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1).gather(1, chosen)[:, 0]
            assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)


def test_a_copy_with_adapters_that_cannot_be_merged_follows_too():
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(make_model(), config)
    rollout = TransformersRollout(model, make_tokenizer(), copy_dtype=torch.float64)
    moved(model)
    rollout.sync(model)
    assert torch.allclose(logits(rollout.model).float(), logits(model), atol=1e-5)


def test_a_wrapped_model_is_sampled_from_in_groups():
    model = adapted()
    rollout = TransformersRollout(model, make_tokenizer())
    assert rollout.share_prompts
    assert rollout.model is inner_model(model)
    rollout.sync(model)


def test_checkpoints_are_adapters(make_args, tmp_path):
    base = tmp_path / "base"
    save_checkpoint(base, make_model(), make_tokenizer())
    args = make_args(loss={"beta": 0.02}, lora=LoraConfig(r=2))
    trainer = GRPOTrainer(str(base), odd_sums, args, ROWS)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-2"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {f.name for f in folder.iterdir()}
    assert not list(folder.glob("model*.safetensors"))
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["r"], saved["lora_alpha"]) == (str(base), 2, 4)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert torch.equal(logits(loaded), logits(trainer.model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(trainer.model))
    # The adapter as model.path: it is trained on, and the reference is where it is now.
    again = GRPOTrainer(str(folder), odd_sums, make_args(loss={"beta": 0.02}), ROWS)
    assert "as they were at the start" in again.reference.reason
    assert torch.equal(logits(again.model), logits(trainer.model))
    assert {name for name, p in again.model.named_parameters() if p.requires_grad} == {
        name for name, p in trainer.model.named_parameters() if p.requires_grad
    }
    assert again.step()["kl"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"lora.r: expected 0 with the adapter in model.path"):
        GRPOTrainer(str(folder), odd_sums, args, ROWS)


def test_merge_writes_a_plain_model(tmp_path):
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    save_checkpoint(base, make_model("gpt2"), make_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(base)
    model = moved(add_lora(model, LoraConfig(r=2, target_modules=["c_attn", "lm_head"]), 0))
    save_checkpoint(adapter, model, make_tokenizer())
    done = CliRunner().invoke(app, ["merge", str(adapter), str(out)])
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.output
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(logits(plain), logits(model), atol=2e-5)
    assert torch.equal(plain.transformer.wte.weight, make_model("gpt2").transformer.wte.weight)  # B107
    assert (out / "tokenizer.json").exists()
    refused = CliRunner().invoke(app, ["merge", str(base), str(tmp_path / "other")])
    assert refused.exit_code == 2
    assert "ADAPTER: expected a folder with adapter_config.json" in refused.output


def test_memory_of_adapters():
    config = make_model().config
    model = add_lora(make_model(), LoraConfig(r=4), 0)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters()) - adapters
    assert count_parameters(config, lora=LoraConfig(r=4)) == (parameters, adapters)
    estimate = predict_memory(GRPOConfig(lora=LoraConfig(r=4)), config, CPU)
    assert (estimate.parameters, estimate.trained) == (parameters + adapters, adapters)
    assert estimate.total == 4 * parameters + 16 * adapters  # and no reference
    half = predict_memory(GRPOConfig(lora=LoraConfig(r=4), model=ModelConfig(dtype="bfloat16")), config, CPU)
    assert half.total == 2 * parameters + 16 * adapters
    assert "0.00 M of them trained" in str(estimate)
    away = estimate_memory(10**9, torch.float32, torch.bfloat16, on_gpu=True, reference_offload=True)
    assert away.reference == 0
    assert estimate_memory(10**9, torch.float32, torch.float32, on_gpu=False, reference_offload=True).reference > 0


def test_an_adapters_folder_is_counted_as_one(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_checkpoint(base, make_model(), make_tokenizer())
    model = add_lora(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=3, target_modules=["q_proj"]), 0)
    save_checkpoint(adapter, model, make_tokenizer())
    args = GRPOConfig(model=ModelConfig(path=str(adapter)))
    config = load_model_config(args)
    trained = sum(p.numel() for p in load_policy(args, config, CPU).parameters() if p.requires_grad)
    assert predict_memory(args, config, CPU).trained == trained == 2 * 3 * (32 + 32)
