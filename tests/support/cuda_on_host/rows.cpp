// The CUDA backend's operations on host memory, as plain C functions for ctypes.
#include "../../../csrc/cuda/rows.cu"

using namespace grpo_fast;

namespace {

thread_local std::string message;

template <class F>
const char* guarded(F f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

extern "C" {

const char* row_stats(const Rows* logits, const Tokens* tokens, const StatsArgs* args, const Scaling* scaling) {
  return guarded([&] { cuda::row_stats(*logits, *tokens, *args, *scaling, nullptr); });
}

const char* row_grad(const Rows* logits, const Tokens* tokens, const GradArgs* args, const Rows* out,
                     const Scaling* scaling) {
  return guarded([&] { cuda::row_grad(*logits, *tokens, *args, *out, *scaling, nullptr); });
}

const char* grpo_loss(const Rows* logits, const Tokens* tokens, const LossArgs* args, const Rows* out,
                      const Scaling* scaling, double clip_low, double clip_high, double delta, double beta,
                      bool bias_correction) {
  return guarded([&] {
    cuda::grpo_loss(*logits, *tokens, *args, *out, *scaling,
                    ClipOptions::make(clip_low, clip_high, delta, beta, bias_correction), nullptr);
  });
}

const char* scale(const Rows* grad, int64_t n, const float* factor) {
  return guarded([&] { cuda::scale(*grad, n, factor, nullptr); });
}

void set_device(int capability, int shared_bytes) {
  cuda_on_host::machine().capability = capability;
  cuda_on_host::machine().shared_bytes = shared_bytes;
}
unsigned last_cluster() { return cuda_on_host::machine().clusters_of; }
unsigned last_threads() { return cuda_on_host::machine().threads_of; }
int64_t last_bytes_read() { return cuda_on_host::machine().bytes_read; }
int64_t last_bytes_written() { return cuda_on_host::machine().bytes_written; }
}
