// Reads the private arrays of other ranks of this machine.
//
// One copy in place of two, by process_vm_readv: where the kernel permits it, which each
// rank finds out by reading a number that every other one keeps in its own memory. That also
// tells a peer from a stranger who has its process id in another namespace. Ranks that are threads
// of one process read each other in the same way: an array that was freed is an error, not a crash.
// Peers are never written to: who has left a call may have put other things where its
// array was, which spoils what is read, and is noticed, but must not be overwritten.
#ifndef FERRO_PEER_MEMORY_HPP
#define FERRO_PEER_MEMORY_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ferro/segment.hpp"
#include "ferro/types.hpp"

namespace ferro {

class PeerMemory {
 public:
  // Publishes where this rank's number is. `index` and peers are places in the segment.
  PeerMemory(std::shared_ptr<Segment> segment, int index);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Whether this process may read the memory of `peer`. Tried once, as soon as it has published.
  bool can_read(int peer);
  // True only after can_read() of each of them.
  bool can_read_all() const { return num_readable_ == segment_->size() - 1; }
  // Whether peers that can read this process will find what is at [data, data + nbytes). They do
  // not where a driver mapped it, nor once this process has given up its privileges.
  bool can_lend(const void* data, std::size_t nbytes) const;
  // From `src` in the memory of `peer`, which can be read. The error number if that fails.
  [[nodiscard]] int read(int peer, void* dst, const void* src, std::size_t nbytes) const noexcept;

 private:
  enum class Access : unsigned char { unknown, refused, granted };

  std::shared_ptr<Segment> segment_;
  const int own_pid_;
  std::uint64_t own_number_;
  std::vector<int> pids_;
  std::vector<Access> access_;
  int num_readable_ = 0;
};

}  // namespace ferro

#endif  // FERRO_PEER_MEMORY_HPP
