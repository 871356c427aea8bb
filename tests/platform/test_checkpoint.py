import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fast.checkpoint import prune_checkpoints, save_checkpoint
from grpo_fast.demo import make_model, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer)


def test_from_pretrained_loads_what_was_saved(tmp_path, model, tokenizer):
    folder = save_checkpoint(tmp_path / "deep" / "checkpoint-1", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    again = AutoTokenizer.from_pretrained(folder)
    assert again.encode("12+34=") == tokenizer.encode("12+34=")
    assert again.decode(again.encode("12+34=")) == "12+34="
    assert again.pad_token_id == tokenizer.pad_token_id


def test_a_failing_save_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path, model, tokenizer, monkeypatch):
    folder = save_checkpoint(tmp_path / "checkpoint-1", model, tokenizer)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fails(path):
        (path / "tokenizer.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(tokenizer, "save_pretrained", fails)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "checkpoint-1", model, tokenizer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def fail_renames(monkeypatch, *names):
    rename = Path.rename

    def fails(path, target):
        if path.name in names:
            raise OSError(f"no renaming of {path.name}")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)


def test_a_new_checkpoint_that_cannot_take_the_name_leaves_it_to_the_old_one(tmp_path, model, monkeypatch):
    folder = save_checkpoint(tmp_path / "checkpoint-1", model)
    (folder / "mark").touch()
    fail_renames(monkeypatch, "new")
    with pytest.raises(OSError, match="no renaming of new"):
        save_checkpoint(folder, model)
    assert (folder / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_if_the_old_one_cannot_come_back_both_stay_beside_it(tmp_path, model, monkeypatch):
    folder = save_checkpoint(tmp_path / "checkpoint-1", model)
    fail_renames(monkeypatch, "new", "old")
    with pytest.raises(OSError, match="no renaming of old"):
        save_checkpoint(folder, model)
    (beside,) = tmp_path.iterdir()
    assert beside.name.startswith(".checkpoint-1.")
    for name in ("old", "new"):
        AutoModelForCausalLM.from_pretrained(beside / name)


def test_saving_again_replaces_the_checkpoint(tmp_path, model, tokenizer):
    folder = save_checkpoint(tmp_path / "checkpoint-1", model, tokenizer)
    (folder / "stale").touch()
    save_checkpoint(folder, model, tokenizer)
    assert not (folder / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_the_newest_checkpoints_stay_whatever_their_numbers(tmp_path):
    # 5000 is left from an earlier run; the rest was written in this order.
    for second, step in enumerate((5000, 90, 200, 1000)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        os.utime(folder, (second, second))
    (tmp_path / "checkpoint-best").mkdir()
    assert prune_checkpoints(tmp_path, None) == []
    assert {path.name for path in prune_checkpoints(tmp_path, 2)} == {"checkpoint-5000", "checkpoint-90"}
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-200", "checkpoint-1000", "checkpoint-best"}
