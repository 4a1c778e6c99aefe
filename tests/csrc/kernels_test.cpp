// Every kernel of every instruction set that this processor runs, bit for bit
// against scalar code that shares nothing with them.
#include "ferro/kernels.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "ferro/kernels_isa.hpp"

namespace {

using namespace ferro;

int failures = 0;

void fail(const std::string& claim) {
  if (++failures <= 20) std::fprintf(stderr, "FAILED: %s\n", claim.c_str());
}
void check(bool holds, const std::string& claim) {
  if (!holds) fail(claim);
}

const char* const kDTypeNames[kDTypeCount] = {
    "bool",    "int8",      "uint8",      "int16",       "uint16",     "int32",
    "uint32",  "int64",     "uint64",     "float16",     "bfloat16",   "float32",
    "float64", "complex64", "complex128", "float8_e4m3", "float8_e5m2"};
const char* const kOpNames[kReduceOpCount] = {"sum", "mean", "prod", "min", "max"};

// ---- 16-bit floats by arithmetic, not by bits -------------------------------

struct Half {
  std::uint16_t bits;
  static constexpr int kMantissaBits = 10, kMinExponent = -14;
};
struct Brain {
  std::uint16_t bits;
  static constexpr int kMantissaBits = 7, kMinExponent = -126;
};

template <class F>
float widen(F value) {
  const int exponent_mask = (1 << (15 - F::kMantissaBits)) - 1;
  const int exponent = value.bits >> F::kMantissaBits & exponent_mask;
  const int mantissa = value.bits & ((1 << F::kMantissaBits) - 1);
  const float sign = value.bits >> 15 ? -1.0f : 1.0f;
  if (exponent == exponent_mask)
    return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0)
    return sign * std::ldexp(static_cast<float>(mantissa), F::kMinExponent - F::kMantissaBits);
  const int scale = exponent - 1 + F::kMinExponent - F::kMantissaBits;
  return sign * std::ldexp(static_cast<float>(mantissa | 1 << F::kMantissaBits), scale);
}

template <class F>
F narrow(float value) {
  const int infinity = ((1 << (15 - F::kMantissaBits)) - 1) << F::kMantissaBits;
  if (std::isnan(value)) return {static_cast<std::uint16_t>(infinity | 1 << (F::kMantissaBits - 1))};
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return {static_cast<std::uint16_t>(sign | infinity)};
  int exponent = magnitude == 0 ? F::kMinExponent : std::ilogb(magnitude);
  if (exponent < F::kMinExponent) exponent = F::kMinExponent;
  // In units of the last place; nearbyint rounds to nearest even.
  const auto units = static_cast<long>(std::nearbyint(std::ldexp(magnitude, F::kMantissaBits - exponent)));
  const long bits = units + (static_cast<long>(exponent - F::kMinExponent) << F::kMantissaBits);
  return {static_cast<std::uint16_t>(sign | (bits > infinity ? infinity : bits))};
}

// ---- the reference ----------------------------------------------------------

template <class T>
struct Complex {
  T real, imag;
};

template <class T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <class T>
T from_bytes(const void* bytes, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const unsigned char*>(bytes) + i * sizeof value, sizeof value);
  return value;
}

template <class T>
bool takes_second(T a, T b, ReduceOp op) {
  if (b != b) return true;
  return op == ReduceOp::min ? b < a : b > a;
}

bool is_order(ReduceOp op) { return op == ReduceOp::min || op == ReduceOp::max; }

template <class T>
T choose(const std::vector<T>& values, ReduceOp op) {
  const T* chosen = &values[0];
  for (const T& value : values)
    if (takes_second(*chosen, value, op)) chosen = &value;
  return *chosen;
}

template <class T>
T calculate(const std::vector<T>& values, ReduceOp op, int divisor) {
  T result = values[0];
  for (std::size_t s = 1; s < values.size(); ++s)
    result = op == ReduceOp::prod ? result * values[s] : result + values[s];
  return op == ReduceOp::mean ? result / static_cast<T>(divisor) : result;
}

