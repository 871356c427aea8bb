"""What is the same to the bit, on every backend, and what to rounding alone (docs/numerics.md).

From logits: from run to run, and a row whatever is beside it. From hidden states: from run to run at equal shapes,
chunks and threads; between chunk sizes to rounding.
"""

import re
from pathlib import Path

import problems
import pytest
import torch
from problems import OPTIONS, split

import grpo_fast as gf

BACKENDS = problems.backends_here()
ROOT = Path(__file__).parents[2]
WIDTH = 13


def logits_run(backend, arguments, options):
    arguments = dict(arguments)
    leaf = arguments.pop("logits").clone().requires_grad_()
    out = gf.grpo_loss(leaf, **arguments, **options, backend=backend)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return {"loss": out.loss.detach(), "logps": out.logps, "grad": grad}


def head_run(backend, hidden, weight, arguments, options, **more):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = gf.linear_grpo_loss(*leaves, **arguments, **options, backend=backend, **more)
    grads = torch.autograd.grad(out.loss, leaves)
    return {"loss": out.loss.detach(), "logps": out.logps, "dhidden": grads[0], "dweight": grads[1]}


def assert_equal(got, want):
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_run_to_run(backend, name, dtype):
    problem = problems.make(vocab=1027, dtype=dtype)
    arguments, options = split(problem, OPTIONS[name])
    arguments["logits"] = problem["logits"]
    assert_equal(logits_run(backend, arguments, options), logits_run(backend, arguments, options))


@pytest.mark.parametrize("V", [1024, 1027])  # rows that all start on 16 bytes, and rows of which few do
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_from_logits_is_the_same_alone(backend, name, V):
    problem = problems.make(vocab=V)
    arguments, options = split(problem, OPTIONS[name])
    arguments["logits"] = problem["logits"]
    options |= {"denominator": 7, "entropy_denominator": 11}
    whole = logits_run(backend, arguments, options)
    for b in (0, 2):
        alone = {key: None if value is None else value[b : b + 1].clone() for key, value in arguments.items()}
        got = logits_run(backend, alone, options)
        for result in ("logps", "grad"):
            assert torch.equal(got[result], whole[result][b : b + 1]), result


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_run_to_run_and_between_chunks(backend, name):
    problem = problems.make(vocab=257, length=9)
    arguments, options = split(problem, OPTIONS[name])
    hidden, weight = torch.randn(3, 9, WIDTH), torch.randn(257, WIDTH) / 4
    runs = {rows: [head_run(backend, hidden, weight, arguments, options, workspace_bytes=4 * 257 * rows)
                   for _ in range(2)] for rows in (4, 100)}  # fmt: skip
    for first, again in runs.values():
        assert_equal(again, first)
    for result, want in runs[100][0].items():
        assert problems.relative_error(runs[4][0][result], want.double()) < 1e-5, result


def test_no_kernel_adds_to_memory_in_the_order_of_arrival():
    """No atomic floating-point sums in any source."""
    sources = [
        p
        for folder in ("csrc", "kernels")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".cpp", ".cu", ".cuh", ".h")
    ]
    assert len(sources) > 15
    for path in sources:
        found = re.findall(r"atomic_add|atomicAdd|red\.global|index_add", path.read_text(encoding="utf-8"))
        assert not found, path
