"""Metrics and their files."""

import builtins
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import grpo_fast as gf
from grpo_fast.batching import MicroBatches, TokenBudget, Trained, padded_micro_batches
from grpo_fast.config import LogConfig
from grpo_fast.metrics import MetricsLog, batch_metrics, completion_metrics, reset_peak_memory, reward_metrics
from grpo_fast.rewards import Scores
from grpo_fast.rollout import Rollout


def rollout(length, truncated=False):
    return Rollout(prompt_ids=(1, 2), completion_ids=(3,) * length, truncated=truncated)


def test_reward_metrics():
    nan = float("nan")
    total = torch.tensor([1.0, 3.0, 2.0, 6.0, 5.0, 5.0, nan, nan, nan, nan, nan, nan])
    metrics = reward_metrics(Scores(total, torch.stack([total, total * 0], 1)), ["a", "b"], 4)
    assert metrics["reward"] == pytest.approx(22 / 6)
    assert metrics["reward_std"] == pytest.approx(1.8708287 / 2)  # groups of std 1.87 and 0; the third has none
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["rewards/a/std"] == pytest.approx(total[:6].std(correction=0).item())
    assert metrics["rewards/b/mean"] == 0.0


def test_equal_rewards_that_round_are_a_zero_variance_group():
    total = torch.full((7,), 0.35)
    assert reward_metrics(Scores(total, total[:, None]), ["a"], 7)["frac_reward_zero_std"] == 1.0


def test_completion_metrics():
    metrics = completion_metrics([rollout(2), rollout(8, True), rollout(0), rollout(4)])
    assert metrics == {
        "completions/clipped_ratio": 0.25,
        "completions/mean_length": 3.5,
        "completions/min_length": 0.0,
        "completions/max_length": 8.0,
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 0.0,
        "completions/max_terminated_length": 4.0,
    }
    assert completion_metrics([rollout(8, True)])["completions/mean_terminated_length"] == 0.0


def test_a_gpus_peak_is_a_steps_own(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    reset_peak_memory(torch.device("cpu"))
    assert calls == []
    reset_peak_memory(torch.device("cuda", 1))
    assert calls == [torch.device("cuda", 1)]


def test_padding_share():
    rollouts = [rollout(2), rollout(8)]
    trained = Trained.of(rollouts, torch.ones(2), [2, 8], all_move=False)
    together, apart = (MicroBatches(trained, padded_micro_batches, TokenBudget(size)) for size in (100, 1))
    assert batch_metrics(together)["padding_share"] == pytest.approx(6 / 20)
    assert batch_metrics(apart) == {
        "padding_share": 0.0, "num_micro_batches": 2.0, "update_tokens": 14.0, "update_token_share": 1.0,
    }  # fmt: skip


def test_micro_batches_are_averaged_by_counts():
    """3 of 12 and 3 of 4 tokens clipped are 6 of 16, not the mean of the two shares."""

    def clipped(tokens, clipped):
        logits = torch.zeros(1, tokens, 5)
        old = torch.full((1, tokens), -1.6094379)
        old[:, :clipped] -= 1.0  # ratio e > 1.2
        ids = torch.zeros(1, tokens, dtype=torch.long)
        return gf.grpo_loss(logits, ids, torch.ones(1), old_logps=old).metrics

    means = (clipped(12, 3) + clipped(4, 3)).means()
    assert means["clip_ratio/high_mean"].item() == pytest.approx(0.375)
    assert means["clip_ratio/region_mean"].item() == pytest.approx(0.375)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_on_disk_at_once_and_nan_is_left_out(tmp_path):
    log = MetricsLog(LogConfig(output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    log.write(1, {"reward": 0.5, "kl": float("nan")})
    assert read(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "reward": 0.5}]
    log.write_samples(1, [{"prompt": "2×3=", "completion": "6"}])
    assert read(tmp_path / "run" / "samples.jsonl") == [{"step": 1, "prompt": "2×3=", "completion": "6"}]


def test_lines_are_standard_json(tmp_path):
    def not_standard(name):
        raise AssertionError(f"{name} is not JSON")

    log = MetricsLog(LogConfig(output_dir=str(tmp_path)))
    log.write(1, {"ratio/max": float("inf"), "loss": -float("inf"), "reward": 1.0})
    log.write_samples(1, [{"prompt": [{"weight": float("nan")}], "advantage": 0.5}])
    (line,) = [json.loads(text, parse_constant=not_standard) for text in (tmp_path / "metrics.jsonl").open()]
    assert line == {"step": 1, "ratio/max": None, "loss": None, "reward": 1.0}
    (sample,) = [json.loads(text, parse_constant=not_standard) for text in (tmp_path / "samples.jsonl").open()]
    assert sample == {"step": 1, "prompt": [{"weight": None}], "advantage": 0.5}


def test_an_earlier_run_is_kept_aside_unless_continued(tmp_path):
    options = LogConfig(output_dir=str(tmp_path))
    MetricsLog(options).write(10, {"reward": 0.1})
    again = MetricsLog(options)
    again.write(10, {"reward": 0.2})
    again.write(20, {"reward": 0.3})
    assert [line["reward"] for line in read(tmp_path / "metrics.jsonl")] == [0.2, 0.3]
    assert [line["reward"] for line in read(tmp_path / "metrics.previous.jsonl")] == [0.1]
    continued = MetricsLog(options)
    continued.continues = True
    continued.write(30, {"reward": 0.4})
    assert [line["reward"] for line in read(tmp_path / "metrics.jsonl")] == [0.2, 0.3, 0.4]


def without(monkeypatch, name):
    original = builtins.__import__

    def fail(module, *args, **kwargs):
        if module.split(".")[0] == name or module == "torch.utils.tensorboard":
            raise ImportError(name)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    log = MetricsLog(LogConfig(output_dir=str(tmp_path)))
    log.write(0, {"eval/accuracy": 0.0})
    log.write(1, {"reward": 0.5})
    log.write(2, {"reward": 0.7})
    assert log.plot().read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_said(tmp_path, monkeypatch, caplog):
    log = MetricsLog(LogConfig(output_dir=str(tmp_path)))
    without(monkeypatch, "matplotlib")
    assert log.plot() is None
    assert "matplotlib is not installed" in caplog.text


def test_tensorboard_that_is_missing_is_said_at_once(tmp_path, monkeypatch):
    without(monkeypatch, "tensorboard")
    with pytest.raises(ImportError, match=r"log.report_to: tensorboard is not installed"):
        MetricsLog(LogConfig(output_dir=str(tmp_path), report_to=["tensorboard"]))


def test_tensorboard_gets_every_metric(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, *scalar):
            calls.append(scalar)

        def flush(self):
            pass

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    log = MetricsLog(LogConfig(output_dir=str(tmp_path), report_to=["tensorboard"]))
    assert calls == []  # a writer creates its file at once, and nothing is touched before the first line
    log.write(3, {"reward": 0.5, "loss": 0.1, "kl": float("nan")})
    log.close()
    assert calls == [str(tmp_path), ("reward", 0.5, 3), ("loss", 0.1, 3), "closed"]
