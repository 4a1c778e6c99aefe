#include "nccl/attendance.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "nccl/error.hpp"

namespace ferro::nccl {

std::size_t Attendance::row_nbytes(int num_members) noexcept {
  const std::size_t nbytes = sizeof(Row) + static_cast<std::size_t>(num_members) * sizeof(Pair);
  return (nbytes + alignof(Row) - 1) / alignof(Row) * alignof(Row);
}

std::size_t Attendance::nbytes(int num_members) noexcept {
  return static_cast<std::size_t>(num_members) * row_nbytes(num_members);
}

Attendance::Attendance(int fd, std::vector<int> members, int rank)
    : members_(std::move(members)), own_(index_of(rank)) {
  const std::size_t size = nbytes(static_cast<int>(members_.size()));
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw Error(ErrorKind::system, "mmap", errno, std::strerror(errno));
  base_ = static_cast<unsigned char*>(base);
}

Attendance::~Attendance() { munmap(base_, nbytes(static_cast<int>(members_.size()))); }

Attendance::Row& Attendance::row(int index) const noexcept {
  const auto offset = static_cast<std::size_t>(index) * row_nbytes(static_cast<int>(members_.size()));
  return *reinterpret_cast<Row*>(base_ + offset);
}

Attendance::Pair& Attendance::pair(int index, int other) const noexcept {
  return reinterpret_cast<Pair*>(&row(index) + 1)[other];
}

int Attendance::index_of(int rank) const noexcept {
  const auto found = std::find(members_.begin(), members_.end(), rank);
  return found == members_.end() ? -1 : static_cast<int>(found - members_.begin());
}

// Only this rank writes its counters, and they order nothing else: relaxed.
Attendance::Entry Attendance::enter(Span<Operation> operations) {
  Entry entry;
  if (operations.front().op != Op::send && operations.front().op != Op::recv) {
    entry.collective = row(own_).collectives.fetch_add(1, std::memory_order_relaxed) + 1;
    return entry;
  }
  for (const Operation& each : operations) {
    const bool is_send = each.op == Op::send;
    const int other = index_of(each.peer);
    if (other < 0 || other == own_) continue;
    std::atomic<std::uint64_t>& counter = is_send ? pair(own_, other).sends : pair(own_, other).recvs;
    const std::uint64_t number = counter.fetch_add(1, std::memory_order_relaxed) + 1;
    entry.messages.push_back({each.peer, is_send, number});
  }
  return entry;
}

Attendance::Entry Attendance::entered() const {
  Entry entry;
  entry.collective = row(own_).collectives.load(std::memory_order_relaxed);
  for (int index = 0; index < static_cast<int>(members_.size()); ++index) {
    const int rank = members_[static_cast<std::size_t>(index)];
    const Pair& ours = pair(own_, index);
    if (const std::uint64_t sends = ours.sends.load(std::memory_order_relaxed); sends != 0)
      entry.messages.push_back({rank, true, sends});
    if (const std::uint64_t recvs = ours.recvs.load(std::memory_order_relaxed); recvs != 0)
      entry.messages.push_back({rank, false, recvs});
  }
  return entry;
}

void Attendance::retract(const Entry& entry) noexcept {
  if (entry.collective != 0) row(own_).collectives.fetch_sub(1, std::memory_order_relaxed);
  for (const Entry::Message& message : entry.messages) {
    Pair& ours = pair(own_, index_of(message.peer));
    (message.is_send ? ours.sends : ours.recvs).fetch_sub(1, std::memory_order_relaxed);
  }
}

void Attendance::leave(bool in_order) noexcept {
  std::uint32_t last = 0;
  for (int index = 0; index < static_cast<int>(members_.size()); ++index)
    if (index != own_) last = std::max(last, row(index).departure.load(std::memory_order_relaxed));
  if (row(own_).departure.load(std::memory_order_relaxed) == 0)
    row(own_).departure.store(last + 1, std::memory_order_relaxed);
  // Release: whoever sees it sees the last numbers, too.
  row(own_).presence.store(in_order ? Presence::left : Presence::gave_up, std::memory_order_release);
}

bool Attendance::has_entered(int index, const Entry& entry) const noexcept {
  if (row(index).collectives.load(std::memory_order_relaxed) < entry.collective) return false;
  return std::all_of(entry.messages.begin(), entry.messages.end(), [&](const Entry::Message& message) {
    if (message.peer != members_[static_cast<std::size_t>(index)]) return true;
    const Pair& theirs = pair(index, own_);
    const auto& counter = message.is_send ? theirs.recvs : theirs.sends;
    return counter.load(std::memory_order_relaxed) >= message.number;
  });
}

bool Attendance::has_left(int index, const Entry& entry) const noexcept {
  switch (row(index).presence.load(std::memory_order_acquire)) {
    case Presence::here:
      return false;
    case Presence::left:
      return !has_entered(index, entry);
    case Presence::gave_up:
      return true;
  }
  return false;
}

template <typename Visit>
void Attendance::for_each_partner(const Entry& entry, Visit visit) const {
  for (int index = 0; index < static_cast<int>(members_.size()); ++index) {
    const int rank = members_[static_cast<std::size_t>(index)];
    const auto is_to = [=](const Entry::Message& message) { return message.peer == rank; };
    const bool takes_part =
        entry.collective != 0 || std::any_of(entry.messages.begin(), entry.messages.end(), is_to);
    if (index != own_ && takes_part) visit(index, rank);
  }
}

std::vector<int> Attendance::missing(const Entry& entry) const {
  std::vector<int> ranks;
  for_each_partner(entry, [&](int index, int rank) {
    if (!has_entered(index, entry)) ranks.push_back(rank);
  });
  return ranks;
}

// Of ranks that have left, finds the one to be named.
class Attendance::EarliestLeaver {
 public:
  // One that left in order comes before one that gave up, perhaps since the other one left; then the first
  // to leave.
  void consider(int rank, Presence presence, std::uint32_t departure) {
    const std::pair place(presence == Presence::gave_up, departure);
    if (rank_ >= 0 && place_ <= place) return;
    rank_ = rank;
    place_ = place;
  }
  int rank() const { return rank_; }  // -1 if none has been considered

 private:
  int rank_ = -1;
  std::pair<bool, std::uint32_t> place_;
};

int Attendance::deserter(const Entry& entry) const {
  EarliestLeaver earliest;
  for_each_partner(entry, [&](int index, int rank) {
    if (!has_left(index, entry)) return;
    const Row& theirs = row(index);
    earliest.consider(rank, theirs.presence.load(std::memory_order_relaxed),
                      theirs.departure.load(std::memory_order_relaxed));
  });
  return earliest.rank();
}

int Attendance::quitter() const noexcept {
  EarliestLeaver earliest;
  for (int index = 0; index < static_cast<int>(members_.size()); ++index) {
    const Row& theirs = row(index);
    if (index == own_ || theirs.presence.load(std::memory_order_acquire) != Presence::gave_up) continue;
    earliest.consider(members_[static_cast<std::size_t>(index)], Presence::gave_up,
                      theirs.departure.load(std::memory_order_relaxed));
  }
  return earliest.rank();
}

}  // namespace ferro::nccl
