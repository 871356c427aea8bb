"""The variants that bench_linear_grpo_loss times compute the same numbers, and multiply the rows its docstring says."""

import pytest

from benchmarks.bench_linear_grpo_loss import ERRORS, cases, gemm_rows, profiled
from benchmarks.harness import Variant
from benchmarks.linear_peers import bare_gemms, losses

V, D, SEQUENCES, PROMPT, COMPLETION = 97, 16, 4, 3, 5
LIVE_ROWS, ALL_ROWS, TRL_ROWS = 2 * COMPLETION, SEQUENCES * COMPLETION, SEQUENCES * (PROMPT + COMPLETION - 1)

# name: rows, GEMMs with a trainable head; a frozen one saves one. "liger compiled" differs in element-wise code only.
EXPECTED = {"grpo_fast": (LIVE_ROWS, 3), "trl": (TRL_ROWS, 4), "liger": (ALL_ROWS, 4), "plain": (ALL_ROWS, 3)}


@pytest.fixture(scope="module")
def candidates():
    """With a chunk of four rows, which ten do not fill evenly."""
    return losses(workspace_bytes=4 * 4 * V)


@pytest.fixture
def case():
    """Two of the four sequences have no advantage."""
    return next(cases(V, D, SEQUENCES, [(PROMPT, 0.5)], COMPLETION))


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_variant_agrees_with_float64_and_multiplies_the_rows_named(candidates, case, name, trainable):
    if name not in candidates:
        pytest.skip(f"{name} is not installed")
    rows, gemms = EXPECTED[name]
    flops, result = profiled(case.variant(name, candidates[name], trainable))
    assert gemm_rows(name, case.batch) == rows
    assert flops == 2 * V * D * rows * (gemms - (not trainable))
    errors = case.errors(*result)
    assert (errors["dweight_error"] == "-") is not trainable
    for kind in ERRORS:
        assert errors[kind] == "-" or float(errors[kind]) <= 1e-5, (kind, errors)


@pytest.mark.parametrize("rows_per_chunk", [4, 100])
def test_the_roof_multiplies_the_rows_with_a_gradient_three_times(case, rows_per_chunk):
    run = bare_gemms(case.live_hidden, case.weight, True, rows_per_chunk)
    assert profiled(Variant("roof", run))[0] == 2 * V * D * LIVE_ROWS * 3


def test_a_wrong_gradient_is_an_error(candidates, case):
    loss, dhidden, dweight = case.variant("plain", candidates["plain"], True).run()
    errors = case.errors(loss * 1.01, dhidden * 1.01, dweight * 1.01)
    assert all(float(errors[kind]) == pytest.approx(0.01, rel=0.1) for kind in ERRORS)
