// The extension module grpo_fast._C: every native op's schema in one list, and the checks between torch's tensors and
// the plain structs of cpu/rows.h and cpu/decode.h. Built on torch's stable ABI and Python's limited API, so one binary
// serves every torch >= 2.11. Ops write into preallocated tensors and return nothing; what they mean: cpu/rows.h,
// cpu/decode.h and docs/math.md.
#include <Python.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "cpu/decode.h"
#include "cpu/rows.h"
#ifdef GRPO_FAST_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include "cuda/rows.h"
#endif

namespace {

using grpo_fast::ClipOptions;
using grpo_fast::DType;
using grpo_fast::GradArgs;
using grpo_fast::LossArgs;
using grpo_fast::Rows;
using grpo_fast::Scaling;
using grpo_fast::StatsArgs;
using grpo_fast::Tokens;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
namespace cpu = grpo_fast::cpu;

// A backend of the row operations: where its tensors are, and its functions on plain structs.
struct Cpu {
  static constexpr const char* kPlace = "CPU";
  static bool holds(const Tensor& x) { return x.is_cpu(); }

  explicit Cpu(const Tensor&) {}
  void row_stats(auto&&... args) const { cpu::row_stats(args...); }
  void row_grad(auto&&... args) const { cpu::row_grad(args...); }
  void grpo_loss(auto&&... args) const { cpu::grpo_loss(args...); }
  void scale(auto&&... args) const { cpu::scale(args...); }
};

#ifdef GRPO_FAST_WITH_CUDA
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
#endif

DType element_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return DType::F32;
    case ScalarType::BFloat16: return DType::BF16;
    case ScalarType::Half: return DType::F16;
    default: STD_TORCH_CHECK(false, "grpo_fast: expected float32, bfloat16 or float16 rows");
  }
}

template <class Backend>
Rows rows_of(const Tensor& x) {
  STD_TORCH_CHECK(Backend::holds(x) && x.dim() == 3, "grpo_fast: expected a [B, T, V] tensor on the ", Backend::kPlace);
  STD_TORCH_CHECK(x.size(2) < 2 || x.stride(2) == 1, "grpo_fast: the vocabulary must have unit stride");
  const DType dtype = element_type(x);
  const int64_t bytes = grpo_fast::element_size(dtype);
  return {static_cast<char*>(x.data_ptr()), x.size(1), x.size(2), x.stride(0) * bytes, x.stride(1) * bytes, dtype};
}

template <class Backend>
Rows rows_like(const Tensor& out, const Tensor& logits) {
  const Rows rows = rows_of<Backend>(out);
  STD_TORCH_CHECK(out.size(0) == logits.size(0) && rows.T == logits.size(1) && rows.V == logits.size(2) &&
                      out.scalar_type() == logits.scalar_type(),
                  "grpo_fast: out must have the shape and dtype of logits");
  const bool same_strides = out.stride(0) == logits.stride(0) && out.stride(1) == logits.stride(1);
  STD_TORCH_CHECK(rows.data != logits.data_ptr() || same_strides || out.numel() == 0,
                  "grpo_fast: out is neither logits nor apart from them");
  return rows;
}

// The data of a contiguous vector with one element per token.
template <class Backend, class T>
T* vector(const Tensor& x, ScalarType dtype, int64_t tokens) {
  STD_TORCH_CHECK(Backend::holds(x) && x.scalar_type() == dtype && x.is_contiguous() && x.numel() == tokens,
                  "grpo_fast: expected a contiguous ", Backend::kPlace, " vector of ", tokens, " elements of dtype ",
                  dtype, ", got ", x.numel(), " of ", x.scalar_type());
  return static_cast<T*>(x.data_ptr());
}

template <class Backend>
float* floats(const Tensor& x, int64_t tokens) {
  return vector<Backend, float>(x, ScalarType::Float, tokens);
}

template <class Backend>
float* floats(const OptionalTensor& x, int64_t tokens) {
  return x ? floats<Backend>(*x, tokens) : nullptr;
}

template <class Backend>
Tokens tokens_of(const Tensor& logits, const Tensor& ids, const Tensor& valid) {
  const int64_t n = logits.size(0) * logits.size(1);
  STD_TORCH_CHECK(n == 0 || logits.size(2) > 0, "grpo_fast: the vocabulary is empty");
  return {vector<Backend, int64_t>(ids, ScalarType::Long, n), vector<Backend, uint8_t>(valid, ScalarType::Byte, n), n};
}

