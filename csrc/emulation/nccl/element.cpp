#include "emulation/nccl/element.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ferro/kernels.hpp"
#include "ferro/wide_float.hpp"

namespace emulation {
namespace {

struct Traits {
  const char* name;
  ferro::DType dtype;
  bool is_integer;
};

constexpr Traits kTraits[ncclNumTypes] = {
    {"int8", ferro::DType::int8, true},
    {"uint8", ferro::DType::uint8, true},
    {"int32", ferro::DType::int32, true},
    {"uint32", ferro::DType::uint32, true},
    {"int64", ferro::DType::int64, true},
    {"uint64", ferro::DType::uint64, true},
    {"float16", ferro::DType::float16, false},
    {"float32", ferro::DType::float32, false},
    {"float64", ferro::DType::float64, false},
    {"bfloat16", ferro::DType::bfloat16, false},
    {"float8_e4m3fn", ferro::DType::float8_e4m3, false},
    {"float8_e5m2", ferro::DType::float8_e5m2, false},
};

const Traits& traits(ncclDataType_t dtype) { return kTraits[dtype]; }

// An 8-bit float: sign, exponent, mantissa. `has_infinity` is false for e4m3fn, whose
// only NaN is all ones and whose overflow, as CUDA converts, is the largest number.
struct Format8 {
  int mantissa_bits;
  int bias;
  bool has_infinity;
  std::uint8_t largest;
  std::uint8_t nan;
};
constexpr Format8 kE4m3{3, 7, false, 0x7e, 0x7f};
constexpr Format8 kE5m2{2, 15, true, 0x7b, 0x7f};

float widen(const Format8& format, std::uint8_t bits) {
  const int magnitude = bits & 0x7f;
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  if (magnitude > format.largest) {
    const bool is_infinite = format.has_infinity && magnitude == format.largest + 1;
    return is_infinite ? sign * INFINITY : NAN;
  }
  const int exponent = magnitude >> format.mantissa_bits;
  const int fraction = magnitude & ((1 << format.mantissa_bits) - 1);
  const int significand = exponent == 0 ? fraction : fraction + (1 << format.mantissa_bits);
  const int power = (exponent == 0 ? 1 : exponent) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(significand), power);
}

// To nearest even. Numbers too large become the largest, as CUDA's conversions do by default.
std::uint8_t narrow(const Format8& format, float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return format.nan;
  const float magnitude = std::fabs(value);
  if (magnitude >= widen(format, format.largest)) return sign | format.largest;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, 0.5 <= f < 1
  const int least = 1 - format.bias;
  const int power = (exponent - 1 < least ? least : exponent - 1) - format.mantissa_bits;
  // Whole steps of the format, counted from 0: rounding up carries into the exponent.
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -power)));
  const int binade = power + format.mantissa_bits - least;
  return sign | static_cast<std::uint8_t>((binade << format.mantissa_bits) + steps);
}

const Format8* format_of(ncclDataType_t dtype) {
  if (dtype == ncclFloat8e4m3) return &kE4m3;
  return dtype == ncclFloat8e5m2 ? &kE5m2 : nullptr;
}

float combine(ncclRedOp_t op, float a, float b) {
  if (op == ncclSum) return a + b;
  if (op == ncclProd) return a * b;
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return op == ncclMax ? (b > a ? b : a) : (b < a ? b : a);
}

void reduce8(const Format8& format, ncclRedOp_t op, std::uint8_t* dst, const void* const* srcs, int n,
             std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t total = static_cast<const std::uint8_t*>(srcs[0])[i];
    for (int rank = 1; rank < n; ++rank) {
      const std::uint8_t next = static_cast<const std::uint8_t*>(srcs[rank])[i];
      total = narrow(format, combine(op, widen(format, total), widen(format, next)));
    }
    dst[i] = total;
  }
}

ferro::ReduceOp engine_op(ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return ferro::ReduceOp::prod;
    case ncclMax:
      return ferro::ReduceOp::max;
    case ncclMin:
      return ferro::ReduceOp::min;
    default:
      return ferro::ReduceOp::sum;
  }
}

