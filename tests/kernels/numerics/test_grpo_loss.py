import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_oracle import DEVICE, Case, check, error, expected, grpo_loss, make_case, poison

pytestmark = pytest.mark.usefixtures("implementation")
FULL = {"old": True, "ref": True, "weights": True, "beta": 0.1}

# Below a vector, odd, one block exactly, several blocks with both edges, an unaligned real vocabulary (GPT-2).
SIZES = [1, 3, 7, 1003, 2048, 8201, 50257]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("V", SIZES)
def test_sizes_and_dtypes(V, dtype):
    case = make_case(V=V, dtype=dtype, **FULL)
    check(grpo_loss(case), expected(case), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"old": True},
        {"old": True, "delta": 1.3},
        {"ref": True, "beta": 0.04},
        {"ref": True, "beta": 0.04, "bias_correction": True},
        {**FULL, "bias_correction": True},
        {"weights": True},
        {"entropy": True},
        {**FULL, "entropy": True},
        {"temperature": 0.6},
        {"logit_scale": 0.0625},
        {"softcap": 5.0},
        {**FULL, "entropy": True, "temperature": 1.7, "softcap": 5.0, "logit_scale": 1.5},
    ],
    ids=lambda o: ",".join(o) or "on-policy",
)
def test_options(options):
    case = make_case(V=2051, **options)
    check(grpo_loss(case), expected(case), torch.float32)


def test_vocabulary_of_many_blocks():
    case = make_case(B=1, T=2, V=262145, dtype=torch.bfloat16, **FULL)
    case = case.with_(valid=torch.ones_like(case.valid))
    check(grpo_loss(case), expected(case), torch.bfloat16)


@pytest.mark.parametrize("V", [151936, 262145, 1048577])
def test_worked_values_of_large_vocabularies(V):
    case = flat_case(V, dtype=torch.bfloat16)
    a = 3.0
    case.logits[0, 0, case.ids[0, 0]] = a
    got = grpo_loss(case)
    assert got.logps.item() == pytest.approx(a - math.log(math.exp(a) + V - 1), rel=1e-6)
    assert abs(got.grad.double().sum().item()) < 2**-9


