"""torch.library and torch.compile: opcheck, one graph, no recompilation per completion length."""

import problems
import pytest
import torch

import grpo_fast as gf
from grpo_fast.ops import library, linear_library

BACKENDS = [b for b in problems.backends_here() if b != "triton"]  # the interpreter cannot run under fake tensors
NATIVE = [b for b in BACKENDS if b != "reference"]


def vectors(batch=2, length=3, vocab=11, dtype=torch.float32):
    problem = problems.make(batch, length, vocab, dtype=dtype)
    floats = (problem["advantages"], problem["sampling_weights"], problem["old_logps"], problem["ref_logps"])
    return problem["logits"], problem["token_ids"], problem["mask"], floats


NUMBERS = (0.9, 0.0, 1.0, 0.8, 1.2, float("inf"), 0.1, False)


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("backend", NATIVE)
def test_opcheck_of_the_logits_ops(backend, want_entropy):
    logits, ids, valid, floats = vectors()
    coef, scale = torch.rand(2, 3), torch.tensor(0.1) if want_entropy else None
    tail = (*floats, coef, scale, want_entropy, *NUMBERS, backend)
    stats = library.row_stats(logits, ids, valid, 0.9, 0.0, 1.0, want_entropy, backend)
    entropy = stats[1] if want_entropy else None
    grad_tail = (stats[2], stats[3], stats[0], entropy, coef, coef if want_entropy else None, 0.9, 0.0, 1.0, backend)
    for op, args in (
        (library.row_stats, (logits, ids, valid, 0.9, 0.0, 1.0, want_entropy, backend)),
        (library.row_grad, (logits, ids, valid, *grad_tail)),
        (library.row_grad_, (logits.clone(), ids, valid, *grad_tail)),
        (library.grpo_loss, (logits, ids, valid, *tail)),
        (library.grpo_loss_, (logits.clone(), ids, valid, *tail)),
        (library.scale, (logits, torch.tensor(2.0), backend)),
        (library.scale_, (logits.clone(), torch.tensor(2.0), backend)),
    ):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 5])], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_opcheck_of_the_head_ops(backend, dtype, rows):
    _, ids, valid, floats = vectors()
    ids, valid, *floats = (t.reshape(-1) for t in (ids, valid, *floats))
    hidden, bias = (torch.randn(*s).to(dtype) for s in ((6, 5), (11,)))
    weight = torch.randn(5, 11).to(dtype).t()  # its gradient has strides of its own
    first = (hidden, weight, bias, rows, ids, valid)
    how = (dtype, torch.float32 if dtype == torch.float16 else dtype, 4, backend)
    transform, need = (0.9, 0.0, 1.0), (True, False, True)
    stats = linear_library.linear_row_stats(*first, *transform, True, "", *how)
    logps, entropy, row_max, row_sum, _ = stats
    units = linear_library.linear_row_stats(*first, *transform, False, "logits", *how)[4]
    coef, policy = torch.rand(1, 6), ("grpo", 0.2, None, None, 0.1, "sequence", False, 0.0, None)
    for op, args in (
        (linear_library.linear_row_stats, (*first, *transform, True, "", *how)),
        (linear_library.linear_row_stats, (*first, *transform, False, "hidden", *how)),
        (linear_library.linear_row_stats, (*first, *transform, False, "logits", *how)),
        (
            linear_library.linear_row_grad,
            (*first[:3], *need, *first[3:], row_max, row_sum, logps, entropy, coef[0], coef[0], *transform, *how),
        ),
        (linear_library.linear_unit_grad, (hidden, weight, bias, *need, rows, valid, units, coef[0], *how)),
        (
            linear_library.linear_grpo_loss,
            (
                *first[:3], *need, rows, ids[None], valid[None], *(v[None] for v in floats), coef,
                torch.tensor(0.1), None, True, *transform, *policy, *how,
            ),
        ),
    ):  # fmt: skip
        torch.library.opcheck(op, args)


