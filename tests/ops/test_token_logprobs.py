"""Log-probs and entropy of a row: values at the extremes, on every backend of this process."""

import math

import oracle
import problems
import pytest
import torch

import grpo_fast as gf

BACKENDS = problems.backends_here()


def logp_of(row, token, **options):
    row = torch.as_tensor(row)
    logits = row[None, None].requires_grad_()
    values = gf.token_logprobs(logits, torch.tensor([[token]]), return_entropy=True, **options)
    values.logps.sum().backward()
    return values.logps.item(), values.entropy.item(), logits.grad[0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
class TestRows:
    def test_padding_lanes_stay_out(self, backend):
        """B05: 100 logits of -8; zeros in the lanes beyond would give -11.33."""
        assert logp_of(torch.full((100,), -8.0), 3, backend=backend)[0] == pytest.approx(-4.605170, rel=1e-6)

    def test_sums_in_fp32(self, backend):
        """B07: 4096 equal bf16 logits."""
        logp, entropy, _ = logp_of(torch.full((4096,), 0.5, dtype=torch.bfloat16), 9, backend=backend)
        assert logp == pytest.approx(-math.log(4096), rel=1e-6)
        assert entropy == pytest.approx(math.log(4096), rel=1e-6)

    @pytest.mark.parametrize("value", [1e4, -1e4, 3e38, -3e38, 0.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_constant_rows(self, backend, value, dtype):
        """B08."""
        logp, entropy, grad = logp_of(torch.full((77,), value, dtype=dtype), 76, backend=backend)
        assert logp == pytest.approx(-math.log(77), rel=1e-6)
        assert entropy == pytest.approx(math.log(77), rel=1e-6)
        assert grad.isfinite().all()

    @pytest.mark.parametrize("top", [89.0, 88.72, 2e4, 1e30])
    def test_gaps(self, backend, top):
        """B08: the winner has logp 0 and the loser minus the gap, wherever in the row they stand."""
        for place in (0, 40, 76):
            row = torch.zeros(77)
            row[place] = top
            assert logp_of(row.clone(), place, backend=backend)[0] == pytest.approx(0.0, abs=1e-6)
            logp, entropy, grad = logp_of(row, (place + 1) % 77, backend=backend)
            assert logp == pytest.approx(-top, rel=1e-6)
            assert abs(entropy) < 1e-6
            assert grad.isfinite().all()
            assert grad[place].item() == pytest.approx(-1.0)

    @pytest.mark.parametrize("kept", [1, 4, 38])
    def test_minus_infinity(self, backend, kept):
        """B23: the finite sub-vocabulary decides, gradient 0 at -inf."""
        row = torch.randn(77)
        row[kept:] = -torch.inf
        exact = row[:kept].double().requires_grad_()
        logp_exact = torch.log_softmax(exact, 0)
        logp_exact[0].backward()
        logp, entropy, grad = logp_of(row, 0, backend=backend)
        assert logp == pytest.approx(logp_exact[0].item(), rel=1e-5, abs=1e-7)
        assert entropy == pytest.approx(-(logp_exact.exp() * logp_exact).sum().item(), rel=1e-5, abs=1e-6)
        assert torch.allclose(grad[:kept].double(), exact.grad, atol=1e-6)
        assert (grad[kept:] == 0).all()

    def test_entropy_of_impossible_tokens(self, backend):
        """B24."""
        assert logp_of([0.3, -math.inf, -math.inf], 0, backend=backend)[1] == pytest.approx(0, abs=1e-7)
        assert logp_of([5.0, 5.0, -math.inf], 0, backend=backend)[1] == pytest.approx(math.log(2), rel=1e-6)

    def test_minus_infinity_survives_transforms(self, backend):
        logp, _, grad = logp_of(
            [5.0, 5.0, -math.inf], 0, softcap=3.0, logit_scale=0.5, temperature=2.0, backend=backend
        )
        assert logp == pytest.approx(-math.log(2), rel=1e-6)
        assert grad[2] == 0

    def test_temperature(self, backend):
        """B11: [1,2,3], token 2, temperature 0.5; the gradient carries 1/T."""
        logp, _, grad = logp_of([1.0, 2.0, 3.0], 2, temperature=0.5, backend=backend)
        assert logp == pytest.approx(-0.142932, abs=1e-6)
        p = torch.softmax(torch.tensor([2.0, 4.0, 6.0]), 0)
        assert torch.allclose(grad, (torch.tensor([0.0, 0.0, 1.0]) - p) / 0.5, atol=1e-6)

    def test_confident_target_in_bf16(self, backend):
        """The target's entry comes from fp32 scalars: p = 0.9999 rounded to bf16 before 1 - p would lose it all."""
        row = torch.zeros(50, dtype=torch.bfloat16)
        row[7] = 13.0
        _, _, grad = logp_of(row, 7, backend=backend)
        p = torch.softmax(row.double(), 0)[7].item()
        assert grad[7].item() == pytest.approx(1 - p, rel=4e-3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "transform", [{}, {"temperature": 0.7}, {"softcap": 4.0, "logit_scale": 3.0, "temperature": 1.3}]
    )
    def test_no_worse_than_torch(self, backend, dtype, transform):
        logits = (torch.randn(2, 3, 1031) * 4).to(dtype)
        ids = torch.randint(0, 1031, (2, 3))
        upstream, upstream_entropy = torch.randn(2, 3), torch.randn(2, 3)
        results = []
        exact = logits.double().requires_grad_()
        logp = torch.log_softmax(oracle.transformed(exact, **transform), -1)
        true_logps = logp.gather(-1, ids[..., None])[..., 0]
        true_entropy = -(logp.exp() * logp).sum(-1)
        ((true_logps * upstream).sum() + (true_entropy * upstream_entropy).sum()).backward()
        leaf = logits.clone().requires_grad_()
        results = gf.token_logprobs(leaf, ids, return_entropy=True, backend=backend, **transform)
        ((results.logps * upstream).sum() + (results.entropy * upstream_entropy).sum()).backward()
        assert problems.relative_error(results.logps, true_logps) < 1e-6
        assert problems.relative_error(results.entropy, true_entropy) < 4e-6
        rounding = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        if backend == "triton":
            rounding *= 2  # the interpreter truncates where hardware rounds to nearest
        assert problems.relative_error(leaf.grad, exact.grad) < rounding

    def test_masked_slots_hold_anything(self, backend):
        """B27, B15: same result as with id 0 and a clean row; logps and entropy 0 there, gradient exactly 0."""
        logits = torch.randn(2, 4, 9)
        ids = torch.randint(0, 9, (2, 4))
        mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]])
        clean = gf.token_logprobs(logits, ids, mask, return_entropy=True, backend=backend)
        for garbage in (torch.nan, torch.inf, -torch.inf):
            for bad in (-100, 9, 2**40):
                dirty = logits.masked_fill(mask[..., None] == 0, garbage).requires_grad_()
                values = gf.token_logprobs(
                    dirty, ids.masked_fill(mask == 0, bad), mask, return_entropy=True, backend=backend
                )
                (values.logps + values.entropy).sum().backward()
                assert torch.equal(values.logps, clean.logps)
                assert torch.equal(values.entropy, clean.entropy)
                assert (dirty.grad[mask == 0] == 0).all()
                assert dirty.grad.isfinite().all()
        assert (clean.logps[mask == 0] == 0).all()

    def test_row_does_not_depend_on_its_batch(self, backend):
        logits = torch.randn(5, 7, 101)
        ids = torch.randint(0, 101, (5, 7))
        whole = gf.token_logprobs(logits, ids, backend=backend)
        if backend != "reference":
            assert torch.equal(gf.token_logprobs(logits[3:4, 2:5], ids[3:4, 2:5], backend=backend), whole[3:4, 2:5])
        assert torch.equal(gf.token_logprobs(logits, ids, backend=backend), whole)

    def test_packed_rows_need_no_cu_seqlens(self, backend):
        logits, ids = torch.randn(6, 11), torch.randint(0, 11, (6,))
        expected = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(gf.token_logprobs(logits, ids, backend=backend), expected, atol=1e-6)


