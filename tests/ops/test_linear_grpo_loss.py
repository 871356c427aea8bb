"""The lm_head path against the logits path in float64: loss, all gradients, dead rows, chunks."""

import sys

import problems
import pytest
import torch
from problems import OPTIONS, split

import grpo_fast as gf
from grpo_fast.ops.options import PolicyOptions

BACKENDS = problems.backends_here()
WIDTH = 13


def head(problem, seed=1, dtype=torch.float32):
    """hidden [B,T,D], weight [V,D], bias [V] for the problem's tokens, whose old and reference log-probs move along."""
    generator = torch.Generator().manual_seed(seed)
    shape, vocab = problem["token_ids"].shape, problem["logits"].shape[-1]
    hidden = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
    before, after = problem["logits"].double(), hidden.double() @ weight.double().t() + bias.double()
    target = problem["token_ids"][..., None]
    moved = torch.log_softmax(after, -1).gather(-1, target) - torch.log_softmax(before, -1).gather(-1, target)
    for name in ("old_logps", "ref_logps"):
        problem[name] = (problem[name] + moved[..., 0]).float()
    return hidden, weight, bias


def truth(tensors, arguments, options):
    """By the reference's logits path in float64, with grads of all three."""
    hidden, weight, bias = (t.double().requires_grad_() for t in tensors)
    clean = torch.where(arguments["mask"][..., None], hidden, 0.0)
    arguments = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}
    out = gf.grpo_loss(clean @ weight.t() + bias, **arguments, **options)
    return out, torch.autograd.grad(out.loss, (hidden, weight, bias))


def run(tensors, arguments, options, **more):
    hidden, weight, bias = (t.clone().requires_grad_() for t in tensors)
    out = gf.linear_grpo_loss(hidden, weight, **arguments, bias=bias, **options, **more)
    return out, torch.autograd.grad(out.loss, (hidden, weight, bias))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients(backend, name, packed):
    problem = problems.make(packed=packed)
    tensors = head(problem)
    arguments, options = split(problem, OPTIONS[name])
    expected, grads = truth(tensors, arguments, options)
    dirty, _ = split(problems.poison(problem), OPTIONS[name])
    tensors[0][~problem["mask"]] = torch.nan
    out, actual = run(tensors, dirty, options, backend=backend, workspace_bytes=4 * 37 * 5)
    assert abs(out.loss - expected.loss) < 5e-6 * max(1, abs(expected.loss))
    for a, e in zip(actual, grads, strict=True):
        assert problems.relative_error(a, e) < 5e-6
    assert problems.relative_error(out.logps * out.scored, expected.logps * out.scored) < 5e-6


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_size_changes_nothing(backend, rows):
    """B38: 259 tokens in chunks of 1, 7, 64 and all, with every per-sequence broadcast."""
    problem = problems.make(batch=37, length=7, vocab=40)
    problem["advantages"] = problem["advantages"][:, 0]
    arguments, options = split(problem, {"beta": 0.1, "entropy_coef": 0.1})
    tensors = head(problem)
    expected, grads = run(tensors, arguments, options, backend=backend, workspace_bytes=4 * 40 * 10_000)
    out, actual = run(tensors, arguments, options, backend=backend, workspace_bytes=4 * 40 * rows)
    assert torch.allclose(out.loss, expected.loss, rtol=1e-6)
    for a, e in zip(actual, grads, strict=True):
        assert problems.relative_error(a, e) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_weight_gradient_is_rounded_once(backend):
    """B40: 256 tokens, many chunks: as good as one chunk."""
    problem = problems.make(batch=1, length=256, vocab=40, all_valid=True)
    hidden, weight, _ = head(problem, dtype=torch.bfloat16)
    arguments, _ = split(problem, {})
    arguments["old_logps"] = None

    def grad(workspace):
        leaf = weight.clone().requires_grad_()
        gf.linear_grpo_loss(hidden, leaf, **arguments, workspace_bytes=workspace, backend=backend).loss.backward()
        return leaf.grad

    one, many = grad(2 * 40 * 256), grad(2 * 40)
    assert one.dtype == torch.bfloat16
    assert problems.relative_error(many, one) < 2**-8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)], ids=str)
