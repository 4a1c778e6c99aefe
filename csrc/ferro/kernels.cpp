// Chooses the kernels of this processor, and copies.
#include "ferro/kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

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

// For what __builtin_cpu_supports of the oldest compilers has no name. All 0 if
// the processor has no such leaf.
CpuidLeaf cpuid_leaf(unsigned leaf, unsigned subleaf) {
  CpuidLeaf regs;
  if (__get_cpuid_count(leaf, subleaf, &regs.eax, &regs.ebx, &regs.ecx, &regs.edx) == 0) return {};
  return regs;
}

bool has_f16c() { return (cpuid_leaf(1, 0).ecx >> 29 & 1) != 0; }
bool has_avx512bf16() { return (cpuid_leaf(7, 1).eax >> 5 & 1) != 0; }
bool has_fast_rep_movsb() { return (cpuid_leaf(7, 0).ebx >> 9 & 1) != 0; }

// __builtin_cpu_supports also knows whether the kernel saves the wide registers.
bool runs_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#endif

// For each reduction the best set that has it.
KernelSet merged_kernels() {
  const KernelSets runnable = runnable_kernel_sets();
  KernelSet merged{runnable.sets[0]->isa, {}};
  for (int set = kMaxKernelSets; set >= 0; --set) {
    if (runnable.sets[set] == nullptr) continue;
    for (int dtype = 0; dtype < kDTypeCount; ++dtype)
      for (int op = 0; op < kReduceOpCount; ++op) {
        const ReduceKernel kernel = runnable.sets[set]->table[dtype][op];
        if (kernel != nullptr) merged.table[dtype][op] = kernel;
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

void copy_past_caches(void* dst, const void* src, std::size_t nbytes) {
  if (nbytes == 0) return;
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
}

// ---- reductions that write past the caches ----------------------------------

constexpr std::size_t kPieceNbytes = 4096;  // stays in the first-level cache with its sources
constexpr int kMaxStreamedSources = 64;     // more share the memory's bandwidth anyway

// The sources of a piece at a time, so that any kernel can be fed by pieces.
class SourceCursor {
 public:
  SourceCursor(const void* const* srcs, int n) : n_(n) {
    for (int i = 0; i < n; ++i) at_[i] = srcs[i];
  }
  const void* const* get() const { return at_; }
  void advance(std::size_t nbytes) {
    for (int i = 0; i < n_; ++i) at_[i] = static_cast<const unsigned char*>(at_[i]) + nbytes;
  }

 private:
  int n_;
  const void* at_[kMaxStreamedSources];
};

// Streaming pays only for whole lines that no source has brought into a cache.
bool can_stream(const void* dst, const void* const* srcs, int n, std::size_t count, std::size_t item_nbytes) {
  if (n > kMaxStreamedSources || count * item_nbytes < 2 * kPieceNbytes) return false;
  if (distance_to_cache_line(dst) % item_nbytes != 0) return false;
  for (int i = 0; i < n; ++i)
    if (srcs[i] == dst) return false;
  return true;
}

// Reduces pieces into a buffer in the cache and streams that: the buffer costs
// less than a second copy of every kernel, for memory is the limit here.
void reduce_past_caches(ReduceKernel kernel, std::size_t item_nbytes, void* dst, const void* const* srcs, int n,
                        std::size_t count, int divisor) {
  if (!can_stream(dst, srcs, n, count, item_nbytes)) return kernel(dst, srcs, n, count, divisor);
  alignas(kCacheLineNbytes) unsigned char piece[kPieceNbytes];
  auto* to = static_cast<unsigned char*>(dst);
  const unsigned char* const end = to + count * item_nbytes;
  SourceCursor from(srcs, n);

  const std::size_t head = distance_to_cache_line(to);
  kernel(to, from.get(), n, head / item_nbytes, divisor);
  from.advance(head);
  to += head;
  for (; static_cast<std::size_t>(end - to) >= kPieceNbytes; to += kPieceNbytes) {
    kernel(piece, from.get(), n, kPieceNbytes / item_nbytes, divisor);
    stream_lines(to, piece, kPieceNbytes);
    from.advance(kPieceNbytes);
  }
  kernel(to, from.get(), n, static_cast<std::size_t>(end - to) / item_nbytes, divisor);
  _mm_sfence();
}

template <int kDType, int kOp>
void streaming_kernel(void* dst, const void* const* srcs, int n, std::size_t count, int divisor) {
  constexpr auto dtype = static_cast<DType>(kDType);
  reduce_past_caches(best_kernels().table[kDType][kOp], item_size(dtype), dst, srcs, n, count, divisor);
}

struct StreamingTable {
  ReduceKernel kernels[kDTypeCount][kReduceOpCount];
};

template <int kDType = 0>
constexpr StreamingTable make_streaming_table(StreamingTable table = {}) {
  static_assert(kReduceOpCount == 5, "one kernel each");
  table.kernels[kDType][0] = streaming_kernel<kDType, 0>;
  table.kernels[kDType][1] = streaming_kernel<kDType, 1>;
  table.kernels[kDType][2] = streaming_kernel<kDType, 2>;
  table.kernels[kDType][3] = streaming_kernel<kDType, 3>;
  table.kernels[kDType][4] = streaming_kernel<kDType, 4>;
  if constexpr (kDType + 1 < kDTypeCount) return make_streaming_table<kDType + 1>(table);
  return table;
}

constexpr StreamingTable kStreamingTable = make_streaming_table();

// ---- copies into a peer's caches --------------------------------------------

// Below this the microcode's start-up costs more than the lines it need not read.
constexpr std::size_t kRepMovsbNbytes = 4096;

void rep_movsb(void* dst, const void* src, std::size_t nbytes) {
  __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
}

#endif

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
  const ReduceKernel kernel = best_kernels().table[static_cast<int>(dtype)][static_cast<int>(op)];
#if defined(__x86_64__)
  if (output_nbytes >= kStreamingNbytes && kernel != nullptr)
    return kStreamingTable.kernels[static_cast<int>(dtype)][static_cast<int>(op)];
#else
  (void)output_nbytes;
#endif
  return kernel;
}

void copy_to_peer(void* dst, const void* src, std::size_t nbytes) {
#if defined(__x86_64__)
  static const bool is_fast = has_fast_rep_movsb();
  if (nbytes >= kRepMovsbNbytes && is_fast) return rep_movsb(dst, src, nbytes);
#endif
  if (nbytes != 0) std::memcpy(dst, src, nbytes);  // an empty array may have no address
}

void copy_to_user(void* dst, const void* src, std::size_t nbytes, std::size_t total_nbytes) {
#if defined(__x86_64__)
  if (total_nbytes >= kStreamingNbytes) return copy_past_caches(dst, src, nbytes);
#else
  (void)total_nbytes;
#endif
  if (nbytes != 0) std::memcpy(dst, src, nbytes);  // an empty array may have no address
}

const char* kernel_isa() { return best_kernels().isa; }

}  // namespace ferro
