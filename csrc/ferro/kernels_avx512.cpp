// Reductions for AVX-512 as servers have had it from the start (F, BW, DQ, VL).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "ferro/kernels_isa.hpp"

// Set after the headers, so that none of their inline functions is compiled for
// it, and up to the end of the file, where GCC instantiates templates.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif

namespace ferro {
namespace {

constexpr std::size_t kVectorNbytes = 64;
constexpr bool kCanTestForNan = true;

template <class V>
[[gnu::always_inline]] inline __mmask16 unordered(V a, V b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
}
[[gnu::always_inline]] inline bool is_any(unsigned mask) { return mask != 0; }

constexpr bool kCanStream = true;

template <class V>
[[gnu::always_inline]] inline void stream_vector(unsigned char* to, V vector) {
  if constexpr (sizeof(V) == 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)vector);
  else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)vector);
}
[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }

#include "ferro/kernels_reduce.inc"

struct Float16 {
  static constexpr std::size_t kBlockNbytes = 32;
  static constexpr std::size_t kItemNbytes = 2;
  static constexpr int kBatchBlocks = 4;
  static constexpr bool kIsFasterOrdered = true;
  // The forms without a mask read an uninitialized vector in GCC's headers, which draws a warning.
  static constexpr __mmask16 kAllLanes = 0xffff;

  template <std::size_t N>
  [[gnu::always_inline]] static auto load(const Byte* from) {
    const auto halves = load_vector<std::uint16_t, N>(from);
    if constexpr (N == 32)
      return bits_as<Vector<float, 64>>(_mm512_maskz_cvtph_ps(kAllLanes, bits_as<__m256i>(halves)));
    else if constexpr (N == 16)
      return bits_as<Vector<float, 32>>(_mm256_cvtph_ps(bits_as<__m128i>(halves)));
    else
      return bits_as<Vector<float, 16>>(_mm_cvtph_ps(bits_as<__m128i>(halves)));
  }
  template <std::size_t N, class To, class V>
  [[gnu::always_inline]] static void store(To to, V sum) {
    store_ordered<N>(to, with_canonical_nan<float>(sum));
  }
  template <std::size_t N, class To, class V>
  [[gnu::always_inline]] static void store_ordered(To to, V sum) {
    if constexpr (N == 32)
      store_vector<N>(to, _mm512_maskz_cvtps_ph(kAllLanes, bits_as<__m512>(sum), _MM_FROUND_TO_NEAREST_INT));
    else if constexpr (N == 16)
      store_vector<N>(to, _mm256_cvtps_ph(bits_as<__m256>(sum), _MM_FROUND_TO_NEAREST_INT));
    else
      store_vector<N>(to, _mm_cvtps_ph(bits_as<__m128>(sum), _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

constexpr KernelSet kAvx512Kernels = make_kernel_set<Float16>("avx512");

}  // namespace ferro

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
