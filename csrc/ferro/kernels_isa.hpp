// The reductions once per instruction set. Only kernels*.cpp and their test
// include this; everybody else asks reduce_kernel().
#ifndef FERRO_KERNELS_ISA_HPP
#define FERRO_KERNELS_ISA_HPP

#include "ferro/kernels.hpp"

namespace ferro {

// dsts[0][i] = dsts[1][i] = (srcs[0][i] + srcs[1][i]) / divisor, a power of two, with the
// same bits as a ReduceKernel. A destination may be one of the sources. Only for arrays of
// kMinPairNbytes or more: shorter ones would take as much code again, and no caller has any.
constexpr std::size_t kMinPairNbytes = 1024;
using PairKernel = void (*)(void* const* dsts, const void* const* srcs, std::size_t count, int divisor);

struct KernelSet {
  const char* isa;
  ReduceKernel table[kDTypeCount][kReduceOpCount];      // null where not defined
  ReduceKernel streaming[kDTypeCount][kReduceOpCount];  // null where `table` serves
  PairKernel pair_sums[kDTypeCount];                    // null where a reduction and a copy serve
  PairKernel streaming_pair_sums[kDTypeCount];          // null where `pair_sums` serves
};

// What the compiler may use everywhere for this architecture: SSE2, NEON.
extern const KernelSet kBaselineKernels;

#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
// Holds the bfloat16 row alone, all null if the compiler knows no AVX512_BF16:
// the conversion is the only instruction that this set adds.
extern const KernelSet kAvx512Bf16Kernels;
#endif

// The sets that this processor can run, best first, then null.
constexpr int kMaxKernelSets = 4;
struct KernelSets {
  const KernelSet* sets[kMaxKernelSets + 1];
};
KernelSets runnable_kernel_sets();

}  // namespace ferro

#endif  // FERRO_KERNELS_ISA_HPP
