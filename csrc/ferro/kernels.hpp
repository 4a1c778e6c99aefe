// Element-wise reductions and large copies, the widest that this processor has,
// chosen once at run time.
#ifndef FERRO_KERNELS_HPP
#define FERRO_KERNELS_HPP

#include <cstddef>

#include "ferro/types.hpp"

namespace ferro {

// dst[i] = (srcs[0][i] op srcs[1][i] op ... srcs[n - 1][i]) / divisor for i < count.
//
// Evaluated from source 0 upwards whatever the processor, so every rank and
// every machine gets the same bits. 16-bit floats are summed in float32 and
// rounded once, to nearest even. MIN and MAX propagate NaN, as NumPy does.
// `divisor` is 1 except for MEAN. dst may be one of the sources, or overlap none;
// pointers may be unaligned.
using ReduceKernel = void (*)(void* dst, const void* const* srcs, int n, std::size_t count, int divisor);

// Null where the reduction is not defined: MIN and MAX of complex numbers, MEAN
// of integers, anything but MIN and MAX of booleans, any of the 8-bit floats.
ReduceKernel reduce_kernel(DType dtype, ReduceOp op);

// Copy into memory that a peer will read soon, without first reading the
// destination's cache lines from it.
void copy_to_peer(void* dst, const void* src, std::size_t nbytes);

// Copy to the user's memory. From kStreamingNbytes on, past the caches: such an
// output would only push the staging window out of them.
void copy_to_user(void* dst, const void* src, std::size_t nbytes, std::size_t total_nbytes);
constexpr std::size_t kStreamingNbytes = std::size_t{32} << 20;

// The name of the instruction set in use: "avx512", "avx2", "sse2", "neon".
const char* kernel_isa();

}  // namespace ferro

#endif  // FERRO_KERNELS_HPP
