// Reductions that take several steps, each of which is one call of a kernel.
#ifndef FERRO_REDUCTION_HPP
#define FERRO_REDUCTION_HPP

#include <cstddef>

#include "ferro/call.hpp"
#include "ferro/kernels.hpp"
#include "ferro/types.hpp"

namespace ferro {

// The kernel of one step. Throws Error{unsupported} where the reduction is not defined.
ReduceKernel kernel_for(DType dtype, ReduceOp op);

// The operation on partial results: a mean is divided once, when the sum over all is known.
constexpr ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::mean ? ReduceOp::sum : op; }
// That division.
void divide(Call& call, void* data, DType dtype, std::size_t count, int divisor);

}  // namespace ferro

#endif  // FERRO_REDUCTION_HPP
