"""Objectives of one's own: the built-in losses written by hand must give the built-in losses' numbers."""

import functools
import itertools

import problems
import pytest
import torch

import grpo_fast as gf

BACKENDS = problems.backends_here()
LENGTHS = (7, 0, 9, 4, 15)  # one empty sequence, and one longer than some of the workspaces below
V, D = 41, 13


def clipped(logps, advantages, old, entropy=None):
    ratio = torch.exp(logps - old)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return losses if entropy is None else losses - 0.1 * entropy


def gspo(logps, advantages, old, mask, entropy=None):
    length = mask.sum(1, keepdim=True).clamp(min=1)
    ratio = torch.exp(((logps - old) * mask).sum(1, keepdim=True) / length)
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    losses = (-gain / length).expand_as(logps)
    return losses if entropy is None else losses - 0.1 * entropy


CASES = {
    "token": (clipped, {}, {"loss_type": "bnpo", "denominator": 3}),
    "token bonus": (
        clipped,
        {"with_entropy": True},
        {"loss_type": "bnpo", "denominator": 3, "entropy_coef": 0.1, "entropy_denominator": 3},
    ),
    "sequence": (gspo, {"align": "sequence"}, {"denominator": 3, "importance_sampling_level": "sequence"}),
    "sequence bonus": (
        gspo,
        {"align": "sequence", "with_entropy": True},
        {
            "denominator": 3, "importance_sampling_level": "sequence", "entropy_coef": 0.1, "entropy_denominator": 3
        },
    ),
}  # fmt: skip


def batch(packed):
    """Five sequences with holes in their mask, and NaN, -100 in every masked slot."""
    torch.manual_seed(0)
    shape = (sum(LENGTHS),) if packed else (5, 7)
    hidden, weight, bias = torch.randn(*shape, D), torch.randn(V, D), torch.randn(V)
    ids, mask, old = torch.randint(0, V, shape), torch.rand(shape) > 0.3, -3 - torch.rand(shape)
    hidden[~mask], old[~mask], ids[~mask] = torch.nan, torch.nan, -100
    kwargs = {"bias": bias, "temperature": 0.8, "softcap": 6.0}
    if packed:
        kwargs["cu_seqlens"] = torch.tensor((0, *LENGTHS)).cumsum(0)
    return hidden, weight, ids, mask, torch.randn(5), old, kwargs


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("rows", [2, 9, 1000])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_built_in_losses_by_hand(backend, name, packed, rows):
    objective, options, built_in = CASES[name]
    hidden, weight, ids, mask, advantages, old, kwargs = batch(packed)
    leaves = [t.requires_grad_() for t in (hidden, weight, kwargs["bias"])]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = gf.linear_grpo_loss(
        *exact[:2], ids, advantages.double(), mask, old_logps=old.double(), backend="reference",
        **kwargs | {"bias": exact[2]}, **built_in,
    )  # fmt: skip
    out = gf.linear_policy_loss(
        hidden, weight, ids, objective, {"advantages": advantages, "old": old}, mask, denominator=3, backend=backend,
        workspace_bytes=4 * V * rows, **kwargs, **options,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=2e-6)
    assert expected.loss.abs() > 0.01
    for got, wanted in zip(gradients(out.loss, *leaves), gradients(expected.loss, *exact), strict=True):
        assert problems.relative_error(got, wanted) < 5e-6
    assert torch.equal(out.scored, mask)
    assert problems.relative_error(out.logps, expected.logps) < 5e-6
    with torch.no_grad():
        again = gf.linear_policy_loss(
            hidden, weight, ids, objective, {"advantages": advantages, "old": old}, mask, denominator=3,
            backend=backend, **kwargs, **options,
        )  # fmt: skip
    assert again.loss.item() == pytest.approx(out.loss.item(), rel=1e-6)
    assert not again.loss.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_per_token_and_per_sequence(backend):
    """[B], [B, 1] and [B, T] say the same at token level; [b] and [b, 1] arrive as they are at sequence level."""
    hidden, weight, ids, mask, advantages, _, _ = batch(packed=False)
    losses = [
        gf.linear_policy_loss(hidden, weight, ids, lambda logps, a: -a * logps, {"a": a}, mask, backend=backend).loss
        for a in (advantages, advantages[:, None], advantages[:, None].expand(5, 7))
    ]
    shapes = []

    def look(logps, a, b, c, flag, mask):
        shapes.append([tuple(x.shape) for x in (logps, a, b, c, flag, mask)])
        assert flag.dtype == mask.dtype == torch.bool
        return -a[:, None] * b * logps / c.clamp(min=1)

    inputs = {"a": advantages, "b": torch.ones(5, 1), "c": torch.ones(5, 7), "flag": torch.ones(5, 7) > 0}
    losses.append(
        gf.linear_policy_loss(
            hidden.requires_grad_(), weight, ids, look, inputs, mask, align="sequence", backend=backend,
            workspace_bytes=4 * V * 14,
        ).loss
    )  # fmt: skip
    for loss in losses[1:]:
        assert loss.item() == pytest.approx(losses[0].item(), rel=1e-6)
    real = [s for s in shapes if s[0][1] == 7]  # the rehearsal's sequences have two tokens
    assert all(s == [(n, 7), (n,), (n, 1), (n, 7), (n, 7), (n, 7)] for s in real for n in [s[0][0]])
    assert sum(s[0][0] for s in real) == 5


