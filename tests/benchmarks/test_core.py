"""The core table's contenders compute one loss, whatever factor is varied; rows are resumed and failures named."""

import csv
from dataclasses import replace

import pytest
import torch

from benchmarks import contenders, core
from benchmarks.cells import CORE, FULL, QUICK, Cell, Problem
from benchmarks.harness import Variant

CPU = torch.device("cpu")
SEQUENCES = 8
SMALL = {"vocab": 97, "hidden": 16, "tokens": 5 * SEQUENCES, "sequences": SEQUENCES}
# A cell of each kind; the masked share of 5 tokens is 2 of them.
KINDS = {
    "base": {}, "masked": {"masked": 0.4}, "dead": {"dead": 0.4}, "frozen": {"frozen": True},
    "sequence": {"level": "sequence"}, "kl": {"beta": 0.04}, "entropy": {"entropy_coef": 0.01},
    "all": {"masked": 0.4, "dead": 0.2, "level": "sequence", "beta": 0.04},
}  # fmt: skip


def make(kind, path=core.HiddenPath):
    return path(Problem(Cell(name=kind, **SMALL, **KINDS[kind]), CPU, torch.float32))


@pytest.mark.parametrize("path", [core.HiddenPath, core.LogitsPath])
@pytest.mark.parametrize("kind", KINDS)
def test_contenders_agree_with_float64(kind, path):
    path = make(kind, path)
    want = path.exact()
    agreed = 0
    for name, maker in path.contenders().items():
        if name == "torch.compile":  # the function is that of another contender
            continue
        try:
            contender = maker()
        except (ImportError, contenders.NotTheirs):
            continue
        variant = path.variant(name, contender)
        variant.prepare()
        assert core.error(variant.run(), want) < 1e-5, name
        agreed += 1
    assert agreed >= 2


def test_a_wrong_gradient_is_an_error():
    path = make("base")
    loss, *gradients = path.exact()
    assert core.error((loss, *(1.01 * g for g in gradients)), (loss, *gradients)) == pytest.approx(0.01, rel=0.1)
    assert core.error((1.02 * loss, *gradients), (loss, *gradients)) == pytest.approx(0.02, rel=0.1)


def test_the_roof_multiplies_the_rows_with_a_gradient():
    assert make("all").problem.live_rows == 3 * SEQUENCES  # with a KL term dead sequences have one
    assert make("dead").problem.live_rows == 5 * (SEQUENCES - round(0.4 * SEQUENCES))


def test_cells_vary_one_factor_and_have_names_of_their_own():
    base = CORE[0]
    for cell in CORE[1:]:
        changed = [f for f in vars(Cell)["__dataclass_fields__"] if getattr(cell, f) != getattr(base, f)]
        assert len(changed) == (3 if cell.name == "frozen, dead 40%" else 2), cell  # its name is one
    assert len(CORE) <= 24
    assert len({cell.name for cell in FULL}) == len(FULL)
    assert set(QUICK) < {cell.name for cell in CORE}


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """A run of two tiny cells without compilers, which writes to a folder of its own."""
    cells = (Cell(name="one", **SMALL), replace(Cell(name="two", **SMALL), frozen=True))

    def only(found):
        return {name: found[name] for name in found if name in ("grpo_fast", "grpo_fast in place", "torch")}

    for name in ("from_hidden", "from_logits"):
        inner = getattr(contenders, name)
        monkeypatch.setattr(contenders, name, lambda *args, inner=inner: only(inner(*args)))
    monkeypatch.setattr(core, "CORE", cells)
    monkeypatch.setattr(core, "COPY", 2**12)
    monkeypatch.setattr(core, "divisor", lambda device, quick: 1)
    for module in ("benchmarks.core", "benchmarks.harness"):
        monkeypatch.setattr(f"{module}.RESULTS", tmp_path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["core", "--output", "table", "--budget", "0.01", *arguments])
        core.main()
        with (tmp_path / "table.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU's paths")
def test_rows_are_written_and_not_measured_again(small_run, monkeypatch, capsys):
    rows = small_run()
    assert {(row["cell"], row["path"]) for row in rows} == {("one", "hidden"), ("two", "hidden")}
    for row in rows:
        assert float(row["median_ms"]) > 0
        assert float(row["error"]) < 1e-5
    measure = core.measure
    monkeypatch.setattr(core, "measure", None)
    assert small_run() == rows
    monkeypatch.setattr(core, "measure", measure)
    about = core.machine()
    monkeypatch.setattr(core, "machine", lambda: about | {"commit": "another"})
    assert {row["commit"] for row in small_run()} == {"another"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU's paths")
def test_what_fails_is_named_and_the_others_go_on(small_run, monkeypatch):
    def broken(problem, hidden, weight):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(
        contenders,
        "from_hidden",
        lambda cell, device: {"grpo_fast": lambda: contenders._ours_from_hidden, "bad": lambda: broken},
    )
    rows = small_run("--fresh")
    assert [(row["variant"], row["skipped"]) for row in rows] == [
        ("grpo_fast", ""), ("bad", "RuntimeError: no such kernel")
    ] * 2  # fmt: skip


def test_seconds_are_those_of_the_call():
    variant = Variant("nothing", lambda: None)
    assert 0 <= core.timed(variant) < 1
