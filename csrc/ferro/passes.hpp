// Work on memory that waits for no peer, cut into passes, between which the caller's
// signals and deadline are checked.
#ifndef FERRO_PASSES_HPP
#define FERRO_PASSES_HPP

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "ferro/call.hpp"
#include "ferro/types.hpp"

namespace ferro {

// What one pass reads and writes: some milliseconds' worth, even where the kernel has yet to map
// the pages, yet so much that the check between two passes costs nothing in comparison.
constexpr std::size_t kPassNbytes = std::size_t{16} << 20;

// Calls `work` with ranges of [0, count) in order, and `look` between two of them. An element
// stands for `nbytes_each` that are read or written; all ranges but the last are whole cache lines.
template <class Look, class Work>
void in_passes(std::size_t count, std::size_t nbytes_each, Look look, Work work) {
  if (count * nbytes_each <= kPassNbytes) {
    if (count != 0) work(Range{0, count});
    return;
  }
  constexpr std::size_t kLine = 64;  // elements, so that this holds for every item size
  const std::size_t most = std::max(kLine, kPassNbytes / nbytes_each / kLine * kLine);
  for (std::size_t first = 0; first < count; first += most) {
    if (first != 0) look();
    work(Range{first, std::min(most, count - first)});
  }
}

// The same for the work of one call.
template <class Work>
void work_in_passes(Call& call, std::size_t count, std::size_t nbytes_each, Work work) {
  in_passes(count, nbytes_each, [&call] { call.check_at_work(); }, work);
}

// `dst` and `src` are the same or do not overlap.
inline void copy_in_passes(Call& call, void* dst, const void* src, std::size_t nbytes) {
  if (dst == src) return;
  work_in_passes(call, nbytes, 2, [=](Range range) {
    std::memcpy(static_cast<char*>(dst) + range.first, static_cast<const char*>(src) + range.first,
                range.count);
  });
}

}  // namespace ferro

#endif  // FERRO_PASSES_HPP
