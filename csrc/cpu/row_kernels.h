// The vocabulary-sized loops, written once over a vector type `V` and compiled once per instruction set: isa_*.cpp
// defines V and then includes this file. Everything sits in an anonymous namespace, so that no symbol of one
// instruction set can be linked in place of another's.
//
// Sweep 1 walks a row in blocks that fit L1: a pass for the block's maximum, a pass for the exponentials against it.
// Sweep 2 multiplies each block's kept exponentials by exp(block max - row max) * factor, so that a logit costs one
// exponential. Sums stay in fp32 lanes within a block and are combined in double: the order depends on V alone.

namespace grpo_fast::cpu {
namespace {

using F = V::F;
constexpr int W = V::kWidth;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Exponent {
  F hi, lo, min_gap;
  explicit Exponent(const Transform& t)
      : hi(V::set1(t.log2_slope_hi)), lo(V::set1(t.log2_slope_lo)), min_gap(V::set1(t.min_gap)) {}
  // log2(e) as hi + lo: exp itself.
  Exponent() : hi(V::set1(0x1.715476p+0f)), lo(V::set1(0x1.4ae0c0p-26f)), min_gap(V::set1(-140.0f)) {}
};

// 2^(gap * log2_slope) for gap <= 0. The fractional part comes from a fused multiply-add, exact to fp32, and the
// polynomial is minimax for 2^f on [-0.5, 0.5] with its constant term held at 1 (error 0.14 * 2^-23).
// max(a, b) gives b where either is NaN, so a NaN gap stays NaN.
inline F exp_gap(F gap, const Exponent& k) {
  gap = V::max(k.min_gap, gap);
  const F whole = V::round(V::mul(gap, k.hi));
  const F f = V::fma(gap, k.lo, V::fms(gap, k.hi, whole));
  F p = V::set1(0x1.41fb2ep-13f);
  p = V::mad(p, f, V::set1(0x1.5f3f30p-10f));
  p = V::mad(p, f, V::set1(0x1.3b2d50p-7f));
  p = V::mad(p, f, V::set1(0x1.c6aee6p-5f));
  p = V::mad(p, f, V::set1(0x1.ebfbdcp-3f));
  p = V::mad(p, f, V::set1(0x1.62e430p-1f));
  p = V::mad(p, f, V::set1(1.0f));
  return V::scale2(p, whole);
}

struct TanhAndSlope {
  F tanh, sech2;
};

// Below 0.63 a minimax polynomial in x^2 (relative error 7e-9); above, 1 - w with w = 2 e^-2|x| / (1 + e^-2|x|), where
// sech^2 = w (2 - w) does not cancel.
inline TanhAndSlope tanh_and_slope(F x) {
  const F a = V::abs(x);
  const F e = exp_gap(V::mul(a, V::set1(-2.0f)), Exponent());
  const F w = V::div(V::add(e, e), V::add(V::set1(1.0f), e));
  const F z = V::mul(x, x);
  F p = V::set1(-0.0056669684f);
  p = V::mad(p, z, V::set1(0.02060617f));
  p = V::mad(p, z, V::set1(-0.053730004f));
  p = V::mad(p, z, V::set1(0.13331331f));
  p = V::mad(p, z, V::set1(-0.33333278f));
  const F small = V::mad(V::mul(p, z), a, a);
  const F limit = V::set1(0.63f);
  const F t = V::select_less(a, limit, small, V::sub(V::set1(1.0f), w));
  const F sech2 = V::select_less(a, limit, V::sub(V::set1(1.0f), V::mul(t, t)), V::mul(w, V::sub(V::set1(2.0f), w)));
  return {V::copysign(t, x), sech2};
}

// -inf stays -inf under a softcap too.
inline F capped(F x, F to_tanh) {
  const F t = tanh_and_slope(V::mul(x, to_tanh)).tanh;
  return V::select_less(V::set1(-kInf), x, t, V::add(x, t));
}

template <bool kSoftcap>
inline F to_u(F x, const Transform& t) {
  if constexpr (kSoftcap) return capped(x, V::set1(t.to_tanh));
  return x;
}

template <bool kSoftcap>
inline float to_u_scalar(float x, const Transform& t) {
  return kSoftcap ? V::first(to_u<kSoftcap>(V::set1(x), t)) : x;
}

// The gap to a maximum of -inf would be NaN for every -inf logit; against 0 each exponential is 0.
inline float gap_origin(float u_max) { return u_max == -kInf ? 0.0f : u_max; }

// The pass for a block's maximum waits for memory while the pass for its exponentials does not, so the latter fetches
// the block after the next: 13 % of a statistics sweep. Fetching past the end of a tensor is harmless, it never faults.
constexpr int64_t kAhead = 2 * kBlock;

template <class T>
constexpr bool starts_line(int64_t i) {
  return i * int64_t(sizeof(T)) % 64 == 0;
}

template <class T>
float block_max(const T* x, int64_t n) {
  F m0 = V::set1(-kInf), m1 = m0, m2 = m0, m3 = m0;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    m0 = V::max(m0, V::load(x + i));
    m1 = V::max(m1, V::load(x + i + W));
    m2 = V::max(m2, V::load(x + i + 2 * W));
    m3 = V::max(m3, V::load(x + i + 3 * W));
  }
  for (; i + W <= n; i += W) m0 = V::max(m0, V::load(x + i));
  if (i < n) m1 = V::max(m1, V::load_partial(x + i, n - i));
  return V::reduce_max(V::max(V::max(m0, m1), V::max(m2, m3)));
}

struct BlockSums {
  float exps, weighted;
};

template <class T, bool kSoftcap, bool kEntropy, bool kKeep>
struct BlockExp {
  const T* x;
  const T* ahead;  // what to prefetch as the block goes
  float* kept;
  const Transform& transform;
  Exponent exponent;
  F origin;
  F sum[4], weighted[4];

