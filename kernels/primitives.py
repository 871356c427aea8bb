"""Row primitives shared by every kernel: one program owns one row of logits and sweeps it block by block.

Legend: row, a pointer to the first of V logits; x, raw logits in fp32; z = cap(x); t = (z - reference) * k, the
exponent in base 2, with k = log2(e) / temperature (times logit_scale without a softcap); e = 2^t.

The compiler makes 128-bit accesses where `locate` tells it that rows start on 16 bytes and hold whole vectors.
Elsewhere it reads and writes element by element, a warp in consecutive addresses. The order of a row's sum depends on
that, hence on V and the pitch, and on nothing else: not on the row's own address, which in a batch of odd rows is
aligned for one row and not for the next.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
VECTOR_BYTES = tl.constexpr(16)

# Exponents are taken relative to the target's logit, so a row of sum <= 2^48 needs no maximum at all. Beyond it (the
# target has p < 2^-48, or the sum overflowed, or is NaN) the row is summed again from its maximum. 2^48 is far beyond
# what a sampled token has, and keeps the error of t below 2^-18.
TARGET_SUM_LIMIT = tl.constexpr(2.0**48)

# Stands for t = -inf in products with p = 0, which must give 0.
LOWEST_EXPONENT = tl.constexpr(-1e30)


@triton.jit
def locate(tensor, row, T, V, stride_b, stride_t, ALIGNED: tl.constexpr):
    """(pointer to row `row` of a [B, T, V] tensor, V), both known to be whole vectors where ALIGNED promises it.

    Offsets are int64, since B*T*V passes 2^31.
    """
    start = tensor + (row // T).to(tl.int64) * stride_b + (row % T).to(tl.int64) * stride_t
    if ALIGNED:
        size: tl.constexpr = VECTOR_BYTES * 8 // tensor.dtype.element_ty.primitive_bitwidth
        start = tl.multiple_of(start, VECTOR_BYTES)
        V = V // size * size
    return start, V


@triton.jit
def widen(x):
    """Logits to fp32. A bf16 is the upper half of its fp32; said as a shift, this costs one instruction, not 1.5."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def tanh(u):
    """(tanh u, 1 - tanh^2 u), both to a relative error of about 2e-7."""
    e = tl.exp2(tl.abs(u) * (-2.0 * LOG2E))
    r = 1.0 / (1.0 + e)
    large = (1.0 - e) * r
    # tanh(u)/u - 1 on |u| < 0.65, interpolated at Chebyshev nodes of u^2 (relative error 3e-8).
    s = u * u
    q = tl.fma(s, -0.00592372621, 0.0208734606)
    q = tl.fma(s, q, -0.0538237589)
    q = tl.fma(s, q, 0.133325837)
    q = tl.fma(s, q, -0.33333327)
    small = tl.fma(u * s, q, u)
    value = tl.where(tl.abs(u) < 0.65, small, tl.where(u < 0.0, -large, large))
    return value, 4.0 * e * r * r


@triton.jit
def cap(x, transform):
    """z = softcap * tanh(x * cap_slope), and dz/dx up to the factor `slope`; the identity when softcap is None."""
    if transform.softcap is None:
        return x, 1.0
    else:
        value, derivative = tanh(x * transform.cap_slope)
        return tl.where(x == float("-inf"), x, transform.softcap * value), derivative


@triton.jit
def exponents(x, reference, transform):
    """(t, e, dz/dx) of a block.

    z * k - reference * k would be one instruction instead of two, but for logits of 1e8 its rounding is a factor of
    e^10 and at 3e38 it overflows; the difference of two logits is exact where it matters.
    """
    z, derivative = cap(x, transform)
    t = (z - reference) * transform.k
    return t, tl.exp2(t), derivative


