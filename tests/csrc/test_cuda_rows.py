"""The kernels of csrc/cuda, executed on the CPU: how rows are spread, what is read, that threads may come in any order.

Their numbers are held to float64 in tests/kernels/numerics, by the tests of the Triton kernels. Threads are resumed in
an order that changes from launch to launch, and shared memory and copies under way hold NaN: see support/cuda_on_host.
"""

import native_rows as rows
import pytest
import torch
from cuda_on_host import CudaOnGpu, on_gpu, on_host

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(scope="module", params=[80, 90, None], ids=["sm_80", "sm_90", "gpu"])
def ops(request):
    if request.param is None:
        return on_gpu() or pytest.skip("needs a GPU and the extension built for it")
    return on_host(request.param) or pytest.skip("there is no C++ compiler")


@pytest.fixture(scope="module")
def hopper():
    return on_host(90) or pytest.skip("there is no C++ compiler")


def check(ops, problem, out=None):
    want = rows.float64_loss(problem)
    got = rows.native_loss(ops, problem, out)
    rows.assert_vector_close(got.losses, want.losses, tolerance=4e-6)
    rows.assert_vector_close(got.logps, want.logps, tolerance=2e-6)
    rows.assert_vector_close(got.entropy, want.entropy, tolerance=1e-5)
    rows.assert_gradient_close(got.grad, want.grad, problem.logits.dtype, tolerance=5e-6)


PLAIN = 0
# Blocks of a row's cluster on sm_90; PLAIN: longer than 8 blocks can hold, so read twice by one. A part of less than a
# vector, of whole chunks, of a chunk and a vector; parts whose last is shorter.
SPREAD = [
    (1, FP32, 1),
    (8, BF16, 1),
    (4096, FP32, 1),
    (4100, FP32, 1),
    (24576, BF16, 1),
    (24584, BF16, 2),
    (32768, BF16, 2),
    (50257, FP16, 4),
    (98312, BF16, 8),
    (151936, BF16, 8),
    (196616, BF16, 8),
    (262144, FP32, 8),
    (409600, FP32, 8),
    (409604, FP32, PLAIN),
    (500001, FP32, PLAIN),
]


@pytest.mark.parametrize("V, dtype, blocks", SPREAD)
def test_how_rows_are_spread_over_a_cluster(hopper, V, dtype, blocks):
    problem = rows.off_policy(rows.make_problem(1, 3, V, dtype, seed=V, entropy_scale=torch.tensor(0.01), beta=0.04))
    check(hopper, problem)
    gpu = on_gpu()
    if gpu is not None:
        check(gpu, problem)
    assert hopper.last_cluster == ((blocks, 256) if blocks else (1, 1024))
    check(hopper, problem, problem.logits)


def test_a_device_with_less_shared_memory_takes_shorter_rows():
    """As some of compute capability 12: 99 KiB a block."""
    ops = on_host(120, 99 << 10) or pytest.skip("there is no C++ compiler")
    for V, cluster in ((151936, (8, 256)), (200000, (8, 256)), (262144, (1, 1024))):
        check(ops, rows.make_problem(1, 2, V, FP32))
        assert ops.last_cluster == cluster


@pytest.mark.parametrize("V", [32768, 151936])
def test_a_logit_is_read_once_and_written_once(V):
    """From device memory on sm_90; before, twice, where the second time comes from L2."""
    problem = rows.make_problem(1, 2, V, BF16)
    size = problem.logits.numel() * 2
    for capability, reads in ((80, 2), (90, 1)):
        ops = on_host(capability) or pytest.skip("there is no C++ compiler")
        rows.native_loss(ops, problem, entropy=False)
        assert ops.last_bytes == (reads * size, size)


def test_rows_without_a_gradient_are_not_read_or_not_again(ops):
    problem = rows.make_problem(1, 4, 32768, BF16, masked=False)
    problem.advantages[:] = 0.0
    problem.valid[0, 1:] = 0
    size = 32768 * 2
    got = rows.native_loss(ops, problem)
    assert (got.grad == 0).all()
    if not isinstance(ops, CudaOnGpu):
        assert ops.last_bytes == (size, 4 * size)  # one sweep of one row for its log-prob, zeros to all


@pytest.mark.parametrize("target", ["usual", "improbable"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_order_of_threads_changes_no_bit(ops, dtype, target):
    problem = rows.off_policy(rows.make_problem(1, 2, 50264, dtype, entropy_scale=torch.tensor(0.01), masked=False))
    if target == "improbable":  # below 2^-48: the row is summed again from its maximum
        problem.logits.scatter_(2, problem.ids[..., None], -60.0)
    first = rows.native_loss(ops, problem)
    for _ in range(3):
        again = rows.native_loss(ops, problem)
        for name in ("losses", "logps", "entropy", "grad"):
            assert torch.equal(getattr(again, name), getattr(first, name)), name


@pytest.mark.parametrize("V", [24584, 50257])
def test_a_row_is_the_same_wherever_it_lies(ops, V):
    """Rows that start on 16 bytes are copied and stored in vectors, others by elements; the sums are the same."""
    problem = rows.off_policy(rows.make_problem(1, 2, V, BF16, masked=False))
    logits, want = problem.logits, rows.native_loss(ops, problem)
    for offset in (1, 8):
        memory = rows.poisoned(2 * (V + 16) + offset, dtype=BF16)
        moved = problem.logits = memory[offset:].view(1, 2, V + 16)[:, :, :V]
        moved.copy_(logits)
        for out in (None, moved):
            got = rows.native_loss(ops, problem, out)
            for name in ("losses", "logps", "entropy", "grad"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert memory.isnan().sum() == memory.numel() - 2 * V
