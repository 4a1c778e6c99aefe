// Who has come to which call: a page that the ranks of a host share.
//
// NCCL tells neither who is missing from a call nor who will never come. Here each rank writes
// down what it enters, and others read it when they have waited too long: how many collectives,
// and how many sends to and receives from each other rank. Calls of two ranks match by number:
// the n-th collective of one is the n-th of all, and its n-th send to a rank is that one's n-th
// receive from it. No rank waits for another here, and a dead one's numbers stay.
#ifndef FERRO_NCCL_ATTENDANCE_HPP
#define FERRO_NCCL_ATTENDANCE_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl/operation.hpp"
#include "nccl/span.hpp"

namespace ferro::nccl {

class Attendance {
 public:
  // The numbers of one call of this rank, or of the last ones of all its calls.
  struct Entry {
    struct Message {
      int peer;  // a rank of the group, of this host
      bool is_send;
      std::uint64_t number;
    };
    std::uint64_t collective = 0;  // 0 for messages alone
    std::vector<Message> messages;
  };

  static std::size_t nbytes(int num_members) noexcept;

  // Maps `fd`, zeros at first, which stays the caller's. `members` are those ranks of a group
  // that share it, in the same order on all of them; `rank` is this one.
  Attendance(int fd, std::vector<int> members, int rank);
  ~Attendance();
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

  // Writes a call down, before it is made. One thread at a time.
  Entry enter(Span<Operation> operations);
  // Takes back a call that was refused.
  void retract(const Entry& entry) noexcept;
  // Writes down that this rank makes no more calls. Unless it leaves `in_order`, not even those
  // that it has entered are to be waited for.
  void leave(bool in_order) noexcept;

  // All that this rank has entered, as if it were one call.
  Entry entered() const;
  // The members that have not entered the call, ascending.
  std::vector<int> missing(const Entry& entry) const;
  // Whom to blame for a call that will never be complete: the first of those that never enter it, since
  // they have left. -1 if there is none.
  int deserter(const Entry& entry) const;
  // Whom to blame for an end in which all members should take part, whatever they have entered: the first
  // other one that has left, but not in order. -1 if there is none.
  int quitter() const noexcept;

 private:
  enum class Presence : std::uint32_t { here, left, gave_up };
  // What one rank writes and all read: on a pair of lines of its own, since prefetchers fetch pairs.
  struct alignas(128) Row {
    std::atomic<std::uint64_t> collectives;
    std::atomic<Presence> presence;
    // Greater than that of every rank that this one knew to have left: whose leaving may be due to theirs.
    std::atomic<std::uint32_t> departure;
  };
  struct Pair {
    std::atomic<std::uint64_t> sends;  // of the one rank to the other
    std::atomic<std::uint64_t> recvs;
  };

  class EarliestLeaver;

  static std::size_t row_nbytes(int num_members) noexcept;
  Row& row(int index) const noexcept;
  Pair& pair(int index, int other) const noexcept;  // written by `index`
  int index_of(int rank) const noexcept;            // -1 for ranks of other hosts
  bool has_entered(int index, const Entry& entry) const noexcept;
  bool has_left(int index, const Entry& entry) const noexcept;
  // Calls `visit` with the place of each other member that takes part in the call.
  template <typename Visit>
  void for_each_partner(const Entry& entry, Visit visit) const;

  const std::vector<int> members_;
  const int own_;  // place among the members
  unsigned char* base_ = nullptr;
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_ATTENDANCE_HPP
