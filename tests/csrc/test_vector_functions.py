"""exp and tanh of the row kernels against float64, in units of the last place."""

import math

import numpy as np
import torch


def ulps(got, want):
    """Error of float32 `got` in units of the spacing of float32 at `want` (float64); 2^-149 among denormals."""
    _, exponent = np.frexp(want)
    spacing = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    return np.abs(got.astype(np.float64) - want) / spacing


def negative_floats():
    """Every 4001st float32 in (-104, -0], so every binade down to the smallest denormal, and a uniform grid."""
    patterns = np.arange(0, np.float32(104).view(np.int32), 4001, dtype=np.int32).view(np.float32)
    return np.concatenate([-patterns, -np.linspace(0, 104, 1_000_001, dtype=np.float32)])


def apply(function, x):
    out = torch.full((len(x),), math.nan)
    function(torch.from_numpy(np.ascontiguousarray(x)), out)
    return out.numpy()


def test_exp_is_within_2_ulp_down_to_the_denormals(ops):
    x = negative_floats()
    error = ulps(apply(ops.exp, x), np.exp(x.astype(np.float64)))
    assert error.max() <= 2.0, f"{error.max()} ulp at {x[error.argmax()]!r}"


def test_exp_at_the_ends(ops):
    x = np.array([0.0, -0.0, -104.5, -1e4, -3e38, -math.inf, math.nan], dtype=np.float32)
    np.testing.assert_array_equal(apply(ops.exp, x), np.array([1, 1, 0, 0, 0, 0, math.nan], dtype=np.float32))


def test_exp_decreases(ops):
    """Over neighbouring floats the result may repeat but never jump back by more than the 2 ulp it is allowed."""
    start = np.float32(-1.0).view(np.int32)
    x = np.arange(start, start + 100_000, dtype=np.int32).view(np.float32)
    y = apply(ops.exp, x).astype(np.float64)
    assert (np.diff(y) <= 2 * 2.0**-25).all()


def test_tanh_is_within_3_ulp_on_both_sides(ops):
    x = negative_floats()
    x = np.concatenate([x, -x])
    error = ulps(apply(ops.tanh, x), np.tanh(x.astype(np.float64)))
    assert error.max() <= 3.0, f"{error.max()} ulp at {x[error.argmax()]!r}"


def test_tanh_at_the_ends(ops):
    x = np.array([0.0, 20.0, -20.0, math.inf, -math.inf, math.nan], dtype=np.float32)
    np.testing.assert_array_equal(apply(ops.tanh, x), np.array([0, 1, -1, 1, -1, math.nan], dtype=np.float32))
