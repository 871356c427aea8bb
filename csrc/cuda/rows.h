// The CUDA backend's four operations: what they mean is row_ops.h's list of schemas and docs/math.md, as for cpu/rows.h.
// Pointers are to the current device, and work is queued on `stream`.
#pragma once

#include "../rows.h"

namespace grpo_fast::cuda {

using Stream = void*;  // a cudaStream_t

void row_stats(const Rows& logits, const Tokens&, const StatsArgs&, const Scaling&, Stream stream);
void row_grad(const Rows& logits, const Tokens&, const GradArgs&, const Rows& out, const Scaling&, Stream stream);
void grpo_loss(const Rows& logits, const Tokens&, const LossArgs&, const Rows& out, const Scaling&, const ClipOptions&,
               Stream stream);
void scale(const Rows& grad, int64_t n, const float* factor, Stream stream);

}  // namespace grpo_fast::cuda
