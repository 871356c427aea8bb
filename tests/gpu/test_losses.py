"""The public functions on CUDA tensors: numbers, synchronisations, devices. Skipped where there is no GPU."""

import oracle
import problems
import pytest
import torch
from problems import OPTIONS, split

import grpo_fast as gf

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


def there(values):
    return {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in values.items()}


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient(name, dtype, inplace):
    problem = problems.make(vocab=1025, dtype=dtype)
    arguments, options = split(problem, OPTIONS[name])
    exact = problem["logits"].double().requires_grad_()
    loss = oracle.loss(exact, **arguments, **{k: v for k, v in options.items() if k != "return_entropy"})
    (expected,) = torch.autograd.grad(loss, exact)
    dirty = problems.poison(problem)
    arguments, options = split(dirty, OPTIONS[name])
    leaf = dirty["logits"].to(DEVICE).requires_grad_()
    out = gf.grpo_loss(leaf * 1 if inplace else leaf, **there(arguments), **options, inplace=inplace, backend="triton")
    (grad,) = torch.autograd.grad(out.loss, leaf)
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}[dtype]
    assert abs(out.loss.cpu() - loss) < 5e-6 * max(1.0, abs(loss))
    assert problems.relative_error(grad.cpu(), expected) < tolerance


@pytest.mark.parametrize("name", ["plain", "entropy", "sequence", "weights"])
def test_head(name):
    problem = problems.make(vocab=257)
    hidden, weight = torch.randn(3, 7, 16), torch.randn(257, 16) / 4
    arguments, options = split(problem, OPTIONS[name])
    grads = []
    for move, dtype in ((lambda t: t.to(DEVICE), torch.float32), (lambda t: t, torch.float64)):
        leaf = move(weight.to(dtype)).clone().requires_grad_()
        moved = {k: move(v) if torch.is_tensor(v) else v for k, v in arguments.items()}
        gf.linear_grpo_loss(
            move(hidden.to(dtype)), leaf, **moved, **options, workspace_bytes=4 * 257 * 5
        ).loss.backward()
        grads.append(leaf.grad.cpu())
    assert problems.relative_error(*grads) < 1e-4


def test_nothing_waits_for_the_device():
    """Loss, backward and metrics of both paths, the head with live_rows, without one host synchronisation."""
    problem = there(problems.make(vocab=257))
    logits = problem.pop("logits").requires_grad_()
    hidden = torch.randn(3, 7, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(257, 16, device=DEVICE, requires_grad=True)
    everything = torch.arange(21, device=DEVICE)

    def step():
        out = gf.grpo_loss(logits, **problem, beta=0.1)
        head = gf.linear_grpo_loss(hidden, weight, **problem, beta=0.1, live_rows=everything)
        own = gf.linear_policy_loss(
            hidden, weight, problem["token_ids"], lambda logps, old: (logps - old) ** 2, {"old": problem["old_logps"]},
            problem["mask"], live_rows=everything,
        )  # fmt: skip
        (out.loss + head.loss + own.loss).backward()
        return (out.metrics + head.metrics).means()

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_mask_on_the_host_is_counted_there():
    problem = problems.make(vocab=257)
    hidden = torch.randn(3, 7, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(257, 16, device=DEVICE, requires_grad=True)
    arguments = there({"token_ids": problem["token_ids"], "old_logps": problem["old_logps"]})
    on_host = {name: problem[name] for name in ("advantages", "mask", "sampling_weights")}

    def step(vectors):
        out = gf.linear_grpo_loss(hidden, weight, **arguments, **vectors)
        logps = gf.linear_token_logprobs(hidden, weight, arguments["token_ids"], vectors["mask"])
        (out.loss + logps.sum()).backward()
        return out

    expected = step(there(on_host))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(on_host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.scored, expected.scored)
    assert torch.allclose(out.loss, expected.loss)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_happen_on_the_tensors_device():
    """B56."""
    problem = {n: v.to("cuda:1") for n, v in problems.make().items()}
    with torch.cuda.device(0):
        out = gf.grpo_loss(problem.pop("logits").requires_grad_(), **problem, beta=0.1)
        out.loss.backward()
    assert out.logps.device == torch.device("cuda:1")


def test_an_id_without_a_column_is_nan_and_debugging_names_it():
    logits, ids = torch.zeros(1, 2, 5, device=DEVICE), torch.tensor([[1, 5]], device=DEVICE)
    logps = gf.token_logprobs(logits, ids, backend="triton")
    assert logps.isnan().tolist() == [[False, True]]
    gf.set_debug(True)
    try:
        with pytest.raises(ValueError, match="token_ids"):
            gf.token_logprobs(logits, ids, backend="triton")
    finally:
        gf.set_debug(False)


def test_more_than_2_to_31_logits():
    """B01, whole: every row's log-prob, and gradient rows that sum to 0 on both sides of element 2^31."""
    rows, vocab = 16384, 151936
    logits = torch.zeros(1, rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.arange(rows, device=DEVICE)[None] * 9 % vocab
    top = torch.arange(rows, device=DEVICE) % 7
    logits.scatter_(2, ids[..., None], top[None, :, None].to(torch.bfloat16))
    leaf = logits.requires_grad_()
    logps = gf.token_logprobs(leaf, ids, backend="triton")
    expected = top - (top.double().exp() + vocab - 1).log()
    assert torch.allclose(logps[0].double(), expected, rtol=1e-6)
    logps.sum().backward()
    assert leaf.grad[0, [0, 14133, 14134, 14135, 16383]].double().sum(-1).abs().max() < 1e-2
