// Reductions for what every processor of the architecture has: SSE2, NEON.
#include <cstddef>
#include <cstdint>

#include "ferro/kernels_isa.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "EvenOdd and partial vectors assume it");

namespace ferro {
namespace {

constexpr std::size_t kVectorNbytes = 16;

#if defined(__x86_64__)
constexpr bool kCanTestForNan = true;

template <class V>
[[gnu::always_inline]] inline __m128i unordered(V a, V b) {
  return _mm_castps_si128(_mm_cmpunord_ps((__m128)a, (__m128)b));
}
[[gnu::always_inline]] inline bool is_any(__m128i mask) { return _mm_movemask_epi8(mask) != 0; }

constexpr bool kCanStream = true;

template <class V>
[[gnu::always_inline]] inline void stream_vector(unsigned char* to, V vector) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)vector);
}
[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }
#else
constexpr bool kCanTestForNan = false;  // branching on a vector mask is slow
constexpr bool kCanStream = false;      // no instruction that GCC would emit
inline void stream_fence() {}
#endif

#include "ferro/kernels_reduce.inc"

#if defined(__aarch64__)
constexpr const char* kIsa = "neon";

struct Float16 {
  static constexpr std::size_t kBlockNbytes = 8;
  static constexpr std::size_t kItemNbytes = 2;
  static constexpr int kBatchBlocks = 4;
  static constexpr bool kIsFasterOrdered = false;

  template <std::size_t N>
  [[gnu::always_inline]] static Vector<float, 16> load(const Byte* from) {
    const auto halves = bits_as<float16x8_t>(load_vector<std::uint16_t, N>(from));
    return bits_as<Vector<float, 16>>(vcvt_f32_f16(vget_low_f16(halves)));
  }
  template <std::size_t N, class To, class V>
  [[gnu::always_inline]] static void store(To to, V sum) {
    const auto halves = vcvt_f16_f32(bits_as<float32x4_t>(with_canonical_nan<float>(sum)));
    store_vector<N>(to, vcombine_f16(halves, halves));
  }
};
#else
#if defined(__x86_64__)
constexpr const char* kIsa = "sse2";
#else
constexpr const char* kIsa = "generic";
#endif
using Float16 = SoftFloat16;
#endif

}  // namespace

constexpr KernelSet kBaselineKernels = make_kernel_set<Float16>(kIsa);

}  // namespace ferro