  BlockExp(const T* x, const T* ahead, float* kept, float u_max, const Transform& t)
      : x(x), ahead(ahead), kept(kept), transform(t), exponent(t), origin(V::set1(gap_origin(u_max))) {
    for (int k = 0; k < 4; ++k) sum[k] = weighted[k] = V::set1(0.0f);
  }

  F step(F logits, int k) {
    const F gap = V::sub(to_u<kSoftcap>(logits, transform), origin);
    const F e = exp_gap(gap, exponent);
    sum[k] = V::add(sum[k], e);
    if constexpr (kEntropy) weighted[k] = V::mad(e, V::max(exponent.min_gap, gap), weighted[k]);
    return e;
  }

  void whole(int64_t i, int k) {
    if (starts_line<T>(k * W)) __builtin_prefetch(ahead + i);
    const F e = step(V::load(x + i), k);
    if constexpr (kKeep) V::store(kept + i, e);
  }

  BlockSums run(int64_t n) {
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      whole(i, 0);
      whole(i + W, 1);
      whole(i + 2 * W, 2);
      whole(i + 3 * W, 3);
    }
    for (; i + W <= n; i += W) whole(i, 0);
    if (i < n) {
      const F e = step(V::load_partial(x + i, n - i), 1);
      if constexpr (kKeep) V::store_partial(kept + i, e, n - i);
    }
    return {total(sum), total(weighted)};
  }

  static float total(const F (&a)[4]) { return V::reduce_add(V::add(V::add(a[0], a[1]), V::add(a[2], a[3]))); }
};

// Running sums against the largest maximum so far, in double.
struct Running {
  float u_max = -kInf;
  double sum = 0, weighted = 0;  // weighted: sum of e * (u - u_max)

  // A block of sums against its own maximum u.
  void merge(float u, BlockSums block, double slope) {
    if (u == -kInf) return;
    if (u > u_max) {
      shift_to(u, slope);
      sum += block.exps;
      weighted += block.weighted;
    } else {
      const double gap = double(u) - u_max, f = std::exp(gap * slope);
      sum += f * block.exps;
      if (f > 0) weighted += f * (block.weighted + gap * block.exps);
    }
  }

  void shift_to(float u, double slope) {
    if (u_max != -kInf) {
      const double gap = double(u_max) - u, f = std::exp(gap * slope);
      weighted = f > 0 ? f * (weighted + gap * sum) : 0;
      sum *= f;
    }
    u_max = u;
  }
};