def test_target_row_is_the_one_before_the_token():
    """B62: with P=5 prompt and T=4 completion tokens, row t of the loss is position P-1+t of the model's logits."""
    full = torch.randn(1, 9, 13)
    sequence = torch.randint(0, 13, (1, 9))
    expected = torch.log_softmax(full[:, :-1], -1).gather(-1, sequence[:, 1:, None])[:, 4:, 0]
    assert torch.allclose(gf.token_logprobs(full[:, 4:8], sequence[:, 5:]), expected, atol=1e-6)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ extension is not built")
def test_more_than_2_to_31_logits():
    """B01: row 14134 straddles element 2^31, row 14135 begins past it. Only the valid rows are ever read."""
    rows, vocab = 16384, 151936
    logits = torch.zeros(1, rows, vocab, dtype=torch.bfloat16)  # pages come into being when touched
    valid_rows = torch.tensor([0, 14133, 14134, 14135, 16383])
    ids = torch.arange(rows)[None] * 9 % vocab
    mask = torch.zeros(1, rows, dtype=torch.bool)
    mask[0, valid_rows] = True
    top = valid_rows % 7
    logits[0, valid_rows, ids[0, valid_rows]] = top.to(torch.bfloat16)
    expected = top - (top.double().exp() + vocab - 1).log()
    holder = problems.as_non_leaf(logits)
    logps = gf.token_logprobs(holder, ids, mask, inplace=True, backend="cpu")
    assert torch.allclose(logps[0, valid_rows].double(), expected, rtol=1e-6)
    logps.sum().backward()
    sums = logits[0, valid_rows].double().sum(-1)
    assert sums.abs().max() < 1e-2, "a gradient row sums to 0, to bf16 rounding"
    assert torch.allclose(logits[0, valid_rows, ids[0, valid_rows]].double(), 1 - expected.exp(), rtol=4e-3)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
