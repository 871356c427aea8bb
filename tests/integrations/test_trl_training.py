"""Whole runs of TRL's trainer and ours from one seed, and what is refused at construction."""

import importlib
import sys

import pytest
import torch

trl = pytest.importorskip("trl", reason="needs pip install 'grpo-fast[trl]'")

from tiny_models import make_tokenizer  # noqa: E402
from trl_problems import GRPOTrainer, dataset, history, make_any_model, make_trainer  # noqa: E402

from grpo_fast.integrations.trl import FastGRPOMixin, _refuse_split  # noqa: E402


class MixedIn(FastGRPOMixin, trl.GRPOTrainer):
    """As a user with a trainer class of one's own writes it."""


def train_both(folder, trainer_class=GRPOTrainer, make=make_any_model, **config):
    """Histories and parameters of both agree; returns the history, and how far the parameters moved."""
    trained = []
    for each in (trl.GRPOTrainer, trainer_class):  # one after the other: construction sets the seed
        trainer = make_trainer(each, folder, make(), max_steps=3, **config)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        trained.append(trainer)
    theirs, ours = trained
    assert len(history(theirs)) == len(history(ours)) > 3
    for expected, got in zip(history(theirs), history(ours), strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for expected, got in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    moved = max((p - q).abs().max().item() for p, q in zip(before, ours.model.parameters(), strict=True))
    return history(ours), moved


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, MixedIn])
def test_three_steps_with_trls_defaults(tmp_path, trainer_class):
    """Accumulation over several generations, truncated completions masked, gradient checkpointing."""
    entries, moved = train_both(tmp_path, trainer_class, mask_truncated_completions=True)
    assert moved > 1e-3
    assert {"loss", "grad_norm", "entropy", "clip_ratio/region_mean", "reward"} <= entries[0].keys()
    assert any(abs(entry["loss"]) > 1e-3 for entry in entries[:3])


def test_three_steps_off_policy_with_a_reference_and_evaluation(tmp_path):
    """Old log-probs of earlier weights, reference log-probs of a model of its own, metrics of evaluation."""
    make_any_model().save_pretrained(tmp_path / "model")
    options = {
        "beta": 0.1, "loss_type": "grpo", "num_iterations": 2, "gradient_accumulation_steps": 1,
        "evaluates": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3,
    }  # fmt: skip
    entries, _ = train_both(tmp_path, make=lambda: str(tmp_path / "model"), **options)
    assert any(entry.get("kl", 0) > 1e-4 for entry in entries)
    assert any(entry.get("clip_ratio/region_mean", 0) > 0 for entry in entries)
    assert any(entry.get("eval_kl", 0) > 1e-4 for entry in entries)


@pytest.mark.parametrize("adapter", ["lora", "whole head", "prompt_tuning", "prefix_tuning"])
def test_three_steps_with_an_adapter(tmp_path, adapter):
    """The reference is the model without its adapter; virtual tokens in front shift no log-prob."""
    peft = pytest.importorskip("peft")
    config = {
        "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2),
        "whole head": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2),
        "prompt_tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "prefix_tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }[adapter]()
    lora = adapter in ("lora", "whole head")
    options = {"beta": 0.1 if lora else 0.0, "gradient_checkpointing": adapter != "prefix_tuning"}
    rate = 1.0 if lora else 10.0
    entries, moved = train_both(tmp_path, peft_config=config, loss_type="bnpo", learning_rate=rate, **options)
    assert moved > 1e-3
    assert not lora or any(entry.get("kl", 0) > 1e-5 for entry in entries)


def test_a_short_training_learns(tmp_path):
    """From a random model to one that writes the rewarded letters."""
    options = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "per_device_train_batch_size": 16}
    optim = {"optim": "adamw_torch", "learning_rate": 1e-2, "num_generations": 8, "max_steps": 20}
    trainer = make_trainer(GRPOTrainer, tmp_path, **options, **optim)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[:3]) / 3 < 0.15
    assert sum(rewards[-3:]) / 3 > 0.6


