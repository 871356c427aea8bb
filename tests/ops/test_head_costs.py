"""What the head costs, counted below the op boundary: GEMM FLOPs, and memory of the vocabulary's size.

F = 2 N V D is one product of N rows with the lm_head's weight.
"""

import concurrent.futures
import inspect

import problems
import pytest
import torch
from allocations import Allocations
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import grpo_fast as gf
from grpo_fast.ops import head as head_module
from grpo_fast.ops import linear_library

BACKENDS = [b for b in problems.backends_here() if b != "reference"]
B, T, V, D = 10, 8, 67, 6  # 80 tokens; five of the ten sequences go with half of the batch
F = 2 * V * D  # FLOP of one product for one row

pytestmark = pytest.mark.skipif(not BACKENDS, reason="the reference backend keeps the logits")


@pytest.fixture(autouse=True)
def bodies(monkeypatch):
    """A mode sees an op as one call; its body, called in the op's place, is seen."""
    for name in ("linear_grpo_loss", "linear_row_stats", "linear_row_grad", "linear_unit_grad"):
        assert inspect.isfunction(getattr(linear_library, f"_{name}"))
        monkeypatch.setattr(linear_library, name, getattr(linear_library, f"_{name}"))


def batch(dead=0, masked=0, clipped=0):
    """Of ten sequences, some with advantage 0, some masked, some whose every token is beyond the clip."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(B, T, D), torch.randn(V, D)
    ids, mask, advantages = torch.randint(0, V, (B, T)), torch.ones(B, T), torch.randn(B).abs() + 0.1
    advantages[:dead] = 0
    mask[B - masked :] = 0
    old_logps = gf.token_logprobs(hidden @ weight.t(), ids)
    old_logps[dead : dead + clipped] -= 1  # ratio e
    return hidden, weight, {"token_ids": ids, "advantages": advantages, "mask": mask, "old_logps": old_logps}


def addmm_flops(total, a, b, **_):
    return 2 * a[0] * a[1] * b[1]


def flops(function, hidden, weight, train=("hidden", "weight")):
    """FLOPs of forward and backward, per row and product: 3.0 where all rows take part in three GEMMs."""
    hidden, weight = hidden.clone(), weight.clone()
    hidden.requires_grad_("hidden" in train)
    weight.requires_grad_("weight" in train)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as counter:
        loss = function(hidden, weight)
        if train:
            loss.backward()
    assert counter.get_total_flops() > 0
    return counter.get_total_flops() / (F * B * T)


def grpo(arguments, **options):
    return lambda hidden, weight: gf.linear_grpo_loss(hidden, weight, **arguments, **options).loss


SEQUENCE = {"importance_sampling_level": "sequence"}
OPTIONS = {
    "token": {},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "sequence": SEQUENCE,
    "chunks": {"workspace_bytes": 4 * V * 3 * T},
    "sequence, chunks": {"workspace_bytes": 4 * V * 3 * T} | SEQUENCE,
    "bias": {"bias": torch.zeros(V)},
    "entropy": {"return_entropy": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_products_over_live_rows(backend, options):
    hidden, weight, arguments = batch()
    loss = grpo(arguments, backend=backend, **options)
    assert flops(loss, hidden, weight) == 3
    assert flops(loss, hidden, weight, train=("hidden",)) == 2
    assert flops(loss, hidden, weight, train=("weight",)) == 2
    assert flops(loss, hidden, weight, train=()) == 1
    for dead, masked, live in ((4, 0, 0.6), (0, 5, 0.5), (4, 5, 0.1)):
        hidden, weight, arguments = batch(dead, masked)
        loss = grpo(arguments, backend=backend, **options)
        assert flops(loss, hidden, weight) == pytest.approx(3 * live)
        assert flops(loss, hidden, weight, train=("hidden",)) == pytest.approx(2 * live)
    hidden, weight, arguments = batch(dead=4)
    assert flops(grpo(arguments | {"mask": None}, backend=backend, **options), hidden, weight) == pytest.approx(1.8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_makes_dead_rows_live(backend):
    hidden, weight, arguments = batch(dead=4, masked=5)
    more = {"backend": backend, "ref_logps": arguments["old_logps"] - 0.5}
    assert flops(grpo(arguments, beta=0.1, **more), hidden, weight) == pytest.approx(1.5)
    assert flops(grpo(arguments, entropy_coef=0.1, **more), hidden, weight) == pytest.approx(1.5)
    assert flops(grpo(arguments, score_dead_rows=True, **more), hidden, weight) == pytest.approx(0.3 + 0.4), "1F more"


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b == "cpu"])
def test_clipped_rows_leave_the_gradient(backend):
    """Where they are many: a few are not worth moving the others."""
    hidden, weight, arguments = batch(clipped=5)
    for options in ({}, SEQUENCE, {"workspace_bytes": 4 * V * 3 * T}):
        assert flops(grpo(arguments, **options), hidden, weight) == pytest.approx(1 + 2 * 0.5)
        assert flops(grpo(arguments, **options), hidden, weight, train=("hidden",)) == pytest.approx(1 + 0.5)
    arguments["old_logps"] = batch()[2]["old_logps"]
    arguments["old_logps"][0, 0] -= 1
    assert flops(grpo(arguments), hidden, weight) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_longer_than_a_chunk_is_computed_twice(backend):
    hidden, weight, arguments = batch()
    loss = grpo(arguments, backend=backend, workspace_bytes=4 * V * (T - 1), **SEQUENCE)
    assert flops(loss, hidden, weight) == 4
    assert flops(loss, hidden, weight, train=("hidden",)) == 3
    assert flops(loss, hidden, weight, train=()) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_objective_of_ones_own(backend):
    hidden, weight, arguments = batch(masked=5)

    def loss(hidden, weight, **options):
        inputs = {"advantages": arguments["advantages"]}
        return gf.linear_policy_loss(
            hidden, weight, arguments["token_ids"], objective, inputs, arguments["mask"], backend=backend, **options
        ).loss

    def objective(logps, advantages, mask=None, entropy=None):
        loss = -advantages * logps if mask is None else -advantages[:, None] * logps * mask.sum(1, keepdim=True)
        return loss if entropy is None else loss - 0.1 * entropy

    for options in ({}, {"align": "sequence"}, {"with_entropy": True}, {"align": "sequence", "with_entropy": True}):
        run = lambda *tensors, options=options: loss(*tensors, **options)  # noqa: E731
        assert flops(run, hidden, weight) == 1.5
        assert flops(run, hidden, weight, train=("hidden",)) == 1.0
        assert flops(run, hidden, weight, train=()) == 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_for_any_loss(backend):
    hidden, weight, arguments = batch(masked=5)

    def loss(hidden, weight, use_entropy=False, **options):
        out = gf.linear_token_logprobs(
            hidden, weight, arguments["token_ids"], arguments["mask"], return_entropy=True, backend=backend, **options
        )
        return (out.logps * 2).sum() + (out.entropy.sum() if use_entropy else 0)

    unit = lambda *tensors: loss(*tensors, save_unit_grads=True)  # noqa: E731
    entropy = lambda *tensors: loss(*tensors, use_entropy=True)  # noqa: E731
    assert flops(loss, hidden, weight) == 2.0
    assert flops(unit, hidden, weight) == 1.5
    assert flops(loss, hidden, weight, train=("hidden",)) == 1.0
    assert flops(loss, hidden, weight, train=("weight",)) == 1.5
    assert flops(unit, hidden, weight, train=("weight",)) == 1.0
    assert flops(loss, hidden, weight, train=()) == 0.5
    assert flops(entropy, hidden, weight) == 2.0
    assert flops(entropy, hidden, weight, train=("hidden",)) == 2.0, "the entropy's gradient needs the logits again"


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_token_losses_and_a_bonus(backend):
    """reduction="none": the upstream gradient is not known in the forward."""
    hidden, weight, arguments = batch()
    total = lambda loss: lambda *tensors: loss(*tensors).sum()  # noqa: E731
    plain = total(grpo(arguments, reduction="none", backend=backend))
    bonus = total(grpo(arguments, reduction="none", entropy_coef=0.1, backend=backend))
    assert (flops(plain, hidden, weight), flops(plain, hidden, weight, train=("hidden",))) == (4, 2)
    assert (flops(bonus, hidden, weight), flops(bonus, hidden, weight, train=("hidden",))) == (4, 3)


def test_the_profiler_sees_the_same(monkeypatch):
    """Through the real op: nothing is hidden in a place that the counting mode does not reach."""
    monkeypatch.undo()
    hidden, weight, arguments = batch(dead=4, masked=5)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with profile(with_flops=True) as seen:
        gf.linear_grpo_loss(hidden, weight, **arguments).loss.backward()
    counted = sum(event.flops for event in seen.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    assert counted == 3 * 8 * F


@pytest.fixture
def no_kept_workspace():
    gf.release_workspace()


def large(function, hidden, weight, size, train=("hidden", "weight")):
    """How many results of at least `size` bytes are made, and the sizes of all of them."""
    hidden, weight = hidden.clone(), weight.clone()
    hidden.requires_grad_("hidden" in train)
    weight.requires_grad_("weight" in train)
    with Allocations() as seen:
        loss = function(hidden, weight)
        if train:
            loss.backward()
    return seen.large(size), seen.sizes


@pytest.mark.parametrize("options", [{}, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_workspace_and_one_gradient(backend, options, no_kept_workspace):
    """The logits of all rows never exist; the workspace is made once, and so is the weight's gradient."""
    hidden, weight, arguments = batch()
    loss = grpo(arguments, backend=backend, workspace_bytes=4 * V * 2 * T, **options)
    _, sizes = large(loss, hidden, weight, 1)
    workspace, whole, dweight = 4 * V * 2 * T, 4 * V * B * T, 4 * V * D
    assert max(sizes) == workspace < whole
    assert sizes.count(workspace) == 1
    assert sizes.count(dweight) == 1
    _, sizes = large(loss, hidden, weight, 1, train=("hidden",))
    assert sizes.count(dweight) == 0, "B39: no [V, D] for a frozen head"
    assert sizes.count(workspace) == 0, "kept from the call before"
    gf.release_workspace()
    _, sizes = large(loss, hidden, weight, 1, train=("hidden",))
    assert sizes.count(workspace) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_workspace_is_made_for_the_largest_chunk(backend, no_kept_workspace):
    """Chunks of whole sequences differ in their rows: of 7 and of 8 here."""
    hidden, weight, arguments = batch()
    arguments["mask"][0, 0] = 0
    loss = grpo(arguments, backend=backend, workspace_bytes=4 * V * T, **SEQUENCE)
    _, sizes = large(loss, hidden, weight, 1)
    assert sizes.count(4 * V * T) == 1
    assert sizes.count(4 * V * (T - 1)) == 0


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b == "cpu"])
def test_the_wide_weight_is_made_once(backend, no_kept_workspace):
    """The CPU has no product of bf16 operands with a float32 result: all chunks share one float32 weight."""
    hidden, weight, arguments = batch()
    loss = lambda hidden, weight: gf.linear_token_logprobs(  # noqa: E731
        hidden.bfloat16(), weight, arguments["token_ids"], fp32_logits=True, workspace_bytes=4 * V * T, backend=backend
    )
    _, sizes = large(loss, hidden, weight.bfloat16(), 1, train=())
    assert sizes.count(4 * V * D) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_fit_the_workspace(backend, dtype, monkeypatch):
    """21 rows, at most 4 at a time: six chunks as equal as can be."""
    sizes, logits = [], linear_library.Head.logits

    def spy(self, hidden_RD):
        sizes.append(hidden_RD.shape[0])
        return logits(self, hidden_RD)

    monkeypatch.setattr(linear_library.Head, "logits", spy)
    hidden, weight, arguments = batch()
    arguments = {name: value.flatten()[:21] for name, value in arguments.items() if value.dim() == 2}
    gf.linear_grpo_loss(
        hidden.flatten(0, 1)[:21].to(dtype),
        weight.to(dtype).requires_grad_(),
        **arguments,
        advantages=torch.ones(1),
        cu_seqlens=torch.tensor([0, 21]),
        workspace_bytes=4 * V * dtype.itemsize + 1,
        backend=backend,
    )
    assert sizes == [4, 4, 4, 3, 3, 3]


