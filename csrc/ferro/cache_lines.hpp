// Hints to the processor about which cache will want a line next. They change no value and order nothing.
#ifndef FERRO_CACHE_LINES_HPP
#define FERRO_CACHE_LINES_HPP

#include <cstddef>

#include "ferro/segment.hpp"

namespace ferro {

// Fetches a cache line for writing while other work goes on, so that the store need not wait for it.
inline void prepare_to_write(void* line) {
#if defined(__x86_64__)
  // The builtin fetches the line for reading only, where the compiler may not assume that the processor has
  // this instruction. 64-bit processors without it do nothing.
  asm volatile("prefetchw %0" : "+m"(*static_cast<char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

inline void prepare_to_write(unsigned char* lines, std::size_t nbytes) {
  for (std::size_t at = 0; at < nbytes; at += kCacheLine) prepare_to_write(lines + at);
}

// Moves lines just written out of this core's own caches into the one that peers share, from where they
// read them sooner. Processors without this instruction do nothing.
inline void hand_over(const unsigned char* lines, std::size_t nbytes) {
#if defined(__x86_64__)
  for (std::size_t at = 0; at < nbytes; at += kCacheLine) asm volatile("cldemote %0" : : "m"(lines[at]));
#else
  static_cast<void>(lines), static_cast<void>(nbytes);
#endif
}

}  // namespace ferro

#endif  // FERRO_CACHE_LINES_HPP
