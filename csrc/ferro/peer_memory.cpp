#include "ferro/peer_memory.hpp"

#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ferro {
namespace {

// Reads all of it, or returns an error number: EFAULT for what is not mapped, or is not memory.
int read_process(int pid, void* dst, const void* src, std::size_t nbytes) noexcept {
  for (std::size_t done = 0; done < nbytes;) {
    const iovec local{static_cast<char*>(dst) + done, nbytes - done};
    const iovec remote{const_cast<char*>(static_cast<const char*>(src)) + done, nbytes - done};
    const ssize_t count = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (count < 0) return errno;
    if (count == 0) return EFAULT;
    done += static_cast<std::size_t>(count);
  }
  return 0;
}

// Never 0, which stands for "not published".
std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number) number = 0;
  return number | 1;
}

}  // namespace

PeerMemory::PeerMemory(std::shared_ptr<Segment> segment, int place, PeerReads setting)
    : segment_(std::move(segment)),
      place_(place),
      setting_(setting),
      own_pid_(getpid()),
      own_number_(random_number()),
      peers_(segment_->size()) {
  RankControl& control = segment_->control(place);
  control.pid = own_pid_;
  control.number_at = &own_number_;
  control.number.store(own_number_, std::memory_order_release);  // last: publishes the others
}

bool PeerMemory::can_read(int peer) {
  auto& [access, pid] = peers_[peer];
  const Access known = access.load(std::memory_order_acquire);
  if (known != Access::unknown) return known == Access::granted;
  const RankControl& control = segment_->control(peer);
  const std::uint64_t number = control.number.load(std::memory_order_acquire);
  if (number == 0) return false;
  std::uint64_t found = 0;
  const int error = read_process(control.pid, &found, control.number_at, sizeof found);
  const bool is_granted = error == 0 && found == number;
  pid.store(control.pid, std::memory_order_relaxed);
  access.store(is_granted ? Access::granted : Access::refused, std::memory_order_release);
  return is_granted;
}

bool PeerMemory::can_read_all() const {
  for (int peer = 0; peer < segment_->size(); ++peer)
    if (peer != place_ && peers_[peer].access.load(std::memory_order_acquire) != Access::granted)
      return false;
  return true;
}

bool PeerMemory::can_lend(const void* data, std::size_t nbytes) const {
  if (prctl(PR_GET_DUMPABLE) != 1) return false;
  char* const first = const_cast<char*>(static_cast<const char*>(data));
  char bytes[2];
  const iovec local{bytes, sizeof bytes};
  const iovec ends[] = {{first, 1}, {first + nbytes - 1, 1}};
  return process_vm_readv(own_pid_, &local, 1, ends, 2, 0) == sizeof bytes;
}

int PeerMemory::read(int peer, void* dst, const void* src, std::size_t nbytes) noexcept {
  auto& [access, pid] = peers_[peer];
  const int error = read_process(pid.load(std::memory_order_relaxed), dst, src, nbytes);
  if (error != 0 && error != EFAULT) access.store(Access::refused, std::memory_order_release);
  return error;
}

}  // namespace ferro
