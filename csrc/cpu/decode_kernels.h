// The loops of decode.h over one row and head, on the vector type `V`, compiled once per instruction set. Included after
// row_kernels.h, whose exponential and tanh these are. Sums are in fp32.

namespace grpo_fast::cpu {
namespace {

constexpr int kTile = 4;  // queries that a key or value is loaded for once

// scores[q * row + j] = query_q . key_j
template <class T, int Q>
void score_tile(const float* query, int64_t query_row, const Span& span, int64_t size, float* scores, int64_t row) {
  for (int64_t j = 0; j < span.n; ++j) {
    const T* key = static_cast<const T*>(span.keys) + j * span.key_stride;
    F sum[Q];
    for (int q = 0; q < Q; ++q) sum[q] = V::set1(0.0f);
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      const F k = V::load(key + i);
      for (int q = 0; q < Q; ++q) sum[q] = V::mad(k, V::load(query + q * query_row + i), sum[q]);
    }
    for (int q = 0; q < Q; ++q) {
      float total = V::reduce_add(sum[q]);
      for (int64_t t = i; t < size; ++t) total += widen(key[t]) * query[q * query_row + t];
      scores[q * row + j] = total;
    }
  }
}

// out_q += sum_j weights[q * row + j] * value_j, for C vectors from `i` on.
template <class T, int Q, int C>
void value_columns(const float* weights, int64_t row, const Span& span, int64_t i, float* out, int64_t out_row) {
  F sum[Q][C];
  for (int q = 0; q < Q; ++q)
    for (int c = 0; c < C; ++c) sum[q][c] = V::load(out + q * out_row + i + c * W);
  const T* value = static_cast<const T*>(span.values) + i;
  for (int64_t j = 0; j < span.n; ++j, value += span.value_stride) {
    F v[C];
    for (int c = 0; c < C; ++c) v[c] = V::load(value + c * W);
    for (int q = 0; q < Q; ++q) {
      const F weight = V::set1(weights[q * row + j]);
      for (int c = 0; c < C; ++c) sum[q][c] = V::mad(weight, v[c], sum[q][c]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int c = 0; c < C; ++c) V::store(out + q * out_row + i + c * W, sum[q][c]);
}

template <class T, int Q>
void value_tile(const float* weights, int64_t row, const Span& span, int64_t size, float* out, int64_t out_row) {
  int64_t i = 0;
  for (; i + 2 * W <= size; i += 2 * W) value_columns<T, Q, 2>(weights, row, span, i, out, out_row);
  for (; i + W <= size; i += W) value_columns<T, Q, 1>(weights, row, span, i, out, out_row);
  for (; i < size; ++i) {
    const T* value = static_cast<const T*>(span.values) + i;
    for (int64_t j = 0; j < span.n; ++j, value += span.value_stride)
      for (int q = 0; q < Q; ++q) out[q * out_row + i] += weights[q * row + j] * widen(*value);
  }
}

// n scores, padded to `row`, become exp(score - maximum); returns 1 / their sum.
inline float softmax_in_place(float* scores, int64_t n, int64_t row, float softcap) {
  std::fill(scores + n, scores + row, -kInf);
  if (softcap > 0) {
    const F to_tanh = V::set1(1.0f / softcap), cap = V::set1(softcap);
    for (int64_t j = 0; j < row; j += W) V::store(scores + j, V::mul(cap, capped(V::load(scores + j), to_tanh)));
  }
  const F maximum = V::set1(block_max(scores, row));
  const Exponent exponent;
  F sum = V::set1(0.0f);
  for (int64_t j = 0; j < row; j += W) {
    const F e = exp_gap(V::sub(V::load(scores + j), maximum), exponent);
    V::store(scores + j, e);
    sum = V::add(sum, e);
  }
  return 1.0f / V::reduce_add(sum);
}

template <class T, int Q>
void attend_tile(const Attend& a, const float* query, float* out, float* scores, int64_t row) {
  const int64_t D = padded(a.size);
  score_tile<T, Q>(query, D, a.prompt, a.size, scores, row);
  score_tile<T, Q>(query, D, a.own, a.size, scores + a.prompt.n, row);
  float inverse[Q];
  for (int q = 0; q < Q; ++q) inverse[q] = softmax_in_place(scores + q * row, a.prompt.n + a.own.n, row, a.softcap);
  value_tile<T, Q>(scores, row, a.prompt, a.size, out, D);
  value_tile<T, Q>(scores + a.prompt.n, row, a.own, a.size, out, D);
  for (int q = 0; q < Q; ++q)
    for (int64_t i = 0; i < D; i += W) V::store(out + q * D + i, V::mul(V::load(out + q * D + i), V::set1(inverse[q])));
}

template <class T>
void attend(const Attend& a) {
  const int64_t D = padded(a.size), row = padded(a.prompt.n + a.own.n);
  float *const query = a.scratch, *const out = query + a.queries * D, *const scores = out + a.queries * D;
  for (int64_t q = 0; q < a.queries; ++q) {
    const T* from = static_cast<const T*>(a.query) + q * a.query_stride;
    for (int64_t i = 0; i < a.size; ++i) query[q * D + i] = widen(from[i]) * a.scale;
  }
  std::fill_n(out, a.queries * D, 0.0f);
  for (int64_t q = 0; q < a.queries; q += kTile) {
    float *const tile = out + q * D, *const tile_scores = scores + q * row;
    switch (std::min<int64_t>(kTile, a.queries - q)) {
      case 1: attend_tile<T, 1>(a, query + q * D, tile, tile_scores, row); break;
      case 2: attend_tile<T, 2>(a, query + q * D, tile, tile_scores, row); break;
      case 3: attend_tile<T, 3>(a, query + q * D, tile, tile_scores, row); break;
      default: attend_tile<T, kTile>(a, query + q * D, tile, tile_scores, row);
    }
  }
  T* const to = static_cast<T*>(a.out);
  for (int64_t q = 0; q < a.queries; ++q)
    for (int64_t i = 0; i < a.size; ++i) to[q * a.size + i] = narrow<T>(out[q * D + i]);
}

}  // namespace
}  // namespace grpo_fast::cpu
