"""grpo_loss on every backend against the float64 oracle: loss and gradient, every option."""

import math

import oracle
import problems
import pytest
import torch
from problems import OPTIONS, split

import grpo_fast as gf

BACKENDS = problems.backends_here()
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


def run(logits, arguments, options, **more):
    leaf = logits.clone().requires_grad_()
    # With inplace the leaf must not be touched: a node between them stands for the model.
    out = gf.grpo_loss(leaf * 1 if more.get("inplace") else leaf, **arguments, **options, **more)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out, grad


def truth(problem, arguments, options):
    leaf = problem["logits"].double().requires_grad_()
    options = {k: v for k, v in options.items() if k not in ("return_entropy",)}
    value = oracle.loss(leaf, **arguments, **options)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradient(backend, name, inplace):
    problem = problems.make()
    arguments, options = split(problem, OPTIONS[name])
    loss, grad = truth(problem, arguments, options)
    poisoned, _ = split(problems.poison(problem), OPTIONS[name])
    out, actual = run(problems.poison(problem)["logits"], poisoned, options, backend=backend, inplace=inplace)
    assert abs(out.loss - loss) <= TOLERANCE[torch.float32] * max(1.0, abs(loss))
    assert problems.relative_error(actual, grad) < TOLERANCE[torch.float32]
    assert (actual[~problem["mask"]] == 0).all()
    assert out.loss.dtype == out.logps.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["kl", "transform", "sequence bonus", "entropy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend, name, dtype):
    problem = problems.make(dtype=dtype)
    arguments, options = split(problem, OPTIONS[name])
    loss, grad = truth(problem, arguments, options)
    out, actual = run(problem["logits"], arguments, options, backend=backend)
    assert abs(out.loss - loss) < 2e-6 * max(1.0, abs(loss)), "the loss itself is fp32"
    assert actual.dtype == dtype
    assert problems.relative_error(actual, grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", OPTIONS)
def test_reference_in_float64(name):
    problem = problems.make(dtype=torch.float64)
    arguments, options = split(problem, OPTIONS[name])
    loss, grad = truth(problem, arguments, options)
    out, actual = run(problem["logits"], arguments, options)
    assert abs(out.loss - loss) < 1e-12 * max(1.0, abs(loss))
    assert problems.relative_error(actual, grad) < 1e-11
    assert out.loss.dtype == torch.float64


# Odd, below, at and above a vector and a block; a real vocabulary's width is in tests/csrc and tests/kernels.
@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 64, 100, 1025])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vocabulary_sizes(backend, vocab):
    problem = problems.make(vocab=vocab)
    arguments, options = split(problem, {"beta": 0.1, "entropy_coef": 0.1})
    loss, grad = truth(problem, arguments, options)
    out, actual = run(problem["logits"], arguments, options, backend=backend)
    assert abs(out.loss - loss) < 3e-6 * max(1.0, abs(loss))
    assert problems.relative_error(actual, grad) < 3e-6 or grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_equals_padded(backend, name):
    problem, packed = problems.make(), problems.make(packed=True)
    arguments, options = split(problem, OPTIONS[name])
    out, grad = run(problem["logits"], arguments, options, backend=backend)
    arguments, options = split(packed, OPTIONS[name])
    out_packed, grad_packed = run(packed["logits"], arguments, options, backend=backend)
    assert abs(out.loss - out_packed.loss) < 1e-6 * max(1, abs(out.loss))
    assert problems.relative_error(grad_packed, grad.flatten(0, 1)) < 1e-6
    assert torch.equal(out_packed.logps, out.logps.flatten())
    for key, value in out.metrics.means().items():
        assert torch.allclose(value, out_packed.metrics.means()[key], atol=1e-6), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_sequence_advantages_in_every_shape(backend):
    """[B], [B,1] and [B,T] mean the same; packed [B], [N] and [N,1] too."""
    problem, packed = problems.make(), problems.make(packed=True)
    values = torch.tensor([1.0, -0.5, 2.0])
    expected = None
    for advantages in (values, values[:, None], values[:, None].expand(3, 7)):
        arguments, _ = split(problem | {"advantages": advantages}, {})
        out, _ = run(problem["logits"], arguments, {}, backend=backend)
        expected = out.loss if expected is None else expected
        assert out.loss == expected
    per_token = values.repeat_interleave(7)
    for advantages in (values, per_token, per_token[:, None]):
        arguments, _ = split(packed | {"advantages": advantages}, {})
        out, _ = run(packed["logits"], arguments, {}, backend=backend)
        assert abs(out.loss - expected) < 1e-6


