// Elements of NCCL's dtypes: their sizes, reductions and scaling.
#ifndef EMULATION_NCCL_ELEMENT_HPP
#define EMULATION_NCCL_ELEMENT_HPP

#include <cstddef>

#include "abi/nccl.h"

namespace emulation {

std::size_t element_nbytes(ncclDataType_t dtype);
const char* name_of(ncclDataType_t dtype);
bool is_integer(ncclDataType_t dtype);

// dst[i] = srcs[0][i] op ... op srcs[n - 1][i], in this order; op is one of sum,
// prod, max and min. 8-bit floats are rounded after every step.
void reduce(ncclDataType_t dtype, ncclRedOp_t op, void* dst, const void* const* srcs, int n,
            std::size_t count);

// data[i] *= scalar, rounded to the dtype; the scalar is an element of that dtype, too.
void scale(ncclDataType_t dtype, void* data, const void* scalar, std::size_t count);

// data[i] /= divisor, for integers, rounded towards zero.
void divide(ncclDataType_t dtype, void* data, int divisor, std::size_t count);

// 1 / n as an element: what ncclAvg multiplies by. 16 bytes are enough for any dtype.
void reciprocal(ncclDataType_t dtype, int n, void* element);

}  // namespace emulation

#endif  // EMULATION_NCCL_ELEMENT_HPP
