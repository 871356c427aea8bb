// What the kernels ask of the GPU beyond CUDA's own words: clusters, bulk copies, conversions, cache hints, a launch.
// One small function each, so that tests can put another file in this one's place and run the kernels on a CPU.
#pragma once

#include <cstdint>

#if defined(GRPO_FAST_CUDA_ON_HOST)
#include "cuda_on_host.h"
#else

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace grpo_fast::cuda {

// The block's dynamic shared memory.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- Thread block clusters: sm_90 and later. The plain kernels never call these. -----------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// All threads of all blocks of the cluster call both, in turn; what was written before the one is seen after the other.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes where `mine` lies in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ void store_remote(float* mine, unsigned rank, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

// --- Bulk copies into shared memory: sm_90 and later. ---------------------------------------------------------------

// Counts the bytes of a copy that have arrived; good for one copy.
struct Arrival {
  uint64_t state;
};

// By one thread; then `fence_prepared`, then a barrier of the block, before any other use.
__device__ __forceinline__ void prepare(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
#endif
}

__device__ __forceinline__ void fence_prepared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Starts a copy. Both addresses and the number of bytes are multiples of 16. By one thread.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
  const uint32_t counter = shared_address(arrival);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(counter)
      : "memory");
#endif
}

__device__ __forceinline__ void wait_for(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(arrival))
        : "memory");
  }
#endif
}

// --- Arithmetic. ----------------------------------------------------------------------------------------------------

// 2^x to 2 ulp; 0 at -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest into a word, the first in its low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ float widen_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// --- Device memory, 16 bytes at a time: kept in L2, or what is not needed again and evicted first. --------------------

__device__ __forceinline__ uint4 load_kept(const uint4* p) { return *p; }
__device__ __forceinline__ uint4 load_streaming(const uint4* p) { return __ldcs(p); }
__device__ __forceinline__ void store_streaming(uint4* p, uint4 value) { __stcs(p, value); }

// --- Launching. ------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t blocks;    // a multiple of cluster
  unsigned cluster;  // blocks in each
  unsigned threads;
  unsigned shared_bytes;
};

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forget it, or torch finds it after a launch of its own
  throw std::runtime_error(std::string("grpo_fast_cuda: ") + cudaGetErrorString(error));
}

// What the current device has.
struct Device {
  int capability;    // 80, 90, 100, ...
  int shared_bytes;  // that a block may have

  static Device current() {
    int device = 0, major = 0, minor = 0, bytes = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return {10 * major + minor, bytes};
  }
};

template <class Problem>
void launch(void (*kernel)(Problem), const Shape& shape, const Problem& problem, void* stream) {
  if (shape.shared_bytes > 48 * 1024) {  // all there is, since another thread may be about to launch with more
    const int bytes = Device::current().shared_bytes;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(shape.blocks));
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {shape.cluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, problem));
}

}  // namespace grpo_fast::cuda

#endif
