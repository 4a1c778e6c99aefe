#include "ferro/reduction.hpp"

#include <string>

#include "ferro/error.hpp"
#include "ferro/fingerprint.hpp"
#include "ferro/passes.hpp"
#include "ferro/pieces.hpp"

namespace ferro {

ReduceKernel kernel_for(DType dtype, ReduceOp op) {
  const ReduceKernel kernel = reduce_kernel(dtype, op);
  if (kernel == nullptr)
    throw Error(ErrorCode::unsupported, -1, std::string(name_of(op)) + " of " + name_of(dtype));
  return kernel;
}

void divide(Call& call, void* data, DType dtype, std::size_t count, int divisor) {
  const ReduceKernel kernel = kernel_for(dtype, ReduceOp::mean);
  const std::size_t itemsize = item_size(dtype);
  work_in_passes(call, count, 2 * itemsize, [=](Range range) {
    char* const place = mutable_bytes(data) + range.first * itemsize;
    const void* source = place;
    kernel(place, &source, 1, range.count, divisor);
  });
}

}  // namespace ferro
