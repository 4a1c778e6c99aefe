// Reductions of bfloat16 for AVX512_BF16, whose rounding to bfloat16 is one
// instruction instead of six.
#if defined(__x86_64__)

#include <cstddef>
#include <cstdint>

#include "ferro/kernels_isa.hpp"

#if defined(__clang__) || __GNUC__ >= 10

#include <immintrin.h>

// Set after the headers, so that none of their inline functions is compiled for
// it, and up to the end of the file, where GCC instantiates templates.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

namespace ferro {
namespace {

constexpr std::size_t kVectorNbytes = 64;
constexpr bool kCanTestForNan = false;  // done below, together with the test for denormals

constexpr bool kCanStream = true;

template <class V>
[[gnu::always_inline]] inline void stream_vector(unsigned char* to, V vector) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)vector);
}
[[gnu::always_inline]] inline void stream_fence() { _mm_sfence(); }

#include "ferro/kernels_reduce.inc"

// vcvtne2ps2bf16 treats denormals as zero and keeps a NaN's payload; a block that
// holds either is rounded as on other processors.
struct FastBFloat16 : BFloat16 {
  template <std::size_t N, class To, class V>
  [[gnu::always_inline]] static void store(To to, EvenOdd<V> sums) {
    if constexpr (N == kBlockNbytes) {
      const __m512 even = bits_as<__m512>(sums.even), odd = bits_as<__m512>(sums.odd);
      if (__builtin_expect(special_lanes(even) | special_lanes(odd), 0) != 0)
        return store_special(to, even, odd);
      store_vector<N>(to, interleaved(bits_as<__m512i>(_mm512_cvtne2ps_pbh(odd, even))));
    } else {
      BFloat16::store<N>(to, sums);
    }
  }

  [[gnu::always_inline]] static unsigned special_lanes(__m512 sums) {
    constexpr int kQuietNan = 0x01, kDenormal = 0x20, kSignalingNan = 0x80;
    return _mm512_fpclass_ps_mask(sums, kQuietNan | kDenormal | kSignalingNan);
  }
  template <class To>
  [[gnu::noinline, gnu::cold]] static void store_special(To to, __m512 even, __m512 odd) {
    BFloat16::store<kBlockNbytes>(to, EvenOdd<Floats<kVectorNbytes>>{bits_as<Floats<kVectorNbytes>>(even),
                                                                     bits_as<Floats<kVectorNbytes>>(odd)});
  }
  // The lower half's words become the even ones, the upper half's the odd ones.
  [[gnu::always_inline]] static __m512i interleaved(__m512i halves) {
    using Indices = Vector<std::uint16_t, kVectorNbytes>;
    constexpr Indices kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(bits_as<__m512i>(kOrder), halves);
  }
};

constexpr KernelSet make_bfloat16_set() {
  KernelSet set{"avx512bf16", {}, {}, {}, {}};
  add_16_bit_floats<FastBFloat16>(set, DType::bfloat16);
  return set;
}

}  // namespace

constexpr KernelSet kAvx512Bf16Kernels = make_bfloat16_set();

}  // namespace ferro

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else  // a compiler without AVX512_BF16

namespace ferro {

constexpr KernelSet kAvx512Bf16Kernels = {"avx512bf16", {}, {}, {}, {}};

}  // namespace ferro

#endif

#endif  // __x86_64__