def losses(backend):
    kwargs = {"beta": 0.1, "backend": backend}
    return {
        "fused": lambda x, p: gf.grpo_loss(x, **p, **kwargs),
        "in place": lambda x, p: gf.grpo_loss(x * 1, **p, **kwargs, inplace=True),
        "entropy": lambda x, p: gf.grpo_loss(x, **p, **kwargs, entropy_coef=0.1, return_entropy=True),
        "sequence": lambda x, p: gf.grpo_loss(x, **p, **kwargs, importance_sampling_level="sequence"),
        "none": lambda x, p: gf.grpo_loss(x, **p, **kwargs, reduction="none"),
        "dapo": lambda x, p: gf.grpo_loss(x, **p, **kwargs, loss_type="dapo"),
    }


@pytest.mark.parametrize("name", ["fused", "in place", "entropy", "sequence", "none", "dapo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fullgraph_gives_the_same_numbers(backend, name):
    """B43."""
    torch._dynamo.reset()
    function = losses(backend)[name]
    problem = problems.make(2, 3, 11)
    logits = problem.pop("logits")
    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = function(eager, problem)
    expected.loss.sum().backward()
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(compiled, problem)
    (out.loss.sum() * 2).backward()
    assert torch.allclose(out.loss, expected.loss, atol=1e-6)
    assert torch.allclose(compiled.grad, 2 * eager.grad, atol=1e-6)
    assert torch.equal(out.logps, expected.logps)
    assert torch.equal(out.scored, expected.scored)
    for key, value in expected.metrics.means().items():
        assert torch.allclose(out.metrics.means()[key], value, atol=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
def test_fullgraph_of_the_head(backend):
    torch._dynamo.reset()
    problem = problems.make(2, 3, 11)
    hidden, weight = torch.randn(2, 3, 5), torch.randn(11, 5)
    del problem["logits"]

    def function(h, w):
        out = gf.linear_grpo_loss(h, w, **problem, beta=0.1, backend=backend)
        return out.loss + gf.linear_token_logprobs(h, w, problem["token_ids"], problem["mask"], backend=backend).sum()

    grads = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        grads.append(torch.autograd.grad(f(*leaves), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
@pytest.mark.parametrize("backend", NATIVE)
def test_at_most_two_compilations_over_20_lengths(backend, head):
    """B155: the completion length, the number of sequences and a denominator tensor all change."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight = torch.randn(11, 5, requires_grad=True)

    def function(x, problem, denominator):
        if head:
            return gf.linear_grpo_loss(x, weight, **problem, beta=0.1, denominator=denominator, backend=backend).loss
        return gf.grpo_loss(x, **problem, beta=0.1, denominator=denominator, backend=backend).loss

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in range(5, 25):
        problem = problems.make(2 + length % 3, length, 11)
        logits = problem.pop("logits")
        x = torch.randn(*logits.shape[:2], 5, requires_grad=True) if head else logits.requires_grad_()
        compiled(x, problem, torch.tensor(float(length))).backward()
        assert x.grad is not None
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("backend", NATIVE)
def test_ids_out_of_range_inside_a_graph(backend):
    problem = problems.make(2, 3, 11, all_valid=True)
    problem["token_ids"][1, 1] = 11
    function = torch.compile(lambda p: gf.grpo_loss(**p, backend=backend).loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="token_ids"):
        function(problem)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fullgraph_of_packed_input(backend, level):
    torch._dynamo.reset()
    problem = problems.make(2, 3, 11, packed=True)
    logits = problem.pop("logits")

    def function(x):
        return gf.grpo_loss(x, **problem, beta=0.1, importance_sampling_level=level, backend=backend).loss

    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    function(eager).backward()
    torch.compile(function, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert torch.allclose(compiled.grad, eager.grad, atol=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
def test_compiled_head_under_autocast(backend):
    """The graph's shape function and the op agree on the GEMMs' dtype, and the numbers on those of eager."""
    torch._dynamo.reset()
    problem = problems.make(2, 3, 11)
    hidden, weight = torch.randn(2, 3, 5).half(), torch.randn(11, 5)
    del problem["logits"]

    def function(h, w):
        return gf.linear_grpo_loss(h, w, **problem, beta=0.1, backend=backend).loss

    grads = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            loss = f(*leaves)
        grads.append(torch.autograd.grad(loss, leaves))
    for a, b, leaf in zip(*grads, leaves, strict=True):
        assert a.dtype == b.dtype == leaf.dtype
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)
