// The four operations as loops over rows. What a row gives depends on that row alone, never on the thread or on its
// neighbours.
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "for_each_row.h"

namespace grpo_fast::cpu {
namespace {

// A gradient that the caller has just allocated has no pages yet, and a fault for each of its 4 KiB pages costs more
// than the computation. Has Linux provide a long row's pages in one call and says whether it did: they then lie zeroed
// in the cache, where plain stores are cheaper; a row that has its pages is better written past the cache.
bool provide_pages([[maybe_unused]] const void* row, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  constexpr int64_t page = 4096;
  if (bytes < 16 * page) return false;
  const auto address = reinterpret_cast<uintptr_t>(row);
  const auto page_of = [](uintptr_t p) { return reinterpret_cast<void*>(p / page * page); };
  unsigned char resident = 1;  // asked of a page in the middle, which no neighbouring row shares
  if (mincore(page_of(address + bytes / 2), page, &resident) != 0 || (resident & 1)) return false;
  const uintptr_t begin = address / page * page;
  return madvise(page_of(begin), address + bytes - begin, MADV_POPULATE_WRITE) == 0;
#else
  return false;
#endif
}

void zero_row(const Rows& out, int64_t n) { std::memset(out.row(n), 0, out.V * element_size(out.dtype)); }

int64_t in_range(int64_t id, int64_t vocab) { return id >= 0 && id < vocab ? id : -1; }

// One thread's memory for a row of exponentials and its block maxima.
class Scratch {
 public:
  Scratch(int64_t vocab, bool exps) {
    const int64_t row = exps ? (vocab + kAlign - 1) / kAlign * kAlign : 0;
    memory_ = std::make_unique_for_overwrite<float[]>(row + blocks(vocab) + kAlign);
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    exps_ = memory_.get() + (kAlign - address / sizeof(float) % kAlign);
    block_max_ = exps_ + row;
  }
  float* exps() const { return exps_; }
  float* block_max() const { return block_max_; }

 private:
  static constexpr int64_t kAlign = 16;  // floats: a cache line
  std::unique_ptr<float[]> memory_;
  float *exps_, *block_max_;
};

}  // namespace

float RowStats::logp() const {
  // Where the target holds most of the mass, log(sum) would round away the rest.
  if (target >= rest) return float(-std::log1p(rest / target));
  return float(gap - std::log(rest + target));
}

float RowStats::entropy() const { return float(std::log(sum()) - weighted / sum()); }

void row_stats(const Rows& logits, const Tokens& tokens, const StatsArgs& args, const Scaling& scaling) {
  const Transform t = Transform::make(scaling);
  const auto stats = isa().rows(logits.dtype).stats;
  for_each_row(tokens.n, logits.V, [&] {
    return [&](int64_t n, int64_t) {
      RowStats row = {0.0f, 0.0, 1.0, 0.0, 0.0};  // masked: logp 0, entropy 0
      if (tokens.valid[n])
        row = stats(logits.row(n), logits.V, in_range(tokens.ids[n], logits.V), t, args.entropy, Kept{});
      args.logps[n] = row.logp();
      if (args.entropy) args.entropy[n] = row.entropy();
      args.row_max[n] = row.max;
      args.row_sum[n] = float(row.sum());
    };
  });
}

void row_grad(const Rows& logits, const Tokens& tokens, const GradArgs& args, const Rows& out, const Scaling& scaling) {
  const Transform t = Transform::make(scaling);
  const auto grad = isa().rows(logits.dtype).grad;
  for_each_row(tokens.n, logits.V, [&] {
    return [&](int64_t n, int64_t) {
      const float g_entropy = value_or(args.g_entropy, n, 0.0f);
      if (!tokens.valid[n] || (args.g[n] == 0 && g_entropy == 0)) return zero_row(out, n);
      const Gradient row = {args.row_max[n], args.row_sum[n], args.logps[n], value_or(args.entropy, n, 0.0f),
                            args.g[n],       g_entropy,       in_range(tokens.ids[n], logits.V)};
      if (logits.data != out.data) provide_pages(out.row(n), out.V * element_size(out.dtype));
      grad(logits.row(n), out.row(n), logits.V, row, t);
    };
  });
}

namespace {

class LossWorker {
 public:
  LossWorker(const Rows& logits, const Tokens& tokens, const LossArgs& args, const Rows& out, const Transform& t,
             const ClipOptions& options)
      : logits_(logits), tokens_(tokens), args_(args), out_(out), t_(t), options_(options),
        rows_(isa().rows(logits.dtype)), in_place_(logits.data == out.data),
        entropy_scale_(args.entropy_scale ? *args.entropy_scale : 0.0f),
        keep_in_row_(in_place_ && logits.dtype == DType::F32), scratch_(logits.V, !keep_in_row_) {}

