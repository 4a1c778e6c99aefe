// Writes what a peer reads next.
//
// Two cores may share a cache or may be far apart, and on a virtual machine that
// changes while a program runs. Near, ordinary stores are best: the peer finds
// the lines in the cache. Far, each line must first be taken back from the
// peer's cache, 0.5 ns/B measured, and stores past the caches cost a fifth of
// that whatever the distance. So every now and then one copy is timed.
#ifndef FERRO_STAGING_HPP
#define FERRO_STAGING_HPP

#include <chrono>
#include <cstddef>
#include <cstring>

#include "ferro/clock.hpp"
#include "ferro/kernels.hpp"

namespace ferro {

class StagingWriter {
 public:
  void copy(void* dst, const void* src, std::size_t nbytes) {
    if (nbytes < kTimedNbytes) {
      if (nbytes != 0) std::memcpy(dst, src, nbytes);
      return;
    }
    if (--copies_to_probe_ <= 0) return probe(dst, src, nbytes);
    if (is_peer_far_) {
      copy_past_caches(dst, src, nbytes);
    } else {
      std::memcpy(dst, src, nbytes);
    }
  }

  // Whether the next copy is likely to go through this core's caches.
  bool writes_through_caches() const { return !is_peer_far_; }

 private:
  static constexpr std::size_t kTimedNbytes = 4096;  // below, the two ways cost the same
  static constexpr double kFarNsPerByte = 0.2;       // between 0.1, the most that near cores take, and 0.4
  static constexpr int kNearInterval = 16;
  static constexpr int kFarInterval = 64;  // a probe costs five copies there

  __attribute__((noinline)) void probe(void* dst, const void* src, std::size_t nbytes) {
    const auto start = Clock::now();
    std::memcpy(dst, src, nbytes);
    const double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
    is_peer_far_ = ns > kFarNsPerByte * static_cast<double>(nbytes);
    copies_to_probe_ = is_peer_far_ ? kFarInterval : kNearInterval;
  }

  bool is_peer_far_ = false;
  int copies_to_probe_ = 0;
};

}  // namespace ferro

#endif  // FERRO_STAGING_HPP