@pytest.mark.parametrize("vocab", [151936, 262145, 1048577])
def test_no_limit_on_the_vocabulary(backend, vocab):
    """B03."""
    logits = torch.zeros(2, 1, vocab)
    ids = torch.tensor([[vocab - 1], [3]])
    logits[0, 0, vocab - 1] = 5.0
    expected = torch.tensor([5 - math.log(math.exp(5) + vocab - 1), -math.log(vocab)])
    rtol = 1e-4 if backend == "reference" else 1e-6  # torch's own fp32 sum of a million terms
    assert torch.allclose(gf.token_logprobs(logits, ids, backend=backend)[:, 0], expected, rtol=rtol)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_target_has_no_gradient(backend, entropy):
    """logp = -inf; the row's gradient is -p, and 0 at the target itself, where onehot - p would be 1."""
    logits = torch.tensor([[[1.0, -torch.inf, 2.0, 0.5]]], requires_grad=True)
    out = gf.token_logprobs(logits, torch.tensor([[1]]), return_entropy=True, backend=backend)
    (out.logps + 0 * out.entropy if entropy else out.logps).sum().backward()
    expected = -torch.softmax(logits.detach(), -1)
    assert out.logps == -torch.inf
    assert torch.allclose(logits.grad, expected, atol=1e-7)
    assert logits.grad[0, 0, 1] == 0


@pytest.mark.parametrize("gap", [20.0, 40.0, 80.0])
@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ extension is not built")
def test_cpu_knows_how_far_a_certain_target_is_from_1(gap):
    """-log(1 + e^-gap), which 1 + e^-gap has forgotten in double from 37 on."""
    logits = torch.tensor([[[gap, 0.0]]], requires_grad=True)
    logps = gf.token_logprobs(logits, torch.tensor([[0]]), backend="cpu")
    logps.sum().backward()
    assert logps.item() == pytest.approx(-math.exp(-gap), rel=1e-5, abs=0)
    assert logits.grad[0, 0].tolist() == pytest.approx([math.exp(-gap), -math.exp(-gap)], rel=1e-5, abs=0)
