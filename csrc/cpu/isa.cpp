// Which instruction set runs, decided once at run time, and the transform's constants.
#include "rows.h"
#include "narrow.h"

#include <atomic>
#include <cfloat>
#include <vector>

namespace grpo_fast::cpu {
namespace {

std::vector<const Isa*> supported() {
  std::vector<const Isa*> found;
#if GRPO_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found.push_back(&isa_avx512);
  if (avx2) found.push_back(&isa_avx2);
#endif
  found.push_back(&isa_portable);
  return found;
}

const std::vector<const Isa*>& available() {
  static const std::vector<const Isa*> found = supported();
  return found;
}

std::atomic<const Isa*> chosen{nullptr};

}  // namespace

const Isa& isa() {
  const Isa* choice = chosen.load(std::memory_order_relaxed);
  return choice ? *choice : *available().front();
}

bool set_isa(const std::string& name) {
  if (name == "auto") {
    chosen = nullptr;
    return true;
  }
  for (const Isa* candidate : available()) {
    if (name == candidate->name) {
      chosen = candidate;
      return true;
    }
  }
  return false;
}

std::string supported_isas() {
  std::string names;
  for (const Isa* candidate : available()) names += (names.empty() ? "" : ",") + std::string(candidate->name);
  return names;
}

Transform Transform::make(const Scaling& s) {
  Transform t;
  t.softcap = s.softcap > 0;
  t.to_tanh = t.softcap ? float(s.logit_scale / s.softcap) : 1.0f;
  t.slope = (t.softcap ? s.softcap : s.logit_scale) / s.temperature;
  const double log2_slope = t.slope * 1.4426950408889634074;
  t.log2_slope_hi = float(log2_slope);
  t.log2_slope_lo = float(log2_slope - t.log2_slope_hi);
  t.min_gap = float(std::max(-200.0 / log2_slope, -double(FLT_MAX)));  // 2^-200 is 0 in fp32
  t.derivative = float(s.logit_scale / s.temperature);
  return t;
}

}  // namespace grpo_fast::cpu