template <class Backend>
void row_stats(Tensor logits, Tensor ids, Tensor valid, Tensor logps, OptionalTensor entropy, Tensor row_max,
               Tensor row_sum, double temperature, double softcap, double logit_scale) {
  const Tokens tokens = tokens_of<Backend>(logits, ids, valid);
  const int64_t n = tokens.n;
  const StatsArgs args = {floats<Backend>(logps, n), floats<Backend>(entropy, n), floats<Backend>(row_max, n),
                          floats<Backend>(row_sum, n)};
  Backend(logits).row_stats(rows_of<Backend>(logits), tokens, args, Scaling{temperature, softcap, logit_scale});
}

template <class Backend>
void row_grad(Tensor logits, Tensor ids, Tensor valid, Tensor row_max, Tensor row_sum, Tensor logps,
              OptionalTensor entropy, Tensor g, OptionalTensor g_entropy, Tensor out, double temperature,
              double softcap, double logit_scale) {
  STD_TORCH_CHECK(entropy.has_value() || !g_entropy.has_value(), "grpo_fast: g_entropy needs entropy");
  const Tokens tokens = tokens_of<Backend>(logits, ids, valid);
  const int64_t n = tokens.n;
  const GradArgs args = {floats<Backend>(row_max, n), floats<Backend>(row_sum, n), floats<Backend>(logps, n),
                         floats<Backend>(entropy, n), floats<Backend>(g, n),       floats<Backend>(g_entropy, n)};
  Backend(logits).row_grad(rows_of<Backend>(logits), tokens, args, rows_like<Backend>(out, logits),
                           Scaling{temperature, softcap, logit_scale});
}

template <class Backend>
void grpo_loss(Tensor logits, Tensor ids, Tensor valid, Tensor advantages, OptionalTensor weights,
               OptionalTensor old_logps, OptionalTensor ref_logps, Tensor coef, OptionalTensor entropy_scale,
               Tensor losses, Tensor logps, OptionalTensor entropy, Tensor out, double temperature, double softcap,
               double logit_scale, double clip_low, double clip_high, double delta, double beta,
               bool bias_correction) {
  const Tokens tokens = tokens_of<Backend>(logits, ids, valid);
  const int64_t n = tokens.n;
  const LossArgs args = {floats<Backend>(advantages, n), floats<Backend>(weights, n), floats<Backend>(old_logps, n),
                         floats<Backend>(ref_logps, n),  floats<Backend>(coef, n),    floats<Backend>(entropy_scale, 1),
                         floats<Backend>(losses, n),     floats<Backend>(logps, n),   floats<Backend>(entropy, n)};
  Backend(logits).grpo_loss(rows_of<Backend>(logits), tokens, args, rows_like<Backend>(out, logits),
                            Scaling{temperature, softcap, logit_scale},
                            ClipOptions::make(clip_low, clip_high, delta, beta, bias_correction));
}

template <class Backend>
void scale_(Tensor grad, Tensor scale) {
  Backend(grad).scale(rows_of<Backend>(grad), grad.size(0) * grad.size(1), floats<Backend>(scale, 1));
}

cpu::Heads heads_of(const Tensor& x, ScalarType dtype, int64_t rows, int64_t heads, int64_t tokens, int64_t size) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == dtype && x.dim() == 4 && x.size(0) == rows && x.size(1) == heads &&
                      x.size(2) >= tokens && x.size(3) == size && (size < 2 || x.stride(3) == 1),
                  "grpo_fast: expected [", rows, ", ", heads, ", ", tokens, " or more, ", size,
                  "] of the query's dtype on the CPU, the last dimension contiguous");
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

void decode_attention(Tensor query, Tensor key, Tensor value, Tensor prompt_keys, Tensor prompt_values, Tensor keys,
                      Tensor values, Tensor groups, Tensor lengths, Tensor ages, Tensor out, double scale,
                      int64_t window, double softcap) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && prompt_keys.dim() == 4 && keys.dim() == 4,
                  "grpo_fast: expected tensors of 4 dimensions");
  const ScalarType dtype = query.scalar_type();
  const int64_t rows = query.size(0), heads = query.size(1), size = query.size(3), kinds = key.size(1);
  const int64_t prompts = prompt_keys.size(0), longest_prompt = prompt_keys.size(2), room = keys.size(2);
  STD_TORCH_CHECK(kinds > 0 && heads % kinds == 0, "grpo_fast: ", heads, " heads cannot share ", kinds);
  STD_TORCH_CHECK(window > 0, "grpo_fast: expected a window of 1 or more, got ", window);
  const auto index = [&](const Tensor& x) { return vector<Cpu, int64_t>(x, ScalarType::Long, rows); };
  const cpu::DecodeArgs args = {
      heads_of(query, dtype, rows, heads, 1, size),
      heads_of(key, dtype, rows, kinds, 1, size),
      heads_of(value, dtype, rows, kinds, 1, size),
      heads_of(prompt_keys, dtype, prompts, kinds, 0, size),
      heads_of(prompt_values, dtype, prompts, kinds, longest_prompt, size),
      heads_of(keys, dtype, rows, kinds, 0, size),
      heads_of(values, dtype, rows, kinds, room, size),
      index(groups), index(lengths), index(ages),
      out.data_ptr(),
      rows, heads, kinds, size, longest_prompt + room, window, float(scale), float(softcap), element_type(query)};
  STD_TORCH_CHECK(out.is_cpu() && out.scalar_type() == dtype && out.is_contiguous() &&
                      out.numel() == rows * heads * size,
                  "grpo_fast: expected a contiguous out [", rows, ", ", heads, ", ", size, "]");
  for (int64_t r = 0; r < rows; ++r)
    STD_TORCH_CHECK(args.groups[r] >= 0 && args.groups[r] < prompts && args.lengths[r] >= 0 &&
                        args.lengths[r] <= longest_prompt && args.ages[r] >= 0 && args.ages[r] < room,
                    "grpo_fast: row ", r, " is not in the cache");
  cpu::decode_attention(args);
}

