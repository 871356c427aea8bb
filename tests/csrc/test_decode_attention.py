"""One token of every row against its prompt and its own tokens, on every instruction set, against float64."""

import math

import pytest
import torch

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
GROUPS, LENGTHS, AGES = [0, 0, 2, 1, 1], [9, 9, 37, 1, 1], [0, 5, 2, 20, 7]
NO_WINDOW = 2**62


class Problem:
    """Rows of unequal lengths in a cache where every place that means nothing is NaN."""

    def __init__(self, heads, kinds, size, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        rows, room = len(GROUPS), 24
        # Positions first, as attention layers hand them over.
        self.query = random(1, rows, heads, size).permute(1, 2, 0, 3)
        self.key, self.value = (random(1, rows, kinds, size).permute(1, 2, 0, 3) for _ in range(2))
        self.prompts = [random(3, kinds, 40, size)[:, :, :37] for _ in range(2)]
        self.own = [random(rows, kinds, room, size) for _ in range(2)]
        for row, (group, length, age) in enumerate(zip(GROUPS, LENGTHS, AGES, strict=True)):
            for prompts, own in zip(self.prompts, self.own, strict=True):
                prompts[group, :, length:] = math.nan
                own[row, :, age:] = math.nan

    def run(self, ops, scale=0.3, window=NO_WINDOW, softcap=0.0):
        own = [x.clone() for x in self.own]
        rows, heads, _, size = self.query.shape
        out = torch.full((rows, heads, size), math.nan, dtype=self.query.dtype)
        index = [torch.tensor(x) for x in (GROUPS, LENGTHS, AGES)]
        ops.decode_attention(self.query, self.key, self.value, *self.prompts, *own, *index, out, scale, window, softcap)
        return out, own

    def float64(self, scale=0.3, window=NO_WINDOW, softcap=0.0):
        rows, heads, _, _ = self.query.shape
        shared = heads // self.key.shape[1]
        out = []
        for row in range(rows):
            group, length, age = GROUPS[row], LENGTHS[row], AGES[row]
            keys, values = (
                torch.cat([prompts[group, :, :length], own[row, :, :age], new[row]], 1)[:, -window:].double()
                for prompts, own, new in zip(self.prompts, self.own, (self.key, self.value), strict=True)
            )
            keys, values = (x.repeat_interleave(shared, 0) for x in (keys, values))
            scores = (keys @ self.query[row, :, 0, :, None].double())[..., 0] * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            out.append((scores.softmax(-1)[:, None] @ values)[:, 0])
        return torch.stack(out)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 8, 20, 32, 48, 80])  # below a vector, between, one, two and a half
@pytest.mark.parametrize("heads, kinds", [(1, 1), (6, 3), (3, 1), (9, 1)])  # queries of a key: 1, 2, 3, 9
def test_values(ops, heads, kinds, size, dtype):
    p = Problem(heads, kinds, size, dtype, seed=size)
    out, _ = p.run(ops)
    torch.testing.assert_close(out.double(), p.float64(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("options", [{"window": w} for w in (1, 2, 6, 7, 25, 39)] + [{"softcap": 2.0}], ids=str)
def test_windows_and_soft_caps(ops, options):
    p = Problem(4, 2, 32, torch.float32)
    out, _ = p.run(ops, **options)
    torch.testing.assert_close(out.double(), p.float64(**options), rtol=3e-6, atol=3e-6)
    assert not torch.allclose(out, p.run(ops)[0], atol=1e-3)


def test_the_new_key_and_value_are_in_the_cache_and_nothing_else_is_touched(ops):
    p = Problem(4, 2, 20, torch.bfloat16)
    _, own = p.run(ops)
    for after, before, new in zip(own, p.own, (p.key, p.value), strict=True):
        for row, age in enumerate(AGES):
            assert torch.equal(after[row, :, age], new[row, :, 0])
            after[row, :, age] = before[row, :, age]
        assert torch.equal(after.view(torch.int16), before.view(torch.int16))


def test_large_scores_do_not_overflow_and_nan_is_not_hidden(ops):
    p = Problem(4, 2, 32, torch.float32)
    out, _ = p.run(ops, scale=1e4)
    torch.testing.assert_close(out.double(), p.float64(scale=1e4), rtol=1e-5, atol=1e-5)
    p.query[1, 2] = math.nan
    out, _ = p.run(ops)
    assert out[1, 2].isnan().all()
    out[1, 2] = 0
    assert not out.isnan().any()


def test_threads_and_neighbours_change_no_bit(ops):
    p = Problem(8, 4, 64, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _ = p.run(ops)
        torch.set_num_threads(2)
        two, _ = p.run(ops)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)
    p.query[1:], p.key[1:] = 0, 0
    assert torch.equal(p.run(ops)[0][0], one[0])


def test_what_is_not_in_the_cache_is_refused(ops, monkeypatch):
    p = Problem(4, 2, 8, torch.float32)
    for ages in ([0, 5, 2, 24, 7], [0, 5, -1, 20, 7]):
        monkeypatch.setattr(f"{__name__}.AGES", ages)
        with pytest.raises(RuntimeError, match=r"row \d is not in the cache"):
            p.run(ops)
    monkeypatch.undo()
    p.own[1] = p.own[1].half()
    with pytest.raises(RuntimeError, match=r"of the query's dtype"):
        p.run(ops)
