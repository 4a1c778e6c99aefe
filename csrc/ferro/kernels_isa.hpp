// The reductions once per instruction set. Only kernels*.cpp and their test
// include this; everybody else asks reduce_kernel().
#ifndef FERRO_KERNELS_ISA_HPP
#define FERRO_KERNELS_ISA_HPP

#include "ferro/kernels.hpp"

namespace ferro {

struct KernelSet {
  const char* isa;
  ReduceKernel table[kDTypeCount][kReduceOpCount];      // null where not defined
  ReduceKernel streaming[kDTypeCount][kReduceOpCount];  // null where `table` serves
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
