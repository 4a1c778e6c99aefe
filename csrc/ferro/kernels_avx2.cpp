// Reductions for AVX2 and F16C. No FMA: fusing would change results.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "ferro/kernels_isa.hpp"

// Set after the headers, so that none of their inline functions is compiled for
// it, and up to the end of the file, where GCC instantiates templates.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

namespace ferro {
namespace {

constexpr std::size_t kVectorNbytes = 32;
constexpr bool kCanTestForNan = true;

template <class V>
[[gnu::always_inline]] inline __m256i unordered(V a, V b) {
  return _mm256_castps_si256(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q));
}
[[gnu::always_inline]] inline bool is_any(__m256i mask) { return _mm256_movemask_epi8(mask) != 0; }

constexpr bool kCanStream = true;

template <class V>
[[gnu::always_inline]] inline void stream_vector(unsigned char* to, V vector) {
  if constexpr (sizeof(V) == 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)vector);
  else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)vector);
}
[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }

#include "ferro/kernels_reduce.inc"

struct Float16 {
  static constexpr std::size_t kBlockNbytes = 16;
  static constexpr std::size_t kItemNbytes = 2;
  static constexpr int kBatchBlocks = 4;
  static constexpr bool kIsFasterOrdered = true;

  template <std::size_t N>
  [[gnu::always_inline]] static auto load(const Byte* from) {
    const auto halves = bits_as<__m128i>(load_vector<std::uint16_t, N>(from));
    if constexpr (N == 16)
      return bits_as<Vector<float, 32>>(_mm256_cvtph_ps(halves));
    else
      return bits_as<Vector<float, 16>>(_mm_cvtph_ps(halves));
  }
  template <std::size_t N, class To, class V>
  [[gnu::always_inline]] static void store(To to, V sum) {
    store_ordered<N>(to, with_canonical_nan<float>(sum));
  }
  template <std::size_t N, class To, class V>
  [[gnu::always_inline]] static void store_ordered(To to, V sum) {
    if constexpr (N == 16)
      store_vector<N>(to, _mm256_cvtps_ph(bits_as<__m256>(sum), _MM_FROUND_TO_NEAREST_INT));
    else
      store_vector<N>(to, _mm_cvtps_ph(bits_as<__m128>(sum), _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

constexpr KernelSet kAvx2Kernels = make_kernel_set<Float16>("avx2");

}  // namespace ferro

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