def test_packed_sequences_arrive_padded():
    hidden, weight, ids, mask, _, old, kwargs = batch(packed=True)
    seen = []

    def look(logps, old, mask):
        seen.append((logps.detach().clone(), old, mask))
        return logps

    gf.linear_policy_loss(
        hidden.requires_grad_(), weight, ids, look, {"old": old}, mask, align="sequence", **kwargs
    )  # fmt: skip
    logps, padded, valid = seen[-1]
    assert logps.shape == (5, 15)
    bounds = kwargs["cu_seqlens"].tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        length = stop - start
        assert torch.equal(valid[i, :length], mask[start:stop])
        assert not valid[i, length:].any()
        assert torch.equal(padded[i, :length], torch.where(mask[start:stop], old[start:stop], 0.0))
        assert (logps[i, length:] == 0).all()


def test_a_chunk_is_padded_to_its_own_longest_sequence():
    hidden, weight, ids, mask, _, _, kwargs = batch(packed=True)
    shapes = []

    def look(logps, mask):
        shapes.append(tuple(logps.shape))
        return logps

    gf.linear_policy_loss(
        hidden.requires_grad_(), weight, ids, look, {}, mask, align="sequence", workspace_bytes=4 * V * 15, **kwargs
    )  # fmt: skip
    assert shapes[-2:] == [(4, 9), (1, 15)]  # before them come the rehearsal's


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_at_all(backend, train):
    hidden, weight = torch.zeros(0, D), torch.randn(V, D, requires_grad=train)
    ids, cu_seqlens = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    out = gf.linear_policy_loss(
        hidden, weight, ids, lambda logps, mask: -logps, {}, align="sequence", cu_seqlens=cu_seqlens, backend=backend
    )  # fmt: skip
    assert out.loss == 0
    if train:
        assert (gradients(out.loss, weight)[0] == 0).all()


def test_losses_at_masked_slots_are_left_out():
    hidden, weight, ids, mask, *_ = batch(packed=False)
    results = []
    for objective in (lambda logps, mask: logps, lambda logps, mask: logps + torch.where(mask, 0.0, torch.nan)):
        leaf = weight.clone().requires_grad_()
        out = gf.linear_policy_loss(hidden, leaf, ids, objective, {}, mask, align="sequence", denominator=1)
        out.loss.backward()
        results.append((out.loss, leaf.grad))
    assert results[0][0] == results[1][0]
    assert results[0][0].isfinite()
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_half_precision(dtype, autocast):
    """Log-probs are fp32 in the objective, whatever the products are in; so is the loss."""
    hidden, weight, ids, mask, advantages, old, kwargs = batch(packed=False)
    kwargs.pop("bias")
    hidden[~mask] = 0.0
    seen = []

    def objective(logps, advantages, old):
        seen.append((logps.dtype, torch.is_autocast_enabled("cpu")))
        return clipped(logps, advantages, old)

    exact = [t.to(dtype).double().requires_grad_() for t in (hidden, weight)]
    inputs = {"advantages": advantages, "old": old}
    wanted = gf.linear_policy_loss(*exact, ids, clipped, inputs, mask, **kwargs).loss
    leaves = [(t if autocast else t.to(dtype)).requires_grad_() for t in (hidden, weight)]
    for grad in (True, False):
        with torch.autocast("cpu", dtype, enabled=autocast), torch.set_grad_enabled(grad):
            loss = gf.linear_policy_loss(*leaves, ids, objective, inputs, mask, **kwargs).loss
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(wanted.item(), rel=2e-2)
        if grad:
            grads = gradients(loss, *leaves)
    assert set(seen) == {(torch.float32, False)}
    for got, reference, leaf in zip(grads, gradients(wanted, *exact), leaves, strict=True):
        assert got.dtype == leaf.dtype
        assert problems.relative_error(got, reference) < 5e-2


