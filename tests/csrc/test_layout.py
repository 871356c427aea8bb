"""Strides, masks, threads, and what a row may depend on: itself alone."""

import ctypes
import math
import mmap

import native_rows as rows
import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16)


def layouts(logits):
    """The same values behind other strides; everything outside the view is NaN."""
    B, T, V = logits.shape
    nan = rows.poisoned(B, T + 1, V + 13, dtype=logits.dtype)
    yield "slice of V", nan.clone()[:, :T, :V]
    yield "slice of T", nan.clone()[:, :-1, 5 : V + 5]
    yield "transposed batch", rows.poisoned(T, B, V, dtype=logits.dtype).transpose(0, 1)
    yield "every other row", rows.poisoned(2 * B, 2 * T, V + 1, dtype=logits.dtype)[::2, 1::2, 1:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [100, 4097])
def test_strides_change_nothing(ops, V, dtype):
    problem = rows.off_policy(rows.make_problem(2, 3, V, dtype))
    contiguous = problem.logits
    want = rows.native_loss(ops, problem)
    for name, view in layouts(contiguous):
        view.copy_(contiguous)
        problem.logits = view
        out = torch.empty_strided(view.shape, view.stride(), dtype=dtype)
        for destination in (None, out, view):
            got = rows.native_loss(ops, problem, destination)
            for field in ("losses", "logps", "entropy", "grad"):
                assert torch.equal(getattr(got, field), getattr(want, field)), (name, field)
        assert view._base.isnan().sum() == view._base.numel() - view.numel(), f"{name}: wrote outside of the view"


def test_expanded_logits_are_read(ops):
    problem = rows.make_problem(3, 1, 509, masked=False, seed=2)
    problem.logits = problem.logits[:1].expand(3, 1, 509)
    rows.assert_gradient_close(rows.native_loss(ops, problem).grad, rows.float64_loss(problem).grad, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_itself_alone(ops, dtype):
    """Bitwise: alone, in a batch, at another alignment, in place, and on one thread or two."""
    problem = rows.off_policy(rows.make_problem(4, 9, 4099, dtype, masked=False, beta=0.1))
    want = rows.native_loss(ops, problem)
    again = rows.native_loss(ops, problem)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        other_threads = rows.native_loss(ops, problem)
    finally:
        torch.set_num_threads(threads)
    for field in ("losses", "logps", "entropy", "grad"):
        assert torch.equal(getattr(again, field), getattr(want, field))
        assert torch.equal(getattr(other_threads, field), getattr(want, field))
    for b, t in ((0, 0), (2, 5), (3, 8)):
        one = rows.Problem(
            **{
                name: value[b : b + 1, t : t + 1].contiguous() if isinstance(value, torch.Tensor) else value
                for name, value in vars(problem).items()
            }
        )
        alone = rows.native_loss(ops, one, one.logits)
        assert torch.equal(alone.grad[0, 0], want.grad[b, t])
        assert torch.equal(alone.losses[0, 0], want.losses[b, t])


def test_many_rows_on_two_threads(ops):
    """More rows than one thread takes at a time, all of them visited once."""
    problem = rows.make_problem(3, 700, 33)
    rows.assert_gradient_close(rows.native_loss(ops, problem).grad, rows.float64_loss(problem).grad, torch.float32)


@pytest.mark.parametrize("masked", [[1, 1, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0]])
def test_masks(ops, masked):
    problem = rows.make_problem(1, 4, 100, masked=False)
    problem.valid = 1 - torch.tensor([masked], dtype=torch.uint8)
    rows.poison_masked(problem)
    got, want = rows.native_loss(ops, problem), rows.float64_loss(problem)
    gone = torch.tensor(masked, dtype=torch.bool)
    for vector in (got.losses, got.logps, got.entropy):
        assert (vector[0, gone] == 0).all()
    assert (got.grad[0, gone] == 0).all()
    if not gone.all():
        rows.assert_gradient_close(got.grad, want.grad, torch.float32)


def test_an_id_outside_the_vocabulary_gives_nan_and_reads_nothing_else(ops):
    problem = rows.make_problem(1, 5, 100, masked=False)
    for id in (-1, -100, 100, 2**62, -(2**63)):
        problem.ids[0, 2] = id
        got = rows.native_loss(ops, problem)
        assert got.logps[0, 2].isnan()
        assert got.losses[0, 2].isnan()
        assert got.grad[0, 2].isnan().all()
        assert got.grad[0, [0, 1, 3, 4]].isfinite().all()
        assert rows.native_stats(ops, problem)[0][0, 2].isnan()


@pytest.mark.parametrize("where", ["target", "elsewhere"])
def test_a_nan_logit_is_not_hidden(ops, where):
    problem = rows.make_problem(1, 1, 100, masked=False)
    problem.logits[0, 0, problem.ids[0, 0] if where == "target" else (problem.ids[0, 0] + 1) % 100] = math.nan
    got = rows.native_loss(ops, problem)
    assert got.logps.isnan().all()
    assert got.losses.isnan().all()
    assert got.grad.isnan().all()


@pytest.fixture
def fenced():
    """fenced(nbytes, at_end) -> a uint8 tensor of nbytes between pages that nobody may touch."""
    page, libc, maps = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True), []

    def allocate(nbytes, at_end):
        pages = -(-nbytes // page)
        memory = mmap.mmap(-1, (pages + 2) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for guard in (start, start + (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0
        maps.append(memory)
        offset = page + (pages * page - nbytes if at_end else 0)
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)

    return allocate


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mprotect"), reason="needs mprotect")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("V", [1, 3, 15, 16, 31, 65, 2049, 4100])  # around a vector, an unroll, and one and two blocks
def test_nothing_outside_of_the_rows_is_touched(ops, fenced, V, dtype):
    """A stray read or write ends the process."""
    for at_end in (False, True):
        problem = rows.make_problem(1, 2, V, dtype, masked=False, entropy_scale=torch.tensor(0.1))
        logits = fenced(2 * V * dtype.itemsize, at_end).view(dtype).view(1, 2, V)
        logits.copy_(problem.logits)
        out = fenced(2 * V * dtype.itemsize, at_end).view(dtype).view(1, 2, V)
        problem.logits = logits
        rows.native_loss(ops, problem, out)
        problem.entropy_scale = None
        rows.native_loss(ops, problem, out)
        rows.native_loss(ops, problem, logits)
        ops.scale_(logits, torch.tensor(0.5))
