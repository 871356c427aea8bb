// The row operations as torch sees them, for any backend: schemas, and the checks between torch's tensors and the plain
// structs of rows.h. Included by each extension module once. What the operations mean: docs/math.md.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "rows.h"

// A backend says where its tensors are and has the functions on plain structs:
//
//   struct Backend {
//     static constexpr const char* kPlace;
//     static bool holds(const Tensor&);
//     explicit Backend(const Tensor&);  // for the device that the tensor is on
//     void row_stats(...), row_grad(...), grpo_loss(...), scale(...);
//   };
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