// No arithmetic touches what is chosen, not even a division that only MEAN needs: Clang makes
// `is_mean ? x / n : x` a division by n or 1, which quiets a signaling NaN.
template <class T>
T reduce_floats(const std::vector<T>& values, ReduceOp op, int divisor) {
  return is_order(op) ? choose(values, op) : canonical(calculate(values, op, divisor));
}

template <class T>
T reduce_integers(const std::vector<T>& values, ReduceOp op) {
  if (is_order(op)) return choose(values, op);
  auto result = static_cast<std::uint64_t>(values[0]);
  for (std::size_t s = 1; s < values.size(); ++s) {
    const auto value = static_cast<std::uint64_t>(values[s]);
    result = op == ReduceOp::prod ? result * value : result + value;
  }
  return static_cast<T>(result);
}

template <class T>
struct Reference {
  static T reduce(const std::vector<T>& values, ReduceOp op, int divisor) {
    if constexpr (std::is_floating_point_v<T>)
      return reduce_floats(values, op, divisor);
    else
      return reduce_integers(values, op);
  }
};

template <class F>
F reduce_16_bit(const std::vector<F>& values, ReduceOp op, int divisor) {
  std::vector<float> wide;
  for (const F value : values) wide.push_back(widen(value));
  return narrow<F>(reduce_floats(wide, op, divisor));
}
template <>
struct Reference<Half> {
  static Half reduce(const std::vector<Half>& v, ReduceOp op, int d) { return reduce_16_bit(v, op, d); }
};
template <>
struct Reference<Brain> {
  static Brain reduce(const std::vector<Brain>& v, ReduceOp op, int d) { return reduce_16_bit(v, op, d); }
};

template <class T>
struct Reference<Complex<T>> {
  static Complex<T> reduce(const std::vector<Complex<T>>& values, ReduceOp op, int divisor) {
    Complex<T> x = values[0];
    for (std::size_t s = 1; s < values.size(); ++s) x = step(x, values[s], op);
    if (op == ReduceOp::mean) x = {x.real / static_cast<T>(divisor), x.imag / static_cast<T>(divisor)};
    return {canonical(x.real), canonical(x.imag)};
  }
  static Complex<T> step(Complex<T> x, Complex<T> y, ReduceOp op) {
    if (op != ReduceOp::prod) return {x.real + y.real, x.imag + y.imag};
    // volatile: each product rounded before the sum.
    const volatile T rr = x.real * y.real, ii = x.imag * y.imag, ri = x.real * y.imag, ir = x.imag * y.real;
    return {rr - ii, ri + ir};
  }
};

using Sources = std::vector<const void*>;

template <class T>
void reduce_as(unsigned char* dst, const Sources& srcs, std::size_t count, ReduceOp op, int divisor) {
  std::vector<T> values(srcs.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < srcs.size(); ++s) values[s] = from_bytes<T>(srcs[s], i);
    const T result = Reference<T>::reduce(values, op, divisor);
    std::memcpy(dst + i * sizeof result, &result, sizeof result);
  }
}

void reference_reduce(DType dtype, unsigned char* dst, const Sources& srcs, std::size_t count, ReduceOp op,
                      int divisor) {
  switch (dtype) {
    case DType::boolean:
    case DType::uint8:
      return reduce_as<std::uint8_t>(dst, srcs, count, op, divisor);
    case DType::int8:
      return reduce_as<std::int8_t>(dst, srcs, count, op, divisor);
    case DType::int16:
      return reduce_as<std::int16_t>(dst, srcs, count, op, divisor);
    case DType::uint16:
      return reduce_as<std::uint16_t>(dst, srcs, count, op, divisor);
    case DType::int32:
      return reduce_as<std::int32_t>(dst, srcs, count, op, divisor);
    case DType::uint32:
      return reduce_as<std::uint32_t>(dst, srcs, count, op, divisor);
    case DType::int64:
      return reduce_as<std::int64_t>(dst, srcs, count, op, divisor);
    case DType::uint64:
      return reduce_as<std::uint64_t>(dst, srcs, count, op, divisor);
    case DType::float16:
      return reduce_as<Half>(dst, srcs, count, op, divisor);
    case DType::bfloat16:
      return reduce_as<Brain>(dst, srcs, count, op, divisor);
    case DType::float32:
      return reduce_as<float>(dst, srcs, count, op, divisor);
    case DType::float64:
      return reduce_as<double>(dst, srcs, count, op, divisor);
    case DType::complex64:
      return reduce_as<Complex<float>>(dst, srcs, count, op, divisor);
    case DType::complex128:
      return reduce_as<Complex<double>>(dst, srcs, count, op, divisor);
    default:
      return;
  }
}

bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }
bool is_float(DType dtype) { return dtype >= DType::float16 && dtype <= DType::float64; }

bool is_defined(DType dtype, ReduceOp op) {
  if (dtype == DType::boolean) return is_order(op);
  if (is_complex(dtype)) return !is_order(op);
  if (is_float(dtype)) return true;
  return dtype <= DType::uint64 && op != ReduceOp::mean;
}

// ---- data -------------------------------------------------------------------

std::mt19937_64 generator{20240607};
std::uint64_t random_below(std::uint64_t bound) { return generator() % bound; }

// What one real number of a dtype is made of.
struct Layout {
  std::size_t nbytes;
  int mantissa_bits;
};
Layout layout_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return {2, 10};
    case DType::bfloat16:
      return {2, 7};
    case DType::float32:
    case DType::complex64:
      return {4, 23};
    default:
      return {8, 52};
  }
}

std::uint64_t random_float_bits(Layout layout) {
  const int exponent_bits = static_cast<int>(8 * layout.nbytes) - 1 - layout.mantissa_bits;
  const std::uint64_t sign = random_below(2) << (8 * layout.nbytes - 1);
  const std::uint64_t top = (std::uint64_t{1} << exponent_bits) - 1, bias = top / 2;
  const std::uint64_t mantissa = generator() & ((std::uint64_t{1} << layout.mantissa_bits) - 1);
  const std::uint64_t quiet = std::uint64_t{1} << (layout.mantissa_bits - 1);
  const auto made_of = [&](std::uint64_t e, std::uint64_t m) { return sign | e << layout.mantissa_bits | m; };
  switch (random_below(24)) {
    case 0:
      return made_of(top, 0);  // inf
    case 1:
      return made_of(top, mantissa | quiet);  // quiet NaN
    case 2:
      return made_of(top, (mantissa & ~quiet) | 1);  // signaling NaN
    case 3:
      return made_of(0, 0);  // zeros of both signs
    case 4:
      return made_of(0, mantissa);  // denormal
    case 5:
      return made_of(0, 1);  // the smallest
    case 6:
      return made_of(1, 0);  // the smallest normal
    case 7:
      return made_of(top - 1, (quiet << 1) - 1);  // the largest
    case 8:
      return made_of(random_below(top + 1), mantissa);  // any
    case 9:
      return made_of(bias + random_below(3), 0);  // 1, 2, 4: ties
    default:
      return made_of(bias - 4 + random_below(8), mantissa);  // ordinary
  }
}

using Bytes = std::vector<unsigned char>;

Bytes random_values(DType dtype, std::size_t nbytes) {
  const bool is_real = is_float(dtype) || is_complex(dtype);
  const Layout layout = is_real ? layout_of(dtype) : Layout{1, 0};
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i + layout.nbytes <= nbytes; i += layout.nbytes) {
    std::uint64_t bits = is_real ? random_float_bits(layout) : generator();
    if (dtype == DType::boolean) bits &= 1;
    std::memcpy(bytes.data() + i, &bits, layout.nbytes);
  }
  return bytes;
}

