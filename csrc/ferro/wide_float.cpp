#include "ferro/wide_float.hpp"

#include <cstdint>
#include <cstring>

#include "ferro/passes.hpp"

namespace ferro {
namespace {

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Half {
  static std::uint32_t widen(std::uint16_t half) {
    // Rebias the exponent by a multiplication, which also makes denormals normal.
    const std::uint32_t magnitude = bits_of(float_of((half & 0x7fffu) << 13) * 0x1p112f);
    const std::uint32_t special = magnitude >= 0x47800000 ? 0x7f800000u : 0u;  // infinity, NaN
    return magnitude | special | (half & 0x8000u) << 16;
  }
  static std::uint16_t narrow(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Adding 0.5 aligns the last bit of a denormal half with the last bit of the float32.
    const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const std::uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    std::uint32_t half = magnitude < 0x38800000u ? denormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half |= bits >> 16 & 0x8000u;
    return static_cast<std::uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : half);
  }
};

struct Brain {
  static std::uint32_t widen(std::uint16_t brain) { return static_cast<std::uint32_t>(brain) << 16; }
  static std::uint16_t narrow(std::uint32_t bits) {
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
};

// memcpy throughout: users' arrays may be unaligned, and compilers vectorize it.
template <class Format>
void widen_all(void* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t narrow;
    std::memcpy(&narrow, static_cast<const char*>(src) + 2 * i, sizeof narrow);
    const std::uint32_t wide = Format::widen(narrow);
    std::memcpy(static_cast<char*>(dst) + 4 * i, &wide, sizeof wide);
  }
}

template <class Format>
void narrow_all(void* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t wide;
    std::memcpy(&wide, static_cast<const char*>(src) + 4 * i, sizeof wide);
    const std::uint16_t narrow = Format::narrow(wide);
    std::memcpy(static_cast<char*>(dst) + 2 * i, &narrow, sizeof narrow);
  }
}

void* at(void* array, std::size_t offset) { return static_cast<char*>(array) + offset; }
const void* at(const void* array, std::size_t offset) { return static_cast<const char*>(array) + offset; }

void copy(void* dst, const void* src, std::size_t nbytes) {
  if (dst != src && nbytes > 0) std::memcpy(dst, src, nbytes);
}

}  // namespace

void to_partial(void* dst, DType partial, const void* src, DType dtype, std::size_t count) {
  if (partial == dtype) return copy(dst, src, count * item_size(dtype));
  dtype == DType::float16 ? widen_all<Half>(dst, src, count) : widen_all<Brain>(dst, src, count);
}

void from_partial(void* dst, DType dtype, const void* src, DType partial, std::size_t count) {
  if (partial == dtype) return copy(dst, src, count * item_size(dtype));
  dtype == DType::float16 ? narrow_all<Half>(dst, src, count) : narrow_all<Brain>(dst, src, count);
}

void to_partial(Call& call, void* dst, DType partial, const void* src, DType dtype, std::size_t count) {
  const std::size_t narrow = item_size(dtype), wide = item_size(partial);
  work_in_passes(call, count, narrow + wide, [=](Range range) {
    to_partial(at(dst, range.first * wide), partial, at(src, range.first * narrow), dtype, range.count);
  });
}

void from_partial(Call& call, void* dst, DType dtype, const void* src, DType partial, std::size_t count) {
  const std::size_t narrow = item_size(dtype), wide = item_size(partial);
  work_in_passes(call, count, narrow + wide, [=](Range range) {
    from_partial(at(dst, range.first * narrow), dtype, at(src, range.first * wide), partial, range.count);
  });
}

}  // namespace ferro
