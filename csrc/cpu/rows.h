// What the CPU backend is made of: plain structs without any torch type.
// row_ops.h fills in `Rows` and the argument structs, rows.cpp walks the rows in parallel, and an `Isa` (one per
// instruction set, isa_*.cpp) holds the vocabulary-sized loops.
#pragma once

#include <cstdint>
#include <string>

#include "../rows.h"
#include "decode.h"

namespace grpo_fast::cpu {

// z = cap(x * logit_scale) / temperature. The kernels work with u(x), monotone in x, where z = slope * u:
// u = x without a softcap, else tanh(x * to_tanh). exp(z - z_max) is 2^((u - u_max) * log2_slope), with log2_slope held
// as a pair of floats because its rounding would be multiplied by the gap.
struct Transform {
  bool softcap;
  float to_tanh;
  double slope;
  float log2_slope_hi, log2_slope_lo;
  float min_gap;     // below it the exponential is 0 in fp32, denormals included; finite, so that -inf makes no NaN
  float derivative;  // dz/dx without a softcap; times sech^2 with one

  static Transform make(const Scaling&);
};

// Statistics of one row. Sums are over exp(z_j - z_max); `rest` leaves the target out, so that a target that holds
// nearly all of the mass still knows how far it is from 1.
struct RowStats {
  float max;         // of the raw logits
  double rest;
  double target;     // exp(z_y - z_max), 0 if the id is out of range
  double gap;        // z_y - z_max, NaN if the id is out of range
  double weighted;   // sum of exp(z_j - z_max) * (z_j - z_max), all j; only where the entropy is asked for

  double sum() const { return rest + target; }
  float logp() const;
  float entropy() const;
};

// Where sweep 1 leaves exp(z_j - block maximum) for sweep 2, and the block maxima beside it.
struct Kept {
  float* exps;       // [V]; may be the logits row itself
  float* block_max;  // [blocks(V)]
};

constexpr int64_t kBlock = 2048;  // logits per block: 8 KiB of fp32, so that its second pass reads L1
constexpr int64_t blocks(int64_t V) { return (V + kBlock - 1) / kBlock; }

// Sweep 2 from kept exponentials (never with a softcap): out_j = -factor * exp(z_j - z_max), the target's entry given.
struct Rescale {
  float max;          // raw maximum, as in RowStats
  float factor;
  int64_t target;     // -1: none
  float target_value;
  bool stream;        // non-temporal stores: out is another tensor, whose old content nobody needs in the cache
  const void* next;   // the row to prefetch into L2 as the sweep goes, or nullptr
};

// Sweep 2 from the logits: out_j = dz_j/dx_j * (g * (onehot_j - p_j) - g_entropy * p_j * (log p_j + H)).
struct Gradient {
  float max;  // raw maximum, as in RowStats
  float sum;
  float logp;
  float entropy;
  float g;
  float g_entropy;  // 0 without an entropy bonus
  int64_t target;   // -1: none
};

// The vocabulary-sized loops for one dtype of `row` and `out`. out may be row.
struct RowFunctions {
  // Sweep 1. kept.exps == nullptr keeps nothing.
  RowStats (*stats)(const void* row, int64_t V, int64_t target, const Transform&, bool entropy, Kept);
  void (*rescale)(Kept, void* out, int64_t V, const Rescale&, const Transform&);
  void (*grad)(const void* row, void* out, int64_t V, const Gradient&, const Transform&);
  void (*scale)(void* row, int64_t V, float factor);
};

// All that is compiled once per instruction set.
struct Isa {
  const char* name;
  RowFunctions f32, bf16, f16;
  AttendFunction attend_f32, attend_bf16, attend_f16;
  // For the accuracy tests: exp(x) for x <= 0, and tanh.
  void (*exp)(const float* x, float* out, int64_t n);
  void (*tanh)(const float* x, float* out, int64_t n);

  const RowFunctions& rows(DType dtype) const {
    return dtype == DType::F32 ? f32 : dtype == DType::BF16 ? bf16 : f16;
  }
  AttendFunction attend(DType dtype) const {
    return dtype == DType::F32 ? attend_f32 : dtype == DType::BF16 ? attend_bf16 : attend_f16;
  }
};

extern const Isa isa_portable, isa_avx2, isa_avx512;

// The best supported one, or what set_isa chose.
const Isa& isa();
// "auto" restores the choice. False if this machine cannot run it or there is none of that name.
bool set_isa(const std::string& name);
std::string supported_isas();

void row_stats(const Rows& logits, const Tokens&, const StatsArgs&, const Scaling&);
void row_grad(const Rows& logits, const Tokens&, const GradArgs&, const Rows& out, const Scaling&);
void grpo_loss(const Rows& logits, const Tokens&, const LossArgs&, const Rows& out, const Scaling&,
               const ClipOptions&);
void scale(const Rows& grad, int64_t n, const float* factor);

}  // namespace grpo_fast::cpu
