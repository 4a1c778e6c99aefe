// 16-bit floats kept as float32 where a reduction passes through several ranks:
// rounding at each of them would add up.
#ifndef FERRO_WIDE_FLOAT_HPP
#define FERRO_WIDE_FLOAT_HPP

#include <cstddef>

#include "ferro/call.hpp"
#include "ferro/fingerprint.hpp"
#include "ferro/types.hpp"

namespace ferro {

// The type in which partial results of a collective travel: float32 for sums and
// products of 16-bit floats, else the type of its arrays.
constexpr DType partial_dtype(const Collective& collective) {
  const bool is_short = collective.dtype == DType::float16 || collective.dtype == DType::bfloat16;
  const bool is_exact = collective.reduce_op == ReduceOp::min || collective.reduce_op == ReduceOp::max;
  return is_short && !is_exact && has_reduce_op(collective.op) ? DType::float32 : collective.dtype;
}

// Copies `count` elements of `dtype` as elements of `partial`, its partial_dtype().
void to_partial(void* dst, DType partial, const void* src, DType dtype, std::size_t count);
// And back; rounds to nearest even. Every NaN becomes the positive quiet one. dst may be src.
void from_partial(void* dst, DType dtype, const void* src, DType partial, std::size_t count);

// The same for arrays of any length, in passes: passes.hpp.
void to_partial(Call& call, void* dst, DType partial, const void* src, DType dtype, std::size_t count);
void from_partial(Call& call, void* dst, DType dtype, const void* src, DType partial, std::size_t count);

}  // namespace ferro

#endif  // FERRO_WIDE_FLOAT_HPP
