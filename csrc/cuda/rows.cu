// The CUDA backend: one kernel an operation, and how it is launched. A block's work on its part of a row is in part.cuh,
// the arithmetic in row.cuh, and what a token's loss is in ../objectives.h.
#include "rows.h"

#include <algorithm>

#include "part.cuh"

namespace grpo_fast::cuda {
namespace {

// A staged part is small enough for four blocks of an SM, so that some load while others compute; or, of rows longer
// than that, for one.
constexpr int64_t kWantedBytes = 48 << 10;
constexpr int64_t kMostBytes = 200 << 10;
static_assert(kMostBytes <= int64_t(kMaxChunks) * kChunk * 16);

// How a row is spread over blocks.
struct Plan {
  bool staged;
  unsigned cluster;
  unsigned shared_bytes;

  static Plan of(int64_t V, DType dtype) {
    const int64_t vectors = (V * element_size(dtype) + 15) / 16;
    const Device device = Device::current();
    if (device.capability >= 90) {
      const int64_t most = std::min(kMostBytes, int64_t(device.shared_bytes) - int64_t(sizeof(Shared)));
      for (unsigned cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
        const int64_t bytes = (vectors + cluster - 1) / cluster * 16;
        if (bytes <= (cluster < kMaxCluster ? kWantedBytes : most))
          return {true, cluster, unsigned(sizeof(Shared) + bytes)};
      }
    }
    return {false, 1, sizeof(Shared)};
  }
};

// Rows start on 16 bytes and hold whole vectors.
bool is_aligned(const Rows& rows) {
  const int64_t bytes = rows.V * element_size(rows.dtype);
  return (reinterpret_cast<uintptr_t>(rows.data) | rows.stride_b | rows.stride_t | bytes) % 16 == 0;
}

struct Statistics {
  float reference, sum, logp, entropy;
};

// Of the row, in nats; sum = sum_j e^((z_j - reference) / temperature).
template <bool kSoftcap, bool kEntropy, class RowPart>
__device__ __forceinline__ Statistics statistics(const RowPart& part, float x_y, const Transform& transform) {
  const auto plus = [](Sums a, Sums b) { return Sums{a.e + b.e, a.et + b.et}; };
  const auto larger = [](Sums a, Sums b) { return Sums{fmaxf(a.e, b.e), 0.0f}; };
  const float z_y = capped<kSoftcap>(x_y, transform).z;
  float reference = z_y;
  Sums sums = part.exchange(0, part.template sums<kSoftcap, kEntropy>(reference, transform), plus);
  if (!(sums.e <= kTargetSumLimit)) {
    const float largest = part.exchange(1, Sums{part.largest(), 0.0f}, larger).e;
    reference = capped<kSoftcap>(largest, transform).z;
    sums = part.exchange(2, part.template sums<kSoftcap, kEntropy>(reference, transform), plus);
  }
  const float log2_sum = log2f(sums.e);
  float logp = (z_y - reference) * (transform.k * kLn2) - log2_sum * kLn2;
  float entropy = (log2_sum - sums.et / sums.e) * kLn2;
  // Rounding may leave 1e-8 on the wrong side; written so that NaN stays NaN.
  if (logp > 0.0f) logp = 0.0f;
  if (entropy < 0.0f) entropy = 0.0f;
  return {reference, sums.e, logp, kEntropy ? entropy : 0.0f};
}

// The raw logit of a row's target; NaN for an id outside the vocabulary, which is never read.
template <class T>
__device__ __forceinline__ float target_logit(const Rows& logits, int64_t n, int64_t id) {
  return id >= 0 && id < logits.V ? widen(reinterpret_cast<const T*>(logits.row(n))[id]) : NAN;
}

// After `write_gradient`, by all threads: the entry that another thread may just have written.
template <class T, class RowPart>
__device__ __forceinline__ void write_target(const RowPart& part, void* out, int64_t id, float value) {
  __syncthreads();
  if (threadIdx.x == 0 && part.holds(id)) narrow(value, static_cast<T*>(out)[id]);
}

struct StatsProblem {
  Rows logits;
  Tokens tokens;
  StatsArgs args;
  Transform transform;
  bool aligned;
};

template <class T, bool kSoftcap, bool kEntropy>
__global__ void __launch_bounds__(kPlainThreads, 1) row_stats_kernel(const __grid_constant__ StatsProblem p) {
  const int64_t n = blockIdx.x;
  Statistics row = {0.0f, 1.0f, 0.0f, 0.0f};
  if (p.tokens.valid[n]) {
    const Part<T, false> part(p.logits.row(n), p.logits.V, 1, p.aligned);
    row = statistics<kSoftcap, kEntropy>(part, target_logit<T>(p.logits, n, p.tokens.ids[n]), p.transform);
  }
  if (threadIdx.x == 0) {
    p.args.logps[n] = row.logp;
    p.args.row_max[n] = row.reference;
    p.args.row_sum[n] = row.sum;
    if (p.args.entropy) p.args.entropy[n] = row.entropy;
  }
}

struct GradProblem {
  Rows logits;
  Tokens tokens;
  GradArgs args;
  Rows out;
  Transform transform;
  bool aligned, out_aligned;
};

template <class T, bool kSoftcap, bool kEntropy>
__global__ void __launch_bounds__(kPlainThreads, 1) row_grad_kernel(const __grid_constant__ GradProblem p) {
  const int64_t n = blockIdx.x;
  const Part<T, false> part(p.logits.row(n), p.logits.V, 1, p.aligned);
  const float g = p.args.g[n];
  char* const out = p.out.row(n);
  if (!p.tokens.valid[n] || (!kEntropy && g == 0.0f)) return part.write_zeros(out, p.out_aligned);
  const int64_t id = p.tokens.ids[n];
  const Gradient row = Gradient::of<kSoftcap, kEntropy>(
      p.args.row_max[n], p.args.row_sum[n], target_logit<T>(p.logits, n, id), p.args.logps[n],
      kEntropy ? p.args.entropy[n] : 0.0f, g, kEntropy ? p.args.g_entropy[n] : 0.0f, p.transform);
  __syncthreads();  // every thread has the target's logit, which one of them is about to overwrite
  part.template write_gradient<kSoftcap, kEntropy>(out, p.out_aligned, row, p.transform);
  if (id >= 0 && id < p.logits.V) write_target<T>(part, out, id, row.target);
}

struct LossProblem {
  Rows logits;
  Tokens tokens;
  LossArgs args;
  Rows out;
  Transform transform;
  ClipOptions options;
  unsigned cluster;
  bool aligned, out_aligned;
};

// kEntropy: the entropy is asked for, or has a coefficient.
template <class T, bool kSoftcap, bool kEntropy, bool kStaged>
__global__ void __launch_bounds__(kStaged ? kStagedThreads : kPlainThreads, kStaged ? 4 : 1)
    grpo_loss_kernel(const __grid_constant__ LossProblem p) {
  const int64_t n = blockIdx.x / p.cluster;
  Part<T, kStaged> part(p.logits.row(n), p.logits.V, p.cluster, p.aligned);
  Shared& shared = part.shared();
  char* const out = p.out.row(n);
  const bool first = threadIdx.x == 0 && part.rank() == 0;
  if (!p.tokens.valid[n]) {
    if (first) {
      p.args.losses[n] = p.args.logps[n] = 0.0f;
      if (p.args.entropy) p.args.entropy[n] = 0.0f;
    }
    return part.write_zeros(out, p.out_aligned);
  }
  part.fetch();
  const int64_t id = p.tokens.ids[n];
  const float x_y = target_logit<T>(p.logits, n, id);
  const Statistics row = statistics<kSoftcap, kEntropy>(part, x_y, p.transform);
  if (threadIdx.x == 0) {
    const TokenLoss token = clip_objective(token_inputs(p.args, n, row.logp), p.options);
    const float g = p.args.coef[n] * token.grad;
    const float g_entropy = kEntropy && p.args.entropy_scale ? -*p.args.entropy_scale : 0.0f;
    shared.live = g != 0.0f || g_entropy != 0.0f;
    shared.gradient = Gradient::of<kSoftcap, kEntropy>(row.reference, row.sum, x_y, row.logp, row.entropy, g, g_entropy,
                                                       p.transform);
    if (first) {
      p.args.losses[n] = token.loss;
      p.args.logps[n] = row.logp;
      if (p.args.entropy) p.args.entropy[n] = row.entropy;
    }
  }
  __syncthreads();
  if (!shared.live) return part.write_zeros(out, p.out_aligned);
  const Gradient gradient = shared.gradient;
  part.template write_gradient<kSoftcap, kEntropy>(out, p.out_aligned, gradient, p.transform);
  if (id >= 0 && id < p.logits.V) write_target<T>(part, out, id, gradient.target);
}

struct ScaleProblem {
  Rows grad;
  const float* factor;
  bool aligned;
};

template <class T>
__global__ void __launch_bounds__(kPlainThreads, 1) scale_kernel(const __grid_constant__ ScaleProblem p) {
  const float factor = *p.factor;
  if (factor == 1.0f) return;
  char* const row = p.grad.row(blockIdx.x);
  Part<T, false>(row, p.grad.V, 1, p.aligned).multiply(row, factor);
}

// f(T{}), T the element's type.
template <class F>
void with_type(DType dtype, F f) {
  if (dtype == DType::F32) return f(float{});
  if (dtype == DType::BF16) return f(BF16{});
  return f(F16{});
}

template <class F>
void with_flag(bool flag, F f) {
  if (flag) return f(std::true_type{});
  return f(std::false_type{});
}

Shape plain_shape(int64_t rows) { return {rows, 1, kPlainThreads, sizeof(Shared)}; }

}  // namespace

void row_stats(const Rows& logits, const Tokens& tokens, const StatsArgs& args, const Scaling& scaling, Stream stream) {
  if (tokens.n == 0) return;
  const StatsProblem problem = {logits, tokens, args, Transform::make(scaling), is_aligned(logits)};
  with_type(logits.dtype, [&](auto element) {
    with_flag(scaling.softcap != 0, [&](auto softcap) {
      with_flag(args.entropy != nullptr, [&](auto entropy) {
        launch(row_stats_kernel<decltype(element), softcap.value, entropy.value>, plain_shape(tokens.n), problem,
               stream);
      });
    });
  });
}

void row_grad(const Rows& logits, const Tokens& tokens, const GradArgs& args, const Rows& out, const Scaling& scaling,
              Stream stream) {
  if (tokens.n == 0) return;
  const bool aligned = is_aligned(logits);
  const GradProblem problem = {logits,  tokens, args, out, Transform::make(scaling),
                               aligned, aligned && is_aligned(out)};
  with_type(logits.dtype, [&](auto element) {
    with_flag(scaling.softcap != 0, [&](auto softcap) {
      with_flag(args.g_entropy != nullptr, [&](auto entropy) {
        launch(row_grad_kernel<decltype(element), softcap.value, entropy.value>, plain_shape(tokens.n), problem,
               stream);
      });
    });
  });
}

void grpo_loss(const Rows& logits, const Tokens& tokens, const LossArgs& args, const Rows& out, const Scaling& scaling,
               const ClipOptions& options, Stream stream) {
  if (tokens.n == 0) return;
  const Plan plan = Plan::of(logits.V, logits.dtype);
  const bool aligned = is_aligned(logits);
  const LossProblem problem = {logits,  tokens,       args,    out, Transform::make(scaling),
                               options, plan.cluster, aligned, aligned && is_aligned(out)};
  const Shape shape = {tokens.n * plan.cluster, plan.cluster, plan.staged ? kStagedThreads : kPlainThreads,
                       plan.shared_bytes};
  with_type(logits.dtype, [&](auto element) {
    with_flag(scaling.softcap != 0, [&](auto softcap) {
      with_flag(args.entropy || args.entropy_scale, [&](auto entropy) {
        with_flag(plan.staged, [&](auto staged) {
          launch(grpo_loss_kernel<decltype(element), softcap.value, entropy.value, staged.value>, shape, problem,
                 stream);
        });
      });
    });
  });
}

void scale(const Rows& grad, int64_t n, const float* factor, Stream stream) {
  if (n == 0) return;
  const ScaleProblem problem = {grad, factor, is_aligned(grad)};
  with_type(grad.dtype, [&](auto element) {
    launch(scale_kernel<decltype(element)>, plain_shape(n), problem, stream);
  });
}

}  // namespace grpo_fast::cuda
