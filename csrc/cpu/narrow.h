// The 16-bit element types, their conversion one at a time, and the macros that open and close a target region.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GRPO_X86 1
#else
#define GRPO_X86 0
#endif

// Functions defined between the two may use the instructions named; the file needs no compiler flag. A target region
// must hold no `inline` function with external linkage: the linker could keep that copy for the whole program.
#define GRPO_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define GRPO_BEGIN_TARGET(names) \
  GRPO_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define GRPO_END_TARGET GRPO_PRAGMA(clang attribute pop)
#else
#define GRPO_BEGIN_TARGET(names) \
  GRPO_PRAGMA(GCC push_options)  \
  GRPO_PRAGMA(GCC target(names))
#define GRPO_END_TARGET GRPO_PRAGMA(GCC pop_options)
#endif

namespace grpo_fast::cpu {

struct BF16 {
  uint16_t bits;
  static constexpr uint16_t kMinusInf = 0xff80;
};

struct F16 {
  uint16_t bits;
  static constexpr uint16_t kMinusInf = 0xfc00;
};

namespace {

template <class T>
T minus_inf() {
  return T{T::kMinusInf};
}
template <>
[[maybe_unused]] float minus_inf<float>() {
  return -std::numeric_limits<float>::infinity();
}

[[maybe_unused]] float widen(float x) { return x; }
[[maybe_unused]] float widen(BF16 x) { return torch::headeronly::detail::f32_from_bits(x.bits); }
[[maybe_unused]] float widen(F16 x) { return torch::headeronly::detail::fp16_ieee_to_fp32_value(x.bits); }

template <class T>
T narrow(float x);
template <>
[[maybe_unused]] float narrow<float>(float x) {
  return x;
}
template <>
[[maybe_unused]] BF16 narrow<BF16>(float x) {
  return {torch::headeronly::detail::round_to_nearest_even(x)};
}
template <>
[[maybe_unused]] F16 narrow<F16>(float x) {
  return {torch::headeronly::detail::fp16_ieee_from_fp32_value(x)};
}

}  // namespace
}  // namespace grpo_fast::cpu
