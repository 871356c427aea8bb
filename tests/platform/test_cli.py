import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import grpo_fast.trainer
from benchmarks.__main__ import NAMES
from grpo_fast.checkpoint import save_checkpoint
from grpo_fast.cli import app
from grpo_fast.demo import make_model, make_tokenizer


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a tiny model, data, a reward function and a recipe."""
    tokenizer = make_tokenizer()
    save_checkpoint(tmp_path / "model", make_model(tokenizer), tokenizer)
    rows = [{"prompt": f"0{n}+0{n}=", "answer": str(2 * n)} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
    )
    (tmp_path / "recipe.yaml").write_text(
        "max_steps: 2\n"
        "model: {path: model}\n"
        "data: {path: rows.jsonl, eval_path: rows.jsonl}\n"
        "reward: {funcs: [exact_match, my_rewards.short], weights: [1.0, 0.1]}\n"
        "rollout: {num_generations: 2, max_completion_length: 4}\n"
        "batch: {prompts_per_step: 3}\n"
        "optim: {learning_rate: 1e-4}\n"
        "log: {output_dir: out, progress: false}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_recipe_trains_a_model_on_a_file(workplace):
    result = run("train", "recipe.yaml", "--set", "loss.beta=0", "--set", "log.plot=false")
    assert result.exit_code == 0, result.output
    assert "wrote out" in result.output
    lines = [json.loads(line) for line in (workplace / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2]
    assert {"rewards/exact_match/mean", "rewards/short/mean"} <= lines[1].keys()
    AutoModelForCausalLM.from_pretrained(workplace / "out/checkpoint-2")


@pytest.mark.parametrize(
    "setting, said",
    [
        ("loss.betta=0", "error: loss.betta: unknown key, did you mean loss.beta?"),
        ("optim.learning_rate=fast", "error: optim.learning_rate: expected a finite number or null, got 'fast'"),
        ("batch.prompts_per_step=8", "error: batch.prompts_per_step: expected at most the 5 prompts"),
        ("rollout.num_generations=1", "error: rollout.num_generations: expected an integer >= 2"),
        ("reward.funcs=[]", "error: reward.weights: expected 0 numbers"),
        ("reward.funcs=[exact_match, nowhere.short]", "error: reward 'nowhere.short'"),
        ("data.path=none.jsonl", "error: no data file at none.jsonl"),
        ("data.prompt_column=question", "error: rows.jsonl: row 1: no column 'question'"),
        ("model.path=null", "error: model.path: expected a folder or hub name"),
        ("loss.backend=cuda", 'error: loss.backend="cuda": '),
        ("data.path=reserved.jsonl", "error: data: columns ['completion_ids'] are named like reward functions'"),
        ("data.eval_path=reserved.jsonl", "error: data: columns ['completion_ids'] are named like reward functions'"),
        ("data.max_prompt_length=5", "error: data.max_prompt_length: 5 of 5 prompts exceed 5 tokens, row 0 first"),
        ("rollout.max_completion_length=27", "error: room left by max_completion_length: 5 of 5 prompts exceed 5"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2_before_the_model_loads(workplace, monkeypatch, setting, said):
    monkeypatch.setattr(grpo_fast.trainer, "load_policy", lambda *_: pytest.fail("the model was loaded"))
    row = {"prompt": "00+00=", "answer": "0", "completion_ids": []}
    (workplace / "reserved.jsonl").write_text("\n".join([json.dumps(row)] * 5))
    assert_refused(run("train", "recipe.yaml", "--set", setting), said)


def assert_refused(result, said):
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "demo"])
def test_what_this_machine_cannot_serve_is_refused_first(workplace, monkeypatch, command):
    monkeypatch.setattr("grpo_fast.run.load_dataset", lambda *_: pytest.fail("data were loaded"))
    monkeypatch.setattr("grpo_fast.demo.load_dataset", lambda *_: pytest.fail("data were made"))
    arguments = [command, *(["recipe.yaml"] if command == "train" else [])]
    monkeypatch.setattr("grpo_fast.environment.default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("grpo_fast.ops.backends._interpreted", lambda: False)
    assert_refused(run(*arguments, "--set", "loss.backend=triton"), 'error: loss.backend="triton": ')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard", None)
        result = run(*arguments, "--set", "log.report_to=[tensorboard]")
        assert_refused(result, "error: log.report_to: tensorboard is not installed: pip install")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(run(*arguments), "error: WORLD_SIZE: expected 1, or torchrun's RANK")


def test_mistakes_in_the_demos_settings_are_one_line(monkeypatch):
    monkeypatch.setattr("grpo_fast.demo.warm_start", lambda *_, **__: pytest.fail("training began"))
    assert_refused(run("demo", "--set", "reward.funcs=[nowhere.short]"), "error: reward 'nowhere.short'")
    assert_refused(run("demo", "--set", "data.task=division"), "error: data.task: expected one of addition")


def test_debug_shows_the_traceback(workplace):
    result = run("train", "none.yaml", "--debug")
    assert isinstance(result.exception, FileNotFoundError)


def test_a_missing_recipe_and_a_missing_model(workplace):
    result = run("train", "none.yaml")
    assert (result.exit_code, result.output) == (2, "error: no recipe at none.yaml\n")
    result = run("train", "recipe.yaml", "--set", "model.path=/no/model")
    assert result.exit_code == 2
    assert "error: model.path: no model in the folder or hub repository /no/model" in result.output
    assert not (workplace / "out").exists()


def test_demo_takes_steps_seed_folder_and_overrides(tmp_path, monkeypatch):
    # The run itself is test_learning.py's.
    monkeypatch.setattr("grpo_fast.demo.prepare_demo", lambda args: SimpleNamespace(train=lambda: seen.append(args)))
    monkeypatch.setattr("grpo_fast.demo.demo_result", lambda folder: f"read from {folder}")
    seen = []
    result = run("demo", "--seed", 1, "--steps", 7, "--output-dir", tmp_path / "demo", "--set", "loss.beta=0")
    assert result.exit_code == 0, result.output
    (args,) = seen
    assert (args.seed, args.max_steps, args.loss.beta) == (1, 7, 0.0)
    assert args.data.task_args["seed"] == 1
    assert result.output == f"read from {tmp_path / 'demo'}\n"


def test_env_names_versions_and_why_backends_are_unavailable():
    # A process of its own: how the package is run, and the other tests' environment stays out of it.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "grpo_fast", "env"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    for name in ("python", "torch", "transformers", "backend triton", "backend cpu"):
        assert f"\n{name} " in f"\n{said}"
    assert "backend reference  available" in said
    for line in said.splitlines():
        assert not line.startswith("backend") or line.endswith("available") or "unavailable: " in line


def test_help_lists_the_commands():
    said = run("--help").output
    assert all(command in said for command in ("train", "demo", "prepare-smollm2", "env", "bench"))


def test_bench_shows_and_runs_the_benchmarks_of_the_checkout():
    command = [sys.executable, "-m", "grpo_fast", "bench"]
    said = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    for name in (*NAMES, "--static"):
        assert name in said
    said = subprocess.run([*command, "--static", "--help"], capture_output=True, text=True, check=True).stdout
    assert "What the kernels compile to" in said
    done = subprocess.run([*command, "magic"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"benchmarks: expected one of {', '.join(NAMES)}, got magic\n",
    )  # fmt: skip