template <class T, bool kSoftcap, bool kEntropy, bool kKeep>
RowStats stats_impl(const T* row, int64_t vocab, int64_t target, const Transform& t, Kept kept) {
  alignas(64) T without_target[kBlock];
  const bool in_range = target >= 0 && target < vocab;
  const float x_target = in_range ? widen(row[target]) : -kInf;
  Running running;
  float x_max = -kInf;
  for (int64_t b = 0, start = 0; start < vocab; ++b, start += kBlock) {
    const int64_t n = std::min(kBlock, vocab - start);
    const T* x = row + start;
    if (in_range && target >= start && target < start + n) {
      std::memcpy(without_target, x, n * sizeof(T));
      without_target[target - start] = minus_inf<T>();
      x = without_target;
    }
    const float x_block = block_max(x, n);
    const float u_block = to_u_scalar<kSoftcap>(x_block, t);
    float* const keep = kKeep ? kept.exps + start : nullptr;
    BlockExp<T, kSoftcap, kEntropy, kKeep> exps(x, row + start + kAhead, keep, u_block, t);
    running.merge(u_block, exps.run(n), t.slope);
    if constexpr (kKeep) kept.block_max[b] = u_block;
    x_max = std::max(x_max, x_block);
  }
  const float u_target = to_u_scalar<kSoftcap>(x_target, t);
  if (u_target > running.u_max) running.shift_to(u_target, t.slope);
  RowStats out;
  out.max = x_target > x_max ? x_target : x_max;
  out.rest = running.sum;
  out.gap = in_range ? (double(u_target) - running.u_max) * t.slope : double(NAN);
  out.target = in_range ? std::exp(out.gap) : 0;
  out.weighted = running.weighted * t.slope + (out.target != 0 ? out.target * out.gap : 0);
  return out;
}

template <class T, bool kStream>
void rescale_block(const float* exps, T* out, int64_t n, float factor, const T* next) {
  const F f = V::set1(factor);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    if (next && starts_line<T>(i)) __builtin_prefetch(next + i, 0, 2);
    const F y = V::mul(V::load(exps + i), f);
    if constexpr (kStream) V::stream(out + i, y);
    else V::store(out + i, y);
  }
  if (i < n) V::store_partial(out + i, V::mul(V::load_partial(exps + i, n - i), f), n - i);
}

// block_max becomes -factor * exp(block_max - max).
inline void block_factors(Kept kept, int64_t count, const Rescale& r, const Transform& t) {
  const Exponent exponent(t);
  const F origin = V::set1(gap_origin(r.max)), scale = V::set1(-r.factor);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t n = std::min<int64_t>(W, count - i);
    const F e = exp_gap(V::sub(V::load_partial(kept.block_max + i, n), origin), exponent);
    V::store_partial(kept.block_max + i, V::mul(e, scale), n);
  }
}

template <class T>
void rescale_impl(Kept kept, T* out, int64_t vocab, const Rescale& r, const Transform& t) {
  block_factors(kept, blocks(vocab), r, t);
  const bool stream = r.stream && reinterpret_cast<uintptr_t>(out) % (W * sizeof(T)) == 0;
  for (int64_t b = 0, start = 0; start < vocab; ++b, start += kBlock) {
    const int64_t n = std::min(kBlock, vocab - start);
    const float f = kept.block_max[b];
    const T* next = r.next ? static_cast<const T*>(r.next) + start + kAhead : nullptr;
    if (stream) rescale_block<T, true>(kept.exps + start, out + start, n, f, next);
    else rescale_block<T, false>(kept.exps + start, out + start, n, f, next);
  }
  if (r.target >= 0) out[r.target] = narrow<T>(r.target_value);
  if (stream) V::fence();
}

template <class T, bool kSoftcap, bool kEntropy>
class GradientOf {
 public:
  GradientOf(const Gradient& row, const Transform& t)
      : row_(row), transform_(t), exponent_(t), origin_(V::set1(gap_origin(to_u_scalar<kSoftcap>(row.max, t)))),
        inv_sum_(V::set1(1.0f / row.sum)), log_sum_(V::set1(std::log(row.sum))) {}

  // -dz/dx * p * (g + g_entropy * (log p + H)). The gap is clamped, so that p = 0 meets a finite log p.
  F operator()(F x) const {
    const F gap = V::sub(to_u<kSoftcap>(x, transform_), origin_);
    const F p = V::mul(exp_gap(gap, exponent_), inv_sum_);
    F g = V::set1(row_.g);
    if constexpr (kEntropy) {
      const F z = V::mul(V::max(exponent_.min_gap, gap), V::set1(float(transform_.slope)));
      const F log_p = V::sub(z, log_sum_);
      g = V::mad(V::set1(row_.g_entropy), V::add(log_p, V::set1(row_.entropy)), g);
    }
    return V::mul(V::mul(p, g), V::sub(V::set1(0.0f), dz_dx(x)));
  }

