"""Two gloo ranks with their shares of the prompts train as one process with all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import data_parallel_rank
import pytest
import torch
from data_parallel_rank import ROWS, ThreeAndNine, always_alive
from ranks import run_ranks
from tiny_models import make_model, make_tokenizer

from grpo_fast import parallel
from grpo_fast.checkpoint import save_checkpoint
from grpo_fast.config import GRPOConfig
from grpo_fast.environment import check_environment

CASES = {
    "three steps (B54)": {"steps": 3},
    "3 and 9 tokens (B129)": {
        "prompts": 2, "rows": ROWS[:2], "engine": ThreeAndNine, "reward": always_alive, "loss": {"loss_type": "dapo"}
    },
    "reference, correction": {
        "steps": 2, "loss": {"beta": 0.1, "entropy_coef": 0.01},
        "rollout": {"importance_sampling_mode": "token_truncate"},
    },
    "three prompts, two iterations": {"steps": 2, "prompts": 3, "loss": {"num_iterations": 2, "loss_type": "dr_grpo"}},
    "one process has nothing to train on": {"prompts": 2, "rows": ROWS[:2]},
    "nobody has": {"prompts": 2, "rows": [ROWS[0], ROWS[3]]},
    "one prompt, one process idle": {"prompts": 1, "rows": ROWS[1:2]},
    "resampling": {"prompts": 4, "rollout": {"max_resampling_rounds": 2}, "loss": {"count_dead_groups": False}},
    "clipped norm": {"optim": {"max_grad_norm": 1e-3}},
    "rewards of all processes scale advantages": {"loss": {"scale_rewards": "batch", "loss_type": "luspo"}},
}  # fmt: skip
_OF_THE_PROCESS = ("time", "tokens_per_second", "peak_memory", "num_micro_batches")


def every_case(rank):
    return {name: data_parallel_rank.run(rank, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(every_case)


@pytest.fixture(scope="module")
def alone():
    return every_case(0)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(ranks, alone, name):
    moved = 0.0
    for key, expected in alone[name]["after"].items():
        step = (expected - alone[name]["before"][key]).abs().max()
        moved = max(moved, step.item())
        assert torch.equal(ranks[0][name]["after"][key], ranks[1][name]["after"][key]), key
        difference = (ranks[0][name]["after"][key] - expected).abs().max()
        assert difference <= 1e-7 * step.clamp(min=1e-6), key  # of what the step changed
    assert (moved > 0) == (name != "nobody has")


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_one_process(ranks, alone, name):
    for rank in ranks:
        for got, expected in zip(rank[name]["metrics"], alone[name]["metrics"], strict=True):
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                if not key.startswith(_OF_THE_PROCESS) and "time" not in key:
                    assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_resampling_left_no_group_dead(alone):
    (metrics,) = alone["resampling"]["metrics"]
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["groups_sampled"] > 4


def test_the_ranks_of_b129_have_3_and_9_tokens():
    lengths = [
        [len(rollout.completion_ids) for rollout in ThreeAndNine().generate([ids], type("Two", (), {"n": 2}), 0)]
        for ids in (make_tokenizer()(row["prompt"]).input_ids for row in ROWS[:2])
    ]
    assert lengths == [[1, 2], [4, 5]]


def test_a_world_size_without_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE: expected 1, or torchrun's RANK, .* torchrun --nproc-per-node"):
        check_environment(GRPOConfig())


def test_torchrun_trains_and_the_first_process_writes(tmp_path):
    save_checkpoint(tmp_path / "model", make_model(), make_tokenizer())
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(
        """
max_steps: 2
model: {path: model}
data: {path: data.jsonl}
reward: {funcs: [length]}
rollout: {num_generations: 2, max_completion_length: 4}
loss: {beta: 0.01}
batch: {prompts_per_step: 3}
log: {output_dir: run, progress: false, plot: false}
""".replace("[length]", "[rewards_here.lengths]"),
        encoding="utf-8",
    )
    (tmp_path / "rewards_here.py").write_text(
        "def lengths(completion_ids, **_):\n    return [float(len(ids)) for ids in completion_ids]\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "grpo_fast", "train", "recipe.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run/checkpoint-2/model.safetensors").exists()


def test_a_group_of_one_process_is_left_to_whoever_made_it(tmp_path):
    """vLLM makes one in the trainer's process, and fails at the end where it is gone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel.leave()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
