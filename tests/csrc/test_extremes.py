"""Values at the edge: large and equal logits, -inf, vocabularies past every block limit, offsets past 2^31."""

import math

import native_rows as rows
import pytest
import torch


def rows_of(*values, dtype=torch.float32, **options):
    """One valid token per row of logits, target 0, advantage 1."""
    logits = torch.stack([torch.as_tensor(v, dtype=torch.float32) for v in values])[None].to(dtype)
    shape = logits.shape[:2]
    return rows.Problem(
        logits=logits,
        ids=torch.zeros(shape, dtype=torch.int64),
        valid=torch.ones(shape, dtype=torch.uint8),
        advantages=torch.ones(shape),
        coef=torch.ones(shape),
        **options,
    )


@pytest.mark.parametrize("level", [0.0, -8.0, 1e4, -1e4, 3e38, -3e38])
@pytest.mark.parametrize("V", [100, 4096, 5000])  # no multiple of a vector, whole blocks, a part of a block
@pytest.mark.parametrize("transform", [{}, {"temperature": 0.7}], ids=str)
def test_constant_rows(ops, level, V, transform):
    """logp = -ln V: no phantom column enters the sum, nothing overflows."""
    got = rows.native_loss(ops, rows_of(torch.full((V,), level), **transform))
    slope = 1 / transform.get("temperature", 1.0)
    assert got.logps.item() == pytest.approx(-math.log(V), rel=2e-7)
    assert got.entropy.item() == pytest.approx(math.log(V), rel=2e-7)
    assert got.grad[0, 0, 1].item() == pytest.approx(slope / V, rel=1e-6)
    assert got.grad[0, 0, 0].item() == pytest.approx(-(1 - 1 / V) * slope, rel=1e-6)


def test_equal_bf16_logits_are_counted_in_fp32(ops):
    got = rows.native_loss(ops, rows_of(torch.full((4096,), 1.5), dtype=torch.bfloat16))
    assert got.logps.item() == pytest.approx(-8.317766, abs=1e-6)


def test_a_logit_far_above_the_rest(ops):
    leads, trails = torch.zeros(300), torch.zeros(300)
    leads[0], trails[7] = 89.0, 2e4
    got = rows.native_loss(ops, rows_of(leads, trails))
    assert got.logps[0, 0].item() == pytest.approx(-299 * math.exp(-89), rel=1e-5)
    assert got.logps[0, 1].item() == -20000.0
    assert got.grad.isfinite().all()
    assert got.grad[0, 1, 0] == -1
    assert got.grad[0, 1, 7] == 1


@pytest.mark.parametrize("margin", [5.0, 16.0, 25.0, 60.0])
def test_a_nearly_certain_target_knows_its_distance_from_1(ops, margin):
    """logp and 1 - p keep their relative accuracy where z_y - log(sum) would round to 0."""
    row = torch.zeros(1000)
    row[0] = margin
    rest = 999 * math.exp(-margin)
    got = rows.native_loss(ops, rows_of(row))
    assert got.logps.item() == pytest.approx(-math.log1p(rest), rel=1e-6)
    assert got.grad[0, 0, 0].item() == pytest.approx(-rest / (1 + rest), rel=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("finite", [5000, 2500, 250, 1])  # none, half, 95 % and all but one of them -inf
def test_minus_infinity(ops, finite, dtype, softcap):
    row = torch.full((5000,), -math.inf)
    where = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:finite]
    where[0] = 0 if finite == 1 else where[0]
    row[0], row[where] = 0.5, torch.randn(finite, generator=torch.Generator().manual_seed(1))
    problem = rows_of(row, row, dtype=dtype, softcap=softcap, entropy_scale=torch.tensor(0.1))
    for entropy_scale in (None, problem.entropy_scale):
        problem.entropy_scale = entropy_scale
        got, want = rows.native_loss(ops, problem), rows.float64_loss(problem)
        rows.assert_vector_close(got.logps, want.logps)
        rows.assert_vector_close(got.entropy, want.entropy)
        rows.assert_gradient_close(got.grad, want.grad, dtype)
        assert (got.grad[problem.logits == -math.inf] == 0).all()


def test_entropy_of_impossible_tokens(ops):
    inf = math.inf
    got = rows.native_loss(ops, rows_of([0.3, -inf, -inf], [5.0, 5.0, -inf], entropy_scale=torch.tensor(1.0)))
    assert got.entropy[0, 0].item() == 0
    assert got.entropy[0, 1].item() == pytest.approx(math.log(2), rel=1e-7)
    assert got.grad.isfinite().all()


def test_an_impossible_target(ops):
    got = rows.native_loss(ops, rows_of([-math.inf, 1.0, 1.0]))
    assert got.logps.item() == -math.inf
    assert got.grad[0, 0, 0] == 0
    rows.assert_vector_close(got.grad[0, 0, 1:], torch.tensor([0.5, 0.5]).double())


def test_the_tempered_example(ops):
    problem = rows_of([1.0, 2.0, 3.0], temperature=0.5)
    problem.ids[:] = 2
    assert rows.native_loss(ops, problem).logps.item() == pytest.approx(-0.142932, abs=1e-6)


@pytest.mark.parametrize("V", [262_145, 1_048_577])  # past 2^18 and 2^20, one beyond a multiple of the block
def test_wide_vocabularies(ops, V):
    problem = rows.make_problem(1, 2, V, torch.bfloat16, masked=False)
    problem.logits[0, 0], problem.ids[0, 0] = 0.0, V - 1
    problem.logits[0, 0, V - 1] = 3.0
    got = rows.native_loss(ops, problem)
    assert got.logps[0, 0].item() == pytest.approx(3 - math.log(math.exp(3) + V - 1), rel=1e-6)
    rows.assert_gradient_close(got.grad, rows.float64_loss(problem).grad, torch.bfloat16)


def test_offsets_past_2_to_31(ops):
    """16384 rows of 151936 bf16 logits in untouched memory; only the rows around offset 2^31 are valid.

    In place and read by statistics first; masked rows must not be written, or 5 GB of pages would appear, so the
    gradient is taken on a view of the five rows, whose strides and base are those of the large tensor.
    """
    rows_, V = 16384, 151936
    logits = torch.empty(1, rows_, V, dtype=torch.bfloat16)
    valid = torch.zeros(1, rows_, dtype=torch.uint8)
    chosen = [0, 14133, 14134, 14135, rows_ - 1]
    ids = torch.full((1, rows_), -100)
    for n in chosen:
        logits[0, n] = 0
        logits[0, n, 11 * n % V] = n % 7
        ids[0, n], valid[0, n] = 11 * n % V, 1
    problem = rows.Problem(logits, ids, valid, torch.ones(1, rows_), torch.ones(1, rows_))
    logps = rows.native_stats(ops, problem)[0][0, chosen]
    want = [n % 7 - math.log(math.exp(n % 7) + V - 1) for n in chosen]
    torch.testing.assert_close(logps, torch.tensor(want), rtol=1e-6, atol=0)
    for n in chosen:
        ops.scale_(logits[:, n : n + 1], torch.tensor(2.0))
        assert logits[0, n, 11 * n % V] == 2 * (n % 7)