// Calls visit(T{}) with the C++ type of an integer or a float of 32 or 64 bits.
template <class Visit>
void visit_type(ncclDataType_t dtype, Visit visit) {
  switch (dtype) {
    case ncclInt8:
      return visit(std::int8_t{});
    case ncclUint8:
      return visit(std::uint8_t{});
    case ncclInt32:
      return visit(std::int32_t{});
    case ncclUint32:
      return visit(std::uint32_t{});
    case ncclInt64:
      return visit(std::int64_t{});
    case ncclUint64:
      return visit(std::uint64_t{});
    case ncclFloat32:
      return visit(float{});
    default:
      return visit(double{});
  }
}

// Through float: exact for a product of two 16-bit or 8-bit floats before its rounding.
float load_float(ncclDataType_t dtype, const void* element) {
  float value = 0;
  if (const Format8* format = format_of(dtype)) {
    value = widen(*format, *static_cast<const std::uint8_t*>(element));
  } else {
    ferro::to_partial(&value, ferro::DType::float32, element, traits(dtype).dtype, 1);
  }
  return value;
}

void store_float(ncclDataType_t dtype, void* element, float value) {
  if (const Format8* format = format_of(dtype)) {
    *static_cast<std::uint8_t*>(element) = narrow(*format, value);
  } else {
    ferro::from_partial(element, traits(dtype).dtype, &value, ferro::DType::float32, 1);
  }
}

bool is_short_float(ncclDataType_t dtype) { return !is_integer(dtype) && element_nbytes(dtype) < 4; }

}  // namespace

std::size_t element_nbytes(ncclDataType_t dtype) { return ferro::item_size(traits(dtype).dtype); }
const char* name_of(ncclDataType_t dtype) { return traits(dtype).name; }
bool is_integer(ncclDataType_t dtype) { return traits(dtype).is_integer; }

void reduce(ncclDataType_t dtype, ncclRedOp_t op, void* dst, const void* const* srcs, int n,
            std::size_t count) {
  if (const Format8* format = format_of(dtype)) {
    return reduce8(*format, op, static_cast<std::uint8_t*>(dst), srcs, n, count);
  }
  ferro::reduce_kernel(traits(dtype).dtype, engine_op(op))(dst, srcs, n, count, 1);
}

void scale(ncclDataType_t dtype, void* data, const void* scalar, std::size_t count) {
  if (is_short_float(dtype)) {
    const float factor = load_float(dtype, scalar);
    const std::size_t nbytes = element_nbytes(dtype);
    for (std::size_t i = 0; i < count; ++i) {
      void* element = static_cast<char*>(data) + i * nbytes;
      store_float(dtype, element, load_float(dtype, element) * factor);
    }
    return;
  }
  visit_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    T factor;
    std::memcpy(&factor, scalar, sizeof factor);
    // Unaligned is allowed, and integers wrap: through unsigned long, where that is defined.
    for (std::size_t i = 0; i < count; ++i) {
      T element;
      char* at = static_cast<char*>(data) + i * sizeof(T);
      std::memcpy(&element, at, sizeof element);
      if constexpr (std::is_integral_v<T>) {
        element = static_cast<T>(static_cast<std::uint64_t>(element) * static_cast<std::uint64_t>(factor));
      } else {
        element *= factor;
      }
      std::memcpy(at, &element, sizeof element);
    }
  });
}

void divide(ncclDataType_t dtype, void* data, int divisor, std::size_t count) {
  visit_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t i = 0; i < count; ++i) {
      T element;
      char* at = static_cast<char*>(data) + i * sizeof(T);
      std::memcpy(&element, at, sizeof element);
      element = static_cast<T>(element / static_cast<T>(divisor));
      std::memcpy(at, &element, sizeof element);
    }
  });
}

void reciprocal(ncclDataType_t dtype, int n, void* element) {
  if (is_short_float(dtype)) return store_float(dtype, element, 1.0f / static_cast<float>(n));
  visit_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T value = static_cast<T>(T{1} / static_cast<T>(n));
    std::memcpy(element, &value, sizeof value);
  });
}

}  // namespace emulation
