// The sockets between one rank and its peers, and how the news that a group has
// ended travels over them. exchange.hpp moves the data.
//
// A rank that leaves sends 64 last bytes on every stream and shuts it: a goodbye,
// or why the group ended and who is to blame. They may fall into the middle of a
// payload that will never be completed; whoever meets the end of a stream finds
// them as its last 64 bytes. An end without last words is a death, certain since
// it is the dead process's kernel that reports it.
//
// A rank that learns of an end before its peers do tells them, naming the culprit
// and not itself. Before a rank blames a peer that fell silent, it looks for last
// words on all other streams: the messenger of a death may have gone as well.
#ifndef FERRO_TCP_MESH_HPP
#define FERRO_TCP_MESH_HPP

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "ferro/error.hpp"
#include "ferro/tcp_stream.hpp"
#include "ferro/unique_fd.hpp"

namespace ferro {

class TcpMesh {
 public:
  struct Socket {
    int rank;
    int fd;
  };

  // Takes the connected sockets over, also if it throws. `may_spin`: each rank of
  // this host has a core to itself.
  TcpMesh(int own_rank, const std::vector<Socket>& sockets, bool may_spin);
  // Says goodbye if that was not done, then closes the sockets.
  ~TcpMesh();
  TcpMesh(const TcpMesh&) = delete;
  TcpMesh& operator=(const TcpMesh&) = delete;

  int own_rank() const { return own_rank_; }
  bool may_spin() const { return may_spin_; }

  // Any thread, at any moment. The first reason given stays; all peers are told
  // of it once, which takes kTellSeconds at most.
  void abort(AbortReason reason) noexcept;
  // Says goodbye. Idempotent; calls in progress raise Error{closed}.
  void close() noexcept;

  // The reason that won, code none while the group is well. Every now and then
  // this also looks at the sockets, so that who waits elsewhere may learn here
  // of a peer's end.
  AbortReason aborted() noexcept;
  // The same, but looks now.
  AbortReason look() noexcept;

  // Adds the peers that said goodbye or died. Those that told of the group's end
  // and then died are not among them.
  void add_lost(std::vector<int>& ranks) noexcept;

  // The collective in progress, for the reasons found from here on.
  void set_sequence(std::uint32_t sequence) { sequence_.store(sequence, std::memory_order_relaxed); }

  // What a rank raises for such a reason.
  Error error_of(AbortReason reason) const;

 private:
  friend class Exchange;

  // Bytes still to move, in the order of the stream.
  struct Transfer {
    char* data;
    std::size_t nbytes;
    bool is_frame;
  };
  // First in, first out; keeps its memory, since an exchange is made for every call.
  class TransferQueue {
   public:
    bool empty() const { return head_ == transfers_.size(); }
    std::size_t size() const { return transfers_.size() - head_; }
    Transfer& operator[](std::size_t i) { return transfers_[head_ + i]; }
    Transfer& front() { return transfers_[head_]; }
    void push(Transfer transfer) { transfers_.push_back(transfer); }
    void pop() {
      if (++head_ == transfers_.size()) clear();
    }
    void clear() {
      transfers_.clear();
      head_ = 0;
    }

   private:
    std::vector<Transfer> transfers_;
    std::size_t head_ = 0;
  };
  // One peer's stream and what the exchange in progress does with it.
  struct Lane {
    Lane(int rank, UniqueFd fd) : stream(rank, std::move(fd)) {}
    TcpStream stream;
    bool said_goodbye = false;
    bool is_active = false;
    TransferQueue sends, receives;
    std::size_t num_sent = 0, num_received = 0;  // payload bytes of this exchange
    Frame outgoing;                              // stays in place while it is sent
    std::size_t frame_nbytes = 0;                // a frame at the front of the buffer that is being read
    std::size_t told_nbytes = 0;                 // of the last words
  };

  static constexpr double kTellSeconds = 0.5;

  Lane& lane(int peer) { return lanes_[static_cast<std::size_t>(lane_of_[static_cast<std::size_t>(peer)])]; }
  AbortReason reason() const noexcept;
  void adopt(AbortReason reason) noexcept;
  void throw_if_aborted() const;
  // Finds out why streams ended. Needs streams_mutex_.
  void examine_hangups();
  void try_examine_hangups() noexcept;
  // The error that the end of this stream means. Needs streams_mutex_.
  Error verdict_on(Lane& suspect);
  // The same where the last words were found in their place, perhaps before the end was.
  Error verdict_of(Lane& speaker, const Frame& last_words);
  void tell_all(const Frame& last_words) noexcept;
  void tell(Lane& lane, const Frame& last_words, std::int64_t deadline_ns) noexcept;
  std::uint32_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  const int own_rank_;
  const bool may_spin_;
  std::vector<Lane> lanes_;
  std::vector<int> lane_of_;   // by rank; -1 where there is no socket
  std::vector<Lane*> active_;  // of the exchange in progress
  std::vector<pollfd> poll_entries_;
  UniqueFd wake_fd_;  // readable from the first abort on

  // AbortReason::pack() of the first reason, 0 before. Set before streams_mutex_
  // is taken by abort(), and looked at with it held by everyone who moves bytes:
  // after abort() held it once, nobody else writes to a socket.
  std::atomic<std::uint64_t> word_{0};
  std::atomic<bool> has_told_{false};
  std::atomic<std::uint32_t> sequence_{0};  // informs, orders nothing
  std::atomic<std::int64_t> next_look_ns_{0};
  std::mutex streams_mutex_;  // the lanes; never held across a wait
};

}  // namespace ferro

#endif  // FERRO_TCP_MESH_HPP
