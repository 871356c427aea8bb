"""row_stats, row_grad and scale_: the two-sweep schedule."""

import math

import native_rows as rows
import pytest
import torch


def row_grad(ops, p, g, g_entropy=None, out=None):
    logps, entropy, row_max, row_sum = rows.native_stats(ops, p)
    out = rows.poisoned(*p.logits.shape, dtype=p.logits.dtype) if out is None else out
    entropy = entropy if g_entropy is not None else None
    ops.row_grad(p.logits, p.ids, p.valid, row_max, row_sum, logps, entropy, g, g_entropy, out, *p.transform)
    return out


def float64_grad(p, g, g_entropy):
    logits = p.logits.double().requires_grad_()
    logps, entropy = rows.float64_logps(p, logits)
    valid = p.valid.bool()
    total = (logps * g.double()).where(valid, 0.0).sum()
    if g_entropy is not None:
        total = total + (entropy * g_entropy.double()).where(valid, 0.0).sum()
    total.backward()
    return logits.grad.where(valid[..., None], 0.0)


TRANSFORMS = (
    {},
    {"temperature": 0.5, "logit_scale": 1.25},
    {"softcap": 4.0},
    {"softcap": 30.0, "temperature": 1.3, "logit_scale": 2.0},
)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 7, 100, 4097])  # one logit, a partial vector, several, more than a block
def test_stats_and_gradient(ops, V, dtype, transform):
    p = rows.make_problem(2, 5, V, dtype, seed=V, **transform)
    logps, entropy, _, _ = rows.native_stats(ops, p)
    want_logps, want_entropy = rows.float64_logps(p)
    valid = p.valid.bool()
    rows.assert_vector_close(logps, want_logps.where(valid, 0.0), tolerance=2e-6)
    rows.assert_vector_close(entropy, want_entropy.where(valid, 0.0), tolerance=2e-6)

    g = torch.randn(2, 5, generator=torch.Generator().manual_seed(2))
    g_entropy = 0.1 * g.flip(1)
    g[0, 0] = g_entropy[0, 0] = 0
    for upstream in (None, g_entropy):
        got = row_grad(ops, p, g.where(valid, math.nan), upstream)
        rows.assert_gradient_close(got, float64_grad(p, g, upstream), dtype, tolerance=4e-6)
        assert (got[0, 0] == 0).all()


def test_stats_of_masked_rows_are_neutral(ops):
    p = rows.make_problem(2, 5, 100)
    logps, entropy, row_max, row_sum = (x[p.valid == 0] for x in rows.native_stats(ops, p))
    assert (logps == 0).all()
    assert (entropy == 0).all()
    assert (row_max == 0).all()
    assert (row_sum == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_equals_out_of_place(ops, dtype):
    p = rows.make_problem(2, 3, 509, dtype, softcap=6.0)
    g = torch.randn(2, 3)
    apart = row_grad(ops, p, g, 0.1 * g)
    assert torch.equal(row_grad(ops, p, g, 0.1 * g, out=p.logits), apart)


def test_a_row_without_upstream_is_not_read(ops):
    """NaN statistics and logits: zero-filled all the same."""
    nan = torch.full((1, 2), math.nan)
    logits, out = rows.poisoned(1, 2, 100), rows.poisoned(1, 2, 100)
    ids, valid = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 0]], dtype=torch.uint8)
    ops.row_grad(logits, ids, valid, nan, nan, nan, None, torch.tensor([[0.0, math.nan]]), None, out, 1.0, 0.0, 1.0)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scale(ops, dtype):
    wide = torch.randn(3, 4, 130).to(dtype)
    grad, before = wide[:, 1:, :101], wide.clone()
    ops.scale_(grad, torch.tensor(1.0))
    assert torch.equal(wide, before)
    ops.scale_(grad, torch.tensor(3.7))
    assert torch.equal(grad, (before[:, 1:, :101].float() * 3.7).to(dtype))
    assert torch.equal(wide[:, :, 101:], before[:, :, 101:])
    assert torch.equal(wide[:, 0], before[:, 0])


def test_every_16_bit_value_goes_through_unchanged(ops):
    """Times 1 + 0, through fp32 and back: all finite patterns, denormals too, and both infinities; NaN stays NaN."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns.view(dtype).view(1, 1, -1).clone()
        before = x.clone()
        ops.scale_(x, torch.tensor(-1.0))
        assert torch.equal(x.isnan(), before.isnan())
        assert torch.equal((-x)[~x.isnan()], before[~before.isnan()])


def test_16_bit_results_round_to_nearest_even(ops):
    """Against PyTorch's own conversion, ties included: products with 1 + 2^-k land between neighbours."""
    x = torch.randn(1, 1, 4099, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        for factor in (1.5, 1.25, 1 + 2**-7, 1e-3):
            got = x.to(dtype)
            want = (got.float() * factor).to(dtype)
            ops.scale_(got, torch.tensor(factor))
            assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (0, 0, 5)])
def test_nothing_to_do(ops, shape):
    ops.scale_(torch.empty(2, 3, 0), torch.tensor(2.0))
    p = rows.make_problem(*shape, masked=False)
    assert rows.native_loss(ops, p).losses.shape == shape[:2]
    row_grad(ops, p, torch.zeros(shape[:2]))
    ops.scale_(p.logits, torch.tensor(2.0))


def test_refusals(ops):
    p = rows.make_problem(1, 2, 8, masked=False)
    p.logits = p.logits.double()
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        rows.native_loss(ops, p, out=p.logits)
    p = rows.make_problem(1, 2, 8, masked=False)
    with pytest.raises(RuntimeError, match="shape and dtype"):
        rows.native_loss(ops, p, out=torch.empty(1, 2, 9))
    p.advantages = p.advantages[:, :1]
    with pytest.raises(RuntimeError, match="contiguous CPU vector of 2 elements"):
        rows.native_loss(ops, p)
    p.advantages = torch.zeros(1, 4)[:, ::2]
    with pytest.raises(RuntimeError, match="contiguous CPU vector of 2 elements"):
        rows.native_loss(ops, p)
    p = rows.make_problem(1, 2, 8, masked=False)
    p.logits = torch.empty(1, 2, 0)
    with pytest.raises(RuntimeError, match="the vocabulary is empty"):
        rows.native_loss(ops, p)
    p = rows.make_problem(1, 2, 8, masked=False)
    p.logits = torch.empty(1, 8, 2).transpose(1, 2)
    with pytest.raises(RuntimeError, match="unit stride"):
        rows.native_loss(ops, p)
    p = rows.make_problem(1, 2, 8, masked=False)
    memory = torch.zeros(1, 3, 16)
    p.logits = memory[:, :2, :8]
    with pytest.raises(RuntimeError, match="neither logits nor apart"):
        rows.native_loss(ops, p, out=memory.view(1, 6, 8)[:, :2])
    with pytest.raises(RuntimeError, match="no instruction set mmx"):
        ops.set_isa("mmx")
