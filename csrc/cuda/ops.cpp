// The extension module grpo_fast._cuda: the CUDA backend's operations. A module of its own, so that whatever keeps it from
// being built or loaded leaves the CPU's in place.
#include <Python.h>

#include <torch/csrc/stable/accelerator.h>

#include "../row_ops.h"
#include "rows.h"

namespace {

struct Cuda {
  static constexpr const char* kPlace = "GPU";
  static bool holds(const Tensor& x) { return x.is_cuda(); }

  // On the tensor's device and the stream that is current there.
  explicit Cuda(const Tensor& x) : guard_(x.get_device_index()), stream_(current_stream(x)) {}
  void row_stats(auto&&... args) const { grpo_fast::cuda::row_stats(args..., stream_); }
  void row_grad(auto&&... args) const { grpo_fast::cuda::row_grad(args..., stream_); }
  void grpo_loss(auto&&... args) const { grpo_fast::cuda::grpo_loss(args..., stream_); }
  void scale(auto&&... args) const { grpo_fast::cuda::scale(args..., stream_); }

 private:
  static void* current_stream(const Tensor& x) {
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream) == 0,
                    "grpo_fast: no current CUDA stream");
    return stream;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
};

}  // namespace

STABLE_TORCH_LIBRARY(grpo_fast_cuda, m) { define_rows(m); }

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_cuda, CUDA, m) { implement_rows<Cuda>(m); }

PyMODINIT_FUNC PyInit__cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1,     nullptr,
                               nullptr,               nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