def test_one_token_per_sequence_means_per_sequence():
    """B == N: [B] is per sequence (here the same), [N,1] per token."""
    logits, ids = torch.randn(3, 5), torch.tensor([0, 1, 2])
    kwargs = {"cu_seqlens": torch.arange(4), "old_logps": torch.full((3,), -1.0)}
    a = gf.grpo_loss(logits, ids, torch.tensor([1.0, 2.0, 3.0]), **kwargs)
    b = gf.grpo_loss(logits, ids, torch.tensor([[1.0], [2.0], [3.0]]), **kwargs)
    assert a.loss == b.loss


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo", "cispo"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)], ids=["masked", "T=0", "B=0"])
def test_nothing_valid(backend, loss_type, shape):
    """B18: loss 0 with a graph, gradients zeros, metrics finite."""
    logits = torch.full((*shape, 5), torch.nan, requires_grad=True)
    out = gf.grpo_loss(
        logits, torch.zeros(shape, dtype=torch.int64), torch.full(shape[:1], torch.nan), torch.zeros(shape),
        old_logps=torch.full(shape, torch.nan), ref_logps=torch.full(shape, torch.nan), beta=0.1, entropy_coef=0.1,
        loss_type=loss_type, max_completion_length=4, epsilon_high=2.0, backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss == 0
    assert logits.grad.shape == logits.shape
    assert (logits.grad == 0).all()
    assert all(value == 0 for value in out.metrics.means().values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_with_nothing(backend):
    logits = torch.zeros(0, 5, requires_grad=True)
    empty = torch.zeros(0)
    out = gf.grpo_loss(logits, empty.long(), empty, cu_seqlens=torch.tensor([0]), old_logps=empty, backend=backend)
    out.loss.backward()
    assert out.loss == 0
    assert logits.grad.shape == (0, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_are_read_in_place(backend):
    """B29, B30: slices of wider tensors, transposed batches, expanded masks, int32 ids, bool/int/float masks."""
    problem = problems.make(all_valid=True)
    arguments, options = split(problem, {"beta": 0.1})
    out, grad = run(problem["logits"], arguments, options, backend=backend)
    wide = torch.full((3, 8, 50), torch.nan)
    wide[:, :7, :37] = problem["logits"]
    transposed = problem["logits"].transpose(0, 1).contiguous().transpose(0, 1)
    for view in (wide[:, :-1, :37], transposed):
        leaf = view.detach().requires_grad_()
        other = gf.grpo_loss(leaf, **arguments, **options, backend=backend)
        other.loss.backward()
        assert torch.allclose(other.loss, out.loss, rtol=1e-6)
        assert problems.relative_error(leaf.grad, grad) < 1e-6
    arguments["mask"] = torch.tensor([[1], [0], [1]]).expand(3, 7)
    masks = (arguments["mask"], arguments["mask"].float(), arguments["mask"].bool().clone())
    both = torch.cat([torch.zeros(3, 4, dtype=torch.int32), arguments["token_ids"].int()], 1)
    results = {
        gf.grpo_loss(problem["logits"], **arguments | {"mask": m, "token_ids": both[:, 4:]}, **options).loss.item()
        for m in masks
    }
    assert len(results) == 1


# DESIGN section 3's worked values and CASES B13-B17 on one token: (log-ratio, A, options) -> loss, dloss/dlogp.
ONE_TOKEN = {
    "clipped above": (math.log(1.5), 1.0, {}, -1.2, 0.0),
    "inside": (0.2, 0.48, {"epsilon": 0.3}, -0.586273, -0.586273),
    "above": (0.2, 0.48, {}, -0.576, 0.0),
    "B16 ++": (0.5, 1.0, {}, -1.2, 0.0),
    "B16 -+": (-0.5, 1.0, {}, -0.606531, -0.606531),
    "B16 +-": (0.5, -1.0, {}, 1.648721, 1.648721),
    "B16 --": (-0.5, -1.0, {}, 0.8, 0.0),
    "B14": (100.0, 1.0, {}, -1.2, 0.0),
    "B14 dead": (100.0, 0.0, {}, 0.0, 0.0),
    "B17": (3.0, -1.0, {"delta": 4.0}, 4.0, 0.0),
    "B17 off": (3.0, -1.0, {}, 20.0855369, 20.0855369),
    "B17 positive": (3.0, 1.0, {"delta": 4.0}, -1.2, 0.0),
    "at the bound": (0.0, 1.0, {"epsilon": 0.0}, -1.0, -1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_TOKEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_values_of_the_clip(backend, case):
    log_ratio, advantage, options, loss, slope = ONE_TOKEN[case]
    logits = torch.tensor([[[0.3, -0.2, 0.9]]], requires_grad=True)
    p = torch.softmax(logits.detach().double()[0, 0], 0)
    old = (p[1].log() - log_ratio).float().reshape(1, 1)
    ids = torch.tensor([[1]])
    out = gf.grpo_loss(logits, ids, torch.tensor([advantage]), old_logps=old, backend=backend, **options)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=2e-6, abs=1e-9)
    expected = slope * (torch.tensor([0.0, 1.0, 0.0]) - p)
    assert torch.allclose(logits.grad[0, 0].double(), expected, atol=1e-5 * max(1, abs(slope)))
    if slope == 0:
        assert (logits.grad == 0).all(), "exactly, not nearly"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [60.0, 80.0, 1e-3, -1e-3, 1e-6, 0.09, 0.11, 0.4, 0.6, -5.0])
def test_kl_numerics(backend, d):
    """B13: finite at 60 and 80; relative error 1e-6 near 0, where the naive form is noise."""
    logits = torch.zeros(1, 1, 4, requires_grad=True)
    logp = torch.tensor(-math.log(4.0))
    ref = (logp + d).reshape(1, 1)
    d = (ref - logp).item()  # as the loss sees it, in fp32
    expected = sum(d**n / math.factorial(n) for n in range(2, 20)) if abs(d) < 1 else math.exp(d) - d - 1
    zero = torch.zeros(1)
    out = gf.grpo_loss(logits, torch.tensor([[2]]), zero, ref_logps=ref, beta=1.0, backend=backend)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected, rel=2e-6 if abs(d) > 1 else 1.1e-6)
    assert out.metrics.means()["kl"].item() == pytest.approx(expected, rel=2e-6)
    slope = -math.expm1(d)
    assert logits.grad[0, 0, 2].item() == pytest.approx(0.75 * slope, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_overflows_to_inf_never_nan(backend):
    out = gf.grpo_loss(
        torch.zeros(1, 1, 4), torch.tensor([[2]]), torch.zeros(1), ref_logps=torch.tensor([[200.0]]), beta=1.0,
        backend=backend,
    )  # fmt: skip
    assert out.loss == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_ratio_is_exactly_one(backend, dtype):
    """B09: with old=None, and with the loss's own fp32 log-probs."""
    logits = (torch.randn(2, 5, 512) * 4).to(dtype)
    ids, advantages = torch.randint(0, 512, (2, 5)), torch.tensor([1.0, -0.3])
    first = gf.grpo_loss(logits, ids, advantages, backend=backend)
    again = gf.grpo_loss(logits.clone().requires_grad_(), ids, advantages, old_logps=first.logps, backend=backend)
    for out in (first, again):
        means = out.metrics.means()
        assert means["ratio/min"] == means["ratio/max"] == 1
        assert out.loss.item() == pytest.approx(-0.35, rel=1e-6)
    assert first.logps.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_zero_is_not_gradient_zero(backend):
    """B10: rewards 1 and 0, on-policy: the loss is 0, the gradient per token -A/N (onehot - p)."""
    logits = torch.randn(2, 1, 5, requires_grad=True)
    advantages = gf.group_advantages(torch.tensor([1.0, 0.0]), 2, eps=0.0)
    ids = torch.tensor([[1], [3]])
    out = gf.grpo_loss(logits, ids, advantages, backend=backend)
    out.loss.backward()
    onehot = torch.nn.functional.one_hot(ids[:, 0], 5)
    expected = -advantages[:, None] / 2 * (onehot - torch.softmax(logits[:, 0], -1))
    assert out.loss.abs() < 1e-7
    assert torch.allclose(logits.grad[:, 0], expected.detach(), atol=1e-7)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo", "cispo"])
@pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (1, 1, 1, 1, 1)], ids=str)
def test_micro_batches_add_up(loss_type, sizes):
    """B12: lengths 7, 3, 0, 1, 5 in any split, in float64, give the full batch's loss and gradient to 1e-12."""
    problem = problems.make(batch=5, dtype=torch.float64, all_valid=True)
    problem["mask"] = torch.arange(7)[None] < torch.tensor([7, 3, 0, 1, 5])[:, None]
    options = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.01, "max_completion_length": 9}
    options["epsilon_high"] = 1.2 if loss_type == "cispo" else 0.3
    valid = problem["mask"].sum()
    denominator = {"grpo": 5, "luspo": 5, "dr_grpo": 45}.get(loss_type, valid)
    arguments, options = split(problem, options)
    full, grad = run(problem["logits"], arguments, options)
    loss, grads, start = 0.0, [], 0
    for size in sizes:
        part = {name: value[start : start + size] for name, value in arguments.items()}
        out, g = run(
            problem["logits"][start : start + size],
            part,
            options | {"denominator": denominator, "entropy_denominator": valid},
        )
        loss, start = loss + out.loss, start + size
        grads.append(g)
    assert abs(loss - full.loss) < 1e-12
    assert (torch.cat(grads) - grad).abs().max() < 1e-12


