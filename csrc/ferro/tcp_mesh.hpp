// The sockets between one rank and its peers, and how the news that a group has
// ended travels over them. exchange.hpp moves the data.
//
// A rank that leaves sends last words on every stream and shuts it: a goodbye, or why
// the group ended and who is to blame; then the ranks that it was waiting for. Last words
// have a fixed size, and may fall into the middle of a payload that will never be completed;
// whoever meets the end of a stream finds them as its last bytes. An end without last words
// is a death, and certain, since it is the dead process's kernel that reports it.
//
// A rank that learns of an end before its peers do tells them, naming the culprit
// and not itself. Before a rank blames a peer whose stream ended without last words, it looks
// for those of all other peers: one that named an earlier culprit may have gone as well.
#ifndef FERRO_TCP_MESH_HPP
#define FERRO_TCP_MESH_HPP

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "ferro/error.hpp"
#include "ferro/tcp_stream.hpp"
#include "ferro/testimony.hpp"
#include "ferro/unique_fd.hpp"

namespace ferro {

class TcpMesh {
 public:
  struct Socket {
    int rank;
    int fd;
  };

  // Takes the connected sockets over, even if it throws. `may_spin`: each rank of
  // this host has a core to itself. `world_size` counts all ranks of the group, even
  // those to which there is no socket.
  TcpMesh(int own_rank, int world_size, const std::vector<Socket>& sockets, bool may_spin);
  // Says goodbye if that has not been done, then closes the sockets. Unless the group was closed, peers have
  // kTellSeconds at most to receive the last words.
  ~TcpMesh();
  TcpMesh(const TcpMesh&) = delete;
  TcpMesh& operator=(const TcpMesh&) = delete;

  int own_rank() const { return own_rank_; }
  bool may_spin() const { return may_spin_; }

  // May be called from any thread, at any moment. The first reason given stands, unless find_missing()
  // settles on another; all peers are told of it once, which takes kTellSeconds at most. A rank that
  // gives up a wait calls look() first: the end may have come while it was kept from running.
  void abort(AbortReason reason) noexcept;
  // Says goodbye. Idempotent; calls in progress raise Error{closed}.
  void close() noexcept;

  // The reason that won, code none while the group is well. Every now and then
  // this also looks at the sockets, so that a thread that waits elsewhere can learn
  // here of a peer's end.
  AbortReason aborted() noexcept;
  // The same, but looks now.
  AbortReason look() noexcept;

  // Whether this peer has left in good order, as far as is known here by now.
  bool has_said_goodbye(int peer) noexcept;

  // Adds the peers that said goodbye or died. Those whose last words told why the group
  // ended are not among them, even if they have died since.
  void add_lost(RankSet& ranks) noexcept;

  // The collective in progress, for the reasons found from here on.
  void set_sequence(std::uint32_t sequence) { sequence_.store(sequence, std::memory_order_relaxed); }

  // The error that this rank raises for such a reason.
  Error error_of(AbortReason reason) const;

  // The peers from which data is missing now or, if there are none, those that do not take ours. May
  // be called from any thread.
  RankSet awaited() const noexcept;
  // For whom the collective in progress has been waiting: part of what this rank testifies if that ends
  // in an error. Noted and cleared by the thread that runs collectives.
  void note_awaited_in_collective(const RankSet& awaited);
  void clear_awaited_in_collective();
  // That a collective is under way. By the thread that runs collectives.
  void note_in_collective(bool is_in_collective) noexcept {
    is_in_collective_.store(is_in_collective, std::memory_order_relaxed);
  }
  // For these three see Transport. Of the program only the main thread is heard, since what others are for is
  // not known here; from note_several_callers() on none, since another may do what the peers wait for.
  void note_waiting_for_collective(const Call& call, bool is_waiting) noexcept;
  void note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept;
  void note_several_callers() noexcept;
  // For a thread that gives up and is about to abort(): adds those for which it waited.
  void add_to_testimony(const Call& call, const Error& error) noexcept;
  // What peers were told or, before that, what they would be told now.
  Testimony testimony();

  // Who is missing, after a timeout has ended the group and this rank has said so: see
  // testimony.hpp. Waits until every rank has been heard, kInquestSeconds from the end at most.
  // `add_others` adds what ranks say that this mesh does not reach. All threads that ask get the
  // same answer; from then on aborted() is the reason that counts on all ranks.
  RankSet find_missing(const std::function<void(Testimonies&)>& add_others);
  // What peers have said so far.
  void add_testimonies(Testimonies& testimonies);

 private:
  friend class Exchange;

