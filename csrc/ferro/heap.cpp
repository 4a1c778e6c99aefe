#include "ferro/heap.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "ferro/pages.hpp"

namespace ferro {
namespace {

// Tens of milliseconds' worth, even while all cores are backing memory.
constexpr std::size_t kBackedAtOnceNbytes = std::size_t{32} << 20;

}  // namespace

Heap::Heap(std::shared_ptr<Segment> segment, int place)
    : segment_(std::move(segment)),
      base_(segment_->heap(place)),
      free_{{0, segment_->layout().heap_nbytes}} {}

// Signals are heard with the lock released: their handlers may free what lies here.
void* Heap::allocate(Call& call, std::size_t nbytes) {
  for (;;) {
    if (void* const data = try_allocate(nbytes)) return data;
    call.check_interrupt_if_due();
  }
}

void* Heap::try_allocate(std::size_t nbytes) {
  const std::size_t alignment = nbytes >= kHugePage ? kHugePage : kLinePair;
  const std::size_t size = round_up(std::max<std::size_t>(nbytes, 1), kLinePair);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const std::size_t begin = block->first, end = begin + block->second;
    const std::size_t at = round_up(begin, alignment);
    if (at + size > end || at + size < at) continue;
    if (!back_until(at + size)) return nullptr;
    // Made first: should memory run out here, nothing has changed.
    Blocks used{{at, size}}, rest;
    if (at + size < end) rest.emplace(at + size, end - at - size);
    block->second = at - begin;
    if (at == begin) free_.erase(block);
    free_.merge(rest);
    used_.merge(used);
    return base_ + at;
  }
  throw Error(ErrorCode::out_of_memory, -1,
              "no room for " + std::to_string(nbytes) + " bytes in the " +
                  std::to_string(segment_->layout().heap_nbytes >> 20) +
                  " MiB of this rank's symmetric memory");
}

void Heap::free(void* data) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = static_cast<std::size_t>(static_cast<unsigned char*>(data) - base_);
  const auto block = free_.insert(used_.extract(at)).position;
  const auto next = std::next(block);
  if (next != free_.end() && block->first + block->second == next->first) {
    block->second += next->second;
    free_.erase(next);
  }
  if (block == free_.begin()) return;
  const auto previous = std::prev(block);
  if (previous->first + previous->second != block->first) return;
  previous->second += block->second;
  free_.erase(block);
}

bool Heap::back_until(std::size_t end) {
  if (end <= backed_nbytes_) return true;
  const std::size_t most = std::min(end, backed_nbytes_ + kBackedAtOnceNbytes);
  const std::size_t wanted = std::min(round_up(most, kHugePage), segment_->layout().heap_nbytes);
  if (madvise(base_ + backed_nbytes_, wanted - backed_nbytes_, kPopulateWrite) != 0 && errno != EINVAL)
    throw Error(ErrorCode::out_of_memory, -1,
                "backing symmetric memory: " + std::generic_category().message(errno));
  backed_nbytes_ = wanted;
  return end <= backed_nbytes_;
}

}  // namespace ferro
