"""The README's snippets run, and the two ways of writing the loss agree."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import report
from grpo_fast.checkpoint import save_checkpoint
from grpo_fast.demo import make_model, make_tokenizer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BEFORE, AFTER, LINEAR, TRAINER = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def setting():
    torch.manual_seed(0)
    mask = torch.zeros(4, 9)
    mask[:, 4:] = 1
    mask[0, 7:] = 0
    return {
        "torch": torch,
        "model": make_model(make_tokenizer()),
        "input_ids": torch.randint(2, 14, (4, 9)),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.3, -1.2]),
        "old_logps": torch.randn(4, 9) * 0.3 - 2.6,
    }


def gradients(code, names):
    exec(code, names)
    found = [parameter.grad.clone() for parameter in names["model"].parameters()]
    names["model"].zero_grad()
    return found


def test_the_loss_snippets_agree(setting):
    before = gradients(BEFORE, setting)
    names = dict(setting)
    for code in (AFTER, LINEAR):  # the second goes on from the first
        for ours, theirs in zip(gradients(code, names), before, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_the_trainer_snippet_runs(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    save_checkpoint(tmp_path / "path/to/model", make_model(tokenizer), tokenizer)
    monkeypatch.chdir(tmp_path)
    exec(TRAINER, {})
    assert (tmp_path / "runs/grpo/checkpoint-2/model.safetensors").exists()


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (Path(__file__).parents[2] / target).exists(), target


def test_the_measured_tables_are_those_of_the_results():
    assert report.filled(README) == README, "run python -m benchmarks.report"


def test_a_report_leaves_what_is_outside_the_markers_alone():
    tables = re.compile(r"(?<=begin -->\n).*?(?=<!-- \w+: end)", re.DOTALL)
    assert tables.sub("", report.fill(README, "demo", "| a table |")) == tables.sub("", README)