// Any part of the values that each dtype has here: to draw all anew takes most of the time of the tests.
void fill(DType dtype, unsigned char* bytes, std::size_t nbytes) {
  constexpr std::size_t kPoolNbytes = std::size_t{1} << 18;
  static std::array<Bytes, kDTypeCount> pools;
  Bytes& pool = pools[static_cast<std::size_t>(dtype)];
  if (pool.empty()) pool = random_values(dtype, kPoolNbytes);
  const std::size_t item = item_size(dtype);
  for (std::size_t done = 0; done < nbytes;) {
    const std::size_t first = item * random_below(kPoolNbytes / item);
    const std::size_t part = std::min(nbytes - done, kPoolNbytes - first);
    std::memcpy(bytes + done, pool.data() + first, part);
    done += part;
  }
}

// ---- reductions -------------------------------------------------------------

enum class Alias { none, first, last };
constexpr std::size_t kGuardNbytes = 128;
constexpr unsigned char kGuard = 0xa5;

struct Case {
  DType dtype;
  ReduceOp op;
  int n;
  std::size_t count;
  int divisor;
  std::size_t dst_offset, src_offset;  // bytes from a cache line
  Alias alias;

  std::string name(const char* isa) const {
    return std::string(isa) + " " + kDTypeNames[static_cast<int>(dtype)] + " " +
           kOpNames[static_cast<int>(op)] + " n=" + std::to_string(n) + " count=" + std::to_string(count) +
           " divisor=" + std::to_string(divisor) + " dst+" + std::to_string(dst_offset) + " src+" +
           std::to_string(src_offset) + " alias=" + std::to_string(static_cast<int>(alias));
  }
};

// Memory that starts `offset` bytes after a cache line, between guards.
class Guarded {
 public:
  Guarded(std::size_t nbytes, std::size_t offset)
      : nbytes_(nbytes), memory_(nbytes + offset + 2 * kGuardNbytes + 64, kGuard) {
    const std::size_t to_line = -reinterpret_cast<std::uintptr_t>(memory_.data()) % 64;
    data_ = memory_.data() + to_line + kGuardNbytes + offset;
  }
  Guarded(Guarded&&) = default;
  Guarded(const Guarded&) = delete;
  unsigned char* data() { return data_; }
  bool is_intact() const {
    return is_guard(memory_.data(), data_) && is_guard(data_ + nbytes_, memory_.data() + memory_.size());
  }

 private:
  // Each byte of it equals the one before.
  static bool is_guard(const unsigned char* begin, const unsigned char* end) {
    const auto nbytes = static_cast<std::size_t>(end - begin);
    return *begin == kGuard && std::memcmp(begin, begin + 1, nbytes - 1) == 0;
  }

  std::size_t nbytes_;
  std::vector<unsigned char> memory_;
  unsigned char* data_;
};

void check_reduction(const char* isa, ReduceKernel kernel, const Case& c) {
  const std::size_t nbytes = c.count * item_size(c.dtype);
  std::vector<Guarded> inputs;
  Sources srcs;
  Guarded output(nbytes, c.dst_offset);
  const int aliased = c.alias == Alias::first ? 0 : c.alias == Alias::last ? c.n - 1 : -1;
  inputs.reserve(static_cast<std::size_t>(c.n));
  for (int s = 0; s < c.n; ++s) {
    inputs.emplace_back(nbytes, c.src_offset * static_cast<std::size_t>(s + 1) % 64);
    unsigned char* const input = s == aliased ? output.data() : inputs.back().data();
    fill(c.dtype, input, nbytes);
    srcs.push_back(input);
  }
  std::vector<unsigned char> expected(nbytes + 1);
  reference_reduce(c.dtype, expected.data(), srcs, c.count, c.op, c.divisor);
  kernel(output.data(), srcs.data(), c.n, c.count, c.divisor);
  if (nbytes != 0 && std::memcmp(output.data(), expected.data(), nbytes) != 0) fail(c.name(isa));
  if (!output.is_intact()) fail(c.name(isa) + ": wrote outside of dst");
}

const std::vector<std::size_t>& counts_around_every_block() {
  static const std::vector<std::size_t> counts = [] {
    std::vector<std::size_t> all;
    for (std::size_t count = 0; count <= 70; ++count) all.push_back(count);
    for (const std::size_t count : {127, 128, 129, 255, 257, 511, 513, 1000, 1031}) all.push_back(count);
    return all;
  }();
  return counts;
}