def test_inference_mode():
    hidden, weight, ids, mask, *_ = batch(packed=False)
    run = functools.partial(gf.linear_policy_loss, hidden, weight, ids, lambda logps: -logps, {}, mask)
    with torch.inference_mode():
        loss = run().loss
    assert loss.item() == pytest.approx(run().loss.item(), rel=1e-6)


def test_packed_sequences_are_not_compiled():
    """How long the longest one is decides a shape, and only the numbers know."""
    torch._dynamo.reset()
    hidden, weight, ids, mask, advantages, old, kwargs = batch(packed=True)
    inputs = {"advantages": advantages, "old": old}

    def loss(hidden):
        return gf.linear_policy_loss(hidden, weight, ids, gspo, inputs, mask, align="sequence", **kwargs).loss

    with pytest.raises(Exception, match="packed sequences cannot be compiled"):
        torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden)


@pytest.mark.parametrize("backend", BACKENDS)
def test_denominator_and_metrics(backend):
    hidden, weight, ids, mask, *_ = batch(packed=False)
    run = functools.partial(
        gf.linear_policy_loss, hidden.requires_grad_(), weight, ids, lambda logps: -logps, {}, mask, backend=backend
    )
    out = run(return_entropy=True)
    total = run(denominator=1).loss.item()
    assert out.loss.item() == pytest.approx(total / mask.sum().item(), rel=1e-6)
    assert run(denominator=torch.tensor(7.0)).loss.item() == pytest.approx(total / 7, rel=1e-6)
    means = out.metrics.means()
    assert means["entropy"].item() == pytest.approx((out.entropy.sum() / mask.sum()).item(), rel=1e-5)
    assert means["ratio/mean"] == means["kl"] == 0
    assert out.metrics.tokens == out.metrics.scored_tokens == mask.sum()
    assert run().entropy is None
    nothing = gf.linear_policy_loss(hidden, weight, ids, lambda logps: -logps, {}, mask & False, backend=backend)
    assert nothing.loss == 0
    assert (torch.autograd.grad(nothing.loss, hidden)[0] == 0).all()