  // The target's entry, from fp32 scalars: 1 - p is -expm1(logp). A logit of -inf has no gradient.
  float target(float x) const {
    if (x == -kInf) return 0.0f;
    float dz = -row_.g * std::expm1(row_.logp);
    if (kEntropy) dz -= row_.g_entropy * std::exp(row_.logp) * (row_.logp + row_.entropy);
    return dz * V::first(dz_dx(V::set1(x)));
  }

 private:
  F dz_dx(F x) const {
    const F derivative = V::set1(transform_.derivative);
    if constexpr (!kSoftcap) return derivative;
    return V::mul(derivative, tanh_and_slope(V::mul(x, V::set1(transform_.to_tanh))).sech2);
  }

  const Gradient& row_;
  const Transform& transform_;
  const Exponent exponent_;
  const F origin_, inv_sum_, log_sum_;
};

template <class T, bool kSoftcap, bool kEntropy>
void grad_impl(const T* x, T* out, int64_t vocab, const Gradient& row, const Transform& t) {
  const GradientOf<T, kSoftcap, kEntropy> gradient(row, t);
  const float target = row.target >= 0 ? gradient.target(widen(x[row.target])) : 0.0f;  // before out overwrites x
  int64_t i = 0;
  for (; i + W <= vocab; i += W) V::store(out + i, gradient(V::load(x + i)));
  if (i < vocab) V::store_partial(out + i, gradient(V::load_partial(x + i, vocab - i)), vocab - i);
  if (row.target >= 0) out[row.target] = narrow<T>(target);
}

template <class T>
void scale_impl(T* x, int64_t vocab, float factor) {
  const F f = V::set1(factor);
  int64_t i = 0;
  for (; i + W <= vocab; i += W) V::store(x + i, V::mul(V::load(x + i), f));
  if (i < vocab) V::store_partial(x + i, V::mul(V::load_partial(x + i, vocab - i), f), vocab - i);
}

template <class T, bool kSoftcap>
RowStats stats_of(const void* row, int64_t vocab, int64_t target, const Transform& t, bool entropy, Kept kept) {
  const T* x = static_cast<const T*>(row);
  if (kept.exps) {
    if (entropy) return stats_impl<T, kSoftcap, true, true>(x, vocab, target, t, kept);
    return stats_impl<T, kSoftcap, false, true>(x, vocab, target, t, kept);
  }
  if (entropy) return stats_impl<T, kSoftcap, true, false>(x, vocab, target, t, kept);
  return stats_impl<T, kSoftcap, false, false>(x, vocab, target, t, kept);
}

template <class T>
RowStats stats(const void* row, int64_t vocab, int64_t target, const Transform& t, bool entropy, Kept kept) {
  if (t.softcap) return stats_of<T, true>(row, vocab, target, t, entropy, kept);
  return stats_of<T, false>(row, vocab, target, t, entropy, kept);
}

template <class T>
void rescale(Kept kept, void* out, int64_t vocab, const Rescale& r, const Transform& t) {
  rescale_impl(kept, static_cast<T*>(out), vocab, r, t);
}

template <class T>
void grad(const void* row, void* out, int64_t vocab, const Gradient& r, const Transform& t) {
  const T* x = static_cast<const T*>(row);
  T* y = static_cast<T*>(out);
  if (t.softcap && r.g_entropy != 0) return grad_impl<T, true, true>(x, y, vocab, r, t);
  if (t.softcap) return grad_impl<T, true, false>(x, y, vocab, r, t);
  if (r.g_entropy != 0) return grad_impl<T, false, true>(x, y, vocab, r, t);
  return grad_impl<T, false, false>(x, y, vocab, r, t);
}

template <class T>
void scale(void* row, int64_t vocab, float factor) {
  scale_impl(static_cast<T*>(row), vocab, factor);
}

template <class T>
constexpr RowFunctions row_functions() {
  return {stats<T>, rescale<T>, grad<T>, scale<T>};
}

inline void map(const float* x, float* out, int64_t n, F (*f)(F)) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = std::min<int64_t>(W, n - i);
    V::store_partial(out + i, f(V::load_partial(x + i, m)), m);
  }
}

inline F exp_vector(F x) { return exp_gap(x, Exponent()); }
inline F tanh_vector(F x) { return tanh_and_slope(x).tanh; }
void exp_array(const float* x, float* out, int64_t n) { map(x, out, n, exp_vector); }
void tanh_array(const float* x, float* out, int64_t n) { map(x, out, n, tanh_vector); }

}  // namespace
}  // namespace grpo_fast::cpu
