// Attention of one new token of every row: to its group's prompt, whose keys are there once, and to the tokens that the
// row has so far. decode.cpp walks rows and heads in parallel, decode_kernels.h holds the loops.
#pragma once

#include <cstdint>

#include "../rows.h"
#include "narrow.h"

namespace grpo_fast::cpu {

// A [rows, heads, tokens, D] tensor with unit stride along D. Strides in elements.
struct Heads {
  void* data;
  int64_t row, head, token;
};

// n tokens of one row and head.
struct Span {
  const void *keys, *values;
  int64_t key_stride, value_stride, n;
};

// One row's queries that share a head of keys and values: out_q = softmax(cap(scale * q . keys)) . values.
struct Attend {
  const void* query;
  int64_t query_stride, queries, size;  // size: D
  Span prompt, own;
  float scale, softcap;  // softcap 0: none
  void* out;             // [queries, D]
  float* scratch;        // scratch_floats(queries, D, tokens)
};

constexpr int64_t kLanes = 16;  // of the widest vector
constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
constexpr int64_t scratch_floats(int64_t queries, int64_t size, int64_t tokens) {
  return queries * (2 * padded(size) + padded(tokens));
}

using AttendFunction = void (*)(const Attend&);

struct DecodeArgs {
  Heads query, key, value;             // [R, H or K, 1, D]
  Heads prompt_keys, prompt_values;    // [n, K, P, D]
  Heads keys, values;                  // [R, K, room, D]; the new key and value are written at `ages`
  const int64_t *groups, *lengths, *ages;  // [R]: which prompt, its length, tokens of the row before this one
  void* out;                           // [R, H, D]
  int64_t rows, heads, kinds, size, longest;  // kinds: K; longest: of prompt and own tokens of any row
  int64_t window;                      // a token sees itself and the window - 1 before it
  float scale, softcap;
  DType dtype;
};

void decode_attention(const DecodeArgs&);

}  // namespace grpo_fast::cpu