  // Bytes still to move, in the order of the stream.
  struct Transfer {
    char* data;
    std::size_t nbytes;
    bool is_frame;
  };
  // First in, first out; keeps its memory, since an exchange is made for every call. Used by the
  // thread that runs collectives alone, except for is_waiting().
  class TransferQueue {
   public:
    bool empty() const { return head_ == transfers_.size(); }
    std::size_t size() const { return transfers_.size() - head_; }
    Transfer& operator[](std::size_t i) { return transfers_[head_ + i]; }
    Transfer& front() { return transfers_[head_]; }
    void push(Transfer transfer) {
      transfers_.push_back(transfer);
      is_waiting_.store(true, std::memory_order_relaxed);
    }
    void pop() {
      if (++head_ == transfers_.size()) clear();
    }
    void clear() {
      transfers_.clear();
      head_ = 0;
      is_waiting_.store(false, std::memory_order_relaxed);
    }
    bool is_waiting() const { return is_waiting_.load(std::memory_order_relaxed); }

   private:
    std::vector<Transfer> transfers_;
    std::size_t head_ = 0;
    std::atomic<bool> is_waiting_{false};  // whether it is not empty; informs, orders nothing
  };
  // One peer's stream and what the exchange in progress does with it.
  struct Lane {
    Lane(int rank, UniqueFd fd, std::size_t testimony_nbytes)
        : stream(rank, std::move(fd), testimony_nbytes) {
      stream.enlarge_local_buffers();
    }
    TcpStream stream;
    bool said_goodbye = false;
    bool is_active = false;
    TransferQueue sends, receives;
    std::size_t num_sent = 0, num_received = 0;  // payload bytes of this exchange
    Frame outgoing;                              // stays in place while it is sent
    std::size_t frame_nbytes = 0;                // a frame at the front of the buffer that is being read
    std::size_t told_nbytes = 0;                 // how much of the last words has been sent
  };

  static constexpr double kTellSeconds = 0.5;

  Lane& lane(int peer) { return lanes_[lane_of_[peer]]; }
  AbortReason reason() const noexcept;
  void adopt(AbortReason reason) noexcept;
  RankSet settle(const Testimonies& testimonies);
  void throw_if_aborted() const;
  // Finds out why streams ended. Needs streams_mutex_.
  void examine_hangups();
  AbortReason end_of(const Lane& lane) const;
  void try_examine_hangups() noexcept;
  // The error that the end of this stream means. Needs streams_mutex_.
  Error verdict_on(Lane& suspect);
  // The same where last words were met in the course of reading, perhaps before the stream's end was seen.
  Error verdict_of(Lane& speaker, const Frame& last_words);
  Testimony testimony_now() const noexcept;  // needs streams_mutex_
  // Last words as they travel: a farewell and a testimony.
  struct Words {
    char bytes[sizeof(Frame) + sizeof(Testimony)];
    std::size_t nbytes;
  };
  Words words_of(const Frame& farewell, const Testimony& testimony) const noexcept;
  void tell_all(const Words& last_words) noexcept;
  void tell(Lane& lane, const Words& last_words, std::int64_t deadline_ns) noexcept;
  void await_delivery() noexcept;
  void discard_unread(Lane& lane) noexcept;
  void await_last_words(std::int64_t deadline_ns);
  std::uint32_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  const int own_rank_;
  const int world_size_;
  const bool may_spin_;
  std::deque<Lane> lanes_;
  std::vector<int> lane_of_;   // by rank; -1 where there is no socket
  std::vector<Lane*> active_;  // of the exchange in progress
  std::vector<pollfd> poll_entries_;
  UniqueFd wake_fd_;  // readable from the first abort on

  // AbortReason::pack() of the first reason or, after an inquest, of the one that counts; 0 while
  // there is none. abort() sets it before it takes streams_mutex_, and everyone who moves bytes looks
  // at it with that held: once abort() has held it, nobody else writes to a socket.
  std::atomic<std::uint64_t> word_{0};
  std::atomic<std::int64_t> ended_at_ns_{0};  // written before word_
  std::atomic<bool> has_told_{false};
  Testimony told_testimony_;  // written under streams_mutex_, final once has_told_
  // Guarded by streams_mutex_, as are the next five.
  RankSet awaited_in_collective_;
  RankSet awaited_in_messages_;  // by the program
  RankSet given_up_;             // in messages
  bool is_stuck_ = false;
  bool has_several_callers_ = false;
  std::optional<RankSet> missing_;  // what an inquest has found
  // Whether awaited_in_collective_ is not empty; spares clear_awaited_in_collective() the lock.
  std::atomic<bool> has_awaited_in_collective_{false};
  // These three inform, and order nothing.
  std::atomic<bool> is_in_collective_{false};
  std::atomic<bool> is_waiting_for_collective_{false};  // the program; written by the main thread
  std::atomic<std::uint32_t> sequence_{0};
  std::atomic<std::int64_t> next_look_ns_{0};
  std::mutex streams_mutex_;  // guards the lanes; never held across a wait
};

}  // namespace ferro

#endif  // FERRO_TCP_MESH_HPP
