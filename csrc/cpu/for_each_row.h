// Rows handed out to torch's threads a few at a time.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace grpo_fast::cpu {

// Calls make_worker() once per thread and the worker it returns with each row index and the end of its chunk of rows.
// A row costs as much as so many logits.
template <class MakeWorker>
void for_each_row(int64_t rows, int64_t logits, const MakeWorker& make_worker) {
  if (rows == 0 || logits == 0) return;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t worth_a_thread = std::max<int64_t>(1, 16384 / logits);
  const int64_t chunk = std::max(worth_a_thread, rows / (16 * threads));
  const int64_t workers = std::min(threads, (rows + chunk - 1) / chunk);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    auto worker = make_worker();
    for (int64_t first; (first = next.fetch_add(chunk, std::memory_order_relaxed)) < rows;) {
      const int64_t last = std::min(first + chunk, rows);
      for (int64_t n = first; n < last; ++n) worker(n, last);
    }
  });
}

}  // namespace grpo_fast::cpu
