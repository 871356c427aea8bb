// The row kernels on AVX-512 (F, BW, VL, DQ): 16 lanes, masked tails.
#include "rows.h"
#include "narrow.h"

#include <algorithm>
#include <cstring>

#if GRPO_X86
// GCC 12's own AVX-512 header trips these (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

GRPO_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

namespace grpo_fast::cpu {
namespace {

struct V {
  using F = __m512;
  static constexpr int kWidth = 16;

  static F set1(float x) { return _mm512_set1_ps(x); }
  static float first(F x) { return _mm512_cvtss_f32(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
  static F mad(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale2(F a, F whole) { return _mm512_scalef_ps(a, whole); }
  static F copysign(F a, F sign) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(int(0x80000000u)));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), bits));
  }
  static F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

  static __mmask16 lanes(int64_t n) { return __mmask16((1u << n) - 1); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const BF16* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

  // Lanes from n on are -inf.
  static F load_partial(const float* p, int64_t n) {
    return _mm512_mask_loadu_ps(set1(minus_infinity), lanes(n), p);
  }
  static F load_partial(const BF16* p, int64_t n) {
    return from_bf16(_mm256_mask_loadu_epi16(_mm256_set1_epi16(short(BF16::kMinusInf)), lanes(n), p));
  }
  static F load_partial(const F16* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_mask_loadu_epi16(_mm256_set1_epi16(short(F16::kMinusInf)), lanes(n), p));
  }

  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store(BF16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
  static void store(F16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(x)); }
  static void store_partial(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), x); }
  static void store_partial(BF16* p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, lanes(n), to_bf16(x)); }
  static void store_partial(F16* p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, lanes(n), to_f16(x)); }

  // Non-temporal, p aligned to the vector.
  static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
  static void stream(BF16* p, F x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
  static void stream(F16* p, F x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_f16(x)); }
  static void fence() { _mm_sfence(); }

 private:
  static constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

  static F from_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  // Round to nearest even in integers: the carry may run into the exponent, as it should. NaN would round to inf.
  static __m256i to_bf16(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static __m256i to_f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

}  // namespace
}  // namespace grpo_fast::cpu

#include "row_kernels.h"
#include "decode_kernels.h"

GRPO_END_TARGET

namespace grpo_fast::cpu {
const Isa isa_avx512 = {
    "avx512",    row_functions<float>(), row_functions<BF16>(), row_functions<F16>(), attend<float>, attend<BF16>,
    attend<F16>, exp_array,              tanh_array};
}
#endif
