"""row_stats, row_grad and scale_ on their own."""

import math

import pytest
import torch
from kernel_oracle import DEVICE, ROUNDING, error, grpo_loss, kernels, make_case, poison, transformed

pytestmark = pytest.mark.usefixtures("implementation")
TRANSFORMS = [(1.0, 0.0, 1.0), (0.6, 0.0, 1.0), (1.7, 5.0, 1.5)]


def statistics(logits, ids, valid, transform, entropy=True):
    logps, row_max, row_sum = (poison(*ids.shape) for _ in range(3))
    entropies = poison(*ids.shape) if entropy else None
    kernels.row_stats(logits, ids, valid, logps, entropies, row_max, row_sum, *transform)
    return logps, entropies, row_max, row_sum


def gradient(logits, ids, valid, transform, g, g_entropy, out):
    logps, entropy, row_max, row_sum = statistics(logits, ids, valid, transform)
    kernels.row_grad(logits, ids, valid, row_max, row_sum, logps, entropy, g, g_entropy, out, *transform)
    return out


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "V, dtype", [(5, torch.float32), (2051, torch.float16), (2056, torch.bfloat16), (9000, torch.bfloat16)]
)
def test_statistics_and_gradient(V, dtype, transform):
    case = make_case(V=V, dtype=dtype)
    valid = case.valid.bool()
    g, g_entropy = torch.randn(2, *valid.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    x = case.logits.double().requires_grad_()
    logp_V = transformed(x, *transform).log_softmax(-1)
    logp = logp_V.gather(-1, case.ids[..., None])[..., 0] * valid
    H = -(logp_V.exp() * logp_V).sum(-1) * valid

    logps, entropy, row_max, row_sum = statistics(case.logits, case.ids, case.valid, transform)
    assert error(logps, logp.detach()) < 3e-6
    assert error(entropy, H.detach()) < 3e-6
    assert row_max[~valid].tolist() == [0.0]
    assert row_sum[~valid].tolist() == [1.0]
    only_logps = statistics(case.logits, case.ids, case.valid, transform, entropy=False)[0]
    assert error(only_logps, logps) < 1e-6

    for with_entropy in (False, True):
        loss = (g * logp).sum() + with_entropy * (g_entropy * H).sum()
        (want,) = torch.autograd.grad(loss, x, retain_graph=True)
        out = poison(*case.logits.shape, dtype=dtype)
        got = gradient(case.logits, case.ids, case.valid, transform, g, g_entropy if with_entropy else None, out)
        assert error(got, want) < max(3e-6, ROUNDING[dtype])
        assert (got[~valid] == 0).all()
    in_place = case.logits.clone()
    gradient(in_place, case.ids, case.valid, transform, g, g_entropy, in_place)
    assert torch.equal(in_place, got)


def test_rows_without_gradient_are_not_read():
    case = make_case(V=203)
    logps, _entropy, row_max, row_sum = statistics(case.logits, case.ids, case.valid, TRANSFORMS[0])
    g = torch.tensor([[1.0, math.nan, 0.0], [0.0, -2.0, 0.0]], device=DEVICE)  # slot (0, 1) is masked
    logits = case.logits.masked_fill((g == 0)[..., None] | (case.valid == 0)[..., None], math.nan)
    out = poison(*logits.shape)
    kernels.row_grad(logits, case.ids, case.valid, row_max, row_sum, logps, None, g, None, out, 1.0, 0.0, 1.0)
    dead = (g == 0) | (case.valid == 0)
    assert (out[dead] == 0).all()
    assert torch.isfinite(out).all()
    assert (out[~dead] != 0).any()


def test_two_sweeps_equal_one_launch(implementation):
    case = make_case(V=2051, dtype=torch.bfloat16)
    want = grpo_loss(case, return_entropy=False)
    logps, _, row_max, row_sum = statistics(case.logits, case.ids, case.valid, TRANSFORMS[0], entropy=False)
    out = poison(*case.logits.shape, dtype=torch.bfloat16)
    g = -case.advantages * case.coef
    kernels.row_grad(case.logits, case.ids, case.valid, row_max, row_sum, logps, None, g, None, out, 1.0, 0.0, 1.0)
    if implementation == "cuda, sm_90":  # which sums a row in parts in the one and as a whole in the other
        assert error(logps, want.logps) < 1e-6
        assert error(out, want.grad) <= ROUNDING[torch.bfloat16]
    else:
        assert torch.equal(logps, want.logps)
        assert torch.equal(out, want.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("V", [3, 2051])
def test_scale(V, dtype):
    wide = torch.randn(2, 4, V + 3, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    view, before = wide[:, :3, :V], wide.clone()
    kernels.scale_(view, torch.tensor(1.0, device=DEVICE))
    assert torch.equal(wide, before)
    kernels.scale_(view, torch.tensor(-3.7, device=DEVICE))
    torch.testing.assert_close(view.double(), -3.7 * before[:, :3, :V].double(), rtol=ROUNDING[dtype], atol=1e-6)
    wide[:, :3, :V] = before[:, :3, :V]
    assert torch.equal(wide, before)
    kernels.scale_(view[:0], torch.tensor(2.0, device=DEVICE))
