// A row of logits as its threads see it: vectors of 16 bytes, from shared or global memory, and the arithmetic on them.
//
// Letters: x, a raw logit; z = cap(x), up to the transform's factor; t = (z - reference) * k, the exponent in base 2;
// e = 2^t. Which elements a thread adds up, and in which order, depends on V and the element's size alone, never on
// where a row lies in memory: so a row's result does not depend on the batch around it.
#pragma once

#include <cmath>
#include <type_traits>

#include "../rows.h"
#include "device.cuh"

namespace grpo_fast::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowestExponent = -1e30f;  // stands for t = -inf in products with p = 0, which must give 0

// Exponents are relative to the target's logit, so a row whose sum is within this limit needs no maximum; beyond it (the
// target has p < 2^-48, or the sum is inf or NaN) the row is summed again from its maximum.
constexpr float kTargetSumLimit = 281474976710656.0f;  // 2^48

struct Transform {
  float k;          // log2(e) / temperature, times logit_scale without a softcap
  float slope;      // dz/dx / temperature without a softcap; times 1 - tanh^2 with one
  float softcap;    // 0: none
  float cap_slope;  // tanh's argument over x

  static Transform make(const Scaling& s) {
    const double slope = s.logit_scale / s.temperature;
    constexpr double log2e = 1.4426950408889634;
    if (s.softcap == 0) return {float(slope * log2e), float(slope), 0.0f, 0.0f};
    return {float(log2e / s.temperature), float(slope), float(s.softcap), float(s.logit_scale / s.softcap)};
  }
};

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(BF16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }
__device__ __forceinline__ float widen(F16 x) { return widen_f16(x.bits); }

__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, BF16& out) { out.bits = uint16_t(pack_bf16(x, 0.0f)); }
__device__ __forceinline__ void narrow(float x, F16& out) { out.bits = uint16_t(pack_f16(x, 0.0f)); }

template <class T>
constexpr int kPerVector = 16 / sizeof(T);

// 16 bytes of T as floats.
template <class T>
struct Vector {
  float x[kPerVector<T>];

  __device__ __forceinline__ static Vector of(uint4 words) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        v.x[i] = __builtin_bit_cast(float, word[i]);
      } else {
        v.x[2 * i] = widen(T{uint16_t(word[i])});
        v.x[2 * i + 1] = widen(T{uint16_t(word[i] >> 16)});
      }
    }
    return v;
  }

  __device__ __forceinline__ uint4 words() const {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = __builtin_bit_cast(uint32_t, x[i]);
      } else if constexpr (std::is_same_v<T, BF16>) {
        word[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
      } else {
        word[i] = pack_f16(x[2 * i], x[2 * i + 1]);
      }
    }
    return {word[0], word[1], word[2], word[3]};
  }

  // The first `n` elements from `p`, of any alignment; -inf beyond, which adds nothing to a sum of exponentials.
  __device__ __forceinline__ static Vector of_elements(const T* p, int64_t n) {
    Vector v;
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i) v.x[i] = i < n ? widen(p[i]) : -INFINITY;
    return v;
  }

  __device__ __forceinline__ void store_elements(T* p, int64_t n) const {
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i)
      if (i < n) narrow(x[i], p[i]);
  }
};

struct Capped {
  float z;
  float derivative;  // dz/dx over `slope`
};

// (softcap * tanh(x * cap_slope), 1 - tanh^2), both to a relative error of about 2e-7; -inf stays -inf.
__device__ __forceinline__ Capped soft_capped(float x, const Transform& transform) {
  const float u = x * transform.cap_slope;
  const float e = exp2_fast(fabsf(u) * (-2.0f * kLog2e));
  const float r = reciprocal(1.0f + e);
  const float large = copysignf((1.0f - e) * r, u);
  const float s = u * u;  // tanh(u)/u - 1 on |u| < 0.65 at Chebyshev nodes of u^2, as in kernels/primitives.py
  float q = fmaf(s, -0.00592372621f, 0.0208734606f);
  q = fmaf(s, q, -0.0538237589f);
  q = fmaf(s, q, 0.133325837f);
  q = fmaf(s, q, -0.33333327f);
  const float small = fmaf(u * s, q, u);
  const float value = fabsf(u) < 0.65f ? small : large;
  return {x == -INFINITY ? x : transform.softcap * value, 4.0f * e * r * r};
}

template <bool kSoftcap>
__device__ __forceinline__ Capped capped(float x, const Transform& transform) {
  if constexpr (kSoftcap) return soft_capped(x, transform);
  return {x, 1.0f};
}

// sum e and sum e*t.
struct Sums {
  float e, et;
};

template <class T, bool kSoftcap, bool kEntropy>
__device__ __forceinline__ void add(Sums& sums, const Vector<T>& v, float reference, const Transform& transform) {
  constexpr int n = kPerVector<T>;
  float e[n], et[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    // The difference of two logits is exact where it matters; z * k - reference * k would not be.
    const float t = (capped<kSoftcap>(v.x[i], transform).z - reference) * transform.k;
    e[i] = exp2_fast(t);
    if constexpr (kEntropy) et[i] = e[i] * fmaxf(t, kLowestExponent);
  }
#pragma unroll
  for (int width = n / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      e[i] += e[i + width];
      if constexpr (kEntropy) et[i] += et[i + width];
    }
  }
  sums.e += e[0];
  if constexpr (kEntropy) sums.et += et[0];
}

template <class T>
__device__ __forceinline__ float larger(float largest, const Vector<T>& v) {
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i) largest = fmaxf(largest, v.x[i]);  // leaves NaN out; the sums will not
  return largest;
}

// dL/dx_j = dz/dx * e_j * (a + b * t_j): see `Gradient::of`.
struct Gradient {
  float reference, a, b;
  float target;  // the target's entry

  // Of g * logp + g_entropy * H. p_j * (log p_j + H) = e/sum * (t*ln2 - ln(sum) + H), so the factor is linear in t. The
  // target's entry comes from scalars, 1 - p_y = -expm1(logp), never from a rounded softmax.
  template <bool kSoftcap, bool kEntropy>
  __device__ __forceinline__ static Gradient of(float reference, float sum, float x_y, float logp, float entropy,
                                                float g, float g_entropy, const Transform& transform) {
    Gradient row = {reference, -g, 0.0f, -g * expm1f(logp)};
    if constexpr (kEntropy) {
      row.a -= g_entropy * (entropy - log2f(sum) * kLn2);
      row.b = -g_entropy * kLn2 * (transform.slope / sum);
      row.target -= g_entropy * expf(logp) * (logp + entropy);
    }
    row.a *= transform.slope / sum;
    row.target *= transform.slope * capped<kSoftcap>(x_y, transform).derivative;
    if (x_y == -INFINITY) row.target = 0.0f;
    return row;
  }
};

template <class T, bool kSoftcap, bool kEntropy>
__device__ __forceinline__ Vector<T> gradient(const Vector<T>& v, const Gradient& row, const Transform& transform) {
  Vector<T> out;
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i) {
    const Capped z = capped<kSoftcap>(v.x[i], transform);
    const float t = (z.z - row.reference) * transform.k;
    float factor = row.a;
    if constexpr (kEntropy) factor = fmaf(fmaxf(t, kLowestExponent), row.b, row.a);
    out.x[i] = exp2_fast(t) * factor * z.derivative;
  }
  return out;
}

}  // namespace grpo_fast::cuda