def test_a_kept_workspace_belongs_to_one_call(no_kept_workspace):
    """An objective may itself call the head: what it computes there must not land in the logits of the outer call."""
    hidden, weight, arguments = batch()
    ids, advantages = arguments["token_ids"], arguments["advantages"]

    def nested(logps, a):
        gf.linear_token_logprobs(torch.randn(1, 4, D), torch.randn(V, D), torch.zeros(1, 4, dtype=torch.int64))
        return -a * logps

    grads = []
    for objective in (lambda logps, a: -a * logps, nested, nested):
        leaf = weight.clone().requires_grad_()
        gf.linear_policy_loss(hidden, leaf, ids, objective, {"a": advantages}).loss.backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_a_workspace_kept_in_inference_mode_serves_training(no_kept_workspace):
    hidden, weight, arguments = batch()
    with torch.inference_mode():
        gf.linear_token_logprobs(hidden, weight, arguments["token_ids"])
    gf.linear_grpo_loss(hidden, weight.requires_grad_(), **arguments).loss.backward()
    assert weight.grad.isfinite().all()


def test_a_large_workspace_is_not_kept(no_kept_workspace, monkeypatch):
    hidden, weight, arguments = batch()
    monkeypatch.setattr(head_module, "_KEPT_BYTES", 100)
    gf.linear_token_logprobs(hidden, weight, arguments["token_ids"])
    assert not vars(head_module._kept)


def test_units_outlive_the_workspace(no_kept_workspace):
    """save_unit_grads keeps what the next call must not overwrite."""
    hidden, weight, arguments = batch()
    leaf, again = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    ids = arguments["token_ids"]
    logps = gf.linear_token_logprobs(hidden, leaf, ids, save_unit_grads=True)
    gf.linear_token_logprobs(hidden * 2, weight, ids)
    logps.sum().backward()
    gf.linear_token_logprobs(hidden, again, ids).sum().backward()
    assert problems.relative_error(leaf.grad, again.grad) < 2e-6


def test_threads_have_workspaces_of_their_own(no_kept_workspace):
    hidden, weight, arguments = batch()
    ids = arguments["token_ids"]
    wanted = gf.linear_token_logprobs(hidden, weight, ids)

    def run(_):
        return [gf.linear_token_logprobs(hidden, weight, ids, workspace_bytes=4 * V * 5) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for results in pool.map(run, range(4)):
            for logps in results:
                assert torch.allclose(logps, wanted, atol=1e-5)