@triton.jit
def fold(x, ALIGNED: tl.constexpr):
    """Sums of 8 elements that one thread holds, whichever way a block is spread: neighbours, or a warp apart."""
    if ALIGNED:
        return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8]), 1)
    else:
        return tl.sum(tl.reshape(x, [8, x.shape[0] // 8]), 0)


@triton.jit
def sums(x, reference, transform, ENTROPY: tl.constexpr, ALIGNED: tl.constexpr):
    """(sum e, sum e*t) over a block, folded by 8: a register a fold instead of one an element, and no shuffles."""
    t, e, _ = exponents(x, reference, transform)
    e_sum = fold(e, ALIGNED)
    et_sum = e_sum
    if ENTROPY:
        et_sum = fold(e * tl.maximum(t, LOWEST_EXPONENT), ALIGNED)
    return e_sum, et_sum


@triton.jit
def sweep_sums(row, V, reference, transform, ENTROPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """(sum e, sum e*t) over a row, whose lines stay in L2 for the sweep that follows.

    Only the last columns need masks; they go in half blocks, since a predicate for every element costs registers.
    """
    lanes = tl.arange(0, BLOCK)
    e_sum = tl.zeros([BLOCK // 8], tl.float32)
    et_sum = tl.zeros([BLOCK // 8], tl.float32)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        x = tl.load(row + start + lanes, eviction_policy="evict_last")
        e, et = sums(widen(x), reference, transform, ENTROPY, ALIGNED)
        e_sum += e
        et_sum += et
    half: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, half)
    e_tail = tl.zeros([half // 8], tl.float32)
    et_tail = tl.zeros([half // 8], tl.float32)
    for start in range(full, V, half):
        x = tl.load(row + start + lanes, mask=lanes < V - start, other=float("-inf"), eviction_policy="evict_last")
        e, et = sums(widen(x), reference, transform, ENTROPY, ALIGNED)
        e_tail += e
        et_tail += et
    return tl.sum(e_sum, 0) + tl.sum(e_tail, 0), tl.sum(et_sum, 0) + tl.sum(et_tail, 0)


@triton.jit
def sweep_max(row, V, BLOCK: tl.constexpr):
    """Largest logit of a row. Rarely run: plain masked loads in small blocks, to spare registers."""
    small: tl.constexpr = BLOCK // 4
    lanes = tl.arange(0, small)
    largest = tl.full([small], float("-inf"), tl.float32)
    for start in range(0, V, small):
        x = tl.load(row + start + lanes, mask=lanes < V - start, other=float("-inf"))
        largest = tl.maximum(largest, widen(x))
    return tl.max(largest, 0)


@triton.jit
def load_target(row, token_id, V):
    """(x_y, whether the id lies in the vocabulary); NaN for an id outside, which is never read."""
    inside = (token_id >= 0) & (token_id < V)
    return tl.load(row + tl.where(inside, token_id, 0), mask=inside, other=float("nan")).to(tl.float32), inside


@triton.jit
def statistics(row, V, x_y, transform, ENTROPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """(reference, sum, logp, entropy) of a row, in nats; sum = sum_j e^((z_j - reference) / temperature)."""
    z_y, _ = cap(x_y, transform)
    reference = z_y
    e_sum, et_sum = sweep_sums(row, V, reference, transform, ENTROPY, ALIGNED, BLOCK)
    if not (e_sum <= TARGET_SUM_LIMIT):
        reference, _ = cap(sweep_max(row, V, BLOCK), transform)
        e_sum, et_sum = sweep_sums(row, V, reference, transform, ENTROPY, ALIGNED, BLOCK)
    log2_sum = tl.log2(e_sum)
    logp = (z_y - reference) * (transform.k * LN2) - log2_sum * LN2
    entropy = (log2_sum - et_sum / e_sum) * LN2
    # Rounding may leave 1e-8 on the wrong side; written so that NaN stays NaN.
    return reference, e_sum, tl.where(logp > 0.0, 0.0, logp), tl.where(entropy < 0.0, 0.0, entropy)


@triton.jit
def gradient_block(x, reference, a, b, transform, ENTROPY: tl.constexpr):
    t, e, derivative = exponents(x, reference, transform)
    factor = a
    if ENTROPY:
        factor = tl.fma(tl.maximum(t, LOWEST_EXPONENT), b, a)
    return e * factor * derivative


@triton.jit
def write_gradient(row, out, V, token_id, x_y, logp, entropy, reference, e_sum, g, g_entropy, transform,
                   ENTROPY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out_j = dz_j/dx_j * (g * (onehot_j - p_j) - g_entropy * p_j * (log p_j + H)); `out` may be `row`.

    The target's entry comes from fp32 scalars, 1 - p_y = -expm1(logp), and overwrites the one of the sweep.
    """
    # p_j * (log p_j + H) = e/sum * (t*ln2 - ln(sum) + H), so a row's coefficient is linear in t.
    a = -g
    b = 0.0
    if ENTROPY:
        a = a - g_entropy * (entropy - tl.log2(e_sum) * LN2)
        b = -g_entropy * LN2 * (transform.slope / e_sum)
    a = a * (transform.slope / e_sum)

    lanes = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        x = tl.load(row + start + lanes, eviction_policy="evict_first")
        d = gradient_block(widen(x), reference, a, b, transform, ENTROPY)
        tl.store(out + start + lanes, d.to(out.dtype.element_ty), eviction_policy="evict_first")
    half: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, half)
    for start in range(full, V, half):
        mask = lanes < V - start
        x = tl.load(row + start + lanes, mask=mask, other=float("-inf"), eviction_policy="evict_first")
        d = gradient_block(widen(x), reference, a, b, transform, ENTROPY)
        tl.store(out + start + lanes, d.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")

    _, derivative = cap(x_y, transform)
    target = -g * expm1(logp)
    if ENTROPY:
        target -= g_entropy * exp(logp) * (logp + entropy)
    target = tl.where(x_y == float("-inf"), 0.0, target * transform.slope * derivative)
    # Another thread wrote this entry in the sweep: order the two stores.
    tl.debug_barrier()
    tl.store(out + token_id, target.to(out.dtype.element_ty), mask=(token_id >= 0) & (token_id < V))


@triton.jit
def write_zeros(out, V, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], out.dtype.element_ty)
    for start in range(0, V, BLOCK):
        tl.store(out + start + lanes, zeros, mask=lanes < V - start, eviction_policy="evict_first")


@triton.jit
def exp(x):
    """e^x to about 2e-7 relative over the whole range of fp32 (2^(x*log2e) alone loses |x|*6e-8)."""
    n = tl.floor(tl.maximum(tl.minimum(x, 200.0), -200.0) * LOG2E + 0.5)
    r = tl.fma(n, -0.693145751953125, x)  # ln 2 in two parts, the first with 16 bits, so that n * it is exact
    r = tl.fma(n, -1.428606765330187e-06, r)
    half = tl.floor(n * 0.5)  # in two factors, since 2^128 overflows before e^x does
    value = tl.exp2(r * LOG2E) * tl.exp2(half) * tl.exp2(n - half)
    return tl.where(tl.abs(x) < 200.0, value, tl.where(x > 0.0, float("inf"), tl.where(x < 0.0, 0.0, x)))


@triton.jit
def exp_remainder(x):
    """e^x - x - 1 to 1e-6 relative: the series x^2/2! + x^3/3! + ... for |x| < 1."""
    q = tl.fma(x, 1.0 / 11.0, 1.0)
    q = tl.fma(x * q, 1.0 / 10.0, 1.0)
    q = tl.fma(x * q, 1.0 / 9.0, 1.0)
    q = tl.fma(x * q, 1.0 / 8.0, 1.0)
    q = tl.fma(x * q, 1.0 / 7.0, 1.0)
    q = tl.fma(x * q, 1.0 / 6.0, 1.0)
    q = tl.fma(x * q, 1.0 / 5.0, 1.0)
    q = tl.fma(x * q, 1.0 / 4.0, 1.0)
    q = tl.fma(x * q, 1.0 / 3.0, 1.0)
    series = 0.5 * x * x * q
    e = exp(x)
    large = tl.where(x > 60.0, e, (e - 1.0) - x)  # never inf - inf
    return tl.where(tl.abs(x) < 1.0, series, large)


@triton.jit
def expm1(x):
    """e^x - 1 to 1e-6 relative."""
    return tl.where(tl.abs(x) < 1.0, x + exp_remainder(x), exp(x) - 1.0)
