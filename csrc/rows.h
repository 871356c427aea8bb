// What every backend is given, without any torch type: rows of logits, and a token's scalars.
#pragma once

#include <cstdint>

#include "objectives.h"

namespace grpo_fast {

enum class DType { F32, BF16, F16 };

GRPO_HOST_DEVICE constexpr int64_t element_size(DType dtype) { return dtype == DType::F32 ? 4 : 2; }

// A [B, T, V] tensor with unit stride along V, addressed by row n = b * T + t. Strides in bytes.
struct Rows {
  char* data;
  int64_t T, V;
  int64_t stride_b, stride_t;
  DType dtype;

  GRPO_HOST_DEVICE char* row(int64_t n) const { return data + n / T * stride_b + n % T * stride_t; }
};

// z = cap(x * logit_scale) / temperature, cap(x) = softcap * tanh(x / softcap); softcap 0: no cap.
struct Scaling {
  double temperature, softcap, logit_scale;
};

// Per-token vectors are contiguous [B*T]; nullptr where absent.
struct Tokens {
  const int64_t* ids;
  const uint8_t* valid;
  int64_t n;
};

struct StatsArgs {
  float *logps, *entropy, *row_max, *row_sum;
};

struct GradArgs {
  const float *row_max, *row_sum, *logps, *entropy, *g, *g_entropy;
};

struct LossArgs {
  const float *advantages, *weights, *old_logps, *ref_logps, *coef, *entropy_scale;
  float *losses, *logps, *entropy;
};

template <class T>
GRPO_HOST_DEVICE T value_or(const T* p, int64_t n, T otherwise) {
  return p ? p[n] : otherwise;
}

// What the objective wants to know of token n, whose log-prob is `logp`.
GRPO_HOST_DEVICE TokenInputs token_inputs(const LossArgs& args, int64_t n, float logp) {
  return {logp, args.advantages[n], value_or(args.weights, n, 1.0f), value_or(args.old_logps, n, 0.0f),
          value_or(args.ref_logps, n, 0.0f), args.old_logps != nullptr, args.ref_logps != nullptr};
}

}  // namespace grpo_fast