def test_token_mean_is_global():
    """B45: micro-batches with token losses [6] and [1,1,1] have mean 2.25, not 3.5."""
    total = 0.0
    for length, advantage in ((1, -6.0), (3, -1.0)):
        ids = torch.zeros(1, length, dtype=torch.int64)
        logits, advantages = torch.zeros(1, length, 3), torch.tensor([advantage])
        total += gf.grpo_loss(logits, ids, advantages, loss_type="dapo", denominator=torch.tensor(4)).loss
    assert total.item() == pytest.approx(2.25)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo"])
def test_padded_width_does_not_matter(loss_type):
    """B47, B20: the same rows padded to T=7 and to T=12."""
    problem = problems.make()
    arguments, options = split(problem, {"loss_type": loss_type, "max_completion_length": 8, "beta": 0.1})
    out = gf.grpo_loss(problem["logits"], **arguments, **options)
    wider = {n: torch.nn.functional.pad(v, (0, 5)) for n, v in arguments.items()}
    padded = gf.grpo_loss(torch.nn.functional.pad(problem["logits"], (0, 0, 0, 5)), **wider, **options)
    assert abs(out.loss - padded.loss) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_reduction_none(backend):
    """B36: per-token losses with per-token upstream weights."""
    problem = problems.poison(problems.make())
    arguments, options = split(problem, {"beta": 0.1, "entropy_coef": 0.2})
    upstream = torch.rand(3, 7)
    leaf = problem["logits"].clone().requires_grad_()
    out = gf.grpo_loss(leaf, **arguments, **options, reduction="none", backend=backend)
    assert out.loss.shape == (3, 7)
    assert (out.loss[~problem["mask"]] == 0).all()
    (actual,) = torch.autograd.grad((out.loss * upstream).sum(), leaf)
    double = {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}
    exact = problem["logits"].double().requires_grad_()
    spec = gf.grpo_loss(exact, **double, **options, reduction="none")
    (expected,) = torch.autograd.grad((spec.loss * upstream).sum(), exact)
    assert problems.relative_error(out.loss, spec.loss) < 3e-6
    assert problems.relative_error(actual, expected) < 3e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequence_ratio_ignores_masked_tokens(backend):
    """B48: a masked log-ratio changed from -2 to -6 changes nothing; the ratio is exp(mean over valid tokens)."""
    problem = problems.make(batch=4, length=8, all_valid=True)
    problem["mask"] = torch.arange(8)[None] < torch.tensor([8, 1, 4, 2])[:, None]
    arguments, _ = split(problem, {})
    options = {"importance_sampling_level": "sequence"}
    first, grad = run(problem["logits"], arguments, options, backend=backend)
    arguments["old_logps"] = arguments["old_logps"].clone()
    arguments["old_logps"][1, 3] += 4
    second, grad2 = run(problem["logits"], arguments, options, backend=backend)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(grad, grad2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cispo_keeps_its_gradient_above_the_cap(backend):
    """B49: ratio e^2, A = 1, cap 1.28: loss -1.28 logp, gradient -1.28 (onehot - p)."""
    logits = torch.randn(1, 1, 5, requires_grad=True)
    logp = torch.log_softmax(logits.detach(), -1)[0, 0]
    out = gf.grpo_loss(
        logits, torch.tensor([[2]]), torch.ones(1), old_logps=(logp[2] - 2).reshape(1, 1), loss_type="cispo",
        epsilon_high=1.28, backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.28 * logp[2].item(), rel=1e-6)
    expected = -1.28 * (torch.eye(5)[2] - logp.exp())
    assert torch.allclose(logits.grad[0, 0], expected, atol=1e-6)
    assert out.metrics.means()["cispo_clip_ratio"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_bonus_gradient(backend):
    """B52: -c * mean entropy has gradient c/N * p (log p + H), composed with temperature, softcap and scale."""
    logits = torch.randn(1, 3, 6, requires_grad=True)
    transform = {"temperature": 0.5, "softcap": 3.0, "logit_scale": 2.0}
    out = gf.grpo_loss(
        logits,
        torch.zeros(1, 3, dtype=torch.int64),
        torch.zeros(1),
        entropy_coef=0.3,
        backend=backend,
        **transform,
    )
    out.loss.backward()
    exact = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(oracle.transformed(exact, **transform), -1)
    (0.3 * (logp.exp() * logp).sum(-1).mean()).backward()
    assert logits.grad.abs().max() > 1e-3
    assert problems.relative_error(logits.grad, exact.grad) < 3e-6


@pytest.mark.parametrize("name", ["plain", "sequence bonus", "cispo sequence", "dapo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_packing(backend, name):
    """Sequences of 4, 0, 7 and 1 tokens, packed, equal the padded batch; an empty one counts as a sequence."""
    lengths = [4, 0, 7, 1]
    problem = problems.make(batch=4, length=7, all_valid=True)
    problem["mask"] = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    arguments, options = split(problem, OPTIONS[name])
    out, grad = run(problem["logits"], arguments, options, backend=backend)
    packed = {key: value[problem["mask"]] for key, value in problem.items()}
    packed["cu_seqlens"] = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32)
    arguments, options = split(packed, OPTIONS[name])
    out_packed, grad_packed = run(packed["logits"], arguments, options, backend=backend)
    assert abs(out.loss - out_packed.loss) < 1e-6 * max(1, abs(out.loss))
    assert problems.relative_error(grad_packed, grad[problem["mask"]]) < 1e-6
    for key, value in out.metrics.means().items():
        assert torch.allclose(value, out_packed.metrics.means()[key], atol=1e-6), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_corners_of_the_kl(backend):
    """Every backend: an impossible token costs inf, not NaN; a ratio that overflows times a KL of 0 is 0."""
    ids, zero = torch.tensor([[1]]), torch.zeros(1)
    impossible = torch.tensor([[[0.0, -torch.inf, 0.0]]], requires_grad=True)
    ref = torch.tensor([[-1.0]])
    out = gf.grpo_loss(impossible, ids, zero, ref_logps=ref, beta=1.0, backend=backend)
    assert out.loss == torch.inf
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    logp = torch.log_softmax(torch.zeros(3), 0)[1].reshape(1, 1)
    same = gf.grpo_loss(logits.detach(), ids, zero, backend=backend).logps
    out = gf.grpo_loss(
        logits, ids, zero, ref_logps=same, old_logps=logp - 200, beta=1.0, use_bias_correction_kl=True, backend=backend
    )
    out.loss.backward()
    assert out.loss == 0
    assert (logits.grad == 0).all()


def test_per_sequence_advantages_when_sequences_are_as_many_as_tokens():
    """B == N with an empty sequence: [B] is per sequence, so both tokens have the second sequence's advantage."""
    kwargs = {"cu_seqlens": torch.tensor([0, 0, 2]), "old_logps": torch.full((2,), -1.0)}
    logits, ids = torch.randn(2, 5), torch.tensor([0, 1])
    a = gf.grpo_loss(logits, ids, torch.tensor([1.0, 2.0]), **kwargs)
    b = gf.grpo_loss(logits, ids, torch.tensor([[2.0], [2.0]]), **kwargs)
    assert a.loss == b.loss


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_flows_at_the_bounds(backend, level):
    """Both bounds at ratio 1, and every ratio is 1: nothing is clipped, for either sign of the advantage."""
    problem = problems.make(all_valid=True)
    ids, logits = problem["token_ids"], problem["logits"]
    old = gf.token_logprobs(logits, ids, backend=backend)
    advantages = torch.tensor([1.0, -1.0, 2.0])
    expected = run(logits, {"token_ids": ids, "advantages": advantages}, {}, backend=backend)[1]
    options = {"epsilon": 0.0, "epsilon_high": 0.0, "importance_sampling_level": level}
    arguments = {"token_ids": ids, "advantages": advantages, "old_logps": old}
    out, actual = run(logits, arguments, options, backend=backend)
    assert problems.relative_error(actual, expected) < 3e-6
    assert out.metrics.means()["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_ratio_of_an_impossible_token_is_one(backend, reduction, level):
    """A target at -inf: logp is -inf, and -inf - -inf must not make the ratio NaN."""
    logits = torch.tensor([[[0.0, 1.0, -torch.inf], [0.0, 1.0, 2.0]]])
    arguments = {"token_ids": torch.tensor([[2, 1]]), "advantages": torch.tensor([1.0])}
    leaf = logits.clone().requires_grad_()
    out = gf.grpo_loss(
        leaf, **arguments, reduction=reduction, importance_sampling_level=level, backend=backend
    )  # fmt: skip
    out.loss.sum().backward()
    assert out.logps[0, 0] == -torch.inf
    assert out.loss.mean() == -1
    assert out.metrics.means()["ratio/max"] == out.metrics.means()["ratio/min"] == 1
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0, 0, 2] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_overflowing_ratio_times_no_kl(backend, level):
    """use_bias_correction_kl with log-ratio 100 and ref == logp: inf * 0 would be NaN."""
    leaf = torch.zeros(1, 1, 4, requires_grad=True)
    logps = gf.token_logprobs(leaf.detach(), torch.tensor([[0]]), backend=backend)
    out = gf.grpo_loss(
        leaf, torch.tensor([[0]]), torch.tensor([0.0]), old_logps=logps - 100, ref_logps=logps, beta=0.1,
        use_bias_correction_kl=True, importance_sampling_level=level, backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss == 0
    assert (leaf.grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_reduction_none_with_an_entropy_bonus(backend):
    """Every token has its own - entropy_coef * H, without entropy_denominator, 0 where masked."""
    problem = problems.make()
    arguments, _ = split(problem, {})
    logits, mask = problem["logits"], problem["mask"]
    plain = gf.grpo_loss(logits, **arguments, reduction="none", return_entropy=True, backend=backend)
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    bonus = gf.grpo_loss(leaf, **arguments, reduction="none", entropy_coef=0.3, entropy_denominator=5, backend=backend)
    assert torch.allclose(bonus.loss, plain.loss - 0.3 * plain.entropy, atol=1e-6)
    assert (bonus.loss[~mask] == 0).all()
    bonus.loss.sum().backward()
    gf.grpo_loss(
        other, **arguments, loss_type="dapo", denominator=1, entropy_coef=0.3, entropy_denominator=1, backend=backend
    ).loss.backward()  # fmt: skip
    assert problems.relative_error(leaf.grad, other.grad) < 3e-6


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_any_layout(backend, shape):
    """Empty logits whose vocabulary has no unit stride: torch calls them contiguous."""
    logits = torch.empty_strided(shape, (15, 1, 3), requires_grad=True)
    ids = torch.zeros(shape[:2], dtype=torch.int64)
    out = gf.grpo_loss(logits, ids, torch.ones(shape[0]), backend=backend)
    out.loss.backward()
    assert out.loss == 0
    assert logits.grad.shape == shape
    assert gf.token_logprobs(logits, ids, backend=backend).shape == shape[:2]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_overflowing_ratio_times_no_weight(backend, level):
    """Log-ratio 100 with a negative advantage, which no clip bounds, and sampling weight 0."""
    leaf = torch.zeros(1, 1, 4, requires_grad=True)
    out = gf.grpo_loss(
        leaf, torch.tensor([[0]]), torch.tensor([-1.0]), old_logps=torch.tensor([[-101.0]]),
        sampling_weights=torch.tensor([0.0]), importance_sampling_level=level, backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss == 0
    assert (leaf.grad == 0).all()


@pytest.mark.parametrize("d", [-30.0, -1.5, 0.5, 1.5, 14.0, 40.0])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=["fused", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_corrected_kl_far_from_the_reference(backend, options, d):
    """r k3 and its derivative -r d: as a difference of two terms of size e^d nothing would be left of it in fp32."""
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 3, 11), torch.randint(0, 11, (2, 3))
    logps = gf.token_logprobs(logits.double(), ids)
    vectors = {"old_logps": logps - 0.3, "ref_logps": logps + d}
    grads = []
    for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
        leaf = logits.to(dtype).requires_grad_()
        out = gf.grpo_loss(
            leaf, ids, torch.zeros(2, dtype=dtype), **{k: v.to(dtype) for k, v in vectors.items()}, beta=1.0,
            use_bias_correction_kl=True, backend=name, loss_type="dapo", denominator=1, **options,
        )  # fmt: skip
        grads.append(torch.autograd.grad(out.loss.sum(), leaf)[0])
        onehot = torch.nn.functional.one_hot(ids, 11)
        wanted = -(0.3 + 0 * logps).exp()[..., None] * d * (onehot - logits.double().softmax(-1))
        assert problems.relative_error(grads[-1], wanted) < 2e-5
    assert problems.relative_error(*grads) < 2e-5
    hidden = torch.eye(11, dtype=torch.float32)[None, :2].expand(2, 2, 11).requires_grad_()
    weight = torch.randn(11, 11)
    rows = hidden.detach().double() @ weight.double().t()
    logps = gf.token_logprobs(rows, ids[:, :2])
    loss = gf.linear_grpo_loss(
        hidden, weight, ids[:, :2], torch.zeros(2), old_logps=(logps - 0.3).float(), ref_logps=(logps + d).float(),
        beta=1.0, use_bias_correction_kl=True, loss_type="dapo", denominator=1, backend=backend,
    ).loss  # fmt: skip
    onehot = torch.nn.functional.one_hot(ids[:, :2], 11)
    wanted = -torch.tensor(0.3).exp() * d * (onehot - rows.softmax(-1)) @ weight.double()
    assert problems.relative_error(torch.autograd.grad(loss, hidden)[0], wanted) < 2e-5
