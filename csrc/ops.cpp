// The extension module grpo_fast._C: the CPU backend's operations and those that only a CPU has. Built on torch's stable
// ABI and Python's limited API, so one binary serves every torch >= 2.11. Ops write into preallocated tensors and return
// nothing.
#include <Python.h>

#include <torch/csrc/stable/ops.h>

#include <string>

#include "cpu/decode.h"
#include "cpu/rows.h"
#include "row_ops.h"

namespace {

namespace cpu = grpo_fast::cpu;

struct Cpu {
  static constexpr const char* kPlace = "CPU";
  static bool holds(const Tensor& x) { return x.is_cpu(); }

  explicit Cpu(const Tensor&) {}
  void row_stats(auto&&... args) const { cpu::row_stats(args...); }
  void row_grad(auto&&... args) const { cpu::row_grad(args...); }
  void grpo_loss(auto&&... args) const { cpu::grpo_loss(args...); }
  void scale(auto&&... args) const { cpu::scale(args...); }
};

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

// Importing grpo_fast._C loads the library and so registers the ops; the module itself is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
