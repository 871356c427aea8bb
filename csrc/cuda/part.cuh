// A block's part of a row, and the sums that the blocks of a row have in common.
//
// Staged (sm_90 and later): a cluster of blocks holds a row in its shared memory, so that it comes from device memory
// once. It arrives in chunks by bulk copies, and is summed as it arrives. Plain: one block has the whole row, reads it
// from device memory, and again, with luck, from L2.
#pragma once

#include "row.cuh"

namespace grpo_fast::cuda {

constexpr unsigned kStagedThreads = 256;
constexpr unsigned kPlainThreads = 1024;  // one block an SM, so that the rows in flight fit in L2
constexpr unsigned kMaxCluster = 8;       // what can be asked for without a device's consent
constexpr int kChunk = 1024;              // vectors that arrive together: 16 KiB
constexpr int kMaxChunks = 13;
constexpr int kExchanges = 3;  // sums, then, rarely, the maximum and the sums again
constexpr int kLanes = 32;
constexpr int kBatch = 2;  // vectors that a thread has on the way from device memory; one where a soft cap needs registers

// At the start of a block's shared memory; a staged part of a row lies behind it.
struct alignas(128) Shared {
  Sums warps[kPlainThreads / kLanes];
  Sums blocks[kExchanges][kMaxCluster];
  Gradient gradient;
  bool live;
  Arrival arrivals[kMaxChunks];
};

template <class T, bool kStaged>
class Part {
 public:
  using Index = std::conditional_t<kStaged, int, int64_t>;

  // blocks: of the row's cluster. aligned: rows start on 16 bytes and hold whole vectors.
  __device__ __forceinline__ Part(const void* row, int64_t V, unsigned blocks, bool aligned)
      : row_(static_cast<const T*>(row)), V_(V), blocks_(kStaged ? blocks : 1), aligned_(aligned) {
    const int64_t vectors = (V + kPerVector<T> - 1) / kPerVector<T>;
    const int64_t each = (vectors + blocks_ - 1) / blocks_;
    if constexpr (kStaged) rank_ = cluster_rank();
    first_ = rank_ * each;
    const int64_t rest = vectors - first_;
    count_ = Index(rest < 0 ? 0 : rest < each ? rest : each);
  }

  __device__ __forceinline__ unsigned rank() const { return rank_; }

  __device__ __forceinline__ bool holds(int64_t id) const {
    const int64_t vector = id / kPerVector<T> - first_;
    return vector >= 0 && vector < count_;
  }

  // Has the part come into shared memory. Before anything else, by all threads.
  __device__ __forceinline__ void fetch() {
    if constexpr (kStaged) {
      cluster_arrive();
      if (aligned_) {
        if (threadIdx.x == 0) {
          for (int chunk = 0; chunk * kChunk < count_; ++chunk) prepare(&shared().arrivals[chunk]);
          fence_prepared();
        }
        __syncthreads();
        if (threadIdx.x == 0) {
          const uint4* row = reinterpret_cast<const uint4*>(row_) + first_;
          for (int chunk = 0; chunk * kChunk < count_; ++chunk) {
            const int start = chunk * kChunk;
            const int length = count_ - start < kChunk ? count_ - start : kChunk;
            bulk_load(staged() + start, row + start, length * 16, &shared().arrivals[chunk]);
          }
        }
      } else {
        T* elements = reinterpret_cast<T*>(staged());
        const int64_t start = first_ * kPerVector<T>;
        for (int i = threadIdx.x; i < count_ * kPerVector<T>; i += blockDim.x) {
          if (start + i < V_)
            elements[i] = row_[start + i];
          else
            narrow(-INFINITY, elements[i]);
        }
        __syncthreads();
      }
    }
  }

  template <bool kSoftcap, bool kEntropy>
  __device__ __forceinline__ Sums sums(float reference, const Transform& transform) const {
    Sums sums = {0.0f, 0.0f};
    read<kSoftcap ? 1 : kBatch>([&](const Vector<T>& v) { add<T, kSoftcap, kEntropy>(sums, v, reference, transform); });
    return sums;
  }

  __device__ __forceinline__ float largest() const {
    float largest = -INFINITY;
    read<kBatch>([&](const Vector<T>& v) { largest = larger(largest, v); });
    return largest;
  }

  // The last sweep: `out`, the row of the gradient, may be the row itself. out_aligned: both are.
  template <bool kSoftcap, bool kEntropy>
  __device__ __forceinline__ void write_gradient(void* out, bool out_aligned, const Gradient& row,
                                                 const Transform& transform) const {
    rewrite<kSoftcap ? 1 : kBatch>(out, out_aligned, [&](const Vector<T>& v) {
      return gradient<T, kSoftcap, kEntropy>(v, row, transform);
    });
  }

  __device__ __forceinline__ void multiply(void* out, float factor) const {
    rewrite<kBatch>(out, aligned_, [&](Vector<T> v) {
#pragma unroll
      for (int i = 0; i < kPerVector<T>; ++i) v.x[i] *= factor;
      return v;
    });
  }