def flat_case(V, value=0.0, dtype=torch.float32):
    """One valid token over V equal logits, A = 1, on-policy."""
    one = torch.ones(1, 1, device=DEVICE)
    logits = torch.full((1, 1, V), value, dtype=dtype, device=DEVICE)
    return Case(logits, torch.full((1, 1), V // 2, device=DEVICE), one.to(torch.uint8), one, one)


@pytest.mark.parametrize("value", [1e4, -1e4, 3e38, -3e38, -8.0])
@pytest.mark.parametrize("V", [100, 4096])
def test_constant_rows(value, V):
    got = grpo_loss(flat_case(V, value))
    assert got.logps.item() == pytest.approx(-math.log(V), rel=1e-6)
    assert got.entropy.item() == pytest.approx(math.log(V), rel=1e-6)
    assert (
        error(got.grad, (torch.full((1, 1, V), 1 / V).index_fill(2, torch.tensor([V // 2]), 1 / V - 1)).to(DEVICE))
        < 1e-6
    )


def test_many_equal_bf16_logits():
    assert grpo_loss(flat_case(4096, dtype=torch.bfloat16)).logps.item() == pytest.approx(-8.317766, abs=1e-6)


@triton.jit
def _fma_kernel(x):
    tl.store(x, tl.fma(tl.load(x), tl.load(x), tl.load(x + 1)))


def exponent_error(level):
    """Of logits around `level`: none if multiply-add is fused, which older interpreters of Triton do not do."""
    x = torch.tensor([1 + 2**-12, -1 - 2**-11], device=DEVICE)
    _fma_kernel[(1,)](x)
    return 1e-6 if x[0] == 2**-24 else 1e-6 + 1e-7 * level


@pytest.mark.parametrize("gap", [60.0, 89.0, 2e4])
@pytest.mark.parametrize("of_target", [True, False])
@pytest.mark.parametrize("level", [0.0, 1e4])
def test_one_logit_far_above(gap, of_target, level):
    case = flat_case(1003, level)
    top = case.ids.item() if of_target else 7
    case.logits[..., top] += gap
    got, want = grpo_loss(case), expected(case)
    assert got.logps.item() == pytest.approx(want.logps.item(), rel=1e-6, abs=exponent_error(level))
    assert got.logps.item() <= 0 <= got.entropy.item()
    assert got.entropy.item() == pytest.approx(want.entropy.item(), abs=1e-6)
    assert (got.grad - want.grad).abs().max() < 1e-6  # p and 1 - p, of order 1 where they are not tiny


def test_one_extreme_logit_and_an_extreme_target():
    for target, other in ((0.0, 3e38), (3e38, 0.0), (-1e38, 0.0), (3e38, -3e38)):
        case = flat_case(40, other)
        case.logits[..., case.ids.item()] = target
        got, want = grpo_loss(case), expected(case)
        assert got.logps.item() == pytest.approx(want.logps.item(), rel=1e-6, abs=1e-6)
        assert torch.isfinite(got.grad).all()
        assert error(got.grad, want.grad) < 1e-6


def test_improbable_target_is_summed_from_the_maximum():
    case = make_case(V=3001, spread=2.0, entropy=True)
    case.logits.scatter_(-1, case.ids[..., None], -70.0)
    check(grpo_loss(case), expected(case), torch.float32)


@pytest.mark.parametrize("finite", [0.5, 0.05, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_minus_infinity(finite, softcap):
    case = make_case(V=3001, entropy=True, softcap=softcap)
    dead = torch.rand(case.logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) >= finite
    dead.scatter_(-1, case.ids[..., None], False)
    case.logits[dead] = -math.inf
    got = grpo_loss(case)
    check(got, expected(case), torch.float32)
    assert (got.grad[dead] == 0).all()


@pytest.mark.parametrize("row, entropy", [([0.3, -math.inf, -math.inf], 0.0), ([5.0, 5.0, -math.inf], math.log(2))])
def test_entropy_with_zero_probabilities(row, entropy):
    case = flat_case(3).with_(
        logits=torch.tensor(row, device=DEVICE).reshape(1, 1, 3), ids=torch.zeros(1, 1, dtype=torch.int64)
    )
    got = grpo_loss(case.with_(ids=case.ids.to(DEVICE)))
    assert got.entropy.item() == pytest.approx(entropy, abs=1e-7)


def test_target_of_minus_infinity():
    case = flat_case(9)
    case.logits[..., case.ids.item()] = -math.inf
    got = grpo_loss(case)
    assert got.logps.item() == -math.inf
    assert got.grad[..., case.ids.item()].item() == 0
    assert torch.isfinite(got.grad).all()


def test_temperature_worked_value():
    case = flat_case(3).with_(logits=torch.tensor([[[1.0, 2.0, 3.0]]], device=DEVICE), scalars={"temperature": 0.5})
    case = case.with_(ids=torch.full((1, 1), 2, device=DEVICE))
    assert grpo_loss(case).logps.item() == pytest.approx(-0.142932, abs=1e-6)


def test_on_policy_is_exact():
    case = make_case(V=512, dtype=torch.bfloat16, spread=4.0)
    first = grpo_loss(case)
    again = grpo_loss(case.with_(old_logps=first.logps))
    valid = case.valid.bool()
    for got in (first, again):
        assert torch.equal(got.losses[valid], -case.advantages[valid])
    assert torch.equal(first.grad, again.grad)
    assert first.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_equals_out_of_place(dtype):
    case = make_case(V=2051, dtype=dtype, **FULL, entropy=True)
    want = grpo_loss(case)
    logits = case.logits.clone()
    got = grpo_loss(case.with_(logits=logits), out=logits)
    for name in ("losses", "logps", "entropy", "grad"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_rows_do_not_depend_on_the_batch():
    case = make_case(B=2, T=4, V=1501, dtype=torch.bfloat16, **FULL)
    whole = grpo_loss(case)
    per_token = ("ids", "valid", "advantages", "coef", "weights", "old_logps", "ref_logps")
    for b, t in ((0, 0), (1, 3)):
        alone = {name: getattr(case, name)[b : b + 1, t : t + 1].clone() for name in per_token}
        got = grpo_loss(case.with_(logits=case.logits[b : b + 1, t : t + 1].clone(), **alone))
        for name in ("losses", "logps", "entropy", "grad"):
            assert torch.equal(getattr(got, name)[0, 0], getattr(whole, name)[b, t]), name


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("token_id", [-100, 1 << 40])
def test_masked_slots_do_not_matter(garbage, token_id):
    case = make_case(V=203, **FULL, entropy=True)
    dead = case.valid == 0
    vectors = {
        n: getattr(case, n).masked_fill(dead, garbage)
        for n in ("advantages", "coef", "weights", "old_logps", "ref_logps")
    }
    logits = case.logits.masked_fill(dead[..., None], garbage)
    got, want = (
        grpo_loss(case.with_(logits=logits, ids=case.ids.masked_fill(dead, token_id), **vectors)),
        grpo_loss(case),
    )
    for name in ("losses", "logps", "entropy", "grad"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert (getattr(got, name)[dead] == 0).all()


@pytest.mark.parametrize("token_id", [-1, 203, 1 << 40])
def test_id_outside_the_vocabulary_is_never_read(token_id):
    case = make_case(V=203)
    want = grpo_loss(case)
    case.ids[1, 1] = token_id
    got = grpo_loss(case)
    assert math.isnan(got.logps[1, 1].item())
    rest = torch.ones_like(case.valid, dtype=torch.bool)
    rest[1, 1] = False
    assert torch.equal(got.grad[rest], want.grad[rest])


def test_nothing_flows_where_the_objective_is_flat():
    case = make_case(V=203, old=True)
    logps = expected(case).logps.float()
    # A > 0 and ratio e^100, which overflows; A = 0 likewise; A < 0 and ratio e^-1.
    old = logps + torch.tensor([[-100.0, 0.0, -100.0], [1.0, 0.0, 0.0]], device=DEVICE)
    advantages = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 1.0, 1.0]], device=DEVICE)
    got = grpo_loss(case.with_(old_logps=old, advantages=advantages))
    assert got.losses[0].tolist() == pytest.approx([-1.2, 0.0, 0.0])
    assert got.losses[1, 0].item() == pytest.approx(0.8)
    assert (got.grad[0] == 0).all()
    assert (got.grad[1, 0] == 0).all()
    assert (got.grad[1, 1:] != 0).any()


@pytest.mark.parametrize("shape", [(0, 3, 17), (2, 0, 17)])
def test_empty(shape):
    B, T, _V = shape
    vector = torch.zeros(B, T, device=DEVICE)
    grpo_loss(Case(torch.zeros(shape, device=DEVICE), vector.long(), vector.to(torch.uint8), vector, vector))


def test_entropy_is_optional():
    case = make_case(V=300, entropy=True)
    got, want = grpo_loss(case, return_entropy=False), grpo_loss(case)
    assert got.entropy is None
    assert torch.equal(got.grad, want.grad)


def test_offsets_pass_int32():
    # Rows 2^30 elements apart in a buffer whose pages are never touched elsewhere.
    V, pitch = 37, (1 << 30) + 3
    buffer = torch.empty(3 * pitch + V, dtype=torch.bfloat16, device=DEVICE)
    case = make_case(B=1, T=4, V=V, dtype=torch.bfloat16)
    logits = buffer.as_strided((1, 4, V), (4 * pitch, pitch, 1))
    logits.copy_(case.logits)
    got = grpo_loss(case.with_(logits=logits), out=logits)
    want = grpo_loss(case)
    assert torch.equal(got.grad, want.grad)
    assert torch.equal(got.logps, want.logps)


@pytest.mark.parametrize(
    "V, offset, dtype",
    [(304, 0, torch.bfloat16), (304, 1, torch.bfloat16), (301, 5, torch.bfloat16), (300, 1, torch.float32)],
)
def test_strides(V, offset, dtype):
    case = make_case(V=V, dtype=dtype, **FULL)
    want = grpo_loss(case)
    B, T, _ = case.logits.shape
    for padding, extra in ((0, 1), (11, 0), (8, 1)):
        wide = poison(B * (T + extra) * (V + padding) + offset, dtype=dtype)
        view = wide[offset:].view(B, T + extra, V + padding)[:, :T, :V]
        view.copy_(case.logits)
        out = poison(*view.shape, dtype=dtype)
        check(grpo_loss(case.with_(logits=view), out=out), want, dtype)
        check(grpo_loss(case.with_(logits=view), out=view), want, dtype)
        assert torch.isnan(wide).sum() == wide.numel() - B * T * V  # nothing beside the rows was written
