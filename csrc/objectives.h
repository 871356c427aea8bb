// Per-token objectives: everything about a loss that does not need the vocabulary.
// A row's log-prob goes in, the token's loss and its derivative dL/dlogp come out. Scalar fp32, no memory access, no
// library beyond <cmath>, so that host and device code share it. Formulas: docs/math.md.
#pragma once

#include <cmath>
#include <limits>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define GRPO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GRPO_HOST_DEVICE inline
#endif

namespace grpo_fast {

struct TokenLoss {
  float loss;
  float grad;  // dL/dlogp
};

// Bounds of the ratio and their logarithms. The logarithms are taken in double on the host and rounded once, so that
// every backend decides with the same number.
struct ClipOptions {
  float clip_low, clip_high, delta;
  float log_low, log_high, log_delta;
  float beta;
  bool bias_correction;

  static ClipOptions make(double clip_low, double clip_high, double delta, double beta, bool bias_correction) {
    return {float(clip_low), float(clip_high), float(delta),
            float(std::log(clip_low)), float(std::log(clip_high)), float(std::log(delta)),
            float(beta), bias_correction};
  }
};

struct TokenInputs {
  float logp;
  float advantage;
  float weight;
  float old_logp;
  float ref_logp;
  bool has_old;
  bool has_ref;
};

// k3 = e^d - d - 1. expm1(d) - d cancels for small d (the result is d^2/2), hence the series; beyond |d| = 0.5 the
// cancellation costs less than 4e-7 relative.
GRPO_HOST_DEVICE float k3(float d) {
  if (d > 60.0f) return expf(d);  // d is lost beside it, and at inf the difference would be NaN
  if (fabsf(d) >= 0.5f) return expm1f(d) - d;
  float p = 1.0f / 362880;
  p = fmaf(p, d, 1.0f / 40320);
  p = fmaf(p, d, 1.0f / 5040);
  p = fmaf(p, d, 1.0f / 720);
  p = fmaf(p, d, 1.0f / 120);
  p = fmaf(p, d, 1.0f / 24);
  p = fmaf(p, d, 1.0f / 6);
  p = fmaf(p, d, 0.5f);
  return p * d * d;
}

// log(pi / pi_old). On-policy it is 0 whatever logp is, except that a NaN log-prob must not turn into a finite loss.
GRPO_HOST_DEVICE float log_ratio(const TokenInputs& in) {
  return in.has_old || std::isnan(in.logp) ? in.logp - in.old_logp : 0.0f;
}

// -min(min(r, delta) * A, clip(r, low, high) * A) and its derivative, without the weight. Decided on log-ratios: the
// ratio is only evaluated where it is the value, so an overflowing ratio never meets a zero gradient.
GRPO_HOST_DEVICE TokenLoss clipped_policy(float lr, float advantage, const ClipOptions& options) {
  if (advantage > 0) {
    if (lr > options.log_high) return {-options.clip_high * advantage, 0.0f};
  } else {
    if (lr < options.log_low) return {-options.clip_low * advantage, 0.0f};
    if (lr > options.log_delta) return {-options.delta * advantage, 0.0f};
  }
  const float value = -expf(lr) * advantage;
  return {value, value};
}

// weight * clip objective + beta * k3 KL against the reference.
GRPO_HOST_DEVICE TokenLoss clip_objective(const TokenInputs& in, const ClipOptions& options) {
  const float lr = log_ratio(in);
  TokenLoss out = {0.0f, 0.0f};
  if (in.advantage * in.weight != 0) {
    const TokenLoss policy = clipped_policy(lr, in.advantage, options);
    out = {in.weight * policy.loss, in.weight * policy.grad};
  }
  if (!in.has_ref || options.beta == 0) return out;
  const float d = in.ref_logp - in.logp;
  if (d == 0) return out;  // an overflowing ratio times zero would be NaN
  if (options.bias_correction) {
    const float beta_r = options.beta * expf(lr);
    return {out.loss + beta_r * k3(d), out.grad - beta_r * d};
  }
  return {out.loss + options.beta * k3(d), out.grad - options.beta * expm1f(d)};
}

}  // namespace grpo_fast
