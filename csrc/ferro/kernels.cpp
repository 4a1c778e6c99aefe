// Chooses the kernels of this processor, and copies.
#include "ferro/kernels.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ferro/kernels_isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace ferro {
namespace {

#if defined(__x86_64__)

struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// For features that __builtin_cpu_supports of the oldest compilers has no name for.
// All 0 if the processor has no such leaf.
CpuidLeaf cpuid_leaf(unsigned leaf, unsigned subleaf) {
  CpuidLeaf regs;
  if (__get_cpuid_count(leaf, subleaf, &regs.eax, &regs.ebx, &regs.ecx, &regs.edx) == 0) return {};
  return regs;
}

bool has_f16c() { return (cpuid_leaf(1, 0).ecx >> 29 & 1) != 0; }
bool has_avx512bf16() { return (cpuid_leaf(7, 1).eax >> 5 & 1) != 0; }

// __builtin_cpu_supports also knows whether the kernel saves the wide registers.
bool runs_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#endif

bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

// Each reduction from the best set that has it.
KernelSet merged_kernels() {
  const KernelSets runnable = runnable_kernel_sets();
  KernelSet merged{runnable.sets[0]->isa, {}, {}, {}, {}};
  for (int set = kMaxKernelSets; set >= 0; --set) {
    if (runnable.sets[set] == nullptr) continue;
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      if (runnable.sets[set]->pair_sums[dtype] != nullptr) {
        merged.pair_sums[dtype] = runnable.sets[set]->pair_sums[dtype];
        merged.streaming_pair_sums[dtype] = runnable.sets[set]->streaming_pair_sums[dtype];
      }
      for (int op = 0; op < kReduceOpCount; ++op) {
        if (runnable.sets[set]->table[dtype][op] == nullptr) continue;
        merged.table[dtype][op] = runnable.sets[set]->table[dtype][op];
        merged.streaming[dtype][op] = runnable.sets[set]->streaming[dtype][op];
      }
    }
  }
  return merged;
}

const KernelSet& best_kernels() {
  static const KernelSet best = merged_kernels();
  return best;
}

#if defined(__x86_64__)

// ---- writing past the caches ------------------------------------------------

constexpr std::size_t kCacheLineNbytes = 64;

std::size_t distance_to_cache_line(const void* pointer) {
  return -reinterpret_cast<std::uintptr_t>(pointer) % kCacheLineNbytes;
}

// Whole, aligned lines; not ordered with other stores before the next sfence.
void stream_lines(unsigned char* dst, const unsigned char* src, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += kCacheLineNbytes) {
    const auto* from = reinterpret_cast<const __m128i*>(src + i);
    auto* to = reinterpret_cast<__m128i*>(dst + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

#endif

// Reading has already brought an array that is reduced in place into the caches: streaming saves nothing.
bool is_in_place(void* const* dsts, const void* const* srcs) {
  return dsts[0] == srcs[0] || dsts[0] == srcs[1] || dsts[1] == srcs[0] || dsts[1] == srcs[1];
}

// Null where there is none, and reduce_and_copy() has to serve.
PairKernel pair_kernel(DType dtype, ReduceOp op, std::size_t count, int divisor, bool streams) {
  if (op != ReduceOp::sum && op != ReduceOp::mean) return nullptr;
  if (!is_power_of_two(divisor) || count * item_size(dtype) < kMinPairNbytes) return nullptr;
  const KernelSet& best = best_kernels();
  const PairKernel streaming = best.streaming_pair_sums[static_cast<int>(dtype)];
  return streams && streaming != nullptr ? streaming : best.pair_sums[static_cast<int>(dtype)];
}

// In blocks that stay in the nearest cache between the reduction and the copies.
void reduce_and_copy(DType dtype, ReduceOp op, void* const* dsts, int num_dsts, const void* const* srcs,
                     int n, std::size_t count, int divisor) {
  constexpr std::size_t kBlockNbytes = 4096;
  const ReduceKernel kernel = reduce_kernel(dtype, op);
  const std::size_t itemsize = item_size(dtype), block = kBlockNbytes / itemsize;
  std::vector<const void*> block_srcs(srcs, srcs + n);
  for (std::size_t first = 0; first < count; first += block) {
    const std::size_t block_count = std::min(block, count - first);
    auto* const reduced = static_cast<unsigned char*>(dsts[0]) + first * itemsize;
    for (int i = 0; i < n; ++i) block_srcs[i] = static_cast<const unsigned char*>(srcs[i]) + first * itemsize;
    kernel(reduced, block_srcs.data(), n, block_count, divisor);
    for (int i = 1; i < num_dsts; ++i)
      std::memcpy(static_cast<unsigned char*>(dsts[i]) + first * itemsize, reduced, block_count * itemsize);
  }
}

}  // namespace

KernelSets runnable_kernel_sets() {
  KernelSets runnable{};
  int found = 0;
#if defined(__x86_64__)
  if (runs_avx512() && has_avx512bf16()) runnable.sets[found++] = &kAvx512Bf16Kernels;
  if (runs_avx512()) runnable.sets[found++] = &kAvx512Kernels;
  if (runs_avx2()) runnable.sets[found++] = &kAvx2Kernels;
#endif
  runnable.sets[found] = &kBaselineKernels;
  return runnable;
}

ReduceKernel reduce_kernel(DType dtype, ReduceOp op, std::size_t output_nbytes) {
  const KernelSet& best = best_kernels();
  const int row = static_cast<int>(dtype), column = static_cast<int>(op);
  if (output_nbytes >= kStreamingNbytes && best.streaming[row][column] != nullptr)
    return best.streaming[row][column];
  return best.table[row][column];
}

void reduce_to_all(DType dtype, ReduceOp op, void* const* dsts, int num_dsts, const void* const* srcs, int n,
                   std::size_t count, int divisor, std::size_t output_nbytes) {
  if (num_dsts == 2 && n == 2) {
    const bool streams = output_nbytes >= kStreamingNbytes && !is_in_place(dsts, srcs);
    const PairKernel kernel = pair_kernel(dtype, op, count, divisor, streams);
    if (kernel != nullptr) return kernel(dsts, srcs, count, divisor);
  }
  reduce_and_copy(dtype, op, dsts, num_dsts, srcs, n, count, divisor);
}

void copy_past_caches(void* dst, const void* src, std::size_t nbytes) {
  if (nbytes == 0) return;  // an empty array may have no address
#if defined(__x86_64__)
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  std::size_t head = distance_to_cache_line(to);
  if (head > nbytes) head = nbytes;
  const std::size_t body = (nbytes - head) / kCacheLineNbytes * kCacheLineNbytes;
  std::memcpy(to, from, head);
  stream_lines(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, nbytes - head - body);
  // The flag that hands the buffer on must not overtake these stores.
  _mm_sfence();
#else
  std::memcpy(dst, src, nbytes);
#endif
}

void copy_to_user(void* dst, const void* src, std::size_t nbytes, std::size_t total_nbytes) {
  if (total_nbytes >= kStreamingNbytes) return copy_past_caches(dst, src, nbytes);
  if (nbytes != 0) std::memcpy(dst, src, nbytes);  // an empty array may have no address
}

const char* kernel_isa() { return best_kernels().isa; }

}  // namespace ferro