void check_kernel(const char* isa, ReduceKernel kernel, DType dtype, ReduceOp op,
                  const std::vector<std::size_t>& counts) {
  for (const std::size_t count : counts)
    for (const int n : {1, 2, 3, 5})
      for (const Alias alias : {Alias::none, Alias::first, Alias::last}) {
        const std::size_t item = item_size(dtype);
        const bool is_odd_address = random_below(4) == 0;
        const std::size_t dst_offset = is_odd_address ? 1 + random_below(15) : item * random_below(64 / item);
        const int divisor =
            op == ReduceOp::mean ? (random_below(2) ? n : 3 + static_cast<int>(random_below(30))) : 1;
        check_reduction(isa, kernel, {dtype, op, n, count, divisor, dst_offset, random_below(64), alias});
      }
}

template <class Body>
void for_each_reduction(Body body) {
  for (int dtype = 0; dtype < kDTypeCount; ++dtype)
    for (int op = 0; op < kReduceOpCount; ++op) body(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
}

void test_every_instruction_set_matches_the_reference() {
  const KernelSets runnable = runnable_kernel_sets();
  for (int i = 0; runnable.sets[i] != nullptr; ++i) {
    const KernelSet& set = *runnable.sets[i];
    std::printf("%s\n", set.isa);
    for_each_reduction([&](DType dtype, ReduceOp op) {
      const ReduceKernel kernel = set.table[static_cast<int>(dtype)][static_cast<int>(op)];
      if (kernel != nullptr) check_kernel(set.isa, kernel, dtype, op, counts_around_every_block());
    });
  }
}

void test_every_streaming_kernel_matches_the_reference() {
  const KernelSets runnable = runnable_kernel_sets();
  for (int i = 0; runnable.sets[i] != nullptr; ++i)
    for_each_reduction([&](DType dtype, ReduceOp op) {
      const ReduceKernel kernel = runnable.sets[i]->streaming[static_cast<int>(dtype)][static_cast<int>(op)];
      if (kernel == nullptr) return;
      const std::size_t item = item_size(dtype), least = 4096 / item;
      const std::string name = std::string(runnable.sets[i]->isa) + " streaming";
      check_kernel(name.c_str(), kernel, dtype, op,
                   {0, 1, least - 1, least, least + 1, least + 77, 3 * least});
    });
}

void test_baseline_has_every_defined_reduction() {
  for_each_reduction([](DType dtype, ReduceOp op) {
    const bool is_there = kBaselineKernels.table[static_cast<int>(dtype)][static_cast<int>(op)] != nullptr;
    check(is_there == is_defined(dtype, op), std::string("baseline ") + kDTypeNames[static_cast<int>(dtype)] +
                                                 " " + kOpNames[static_cast<int>(op)] + " is defined");
  });
}

void test_kernel_is_null_exactly_where_undefined() {
  for_each_reduction([](DType dtype, ReduceOp op) {
    for (const std::size_t output_nbytes : {std::size_t{0}, kStreamingNbytes})
      check((reduce_kernel(dtype, op, output_nbytes) != nullptr) == is_defined(dtype, op),
            std::string("reduce_kernel ") + kDTypeNames[static_cast<int>(dtype)] + " " +
                kOpNames[static_cast<int>(op)] + " is null exactly where undefined");
  });
}

void test_kernel_of_a_large_output_gives_the_same_bits() {
  for_each_reduction([](DType dtype, ReduceOp op) {
    const ReduceKernel kernel = reduce_kernel(dtype, op, kStreamingNbytes);
    if (kernel != nullptr) check_kernel("large output", kernel, dtype, op, {1, 4500});
  });
}

// ---- reductions to several destinations --------------------------------------

// Which destination is which source.
struct InPlace {
  int source_of_dst[2];  // -1: none
};

struct Destinations {
  std::vector<Guarded> memory;
  std::vector<void*> pointers;
};

Destinations make_destinations(int num_dsts, std::size_t nbytes, std::size_t offset, std::size_t skew) {
  Destinations dsts;
  dsts.memory.reserve(static_cast<std::size_t>(num_dsts));
  for (int d = 0; d < num_dsts; ++d) {
    dsts.memory.emplace_back(nbytes, (offset + skew * static_cast<std::size_t>(d)) % 64);
    dsts.pointers.push_back(dsts.memory.back().data());
  }
  return dsts;
}

template <class Reduce>
void check_reduction_to_all(const Case& c, int num_dsts, std::size_t skew, InPlace in_place, Reduce reduce,
                            const std::string& name) {
  const std::size_t nbytes = c.count * item_size(c.dtype);
  Destinations dsts = make_destinations(num_dsts, nbytes, c.dst_offset, skew);
  std::vector<Guarded> inputs;
  inputs.reserve(static_cast<std::size_t>(c.n));
  Sources srcs;
  for (int s = 0; s < c.n; ++s) {
    inputs.emplace_back(nbytes, c.src_offset);
    srcs.push_back(inputs.back().data());
  }
  for (int d = 0; d < 2 && d < num_dsts; ++d)
    if (in_place.source_of_dst[d] >= 0)
      srcs[static_cast<std::size_t>(in_place.source_of_dst[d])] = dsts.pointers[static_cast<std::size_t>(d)];
  for (const void* src : srcs) fill(c.dtype, static_cast<unsigned char*>(const_cast<void*>(src)), nbytes);
  std::vector<unsigned char> expected(nbytes + 1);
  reference_reduce(c.dtype, expected.data(), srcs, c.count, c.op, c.divisor);
  reduce(dsts.pointers.data(), srcs.data());
  for (Guarded& dst : dsts.memory) {
    check(nbytes == 0 || std::memcmp(dst.data(), expected.data(), nbytes) == 0, name + ": wrong result");
    check(dst.is_intact(), name + ": wrote outside of a destination");
  }
}

constexpr InPlace kAliases[] = {{{-1, -1}}, {{0, 1}}, {{1, 0}}, {{0, -1}}, {{-1, 0}}};

void check_pair_kernel(const char* isa, PairKernel kernel, DType dtype) {
  const std::size_t item = item_size(dtype), least = kMinPairNbytes / item;
  for (const std::size_t count : {least, least + 1, least + 3, 2 * least - 1, 2 * least + 17, 5 * least + 40})
    for (const InPlace in_place : kAliases)
      for (const int divisor : {1, 2})
        for (const std::size_t skew : {std::size_t{0}, item, std::size_t{1}}) {
          const ReduceOp op = divisor == 1 ? ReduceOp::sum : ReduceOp::mean;
          const Case c{dtype,      op, 2, count, divisor, item * random_below(64 / item), random_below(64),
                       Alias::none};
          check_reduction_to_all(
              c, 2, skew, in_place,
              [&](void* const* dsts, const void* const* srcs) { kernel(dsts, srcs, count, divisor); },
              c.name(isa) + " to two, skew " + std::to_string(skew));
        }
}

void test_every_pair_kernel_matches_the_reference() {
  const KernelSets runnable = runnable_kernel_sets();
  for (int i = 0; runnable.sets[i] != nullptr; ++i)
    for (int dtype = 0; dtype < kDTypeCount; ++dtype)
      for (const PairKernel kernel :
           {runnable.sets[i]->pair_sums[dtype], runnable.sets[i]->streaming_pair_sums[dtype]})
        if (kernel != nullptr) check_pair_kernel(runnable.sets[i]->isa, kernel, static_cast<DType>(dtype));
}

void test_reduce_to_all_matches_the_reference() {
  for_each_reduction([](DType dtype, ReduceOp op) {
    if (!is_defined(dtype, op)) return;
    for (const std::size_t count : {0, 1, 100, 2500})
      for (const int n : {1, 2, 3})
        for (const std::size_t output_nbytes : {std::size_t{0}, kStreamingNbytes}) {
          const Case c{dtype, op, n, count, op == ReduceOp::mean ? n : 1, 0, random_below(64), Alias::none};
          const InPlace in_place = n == 1 ? InPlace{{0, -1}} : kAliases[random_below(5)];
          check_reduction_to_all(
              c, n, 64, in_place,
              [&](void* const* dsts, const void* const* srcs) {
                reduce_to_all(dtype, op, dsts, n, srcs, n, count, c.divisor, output_nbytes);
              },
              c.name("reduce_to_all"));
        }
  });
}

// All 16-bit patterns, each with a few partners, so that every rounding occurs.
void test_16_bit_floats_exhaustively(DType dtype) {
  constexpr std::size_t kPatterns = 65536;
  std::vector<std::uint16_t> all(kPatterns), partner(kPatterns), output(kPatterns), expected(kPatterns);
  for (std::size_t i = 0; i < kPatterns; ++i) all[i] = static_cast<std::uint16_t>(i);
  const KernelSets runnable = runnable_kernel_sets();
  for (int round = 0; round < 4; ++round) {
    for (auto& bits : partner) bits = round == 0 ? 0 : static_cast<std::uint16_t>(generator());
    const Sources srcs = {all.data(), partner.data()};
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::max}) {
      reference_reduce(dtype, reinterpret_cast<unsigned char*>(expected.data()), srcs, kPatterns, op, 1);
      for (int i = 0; runnable.sets[i] != nullptr; ++i) {
        const ReduceKernel kernel = runnable.sets[i]->table[static_cast<int>(dtype)][static_cast<int>(op)];
        if (kernel == nullptr) continue;
        kernel(output.data(), srcs.data(), 2, kPatterns, 1);
        check(output == expected, std::string(runnable.sets[i]->isa) + " all patterns of " +
                                      kDTypeNames[static_cast<int>(dtype)] + " " +
                                      kOpNames[static_cast<int>(op)]);
      }
    }
  }
}