using ArrayFunction = void (*)(const float*, float*, int64_t);

void apply(ArrayFunction f, const Tensor& x, const Tensor& out) {
  f(floats<Cpu>(x, x.numel()), floats<Cpu>(out, x.numel()), x.numel());
}

void exp_out(Tensor x, Tensor out) { apply(cpu::isa().exp, x, out); }
void tanh_out(Tensor x, Tensor out) { apply(cpu::isa().tanh, x, out); }

std::string isa() { return cpu::isa().name; }
std::string supported_isas() { return cpu::supported_isas(); }

void set_isa(std::string name) {
  STD_TORCH_CHECK(cpu::set_isa(name), "grpo_fast: no instruction set ", name, " here, only ",
                  cpu::supported_isas());
}

// The row operations, which every backend has.
void define_rows(auto& m) {
  m.def(
      "row_stats(Tensor logits, Tensor ids, Tensor valid, Tensor(a!) logps, Tensor(b!)? entropy, "
      "Tensor(c!) row_max, Tensor(d!) row_sum, float temperature, float softcap, float logit_scale) -> ()");
  m.def(
      "row_grad(Tensor logits, Tensor ids, Tensor valid, Tensor row_max, Tensor row_sum, Tensor logps, "
      "Tensor? entropy, Tensor g, Tensor? g_entropy, Tensor(a!) out, "
      "float temperature, float softcap, float logit_scale) -> ()");
  m.def(
      "grpo_loss(Tensor logits, Tensor ids, Tensor valid, Tensor advantages, Tensor? weights, Tensor? old_logps, "
      "Tensor? ref_logps, Tensor coef, Tensor? entropy_scale, Tensor(a!) losses, Tensor(b!) logps, "
      "Tensor(c!)? entropy, Tensor(d!) out, float temperature, float softcap, float logit_scale, "
      "float clip_low, float clip_high, float delta, float beta, bool bias_correction) -> ()");
  m.def("scale_(Tensor(a!) grad, Tensor scale) -> ()");
}

template <class Backend>
void implement_rows(auto& m) {
  m.impl("row_stats", TORCH_BOX(&row_stats<Backend>));
  m.impl("row_grad", TORCH_BOX(&row_grad<Backend>));
  m.impl("grpo_loss", TORCH_BOX(&grpo_loss<Backend>));
  m.impl("scale_", TORCH_BOX(&scale_<Backend>));
}

}  // namespace

STABLE_TORCH_LIBRARY(grpo_fast_cpu, m) {
  define_rows(m);
  m.def(
      "decode_attention(Tensor query, Tensor key, Tensor value, Tensor prompt_keys, Tensor prompt_values, "
      "Tensor(a!) keys, Tensor(b!) values, Tensor groups, Tensor lengths, Tensor ages, Tensor(c!) out, float scale, "
      "int window, float softcap) -> ()");
  // For the tests: the vector functions, and which instruction set runs ("auto" lets the machine decide).
  m.def("exp(Tensor x, Tensor(a!) out) -> ()");
  m.def("tanh(Tensor x, Tensor(a!) out) -> ()");
  m.def("isa() -> str");
  m.def("supported_isas() -> str");
  m.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_cpu, CPU, m) {
  implement_rows<Cpu>(m);
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
  m.impl("exp", TORCH_BOX(&exp_out));
  m.impl("tanh", TORCH_BOX(&tanh_out));
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("supported_isas", TORCH_BOX(&supported_isas));
  m.impl("set_isa", TORCH_BOX(&set_isa));
}

#ifdef GRPO_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY(grpo_fast_cuda, m) { define_rows(m); }

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_cuda, CUDA, m) { implement_rows<Cuda>(m); }
#endif

// Importing grpo_fast._C loads the library and so registers the ops; the module itself is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
