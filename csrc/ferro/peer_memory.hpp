// Reads the private arrays of other ranks of this machine.
//
// One copy instead of two, by process_vm_readv, where the kernel permits it. Each rank finds
// that out by reading a number that every other rank keeps in its own memory, which also tells a
// peer from a stranger that has its process id in another namespace. Ranks that are threads of
// one process read each other in the same way, so that an array that was freed is an error, not a
// crash. Peers' memory is never written: a rank that has left a call may have put other things
// where its array was. That spoils what is read, and is noticed; a write would destroy them.
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

  // Whether this process may read the memory of `peer`. Tried once, when the peer has published
  // its number.
  bool can_read(int peer);
  // True only after can_read() has been true of every peer.
  bool can_read_all() const { return num_readable_ == segment_->size() - 1; }
  // Whether peers that can read this process can read [data, data + nbytes) as well. They cannot
  // where a driver mapped it, nor once this process has changed its privileges.
  bool can_lend(const void* data, std::size_t nbytes) const;
  // Reads from `src` in the memory of `peer`, of which can_read() was true. Returns 0 or the error
  // number.
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
