// Element-wise reductions and large copies, with the widest instructions that this
// processor has, chosen once at run time.
#ifndef FERRO_KERNELS_HPP
#define FERRO_KERNELS_HPP

#include <cstddef>

#include "ferro/types.hpp"

namespace ferro {

// dst[i] = (srcs[0][i] op srcs[1][i] op ... srcs[n - 1][i]) / divisor for i < count.
//
// Evaluated from source 0 upwards whatever the processor, so every rank and
// every machine gets the same bits. 16-bit floats are summed in float32 and
// rounded once, to nearest even. Integers wrap. MIN and MAX propagate NaN, as
// NumPy does, and keep the first of two zeros of different sign. A NaN that
// SUM, MEAN or PROD makes is always the positive quiet one, since processors
// differ in the sign and payload that they give it.
// `divisor` is 1 except for MEAN. dst may be one of the sources, or overlap none;
// pointers may be unaligned; n is at least 1.
using ReduceKernel = void (*)(void* dst, const void* const* srcs, int n, std::size_t count, int divisor);

// What a kernel that sees the inputs of all ranks divides by.
constexpr int divisor_of(ReduceOp op, int num_ranks) { return op == ReduceOp::mean ? num_ranks : 1; }

// From this size on an output would push the staging window, the inputs and itself
// out of the caches, so it is written past them.
constexpr std::size_t kStreamingNbytes = std::size_t{16} << 20;

// Null where the reduction is not defined: MIN and MAX of complex numbers, MEAN
// of integers, anything but MIN and MAX of booleans, any of the 8-bit floats.
//
// `output_nbytes` is the size of the whole output of which the kernel will
// write one segment a call: from kStreamingNbytes on, the kernel returned writes
// past the caches, with the same bits. Leave it 0 where a peer reads dst next.
ReduceKernel reduce_kernel(DType dtype, ReduceOp op, std::size_t output_nbytes = 0);

// The same reduction into each of `num_dsts` destinations, same bits: in one pass from two
// sources to two destinations (SUM of floats, and MEAN by a power of two), by small blocks
// and copies otherwise. A destination may be one of the sources, or overlap none;
// destinations overlap none of the others. `output_nbytes` as in reduce_kernel().
void reduce_to_all(DType dtype, ReduceOp op, void* const* dsts, int num_dsts, const void* const* srcs, int n,
                   std::size_t count, int divisor, std::size_t output_nbytes = 0);

// Copy without leaving the destination in this core's caches, nor reading it into
// them first. Ordinary stores that follow do not overtake it.
void copy_past_caches(void* dst, const void* src, std::size_t nbytes);

// Copy to the user's memory, past the caches if the whole output, of which this
// is one segment, has kStreamingNbytes or more.
void copy_to_user(void* dst, const void* src, std::size_t nbytes, std::size_t total_nbytes);

// The name of the instruction set in use: "avx512bf16", "avx512", "avx2",
// "sse2", "neon", or "generic" on other processors.
const char* kernel_isa();

}  // namespace ferro

#endif  // FERRO_KERNELS_HPP
