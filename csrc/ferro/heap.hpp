// Symmetric memory: arrays in the segment, which every rank of the host can read
// and write in place.
#ifndef FERRO_HEAP_HPP
#define FERRO_HEAP_HPP

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "ferro/call.hpp"
#include "ferro/segment.hpp"

namespace ferro {

// One rank's part of the segment's heaps. Allocating concerns this rank alone: the
// others find an array by its offset. First fit over address-ordered free blocks;
// freed memory stays backed, since touching a page for the first time is what costs.
class Heap {
 public:
  Heap(std::shared_ptr<Segment> segment, int place);

  // Aligned to cache lines or, from the size of a huge page on, to huge pages. Never null.
  // Throws Error{out_of_memory} where there is no memory to back it. Backing gigabytes takes
  // seconds, in the course of which the caller's signals are heard.
  void* allocate(Call& call, std::size_t nbytes);
  // Allocates nothing: it is called where errors cannot be raised.
  void free(void* data) noexcept;

 private:
  using Blocks = std::map<std::size_t, std::size_t>;  // offset → size

  // Null if more of the memory has to be backed first; each attempt backs some of it.
  void* try_allocate(std::size_t nbytes);
  // Backs [0, end) of the heap with memory before it is used: otherwise the kernel of a machine short
  // of memory would kill the process at the first touch. False if it has backed only some of it.
  bool back_until(std::size_t end);

  const std::shared_ptr<Segment> segment_;  // the arrays outlive the group
  unsigned char* const base_;
  std::mutex mutex_;  // guards all below
  Blocks free_;       // neighbours merged
  Blocks used_;
  std::size_t backed_nbytes_ = 0;
};

}  // namespace ferro

#endif  // FERRO_HEAP_HPP