def test_live_rows_are_the_callers_promise():
    hidden, weight, ids, mask, *_ = batch(packed=False)
    rows = mask.flatten().nonzero()[:, 0]
    run = functools.partial(gf.linear_policy_loss, hidden, weight, ids, lambda logps: -logps, {}, mask, denominator=1)
    assert run(live_rows=rows.flip(0)).loss.item() == pytest.approx(run().loss.item(), rel=1e-6)
    some = run(live_rows=rows[:3])
    assert some.scored.sum() == 3
    assert some.loss.item() == pytest.approx(-some.logps.sum().item(), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_rows_keep_the_default_denominator(backend):
    """The loss divides by valid tokens, scored or not; the mean entropy is of scored ones."""
    hidden, weight, ids, mask, *_ = batch(packed=False)
    rows = mask.flatten().nonzero()[:3, 0]
    out = gf.linear_policy_loss(
        hidden, weight, ids, lambda logps: -logps, {}, mask, live_rows=rows, return_entropy=True, backend=backend
    )  # fmt: skip
    assert out.loss.item() == pytest.approx((-out.logps.sum() / mask.sum()).item(), rel=1e-6)
    assert out.metrics.means()["entropy"].item() == pytest.approx((out.entropy.sum() / 3).item(), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_objective_of_the_entropy_alone(backend):
    hidden, weight, ids, mask, *_ = batch(packed=False)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    run = functools.partial(
        gf.linear_policy_loss, *leaves, ids, mask=mask, inputs={}, with_entropy=True, denominator=1, backend=backend
    )
    alone = gradients(run(objective=lambda logps, entropy: -entropy).loss, *leaves)
    both = gradients(run(objective=lambda logps, entropy: 0.0 * logps - entropy).loss, *leaves)
    for got, wanted in zip(alone, both, strict=True):
        assert wanted.abs().max() > 0.1
        assert problems.relative_error(got, wanted) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_corrected_kl_of_sequences_by_hand(backend):
    """The ratio is the sequence's: r e^d is no constant there, however far the reference is."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, D).requires_grad_(), (torch.randn(V, D) / 4).requires_grad_()
    ids, old, ref = torch.randint(0, V, (2, 5)), -3 - torch.rand(2, 5), -torch.rand(2, 5)

    def kl(logps, old, ref, mask):
        ratio = torch.exp((logps - old).mean(1, keepdim=True))
        return 0.1 * ratio * (torch.exp(ref - logps) - (ref - logps) - 1)

    inputs = {"old": old, "ref": ref}
    by_hand = gf.linear_policy_loss(
        hidden, weight, ids, kl, inputs, align="sequence", denominator=1, backend=backend
    ).loss  # fmt: skip
    built_in = gf.linear_grpo_loss(
        hidden, weight, ids, torch.zeros(2), old_logps=old, ref_logps=ref, beta=0.1, use_bias_correction_kl=True,
        importance_sampling_level="sequence", loss_type="bnpo", denominator=1, backend=backend,
    ).loss  # fmt: skip
    assert built_in.item() == pytest.approx(by_hand.item(), rel=1e-5)
    for got, wanted in zip(gradients(built_in, hidden, weight), gradients(by_hand, hidden, weight), strict=True):
        assert problems.relative_error(got, wanted) < 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_without_gradient_in_a_sequence_of_several_parts(backend, packed):
    """They leave the products part by part, and each part has its own."""
    hidden, weight, ids, mask, _, _, kwargs = batch(packed)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), kwargs["bias"].requires_grad_()]
    a = torch.randn(ids.shape) * (torch.rand(ids.shape) > 0.5)

    def grads(rows):
        out = gf.linear_policy_loss(
            hidden, weight, ids, lambda logps, a, mask: a * logps, {"a": a}, mask, align="sequence",
            workspace_bytes=4 * V * rows, backend=backend, **kwargs,
        )  # fmt: skip
        return gradients(out.loss, *leaves)

    for got, wanted in zip(grads(3), grads(1000), strict=True):
        assert problems.relative_error(got, wanted) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_add_up_in_float64(backend):
    """One large loss first: each of the others alone is below half a rounding step of it in float32."""
    a = torch.ones(1, 65)
    a[0, 0] = 2.0**24
    loss = gf.linear_policy_loss(
        torch.zeros(1, 65, D), torch.zeros(V, D, requires_grad=True), torch.zeros(1, 65, dtype=torch.int64),
        lambda logps, a: 0.0 * logps + a, {"a": a}, denominator=1, workspace_bytes=4 * V, backend=backend,
    ).loss  # fmt: skip
    assert loss == 2.0**24 + 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(backend):
    hidden, weight, ids, mask, *_ = batch(packed=False)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = gf.linear_policy_loss(hidden, weight, ids, lambda logps: -logps, {}, mask, backend=backend).loss
    first = torch.autograd.grad(2.0 * loss, leaves, retain_graph=True)
    again = torch.autograd.grad(2.0 * loss, leaves, retain_graph=True)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", CASES)
def test_fullgraph(name):
    torch._dynamo.reset()
    objective, options, _ = CASES[name]
    _, weight, ids, mask, advantages, old, _ = batch(packed=False)
    hidden, weight = torch.randn(5, 7, D).requires_grad_(), weight.requires_grad_()

    def loss(hidden, weight):
        inputs = {"advantages": advantages, "old": old}
        return gf.linear_policy_loss(hidden, weight, ids, objective, inputs, mask, denominator=3, **options).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight)
    eager = loss(hidden, weight)
    assert compiled.item() == pytest.approx(eager.item(), rel=1e-6)
    for got, wanted in zip(gradients(compiled, hidden, weight), gradients(eager, hidden, weight), strict=True):
        assert problems.relative_error(got, wanted) < 2e-6


PARAMETER = torch.nn.Parameter(torch.ones(3))
BAD = {
    "one loss per token, not reduced, in logps' shape \\(here \\[2\\]\\), got \\[\\]": {
        "objective": lambda logps: logps.sum()
    },
    "expand_as": {"objective": lambda logps, mask: logps.sum(1), "align": "sequence"},
    "objective: is called as objective\\(logps, a=...\\), but": {
        "objective": lambda logps: logps,
        "inputs": {"a": torch.ones(5)},
    },
    "objective: is called as objective\\(logps, mask=..., entropy=...\\), but": {
        "objective": lambda logps, mask: logps,
        "align": "sequence",
        "with_entropy": True,
    },
    "loss of a token depends on other tokens": {"objective": lambda logps: logps - logps.mean()},
    "loss of a sequence depends on other sequences": {
        "objective": lambda logps, mask, a: logps * (a - a.mean())[:, None],
        "inputs": {"a": torch.ones(5)},
        "align": "sequence",
    },
    "uses a tensor of shape \\[3\\] that requires grad": {"objective": lambda logps: logps * PARAMETER.exp().sum()},
    "with_entropy: expected True or False, got 1": {"with_entropy": 1},
    "inputs: expected a dict of tensors by argument name, got list": {"inputs": [torch.ones(5)]},
    "got float": {"objective": lambda logps: 1.0},
    "does not depend on logps": {"objective": lambda logps: logps.detach()},
    "objective: expected a function, got int": {"objective": 3},
    'align: expected "token" or "sequence"': {"align": "row"},
    "inputs: expected argument names other than logps, entropy, mask, got 'mask'": {"inputs": {"mask": torch.ones(5)}},
    "functools.partial": {"inputs": {"beta": 0.1}},
    "inputs\\['a'\\]: expected shape \\[5\\], \\[5, 1\\] or \\[5, 7\\], got \\[4\\]": {"inputs": {"a": torch.ones(4)}},
    "inputs\\['a'\\]: is a constant": {"inputs": {"a": torch.ones(5, requires_grad=True)}},
    "denominator": {"denominator": -1},
}


@pytest.mark.parametrize("message", BAD)
def test_mistakes_are_named_before_any_product(message, monkeypatch):
    from grpo_fast.ops import head

    monkeypatch.setattr(head.Head, "logits", lambda *_: pytest.fail("the logits were computed"))
    hidden, weight, ids, mask, *_ = batch(packed=False)
    arguments = {"objective": lambda logps, **_: logps, "inputs": {}} | BAD[message]
    with pytest.raises(ValueError, match=message):
        gf.linear_policy_loss(hidden, weight.requires_grad_(), ids, mask=mask, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_differentiable_once(backend):
    hidden, weight, ids, mask, *_ = batch(packed=False)
    hidden = torch.where(mask[..., None], hidden, 0.0).requires_grad_()
    loss = gf.linear_policy_loss(hidden, weight, ids, lambda logps: logps**2, {}, mask, backend=backend).loss
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    if backend == "reference":
        grad.sum().backward()
        return
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.sum().backward()


@pytest.mark.parametrize("align", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_objective_may_write_into_its_inputs(backend, align):
    def objective(logps, advantages, mask=None):
        advantages.mul_(2.0)
        return (-logps * (advantages if advantages.dim() == logps.dim() else advantages[:, None])).double()

    advantages = torch.tensor([1.0, -2.0])
    out = gf.linear_policy_loss(
        torch.randn(2, 3, D), torch.randn(V, D), torch.randint(0, V, (2, 3)), objective, {"advantages": advantages},
        align=align, backend=backend, workspace_bytes=1,
    )  # fmt: skip
    assert advantages.tolist() == [1.0, -2.0]
    assert out.loss.dtype == torch.float32
