// CUDA's kernels on a CPU, for tests: stands in for csrc/cuda/device.cuh.
//
// The threads of a cluster's blocks are fibers of one thread, resumed in an order that changes from launch to launch; a
// barrier or a shuffle hands on to the next. Shared memory starts as NaN. A bulk copy happens only once somebody waits
// for it, so whoever reads without waiting reads NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint4 {
  uint32_t x, y, z, w;
};
struct Dim {
  unsigned x;
};

namespace cuda_on_host {

struct Block;

struct Fiber {
  Block* block;
  unsigned thread;
  bool done = false;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

// Everybody has arrived when `count` have, which starts the next round.
struct Barrier {
  unsigned count = 0, arrived = 0;
  uint64_t round = 0;

  uint64_t arrive() {
    const uint64_t mine = round;
    if (++arrived == count) {
      arrived = 0;
      ++round;
    }
    return mine;
  }
};

struct Copy {
  void* shared;
  const void* global;
  uint32_t bytes;
};

struct Block {
  unsigned index, rank;
  std::unique_ptr<char[]> memory;
  char* shared;
  Barrier barrier;
  struct Warp {
    Barrier barrier;
    float values[32];
  };
  std::vector<Warp> warps;
  std::vector<std::pair<const void*, Copy>> pending;  // copies under way, by their arrival counter
};

struct Machine {
  unsigned block_threads = 0;
  std::vector<Block> cluster;
  Barrier cluster_barrier;
  std::vector<uint64_t> cluster_round;  // by fiber, of its last arrival
  std::vector<unsigned> cluster_waits;  // by fiber, rounds it has waited for
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;
  unsigned current_index = 0;
  ucontext_t scheduler;
  std::function<void()> body;
  std::exception_ptr error;  // the first; it cannot leave a fiber by itself
  int capability = 90, shared_bytes = 227 << 10;
  unsigned clusters_of = 0, threads_of = 0;  // blocks of a cluster and threads of a block in the last launch
  int64_t bytes_read = 0, bytes_written = 0;  // of device memory in the last launch, in whole vectors and bulk copies
};

inline Machine& machine() {
  static Machine machine;
  return machine;
}

inline void yield() {
  Machine& m = machine();
  swapcontext(&m.current->context, &m.scheduler);
}

inline void wait(const Barrier& barrier, uint64_t round) {
  while (barrier.round == round) yield();
}

inline void enter() {
  Machine& m = machine();
  try {
    m.body();
  } catch (...) {
    if (!m.error) m.error = std::current_exception();
  }
  m.current->done = true;
  swapcontext(&m.current->context, &m.scheduler);
}

inline Dim thread_index() { return {machine().current->thread}; }
inline Dim block_index() { return {machine().current->block->index}; }
inline Dim block_dim() { return {machine().block_threads}; }

}  // namespace cuda_on_host

#define threadIdx cuda_on_host::thread_index()
#define blockIdx cuda_on_host::block_index()
#define blockDim cuda_on_host::block_dim()

inline void __syncthreads() {
  cuda_on_host::Barrier& barrier = cuda_on_host::machine().current->block->barrier;
  cuda_on_host::wait(barrier, barrier.arrive());
}

inline void __syncwarp() {
  cuda_on_host::Fiber& fiber = *cuda_on_host::machine().current;
  auto& warp = fiber.block->warps[fiber.thread / 32];
  cuda_on_host::wait(warp.barrier, warp.barrier.arrive());
}

inline float __shfl_xor_sync(unsigned, float value, int offset) {
  cuda_on_host::Fiber& fiber = *cuda_on_host::machine().current;
  auto& warp = fiber.block->warps[fiber.thread / 32];
  warp.values[fiber.thread % 32] = value;
  cuda_on_host::wait(warp.barrier, warp.barrier.arrive());
  const float other = warp.values[(fiber.thread % 32) ^ offset];
  cuda_on_host::wait(warp.barrier, warp.barrier.arrive());  // before anybody writes again
  return other;
}

namespace grpo_fast::cuda {

using cuda_on_host::machine;

inline char* shared_memory() { return machine().current->block->shared; }

inline unsigned cluster_rank() { return machine().current->block->rank; }

inline void cluster_arrive() { machine().cluster_round[machine().current_index] = machine().cluster_barrier.arrive(); }

inline void cluster_wait() {
  cuda_on_host::wait(machine().cluster_barrier, machine().cluster_round[machine().current_index]);
  ++machine().cluster_waits[machine().current_index];
}

// A block's shared memory is there from its first instruction, which a barrier of the cluster shows, to its last.
inline void store_remote(float* mine, unsigned rank, float value) {
  if (machine().cluster_waits[machine().current_index] == 0)
    throw std::logic_error("a store to a block that may not have started");
  for (const auto& fiber : machine().fibers)
    if (fiber.block->rank == rank && fiber.done) throw std::logic_error("a store to a block that has ended");
  const auto offset = reinterpret_cast<char*>(mine) - shared_memory();
  std::memcpy(machine().cluster.at(rank).shared + offset, &value, sizeof(value));
}

struct Arrival {
  uint64_t state;
};

constexpr uint64_t kPrepared = 0x5afe, kExpecting = 0x5afe1;

inline void prepare(Arrival* arrival) { arrival->state = kPrepared; }
inline void fence_prepared() {}

inline void bulk_load(void* shared, const void* global, uint32_t bytes, Arrival* arrival) {
  if (arrival->state != kPrepared) throw std::logic_error("a bulk copy to a counter that was not prepared");
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16 || bytes == 0)
    throw std::logic_error("a bulk copy of other than whole, aligned vectors");
  arrival->state = kExpecting;
  machine().current->block->pending.push_back({arrival, {shared, global, bytes}});
}

inline void wait_for(Arrival* arrival) {
  while (arrival->state == kPrepared) cuda_on_host::yield();
  if (arrival->state != kExpecting) throw std::logic_error("a wait for a counter that was not prepared");
  auto& pending = machine().current->block->pending;
  for (auto it = pending.begin(); it != pending.end(); ++it) {
    if (it->first != arrival) continue;
    std::memcpy(it->second.shared, it->second.global, it->second.bytes);
    machine().bytes_read += it->second.bytes;
    pending.erase(it);
    return;
  }
}

// As inexact as the GPU's: up to 2 and 1 units in the last place away, by no rule but the argument, and no denormals.
inline float inexact(float argument, float value, int units) {
  uint32_t hash, bits;
  std::memcpy(&hash, &argument, 4);
  hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
  hash = (hash ^ hash >> 12) * 0x297a2d39u;
  if (!std::isnormal(value)) return value == value && !std::isinf(value) ? 0.0f : value;
  std::memcpy(&bits, &value, 4);
  bits += int(hash % (2 * units + 1)) - units;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float exp2_fast(float x) { return x == 0 ? 1.0f : inexact(x, std::exp2(x), 2); }
inline float reciprocal(float x) { return inexact(x, 1.0f / x, 1); }

inline uint16_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t round_f16(float x) {
  const _Float16 half = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

inline float widen_f16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}

inline uint32_t pack_bf16(float low, float high) { return round_bf16(low) | uint32_t(round_bf16(high)) << 16; }
inline uint32_t pack_f16(float low, float high) { return round_f16(low) | uint32_t(round_f16(high)) << 16; }

inline void check_alignment(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) throw std::logic_error("a vector that does not start on 16 bytes");
}

inline uint4 load_kept(const uint4* p) {
  check_alignment(p);
  machine().bytes_read += sizeof(*p);
  return *p;
}

inline uint4 load_streaming(const uint4* p) { return load_kept(p); }

inline void store_streaming(uint4* p, uint4 value) {
  check_alignment(p);
  machine().bytes_written += sizeof(*p);
  *p = value;
}

struct Shape {
  int64_t blocks;
  unsigned cluster;
  unsigned threads;
  unsigned shared_bytes;
};

struct Device {
  int capability, shared_bytes;
  static Device current() { return {machine().capability, machine().shared_bytes}; }
};

template <class Problem>
void launch(void (*kernel)(Problem), const Shape& shape, const Problem& problem, void*) {
  using namespace cuda_on_host;
  Machine& m = machine();
  if (shape.blocks % shape.cluster || shape.threads % 32 || shape.threads > 1024 || shape.cluster > 8 ||
      shape.shared_bytes > unsigned(m.shared_bytes) || (shape.cluster > 1 && m.capability < 90))
    throw std::logic_error("a launch that no device accepts");
  constexpr size_t kStack = 64 << 10;
  static std::mt19937 rng(0);
  m.block_threads = shape.threads;
  m.clusters_of = shape.cluster;
  m.threads_of = shape.threads;
  m.bytes_read = m.bytes_written = 0;
  m.body = [&] { kernel(problem); };
  for (int64_t first = 0; first < shape.blocks; first += shape.cluster) {
    m.cluster = std::vector<Block>(shape.cluster);
    m.fibers = std::vector<Fiber>(shape.cluster * shape.threads);
    m.cluster_round.assign(m.fibers.size(), 0);
    m.cluster_waits.assign(m.fibers.size(), 0);
    m.cluster_barrier = {unsigned(m.fibers.size())};
    for (unsigned rank = 0; rank < shape.cluster; ++rank) {
      Block& block = m.cluster[rank];
      block.index = unsigned(first + rank);
      block.rank = rank;
      block.memory = std::make_unique<char[]>(shape.shared_bytes + 128);
      std::memset(block.memory.get(), 0xff, shape.shared_bytes + 128);
      block.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block.memory.get()) + 127) / 128 * 128);
      block.barrier.count = shape.threads;
      block.warps.resize(shape.threads / 32);
      for (auto& warp : block.warps) warp.barrier.count = 32;
      for (unsigned thread = 0; thread < shape.threads; ++thread) {
        Fiber& fiber = m.fibers[rank * shape.threads + thread];
        fiber.block = &block;
        fiber.thread = thread;
        fiber.stack.reset(new char[kStack]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
      }
    }
    std::vector<unsigned> order(m.fibers.size());
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), rng);
    size_t alive = order.size();
    for (uint64_t turns = 0; alive; ++turns) {
      if (turns > 100000) throw std::logic_error("threads wait for each other");
      for (unsigned index : order) {
        Fiber& fiber = m.fibers[index];
        if (fiber.done) continue;
        m.current = &fiber;
        m.current_index = index;
        swapcontext(&m.scheduler, &fiber.context);
        alive -= fiber.done;
        if (m.error) std::rethrow_exception(std::exchange(m.error, nullptr));
      }
    }
    for (const Block& block : m.cluster)
      if (!block.pending.empty()) throw std::logic_error("a block ended while a bulk copy was under way");
  }
}

}  // namespace grpo_fast::cuda
