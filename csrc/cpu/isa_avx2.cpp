// The row kernels on AVX2 with FMA and F16C: 8 lanes, tails through a buffer on the stack.
#include "rows.h"
#include "narrow.h"

#include <algorithm>
#include <cstring>

#if GRPO_X86
#include <immintrin.h>

GRPO_BEGIN_TARGET("avx2,fma,f16c")

namespace grpo_fast::cpu {
namespace {

struct V {
  using F = __m256;
  static constexpr int kWidth = 8;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static float first(F x) { return _mm256_cvtss_f32(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  static F mad(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // In two steps, so that 2^whole stays a normal number on the way to a denormal result. NaN lanes stay NaN through a.
  static F scale2(F a, F whole) {
    const __m256i n = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(n, 1);
    return mul(mul(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(n, half)));
  }
  static F copysign(F a, F sign) { return _mm256_or_ps(a, _mm256_and_ps(sign, set1(-0.0f))); }
  static F select_less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static float reduce_add(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float reduce_max(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const BF16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store(BF16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x)); }
  static void store(F16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_f16(x)); }

  // Lanes from n on are -inf.
  template <class T>
  static F load_partial(const T* p, int64_t n) {
    alignas(32) T buffer[kWidth];
    std::fill_n(buffer, kWidth, minus_inf<T>());
    std::memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
  }
  template <class T>
  static void store_partial(T* p, F x, int64_t n) {
    alignas(32) T buffer[kWidth];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(T));
  }

  // Non-temporal, p aligned to the vector.
  static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
  static void stream(BF16* p, F x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16(x)); }
  static void stream(F16* p, F x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_f16(x)); }
  static void fence() { _mm_sfence(); }

 private:
  static F power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  // Round to nearest even in integers: the carry may run into the exponent, as it should. NaN would round to inf.
  static __m128i to_bf16(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    const __m256i high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  static __m128i to_f16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

}  // namespace
}  // namespace grpo_fast::cpu

#include "row_kernels.h"
#include "decode_kernels.h"

GRPO_END_TARGET

namespace grpo_fast::cpu {
const Isa isa_avx2 = {
    "avx2",      row_functions<float>(), row_functions<BF16>(), row_functions<F16>(), attend<float>, attend<BF16>,
    attend<F16>, exp_array,              tanh_array};
}
#endif