  void operator()(int64_t n, int64_t last) {
    if (!tokens_.valid[n]) return masked(n);
    const TokenInputs in = token_inputs(args_, n, 0.0f);
    const bool dead = in.advantage * in.weight == 0 && !(in.has_ref && options_.beta != 0);
    Kept kept = {nullptr, scratch_.block_max()};
    if (!dead && !t_.softcap && entropy_scale_ == 0)
      kept.exps = keep_in_row_ ? reinterpret_cast<float*>(logits_.row(n)) : scratch_.exps();
    const int64_t target = in_range(tokens_.ids[n], logits_.V);
    const bool entropy = args_.entropy || entropy_scale_ != 0;
    const RowStats stats = rows_.stats(logits_.row(n), logits_.V, target, t_, entropy, kept);

    const float logp = stats.logp();
    const TokenLoss token = clip_objective(token_inputs(args_, n, logp), options_);
    args_.losses[n] = token.loss;
    args_.logps[n] = logp;
    if (args_.entropy) args_.entropy[n] = stats.entropy();

    const float g = args_.coef[n] * token.grad;
    if (g == 0 && entropy_scale_ == 0) return zero_row(out_, n);
    if (kept.exps) return rescale(n, last, stats, kept, g, target);
    const Gradient row = {stats.max, float(stats.sum()), logp, entropy ? stats.entropy() : 0.0f, g, -entropy_scale_,
                          target};
    rows_.grad(logits_.row(n), out_.row(n), logits_.V, row, t_);
  }

 private:
  void masked(int64_t n) {
    args_.losses[n] = args_.logps[n] = 0;
    if (args_.entropy) args_.entropy[n] = 0;
    zero_row(out_, n);
  }

  void rescale(int64_t n, int64_t last, const RowStats& stats, Kept kept, float g, int64_t target) const {
    const float dz = g * t_.derivative;
    // A target at -inf has no gradient.
    const float at_target = stats.gap == -HUGE_VAL ? 0.0f : -dz * std::expm1(stats.logp());
    // Out of place the sweep only writes, so the next row can come in meanwhile: 12 %. In place it gained nothing.
    const void* next = !in_place_ && n + 1 < last && tokens_.valid[n + 1] ? logits_.row(n + 1) : nullptr;
    const bool stream = !in_place_ && !provide_pages(out_.row(n), out_.V * element_size(out_.dtype));
    const Rescale row = {stats.max, float(dz / stats.sum()), target, at_target, stream, next};
    rows_.rescale(kept, out_.row(n), logits_.V, row, t_);
  }

  const Rows& logits_;
  const Tokens& tokens_;
  const LossArgs& args_;
  const Rows& out_;
  const Transform& t_;
  const ClipOptions& options_;
  const RowFunctions& rows_;
  const bool in_place_;
  const float entropy_scale_;
  const bool keep_in_row_;
  const Scratch scratch_;
};

}  // namespace

void grpo_loss(const Rows& logits, const Tokens& tokens, const LossArgs& args, const Rows& out, const Scaling& scaling,
               const ClipOptions& options) {
  const Transform t = Transform::make(scaling);
  for_each_row(tokens.n, logits.V, [&] { return LossWorker(logits, tokens, args, out, t, options); });
}

void scale(const Rows& grad, int64_t n, const float* scale) {
  const float factor = *scale;
  if (factor == 1.0f) return;
  const auto scale_row = isa().rows(grad.dtype).scale;
  for_each_row(n, grad.V, [&] { return [&](int64_t i, int64_t) { scale_row(grad.row(i), grad.V, factor); }; });
}

}  // namespace grpo_fast::cpu