def test_only_what_needs_a_gradient_gets_one(backend, needed):
    """B39: a frozen head has no [V, D] gradient, and none is allocated."""
    problem = problems.make(batch=2, vocab=37)
    hidden, weight, _ = head(problem)
    arguments, options = split(problem, {"beta": 0.1})
    full = run((hidden, weight, torch.zeros(37)), arguments, options, backend=backend)
    hidden, weight = hidden.requires_grad_(needed[0]), weight.requires_grad_(needed[1])
    out = gf.linear_grpo_loss(hidden, weight, **arguments, **options, backend=backend)
    assert torch.allclose(out.loss, full[0].loss, rtol=1e-6)
    if not any(needed):
        assert not out.loss.requires_grad
        return
    out.loss.backward()
    for tensor, wanted, expected in zip((hidden, weight), needed, full[1], strict=False):
        assert (tensor.grad is not None) == wanted
        if wanted:
            assert problems.relative_error(tensor.grad, expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_rows_are_dropped_and_nothing_changes(backend):
    problem = problems.make(batch=4, length=6)
    problem["advantages"][2] = 0.0
    problem["sampling_weights"][3, 2] = 0.0
    tensors = head(problem)
    arguments, options = split(problem, {"loss_type": "dapo", "use_weights": True})
    expected, grads = truth(tensors, arguments, options)
    dead = (problem["advantages"] * problem["sampling_weights"] == 0) & problem["mask"]
    for more in ({}, {"score_dead_rows": True}, {"live_rows": (problem["mask"] & ~dead).flatten().nonzero()[:, 0]}):
        out, actual = run(tensors, arguments, options, backend=backend, **more)
        assert torch.allclose(out.loss.double(), expected.loss, rtol=1e-5)
        for a, e in zip(actual, grads, strict=True):
            assert problems.relative_error(a, e) < 5e-6
        live = problem["mask"] if "score_dead_rows" in more else problem["mask"] & ~dead
        assert torch.equal(out.scored, live)
        assert (out.logps[~out.scored] == 0).all()
        assert out.metrics.tokens == problem["mask"].sum()
        assert out.metrics.scored_tokens == live.sum()
    for options in ({"beta": 0.1, "ref_logps": problem["ref_logps"]}, {"entropy_coef": 0.1}):
        out = gf.linear_grpo_loss(*tensors[:2], **arguments, **options, backend=backend)
        assert torch.equal(out.scored, problem["mask"]), "with a KL or an entropy bonus only masked rows are dead"


@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_rows_at_sequence_level(backend):
    """One live token keeps its whole sequence: the others enter its ratio."""
    problem = problems.make(batch=3, length=5, all_valid=True)
    problem["advantages"] = torch.zeros(3, 5)
    problem["advantages"][1, 2] = 1.0
    arguments, options = split(problem, {"importance_sampling_level": "sequence"})
    tensors = head(problem)
    _, grads = truth(tensors, arguments, options)
    out, actual = run(tensors, arguments, options, backend=backend)
    assert out.scored.all(1).tolist() == [False, True, False]
    assert problems.relative_error(actual[1], grads[1]) < 5e-6


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)], ids=["masked", "T=0", "B=0"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_valid(backend, shape):
    hidden = torch.full((*shape, 4), torch.nan, requires_grad=True)
    weight, bias = torch.randn(9, 4, requires_grad=True), torch.zeros(9, requires_grad=True)
    ids, mask = torch.full(shape, -100), torch.zeros(shape)
    out = gf.linear_grpo_loss(hidden, weight, ids, torch.ones(shape[0]), mask, bias=bias, backend=backend)
    out.loss.backward()
    assert out.loss == 0
    for tensor in (hidden, weight, bias):
        assert tensor.grad.shape == tensor.shape
        assert (tensor.grad == 0).all()


@pytest.mark.parametrize("transform", [{}, {"temperature": 0.7, "softcap": 3.0, "logit_scale": 0.0625}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_token_logprobs(backend, transform):
    """B51 too: bias, scale, softcap and temperature all reach the head."""
    problem = problems.make()
    tensors = [t.requires_grad_() for t in head(problem)]
    hidden, weight, bias = tensors
    mask, ids = problem["mask"], problem["token_ids"]
    values = gf.linear_token_logprobs(
        hidden, weight, ids, mask, bias=bias, return_entropy=True, workspace_bytes=800, backend=backend, **transform
    )
    upstream = torch.randn(3, 7)
    grads = torch.autograd.grad((values.logps * upstream + values.entropy * 0.3).sum(), tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    spec = gf.token_logprobs(exact[0] @ exact[1].t() + exact[2], ids, mask, return_entropy=True, **transform)
    expected = torch.autograd.grad((spec.logps * upstream + spec.entropy * 0.3).sum(), exact)
    assert problems.relative_error(values.logps, spec.logps) < 2e-6
    assert problems.relative_error(values.entropy, spec.entropy) < 2e-6
    for a, e in zip(grads, expected, strict=True):
        assert problems.relative_error(a, e) < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_mixed_dtypes_and_autocast(backend, dtypes):
    """B41: gradients have their parameter's dtype."""
    problem = problems.make()
    hidden, weight, _ = head(problem)
    arguments, options = split(problem, {})
    hidden, weight = hidden.to(dtypes[0]).requires_grad_(), weight.to(dtypes[1]).requires_grad_()
    for autocast in (False, True):
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = gf.linear_grpo_loss(hidden, weight, **arguments, **options, backend=backend).loss
            more = gf.linear_token_logprobs(
                hidden, weight, problem["token_ids"], problem["mask"], backend=backend
            ).sum()
        (loss + more).backward()
        assert hidden.grad.dtype == dtypes[0]
        assert weight.grad.dtype == dtypes[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_head_survives_small_coefficients(backend):
    problem = problems.make()
    hidden, weight, _ = head(problem, dtype=torch.float16)
    arguments, options = split(problem, {"denominator": 10**7})
    leaf, exact = weight.clone().requires_grad_(), weight.double().requires_grad_()
    (gf.linear_grpo_loss(hidden, leaf, **arguments, **options, backend=backend).loss * 2.0**20).backward()
    (gf.linear_grpo_loss(hidden.double(), exact, **arguments, **options).loss * 2.0**20).backward()
    assert problems.relative_error(leaf.grad, exact.grad) < 3e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_hidden_states_stay_out_of_the_weight(backend):
    """0 * NaN: a masked row may be among live_rows, and under torch.compile every row is walked."""
    problem = problems.make(batch=2, vocab=11)
    hidden, weight, _ = head(problem)
    arguments, options = split(problem, {"beta": 0.1})
    clean = weight.clone().requires_grad_()
    gf.linear_grpo_loss(hidden, clean, **arguments, **options, backend=backend).loss.backward()
    hidden[~problem["mask"]] = torch.nan

    def function(w, **more):
        return gf.linear_grpo_loss(hidden, w, **arguments, **options, backend=backend, **more).loss

    everything = torch.arange(problem["mask"].numel())
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for loss in (lambda w: function(w, live_rows=everything), compiled):
        dirty = weight.clone().requires_grad_()
        loss(dirty).backward()
        assert problems.relative_error(dirty.grad, clean.grad) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradient_under_autocast_is_rounded_once(backend):
    """bf16 GEMMs, many chunks, an fp32 weight: its gradient is a sum in fp32, not one of bf16 values."""
    problem = problems.make(batch=1, length=256, vocab=40, all_valid=True)
    hidden, weight, _ = head(problem)
    arguments, _ = split(problem, {})
    arguments["old_logps"] = None
    exact = weight.double().requires_grad_()
    gf.linear_grpo_loss(hidden.double(), exact, **arguments).loss.backward()
    leaf = weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        gf.linear_grpo_loss(hidden, leaf, **arguments, workspace_bytes=2 * 40 * 4, backend=backend).loss.backward()
    assert problems.relative_error(leaf.grad, exact.grad) < 1e-2
    if backend != "reference":
        assert not torch.equal(leaf.grad, leaf.grad.bfloat16().float())


@pytest.mark.parametrize("options", [{}, {"loss_type": "cispo", "epsilon_high": 2.0}], ids=["grpo", "cispo"])
@pytest.mark.parametrize("coef", [0.0, 0.1])
@pytest.mark.parametrize("denominators", [(10**6, 10**6), (100, 10**6), (10**7, 5)], ids=str)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_fp16_head_with_bias_and_bonus(backend, denominators, coef, options):
    """What was scaled up is scaled down again in all three gradients, and neither term may overflow."""
    problem = problems.make()
    tensors = head(problem, dtype=torch.float16)
    arguments, _ = split(problem, {})
    options = options | {"entropy_coef": coef, "denominator": denominators[0], "entropy_denominator": denominators[1]}
    leaves = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().requires_grad_() for t in tensors]
    scale = 2.0 ** (12 if 5 in denominators and coef else 18)
    (gf.linear_grpo_loss(*leaves[:2], bias=leaves[2], **arguments, **options, backend=backend).loss * scale).backward()
    (gf.linear_grpo_loss(*exact[:2], bias=exact[2], **arguments, **options).loss * scale).backward()
    for leaf, expected in zip(leaves, exact, strict=True):
        assert problems.relative_error(leaf.grad, expected.grad) < 1e-2


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_fp16_head_entropy_alone(backend):
    """No gradient by way of the log-probs: the entropy's own is what has to be kept away from 0."""
    problem = problems.make()
    hidden, weight, _ = head(problem, dtype=torch.float16)

    def grad(dtype, backend):
        leaf = hidden.to(dtype).requires_grad_()
        out = gf.linear_token_logprobs(
            leaf, weight.to(dtype), problem["token_ids"], problem["mask"], return_entropy=True, backend=backend
        )
        (out.entropy.sum() * 1e-6).backward()
        return leaf.grad

    unit = 2.0**-24  # the smallest fp16: the result itself cannot be more exact
    exact = grad(torch.float64, "reference")
    assert ((grad(torch.float16, backend).double() - exact).abs() <= unit + 0.01 * exact.abs()).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"loss_type": "cispo", "epsilon_high": 2.0}], ids=["grpo", "cispo"])
def test_live_rows_may_name_masked_tokens(backend, options):
    """A superset is allowed, and a masked token's hidden state may be NaN: not even 0 * NaN of it may enter."""
    problem = problems.make()
    hidden, weight, bias = head(problem)
    arguments, _ = split(problem, {})
    expected, grads = run((hidden, weight, bias), arguments, options, backend=backend)
    hidden[~problem["mask"]] = torch.nan
    rows = torch.arange(problem["mask"].numel())
    out, actual = run((hidden, weight, bias), arguments, options, backend=backend, live_rows=rows)
    assert torch.allclose(out.loss, expected.loss, rtol=1e-6)
    for a, e in zip(actual, grads, strict=True):
        assert problems.relative_error(a, e) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_few_masked_live_rows_stay_out_of_the_gradients(backend):
    """Too few for the rows without a gradient to be moved out of the products: their NaN has to be kept out there."""
    problem = problems.make(batch=1, length=64, vocab=11, all_valid=True)
    problem["mask"][0, 20] = False
    tensors = head(problem)
    arguments, _ = split(problem, {})
    expected, grads = run(tensors, arguments, {"beta": 0.1, "ref_logps": problem["ref_logps"]}, backend=backend)
    tensors[0][0, 20] = torch.nan
    options = {"beta": 0.1, "ref_logps": problem["ref_logps"], "live_rows": torch.arange(64)}
    out, actual = run(tensors, arguments, options, backend=backend)
    assert torch.allclose(out.loss, expected.loss, rtol=1e-6)
    for a, e in zip(actual, grads, strict=True):
        assert problems.relative_error(a, e) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_live_rows_are_not_scored(backend):
    """Whatever their ids: log-probs and entropies are 0 there."""
    problem = problems.make()
    hidden, weight, _ = head(problem)
    mask = problem["mask"]
    problem["token_ids"][~mask] = -100
    arguments, _ = split(problem, {})
    weight, rows = weight.requires_grad_(), torch.arange(mask.numel())
    for out in (
        gf.linear_grpo_loss(hidden, weight, **arguments, live_rows=rows, return_entropy=True, backend=backend),
        gf.linear_policy_loss(
            hidden, weight, problem["token_ids"], lambda logps: -logps, {}, mask, live_rows=rows, return_entropy=True,
            backend=backend,
        ),
    ):  # fmt: skip
        assert torch.equal(out.scored, mask)
        for vector in (out.logps, out.entropy):
            assert (vector[~mask] == 0).all()
            assert (vector[mask] != 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_rows_in_any_order_at_sequence_level(backend):
    problem = problems.make(batch=4, all_valid=True)
    tensors = head(problem)
    arguments, options = split(problem, {"importance_sampling_level": "sequence", "beta": 0.1})
    more = {"backend": backend, "workspace_bytes": 4 * 37 * 14}
    expected, grads = run(tensors, arguments, options, **more)
    rows = torch.randperm(28, generator=torch.Generator().manual_seed(0))
    out, actual = run(tensors, arguments, options, live_rows=rows, **more)
    assert torch.allclose(out.loss, expected.loss, rtol=1e-6)
    for a, e in zip(actual, grads, strict=True):
        assert problems.relative_error(a, e) < 2e-6


def test_live_rows_name_dead_tokens_too_where_those_are_scored():
    problem = problems.make()
    hidden, weight, _ = head(problem)
    arguments, _ = split(problem, {})
    valid = problem["mask"]
    live = (valid & (problem["advantages"] != 0)).flatten().nonzero()[:, 0]
    with pytest.raises(ValueError, match=r"live_rows.*misses flat index 0"):
        gf.linear_grpo_loss(hidden, weight, **arguments, live_rows=live, score_dead_rows=True)
    everything = valid.flatten().nonzero()[:, 0]
    out = gf.linear_grpo_loss(hidden, weight, **arguments, live_rows=everything, score_dead_rows=True)
    assert torch.equal(out.scored, valid)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_unit_gradients_of_some_rows_in_chunks(backend):
    """The backward takes them chunk by chunk, each row with its own upstream gradient."""
    problem = problems.make()
    tensors = [t.requires_grad_() for t in head(problem)]
    upstream = torch.randn(problem["mask"].shape)

    def grads(**options):
        logps = gf.linear_token_logprobs(
            *tensors[:2], problem["token_ids"], problem["mask"], bias=tensors[2], backend=backend, **options
        )
        return torch.autograd.grad((logps * upstream).sum(), tensors)

    for got, wanted in zip(grads(save_unit_grads=True, workspace_bytes=4 * 37 * 3), grads(), strict=True):
        assert problems.relative_error(got, wanted) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflowing_corrected_kl_is_inf(backend):
    """Log-ratio 100, the reference 2 above: inf, as the product says, and not inf - inf."""
    hidden, weight, ids = torch.zeros(1, 1, 4), torch.zeros(9, 4), torch.zeros(1, 1, dtype=torch.int64)
    logps = gf.linear_token_logprobs(hidden, weight, ids)
    out = gf.linear_grpo_loss(
        hidden, weight.requires_grad_(), ids, torch.ones(1), old_logps=logps - 100, ref_logps=logps + 2, beta=0.1,
        use_bias_correction_kl=True, backend=backend,
    )  # fmt: skip
    assert out.loss == torch.inf


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("options", [{}, {"importance_sampling_level": "sequence"}], ids=["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_out_of_range(backend, options, train):
    hidden, weight = torch.zeros(1, 2, 4), torch.zeros(9, 4, requires_grad=train)
    for bad in (9, -1):
        with pytest.raises((ValueError, RuntimeError), match="token_ids"):
            gf.linear_grpo_loss(hidden, weight, torch.tensor([[0, bad]]), torch.ones(1), backend=backend, **options)


def test_live_rows_name_a_token_once():
    """Twice would count twice in the weight's gradient."""
    problem = problems.make(all_valid=True)
    hidden, weight, _ = head(problem)
    arguments, _ = split(problem, {})
    rows = torch.arange(problem["mask"].numel())
    with pytest.raises(ValueError, match=r"live_rows.*once"):
        gf.linear_grpo_loss(hidden, weight, **arguments, live_rows=torch.cat([rows, rows[:1]]))


def test_empty_vocabulary_without_tokens():
    out = gf.linear_grpo_loss(
        torch.zeros(1, 0, 3), torch.zeros(0, 3), torch.zeros(1, 0, dtype=torch.int64), torch.ones(1)
    )
    assert out.loss == 0


def test_live_rows_must_name_every_live_token():
    problem = problems.make()
    hidden, weight, _ = head(problem)
    arguments, _ = split(problem, {})
    live = (problem["mask"] & (problem["advantages"] != 0)).flatten().nonzero()[:, 0]
    gf.linear_grpo_loss(hidden, weight, **arguments, live_rows=live)
    with pytest.raises(ValueError, match=f"live_rows.*misses flat index {live[2]}"):
        gf.linear_grpo_loss(hidden, weight, **arguments, live_rows=live[live != live[2]])


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_bias_gradient_is_summed_in_fp32(backend):
    """An fp32 bias on a bf16 head: chunks of one row add bf16 rows exactly, a whole chunk must do no worse."""
    problem = problems.make(batch=1, length=256, vocab=40, all_valid=True)
    hidden, weight, bias = head(problem, dtype=torch.bfloat16)
    arguments, _ = split(problem, {})
    arguments["old_logps"] = None

    def grad(rows):
        leaf = bias.float().requires_grad_()
        gf.linear_grpo_loss(
            hidden, weight, **arguments, bias=leaf, workspace_bytes=2 * 40 * rows, backend=backend
        ).loss.backward()  # fmt: skip
        return leaf.grad

    assert problems.relative_error(grad(64), grad(1)) < 2e-4


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_two_sweeps_recompute_under_the_forwards_autocast(backend):
    """The backward runs outside autocast, but its logits must be those of the forward."""
    problem = problems.make()
    hidden, weight, _ = head(problem)
    arguments, _ = split(problem, {})

    def grads(reduction):
        leaves = hidden.clone().requires_grad_(), (weight * 3).requires_grad_()
        options = {"loss_type": "dapo", "denominator": 1, "reduction": reduction, "backend": backend}
        with torch.autocast(hidden.device.type, torch.bfloat16):
            loss = gf.linear_grpo_loss(*leaves, **arguments, **options).loss
        return torch.autograd.grad(loss.sum(), leaves)

    for actual, expected in zip(grads("none"), grads("sum"), strict=True):
        assert problems.relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("d, advantage", [(15.0, 0.0), (0.0, 1e-7)], ids=["large k3", "small advantage"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_fp16_head_scales_what_the_gradient_is(backend, d, advantage):
    """Coefficients do not tell how large it is: k3's derivative at d = 15 is 3e6, an advantage may be 1e-7."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(4, 8).half(), torch.randn(11, 8).half()
    ids = torch.tensor([1, 2, 3, 4])
    logps = gf.linear_token_logprobs(hidden.double(), weight.double(), ids).float()
    kwargs = {"cu_seqlens": torch.tensor([0, 4]), "ref_logps": logps + d, "beta": 0.04 if d else 0.0}
    grads = []
    for dtype, name in ((torch.float16, backend), (torch.float64, None)):
        leaf = weight.clone().to(dtype).requires_grad_()
        out = gf.linear_grpo_loss(hidden.to(dtype), leaf, ids, torch.full((1,), advantage), backend=name, **kwargs)
        scale = 2.0**-4 if d else 2.0**20
        (out.loss * scale).backward()
        grads.append(leaf.grad)
    assert problems.relative_error(*grads) < 3e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("options", [{}, {"beta": 0.1}], ids=["", "beta"])
def test_live_tokens_known_on_the_host_are_those_of_the_device(level, options):
    """What spares a GPU the count must not be another set of rows."""
    module = sys.modules["grpo_fast.ops.linear_grpo_loss"]
    problem = problems.make(batch=4, length=6)
    problem["advantages"][1], problem["sampling_weights"][2, 3] = 0.0, 0.0
    mask, advantages, weights = problem["mask"], problem["advantages"], problem["sampling_weights"]
    options = PolicyOptions(importance_sampling_level=level, **options)
    for given in ((mask, advantages, weights), (None, advantages[:, 0], None), (mask.float(), advantages, None)):
        hidden, weight, _ = head(problem)
        arguments = dict(zip(("mask", "advantages", "sampling_weights"), given, strict=True))
        arguments |= {"token_ids": problem["token_ids"], "ref_logps": problem["ref_logps"]}
        fields = {"importance_sampling_level": level, "beta": options.beta}
        scored = gf.linear_grpo_loss(hidden, weight, **arguments, **fields).scored
        assert torch.equal(module._known_on_host(*given, (4, 6), options)[1], scored)
    valid, live = module._known_on_host(mask, advantages.to("meta"), weights, (4, 6), options)
    assert torch.equal(valid, mask)
    assert live is None
    assert module._known_on_host(mask, advantages, weights, (24,), options)[1] is None


@pytest.mark.parametrize("options", [{}, {"save_unit_grads": True}], ids=["", "units"])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_for_a_loss_downstream(backend, dtype, packed, trainable, options):
    """Every way to keep a gradient from the forward, with NaN in masked slots, upstream too (0 * inf there)."""
    problem = problems.make(packed=packed)
    hidden, weight, bias = head(problem, dtype=dtype)
    ids, mask = problem["token_ids"], problem["mask"]
    upstream = torch.randn(mask.shape)
    kwargs = {"softcap": 5.0, "temperature": 0.7}
    exact = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    wanted = gf.token_logprobs(exact[0] @ exact[1].t() + exact[2], ids, mask, **kwargs)
    (wanted * upstream).sum().backward()
    hidden[~mask], upstream[~mask], ids[~mask] = torch.nan, torch.nan, -100
    leaves = [hidden.requires_grad_(), weight.requires_grad_(trainable), bias.requires_grad_(trainable)]
    logps = gf.linear_token_logprobs(
        leaves[0],
        leaves[1],
        ids,
        mask,
        bias=leaves[2],
        workspace_bytes=4 * 37 * 5,
        backend=backend,
        **kwargs,
        **options,
    )
    logps.backward(upstream)
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
    assert problems.relative_error(logps, wanted) < tolerance
    for leaf, reference in zip(leaves[: 3 if trainable else 1], exact, strict=False):
        assert leaf.grad.dtype == dtype
        assert problems.relative_error(leaf.grad, reference.grad) < tolerance


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_log_prob_is_wanted(backend, trainable, shape):
    """B18 of log-probs: everything masked, no sequence, no token."""
    for save_unit_grads in (False, True):
        hidden, weight = torch.randn(*shape, 4).requires_grad_(), torch.randn(7, 4).requires_grad_(trainable)
        ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        logps = gf.linear_token_logprobs(hidden, weight, ids, mask, save_unit_grads=save_unit_grads, backend=backend)
        logps.sum().backward()
        assert logps.sum() == 0
        assert hidden.grad.shape == hidden.shape
        assert not hidden.grad.any()
        assert weight.grad is None if not trainable else not weight.grad.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_is_clipped(backend, dtype, level):
    """Whole chunks without a gradient: it is exactly 0, in every dtype."""
    problem = problems.make(all_valid=True)
    hidden, weight, bias = (t.requires_grad_() for t in head(problem, dtype=dtype))
    ids = problem["token_ids"]
    old_logps = gf.linear_token_logprobs(hidden.detach(), weight.detach(), ids, bias=bias.detach()) - 2.0
    out = gf.linear_grpo_loss(
        hidden, weight, ids, torch.ones(3), bias=bias, old_logps=old_logps, workspace_bytes=4 * 37 * 8, backend=backend,
        importance_sampling_level=level,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.2)
    for leaf in (hidden, weight, bias):
        assert not leaf.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_checkpointing_and_hooks_on_saved_tensors(backend):
    """The objective's own small graphs are the head's business: the function is recomputed once, not once a chunk."""
    problem = problems.make(vocab=37)
    hidden, weight, _ = head(problem)
    arguments, options = split(problem, {"beta": 0.1})
    hidden[~problem["mask"]] = 0.0
    calls = []

    def loss(h, w):
        calls.append(1)
        return gf.linear_grpo_loss(h.sin(), w, **arguments, **options, workspace_bytes=4 * 37 * 3, backend=backend).loss

    grads = []
    for run in (loss, lambda *t: torch.utils.checkpoint.checkpoint(loss, *t, use_reentrant=False)):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        calls.clear()
        grads.append(torch.autograd.grad(run(*leaves), leaves))
    assert len(calls) == 2
    with torch.autograd.graph.save_on_cpu():
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        grads.append(torch.autograd.grad(loss(*leaves), leaves))
    for other in grads[1:]:
        for got, wanted in zip(other, grads[0], strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("upstream", [1.0, 2.0])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("mask", [True, False], ids=["valid", "masked"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_of_any_strides(backend, mask, retain, upstream):
    """Both transposed: a gradient in their layout has no unit-stride rows for the backend to scale."""
    hidden = torch.randn(WIDTH, 2, 3).permute(1, 2, 0).requires_grad_()
    weight = torch.randn(WIDTH, 11).t().requires_grad_()
    arguments = (torch.randint(0, 11, (2, 3)), torch.tensor([1.0, -2.0]), torch.full((2, 3), mask))
    out = gf.linear_grpo_loss(hidden, weight, *arguments, backend=backend)
    actual = torch.autograd.grad(out.loss * upstream, (hidden, weight), retain_graph=retain)
    straight = [t.detach().contiguous().requires_grad_() for t in (hidden, weight)]
    out = gf.linear_grpo_loss(*straight, *arguments, backend=backend)
    for a, e in zip(actual, torch.autograd.grad(out.loss * upstream, straight), strict=True):
        assert torch.allclose(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("save_unit_grads", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_nan_at_masked_slots_stays_there(backend, frozen, save_unit_grads):
    """As where(mask, exp(logps - old), 0) makes it of old log-probs that are -inf at masked slots."""
    mask = torch.tensor([[True, False, True], [False, True, True]])
    hidden = torch.randn(2, 3, WIDTH, requires_grad=True)
    weight = torch.randn(11, WIDTH, requires_grad=not frozen)
    out = gf.linear_token_logprobs(
        hidden, weight, torch.randint(0, 11, (2, 3)), mask, save_unit_grads=save_unit_grads, backend=backend
    )
    old_logps = torch.where(mask, -1.0, -torch.inf)
    torch.where(mask, torch.exp(out - old_logps), 0.0).sum().backward()
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[~mask].any()
    assert hidden.grad[mask].any()
    assert frozen or weight.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_corrected_kl_far_from_the_reference_in_sequences_of_one_token(backend):
    """dL/dlogp = -beta r d: at d = 40 nothing of it is left of r (k3 + 1 - e^d) in float32."""
    hidden, weight = torch.randn(3, 1, WIDTH), torch.randn(11, WIDTH)
    ids, advantages = torch.randint(0, 11, (3, 1)), torch.zeros(3)
    logps = gf.linear_token_logprobs(hidden, weight, ids)
    gradients = []
    for level in ("token", "sequence"):
        leaf = hidden.clone().requires_grad_()
        gf.linear_grpo_loss(
            leaf, weight, ids, advantages, old_logps=logps, ref_logps=logps + 40.0, beta=0.1,
            use_bias_correction_kl=True, importance_sampling_level=level, backend=backend,
        ).loss.backward()  # fmt: skip
        gradients.append(leaf.grad)
    assert problems.relative_error(*gradients) < 1e-5


def test_what_is_no_tensor_is_named():
    hidden, weight, ids, advantages = torch.randn(2, 3, 4), torch.randn(5, 4), torch.zeros(2, 3).long(), torch.ones(2)
    given = {"hidden": hidden, "weight": weight, "token_ids": ids, "advantages": advantages}
    for name in (*given, "mask", "bias", "old_logps", "ref_logps", "live_rows"):
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got list"):
            gf.linear_grpo_loss(**given | {name: [1.0]})
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected a tensor, got list"):
        gf.linear_grpo_loss(hidden[0], weight, ids[0], advantages[:1], cu_seqlens=[0, 3])
    for bias in (torch.zeros(5).long(), torch.zeros(5, dtype=torch.complex64)):
        with pytest.raises(ValueError, match=r"^bias: expected a floating"):
            gf.linear_grpo_loss(**given, bias=bias)
    for name in ("hidden", "weight"):
        with pytest.raises(ValueError, match=f"^{name}: expected a floating.*float8"):
            gf.linear_grpo_loss(**given | {name: given[name].to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_parameter_beside_fp32_survives_small_coefficients(backend, dtypes):
    """A loss scaler's factor arrives in the backward; before, these gradients are below float16's smallest number."""
    hidden, weight = (t.to(d) for t, d in zip((torch.randn(2, 3, WIDTH), torch.randn(11, WIDTH)), dtypes, strict=True))
    ids, scale = torch.randint(0, 11, (2, 3)), 2.0**24
    gradients = []
    for inside, outside in ((1.0, scale), (scale, 1.0)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = gf.linear_grpo_loss(*leaves, ids, torch.full((2,), 1e-8 * inside), backend=backend)
        gradients.append(torch.autograd.grad(out.loss * outside, leaves))
    for late, early in zip(*gradients, strict=True):
        assert problems.relative_error(late, early) < 2e-3
