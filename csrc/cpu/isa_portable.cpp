// The row kernels in plain C++, for every CPU without AVX2: 8 lanes in an array, left to the compiler's vectoriser.
#include "rows.h"
#include "narrow.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace grpo_fast::cpu {
namespace {

struct V {
  static constexpr int kWidth = 8;
  struct F {
    float lane[kWidth];
  };

  template <class Op>
  static F map(Op op) {
    F out;
    for (int i = 0; i < kWidth; ++i) out.lane[i] = op(i);
    return out;
  }

  static F set1(float x) { return map([=](int) { return x; }); }
  static float first(F x) { return x.lane[0]; }
  static F add(F a, F b) { return map([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static F sub(F a, F b) { return map([&](int i) { return a.lane[i] - b.lane[i]; }); }
  static F mul(F a, F b) { return map([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static F div(F a, F b) { return map([&](int i) { return a.lane[i] / b.lane[i]; }); }
  static F fma(F a, F b, F c) { return map([&](int i) { return fused(a.lane[i], b.lane[i], c.lane[i]); }); }
  static F fms(F a, F b, F c) { return map([&](int i) { return fused(a.lane[i], b.lane[i], -c.lane[i]); }); }
  static F mad(F a, F b, F c) { return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }
  // b where either is NaN, as the x86 instruction.
  static F max(F a, F b) { return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static F abs(F a) { return map([&](int i) { return std::fabs(a.lane[i]); }); }
  // Adding 1.5 * 2^23 leaves no bits for a fraction; for |a| < 2^22, which the clamped gap keeps to.
  static F round(F a) {
    constexpr float magic = 0x1.8p23f;
    return map([&](int i) { return (a.lane[i] + magic) - magic; });
  }
  // In two steps, so that 2^whole stays a normal number on the way to a denormal result. NaN lanes stay NaN through a.
  static F scale2(F a, F whole) {
    return map([&](int i) {
      const int n = whole.lane[i] >= -256.0f ? int(whole.lane[i]) : 0, half = n >> 1;
      return a.lane[i] * power_of_two(half) * power_of_two(n - half);
    });
  }
  static F copysign(F a, F sign) { return map([&](int i) { return std::copysign(a.lane[i], sign.lane[i]); }); }
  static F select_less(F a, F b, F yes, F no) {
    return map([&](int i) { return a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]; });
  }
  static float reduce_add(F a) {
    const float* x = a.lane;
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  }
  static float reduce_max(F a) {
    float m = a.lane[0];
    for (int i = 1; i < kWidth; ++i) m = a.lane[i] > m ? a.lane[i] : m;
    return m;
  }

  template <class T>
  static F load(const T* p) {
    return map([=](int i) { return widen(p[i]); });
  }
  template <class T>
  static void store(T* p, F x) {
    for (int i = 0; i < kWidth; ++i) p[i] = narrow<T>(x.lane[i]);
  }
  // Lanes from n on are -inf.
  template <class T>
  static F load_partial(const T* p, int64_t n) {
    return map([=](int i) { return i < n ? widen(p[i]) : minus_inf<float>(); });
  }
  template <class T>
  static void store_partial(T* p, F x, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = narrow<T>(x.lane[i]);
  }

  // There is no portable non-temporal store.
  template <class T>
  static void stream(T* p, F x) {
    store(p, x);
  }
  static void fence() {}

 private:
  // Without the instruction, by way of double, where the product of two floats is exact.
  static float fused(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return std::fma(a, b, c);
#else
    return float(double(a) * b + c);
#endif
  }
  static float power_of_two(int n) { return std::bit_cast<float>((n + 127) << 23); }
};

}  // namespace
}  // namespace grpo_fast::cpu

#include "row_kernels.h"
#include "decode_kernels.h"

namespace grpo_fast::cpu {
const Isa isa_portable = {
    "portable",  row_functions<float>(), row_functions<BF16>(), row_functions<F16>(), attend<float>, attend<BF16>,
    attend<F16>, exp_array,              tanh_array};
}
