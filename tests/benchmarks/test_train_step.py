"""Both sides of bench_train_step compute the same numbers and multiply what it says they do."""

import math

import pytest
import torch

pytest.importorskip("trl", reason="needs pip install 'grpo-fast[trl]'")

from benchmarks import harness
from benchmarks.bench_linear_grpo_loss import profiled
from benchmarks.bench_train_step import DEAD, QUICK_CELLS, make_quick, make_variants, measure
from benchmarks.train_step_sides import SIDES, make_batch, our_work, trl_work

CELL = QUICK_CELLS[0]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    return {name: side(*make_quick(None), CELL, folder) for name, side in SIDES.items()}


@pytest.mark.parametrize("dead", DEAD)
def test_losses_gradient_norms_and_log_probs_agree(sides, dead):
    batch = make_batch(CELL, 512, dead)
    (loss, norm), (expected_loss, expected_norm) = (sides[name].update(batch) for name in ("grpo_fast", "trl"))
    assert abs(expected_loss) > 0.005
    assert expected_norm > 0.01
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    logps, expected = sides["grpo_fast"].reference(batch), sides["trl"].reference(batch)
    live = batch.advantages != 0
    torch.testing.assert_close(logps.view(-1, CELL.completion), expected[live], rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_nothing_ends_a_completion(sides, side):
    completions = sides[side].rollout(make_batch(CELL, 512, 0.0))
    assert [len(completion) for completion in completions] == [CELL.completion] * CELL.rows


@pytest.mark.parametrize("phase", ["rollout", "reference", "update"])
@pytest.mark.parametrize("side", SIDES)
def test_the_work_named_is_what_is_multiplied(sides, side, phase):
    variants = make_variants(CELL, sides, 512)
    for dead in DEAD if phase == "update" else (0.0,):
        work = our_work(CELL, phase, dead) if side == "grpo_fast" else trl_work(CELL, phase)
        variant = variants[side, phase, dead]
        variant.run()
        flops, _ = profiled(variant)
        model = sides[side].trainer.model
        assert work.products(model) <= flops <= 1.02 * work.flops(model), (work, flops / work.products(model))


def test_rows_have_every_phase_of_both_sides_and_the_step_adds_up():
    rows = {(row["side"], row["phase"], row["dead"]): row for row in measure(CELL, make_quick, rounds=2)}
    assert len(rows) == 12
    for side in SIDES:
        for dead in ("0", "0.5"):
            step, update = rows[side, "step", dead], rows[side, "update", dead]
            assert step["trunk_tokens"] == update["trunk_tokens"] + rows[side, "rollout", "0"]["trunk_tokens"]
            parts = float(update["seconds"]) + float(rows[side, "rollout", "0"]["seconds"])
            assert float(step["seconds"]) == pytest.approx(parts, abs=0.002)
            assert math.isfinite(float(update["loss"]))
            assert rows["trl", "update", dead]["trl_over_this"] == "1.00"


def test_kept_rows_keep_the_machine_that_measured_them(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert harness.read_csv("table") == []
    harness.write_csv("table", [{"cell": "a", "seconds": "1"}])
    old = [row | {"commit": "earlier"} for row in harness.read_csv("table")]
    harness.write_csv("table", [*old, {"cell": "b", "seconds": "2"}])
    first, second = harness.read_csv("table")
    assert (first["cell"], first["commit"], second["cell"]) == ("a", "earlier", "b")
    assert second["commit"] == harness.machine()["commit"] != "earlier"