REFUSED = [
    ({"loss_type": "sapo"}, ValueError, "loss_type"),
    ({"loss_type": "vespo"}, ValueError, "loss_type"),
    ({"loss_type": "cispo"}, ValueError, "epsilon_high"),  # TRL would cap the ratio at epsilon
    ({"loss_type": "cispo", "epsilon_high": 2.0, "delta": 3.0}, ValueError, "delta"),  # TRL would ignore it
    ({"delta": 1.1}, ValueError, "delta"),
    ({"entropy_coef": -0.1}, ValueError, "entropy_coef"),
    ({"entropy_coef": 0.1, "top_entropy_quantile": 0.5}, NotImplementedError, "top_entropy_quantile"),
    ({"torch_compile": True}, NotImplementedError, "torch_compile"),
    ({"use_liger_kernel": True}, NotImplementedError, "use_liger_kernel"),
]


@pytest.mark.parametrize("config, error, name", REFUSED, ids=str)
def test_options_that_are_refused_by_name(tmp_path, monkeypatch, config, error, name):
    """Before TRL's constructor, which loads the models, is called."""
    monkeypatch.setattr(trl.GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("TRL's constructor was called"))
    with pytest.raises(error, match=rf"(?s)^{name}.*trl\.GRPOTrainer$"):
        make_trainer(GRPOTrainer, tmp_path, **config)


@pytest.mark.parametrize(
    "attribute, name",
    [
        ("is_deepspeed_enabled", "deepspeed"),
        ("is_fsdp_enabled", "fsdp"),
        ("_is_vlm", "multimodal"),
    ],
)
def test_what_cannot_be_made_here_is_refused_too(tmp_path, monkeypatch, attribute, name):
    trainer = make_trainer(GRPOTrainer, tmp_path)
    monkeypatch.setattr(trainer, attribute, True)
    with pytest.raises(NotImplementedError, match=f"{name}.*trl.GRPOTrainer"):
        trainer._refuse_unsupported()


def test_a_router_loss_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="router_aux_loss_coef: set it to 0"):
        make_trainer(GRPOTrainer, tmp_path, make_any_model("mixtral"))


def test_lora_on_the_head_is_refused(tmp_path):
    """By TRL itself, whose head would ignore it and never train it."""
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="lm_head"):
        make_trainer(GRPOTrainer, tmp_path, peft_config=peft.LoraConfig(target_modules=["lm_head"]))


def test_a_model_that_is_split_or_sharded_is_refused(tmp_path):
    split = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(NotImplementedError, match=r"one device, got \['cpu', 'meta'\]"):
        _refuse_split(split)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_module(torch.nn.Linear(2, 2), mesh)
        with pytest.raises(NotImplementedError, match="DTensor"):
            _refuse_split(sharded)
    finally:
        torch.distributed.destroy_process_group()
    _refuse_split(torch.nn.Linear(2, 2))


def test_a_head_that_the_configuration_does_not_describe_is_refused(tmp_path):
    model = make_any_model()
    inner = model.lm_head.forward
    model.lm_head.forward = lambda hidden: inner(hidden).sin()
    with pytest.raises(NotImplementedError, match="head"):
        make_trainer(GRPOTrainer, tmp_path, model)


@pytest.mark.parametrize("name", ["_compute_loss", "_get_per_token_logps_and_entropies"])
def test_a_base_class_with_a_loss_of_its_own_is_refused(tmp_path, name):
    base = type("Custom", (trl.GRPOTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(NotImplementedError, match=f"overrides {name}"):
        make_trainer(type("Mixed", (FastGRPOMixin, base), {}), tmp_path)


MODULE = "grpo_fast.integrations.trl"


def test_a_missing_trl_is_one_clear_import_error(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"needs TRL, .* pip install 'grpo-fast\[trl\]'"):
        importlib.import_module(MODULE)


def test_a_trl_that_lacks_something_itself_says_what(monkeypatch, tmp_path):
    """Not that TRL is missing."""
    (tmp_path / "trl.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.delitem(sys.modules, "trl")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        importlib.import_module(MODULE)


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "2.16.0"])
def test_an_untested_trl_is_refused(monkeypatch, version):
    """What is overridden is private to TRL: an unseen version may train something else without an error."""
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(ImportError, match=f"expected TRL 1.16, got {version}"):
        importlib.import_module(MODULE)


def test_the_arguments_are_trls(tmp_path):
    """Positional ones too, and the tokenizer and options end where TRL puts them."""
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", temperature=0.9)
    trainer = GRPOTrainer(make_any_model(), lambda **_: [0.0], args, dataset(), None, make_tokenizer())
    assert isinstance(trainer, trl.GRPOTrainer)
    assert trainer.temperature == 0.9
    assert trainer.score_dead_rows