  __device__ __forceinline__ void write_zeros(void* out, bool out_aligned) const {
    const Vector<T> zeros = {};
    if (out_aligned)
      for (Index i = threadIdx.x; i < count_; i += blockDim.x) store<true>(out, i, zeros);
    else
      for (Index i = threadIdx.x; i < count_; i += blockDim.x) store<false>(out, i, zeros);
  }

  // Every block's `mine` in the order of ranks, by `join`: the same on every thread of the row, run after run.
  template <class Join>
  __device__ __forceinline__ Sums exchange(int number, Sums mine, Join join) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      mine = join(mine, Sums{__shfl_xor_sync(~0u, mine.e, offset), __shfl_xor_sync(~0u, mine.et, offset)});
    if (threadIdx.x % kLanes == 0) shared().warps[threadIdx.x / kLanes] = mine;
    __syncthreads();
    Sums* const blocks = shared().blocks[number];
    if constexpr (kStaged) {
      if (number == 0) cluster_wait();  // the other blocks are there
    }
    if (threadIdx.x < blocks_) {
      Sums total = shared().warps[0];
      for (unsigned warp = 1; warp < blockDim.x / kLanes; ++warp) total = join(total, shared().warps[warp]);
      if constexpr (kStaged) {
        store_remote(&blocks[rank_].e, threadIdx.x, total.e);
        store_remote(&blocks[rank_].et, threadIdx.x, total.et);
      } else {
        blocks[0] = total;
      }
    }
    if constexpr (kStaged) {
      __syncwarp();  // together again for the barrier
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    Sums total = blocks[0];
    for (unsigned rank = 1; rank < blocks_; ++rank) total = join(total, blocks[rank]);
    return total;
  }

  __device__ __forceinline__ static Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory()); }

 private:
  __device__ __forceinline__ static uint4* staged() {
    return reinterpret_cast<uint4*>(shared_memory() + sizeof(Shared));
  }

  template <int kTogether, class F>
  __device__ __forceinline__ void read(F f) const {
    const auto ignore = [&](Index, const Vector<T>& v) { f(v); };
    if (kStaged || aligned_)
      sweep<kTogether, true, true>(ignore);
    else
      sweep<kTogether, true, false>(ignore);
  }

  template <int kTogether, class F>
  __device__ __forceinline__ void rewrite(void* out, bool out_aligned, F f) const {
    if (out_aligned)
      sweep<kTogether, false, true>([&](Index i, const Vector<T>& v) { store<true>(out, i, f(v)); });
    else
      sweep<kTogether, false, false>([&](Index i, const Vector<T>& v) { store<false>(out, i, f(v)); });
  }

  // f(index, vector) for the thread's vectors of the part. kAgain: the row will be read again.
  template <int kTogether, bool kAgain, bool kAligned, class F>
  __device__ __forceinline__ void sweep(F f) const {
    if constexpr (kStaged) {
      for (int chunk = 0; chunk * kChunk < count_; ++chunk) {
        if (kAgain && aligned_) wait_for(&shared().arrivals[chunk]);
        const int end = count_ < (chunk + 1) * kChunk ? count_ : (chunk + 1) * kChunk;
#pragma unroll 4
        for (int i = chunk * kChunk + threadIdx.x; i < end; i += kStagedThreads) f(i, Vector<T>::of(staged()[i]));
      }
    } else {
      // Loads of a batch before its stores, which might be to the same memory for all that the compiler knows.
      Index i = threadIdx.x;
#pragma unroll 1
      for (; i + (kTogether - 1) * kPlainThreads < count_; i += kTogether * kPlainThreads) {
        Vector<T> batch[kTogether];
#pragma unroll
        for (int b = 0; b < kTogether; ++b) batch[b] = load<kAgain, kAligned>(i + b * kPlainThreads);
#pragma unroll
        for (int b = 0; b < kTogether; ++b) f(i + b * kPlainThreads, batch[b]);
      }
#pragma unroll 1
      for (; i < count_; i += kPlainThreads) f(i, load<kAgain, kAligned>(i));
    }
  }

  template <bool kAgain, bool kAligned>
  __device__ __forceinline__ Vector<T> load(Index index) const {
    if constexpr (kAligned) {
      const uint4* p = reinterpret_cast<const uint4*>(row_) + index;
      return Vector<T>::of(kAgain ? load_kept(p) : load_streaming(p));
    }
    return Vector<T>::of_elements(row_ + index * kPerVector<T>, V_ - index * kPerVector<T>);
  }

  template <bool kAligned>
  __device__ __forceinline__ void store(void* out, Index index, const Vector<T>& v) const {
    const int64_t vector = first_ + index;
    if constexpr (kAligned)
      store_streaming(static_cast<uint4*>(out) + vector, v.words());
    else
      v.store_elements(static_cast<T*>(out) + vector * kPerVector<T>, V_ - vector * kPerVector<T>);
  }

  const T* row_;
  int64_t V_;
  unsigned blocks_;
  bool aligned_;
  unsigned rank_ = 0;
  int64_t first_;
  Index count_;
};

}  // namespace grpo_fast::cuda