// ---- copies -----------------------------------------------------------------

template <class Copy>
void check_copies(const char* name, Copy copy) {
  for (const std::size_t nbytes : {0, 1, 7, 63, 64, 65, 200, 1023, 2048, 4095, 4096, 4097, 70001})
    for (const std::size_t dst_offset : {0, 1, 16, 63})
      for (const std::size_t src_offset : {0, 5, 64}) {
        Guarded from(nbytes, src_offset), to(nbytes, dst_offset);
        fill(DType::uint8, from.data(), nbytes);
        copy(to.data(), from.data(), nbytes);
        const std::string claim = std::string(name) + " copies " + std::to_string(nbytes) + " bytes to +" +
                                  std::to_string(dst_offset);
        check(nbytes == 0 || std::memcmp(to.data(), from.data(), nbytes) == 0, claim);
        check(to.is_intact(), claim + " and nothing else");
      }
}

void test_copies_are_exact() {
  check_copies("copy_past_caches", copy_past_caches);
  check_copies("copy_to_user", [](void* dst, const void* src, std::size_t nbytes) {
    copy_to_user(dst, src, nbytes, nbytes);
  });
  check_copies("streaming copy_to_user", [](void* dst, const void* src, std::size_t nbytes) {
    copy_to_user(dst, src, nbytes, kStreamingNbytes);
  });
}

void test_empty_copies_take_null_pointers() {
  copy_past_caches(nullptr, nullptr, 0);
  copy_to_user(nullptr, nullptr, 0, 0);
  copy_to_user(nullptr, nullptr, 0, kStreamingNbytes);
}

}  // namespace

int main() {
  test_every_instruction_set_matches_the_reference();
  test_baseline_has_every_defined_reduction();
  test_kernel_is_null_exactly_where_undefined();
  test_every_streaming_kernel_matches_the_reference();
  test_kernel_of_a_large_output_gives_the_same_bits();
  test_every_pair_kernel_matches_the_reference();
  test_reduce_to_all_matches_the_reference();
  test_16_bit_floats_exhaustively(DType::float16);
  test_16_bit_floats_exhaustively(DType::bfloat16);
  test_copies_are_exact();
  test_empty_copies_take_null_pointers();
  std::printf("kernel_isa() is %s; %d failures\n", kernel_isa(), failures);
  return failures == 0 ? 0 : 1;
}
