// Point-to-point messages of one rank: many at once, over any channels.
//
// Messages to one peer, and from one peer, keep their order; everything else
// moves as it can. All that is posted makes progress together, so that a send
// and a receive that wait for each other both get on.
//
// Several threads may be in calls at once. Whoever holds the gate moves what all of
// them have posted; whoever has nothing left to move sleeps outside it, so that a
// blocked receive keeps no other thread from sending. One of the sleepers, the watch,
// sleeps on what peers write to or wake. The others, its followers, sleep until it has
// news for them, or leaves and one of them must take over the watch.
#ifndef FERRO_MESSENGER_HPP
#define FERRO_MESSENGER_HPP

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "ferro/channel.hpp"
#include "ferro/gate.hpp"
#include "ferro/parking.hpp"
#include "ferro/segment.hpp"
#include "ferro/transport.hpp"
#include "ferro/unique_fd.hpp"

namespace ferro {

// Messages that complete together. Belongs to the caller until then; guarded by the
// messenger's gate.
class Batch {
 public:
  explicit Batch(const std::vector<PointToPoint>& ops)
      : messages_(ops.begin(), ops.end()), remaining_(ops.size()) {}

  bool is_done() const { return remaining_ == 0; }
  // Whether it may be left alone until somebody asks for it. Then sends may be left to receivers that can
  // fetch them, which what is sent behind them ends, too; and receives give their senders nothing to wait
  // for.
  void set_patient(bool is_patient) {
    for (Message& message : messages_) message.is_patient = is_patient;
  }
  // For one that somebody waits for: its sends are left to their receivers for a moment if it receives
  // something itself. Ranks that exchange messages then fetch them at the same time.
  void set_sends_patient() {
    const bool receives = std::any_of(messages_.begin(), messages_.end(),
                                      [](const Message& message) { return !message.op.is_send; });
    for (Message& message : messages_) message.is_patient = receives && message.op.is_send;
  }
  // Throws what ended the group, or else the error of the first message that did not fit; then the
  // messages that fit have been delivered.
  void rethrow() const {
    if (error_ != nullptr) throw *error_;
  }

 private:
  friend class Messenger;
  std::vector<Message> messages_;
  std::size_t remaining_;
  bool is_owner_away_ = false;  // its owner sleeps, and must be told when it is done
  std::shared_ptr<const Error> error_;

  void fail(const std::shared_ptr<const Error>& error) {
    remaining_ = 0;
    error_ = error;
  }
};

class Messenger : public std::enable_shared_from_this<Messenger> {
 public:
  // `channels` by rank of the group, null for this rank itself. `segment` is the
  // one of this host, null where no peer shares it; `place` is this rank's in it.
  Messenger(std::shared_ptr<Transport> transport, std::vector<std::unique_ptr<Channel>> channels,
            std::shared_ptr<Segment> segment, int place, SpinPolicy spin);
  // Closes the channels if that has not been done.
  ~Messenger();

  // Held by whoever calls what follows, except for news() and notify(). Whoever waits for it need not
  // keep the messenger.
  const std::shared_ptr<Gate>& gate() const { return gate_; }

  // Posts all of the batch or, if it throws bad_alloc, none of it. After end() it fails the batch.
  void post(Batch& batch);
  // Moves messages until `batch`, which has been posted, is done; it may be patient for about a microsecond.
  // Lets go of the gate while it sleeps: if the group is closed meanwhile, the messenger may be gone when
  // this returns.
  void run(Call& call, Batch& batch);
  // Moves messages for as long as it is worth to spin for `batch`, which then is patient no more, or for
  // about a microsecond if nobody waits for it, which a null `call` means. True if it is done.
  bool linger(Call* call, Batch& batch);
  // Whether all that is left of it are sends that their receivers can fetch, and receives that hold up no
  // sender. For what was posted last, after progress().
  bool holds_up_nobody(const Batch& batch) const;
  // Whether some of what is left of it are sends.
  bool is_sending(const Batch& batch) const;
  // Moves what can be moved, one turn for each peer and direction. False if nothing could be.
  // Throws what ended a peer or the group.
  bool progress();
  // For a thread that always finds something to move, after every kPassesPerCheck passes: lets in
  // whoever waits at the gate, and hears the caller's signals.
  void make_way(Call& call);
  static constexpr unsigned kPassesPerCheck = 8;
  // Fails everything that is posted or will be, whoever posts it: the group has ended, of which the transport
  // may hear later. Nothing may follow what is cut off here: the peers would take it for the rest of that.
  void end(const Error& why) noexcept;

  // Lets go of the gate and sleeps until a peer may have made progress possible, another
  // thread has completed a batch whose owner is away, notify() has been called since
  // news() returned `heard`, or a slice has passed. Throws if the caller is interrupted.
  void sleep(Call& call, std::uint32_t heard);
  static void set_owner_away(Batch& batch, bool is_away) { batch.is_owner_away_ = is_away; }
  // Changes with everything that ends a sleep without a peer's doing.
  std::uint32_t news() const { return news_.load(std::memory_order_seq_cst); }
  // Ends every sleep() in progress, or else the next one. May be called from any thread.
  void notify();
  // For a thread that leaves for good: unless there is a watch, one of the sleepers must become it.
  void relieve();

  // Tells all peers that this rank has left, unless it goes on in a successor. Nothing is posted afterwards.
  void close(bool is_superseded) noexcept;

  // Adds the peers that have left after the group had ended: the transport knows of no end but the first.
  void add_lost(RankSet& ranks) const;

  // The peers to or from which some of the batch is still due: all of its peers if it has not
  // been posted.
  std::vector<int> awaited_by(const Batch& batch) const;
  // Throws timeout, naming them.
  [[noreturn]] void throw_timeout(const Batch& batch) const;
  static std::size_t nbytes_of(const Batch& batch);
  // All peers of the batch. Needs no gate.
  static std::vector<int> peers_of(const Batch& batch);
  bool is_idle() const { return lanes_in_use_.empty(); }

 private:
  struct Lane {  // one direction of one channel
    Channel* channel;
    std::deque<std::pair<Message*, Batch*>> messages;
    int peer;
    bool is_outgoing;
  };
  bool progress(Lane& lane);
  bool try_briefly(const Batch& batch);
  void move_until_done(Call& call, Batch& batch);
  void withdraw(const Batch& batch);
  void check_group() const;
  void check_caller(const Call& call, const Batch& batch) const;
  RankSet peers_due(const Batch& batch) const;
  class WaitNote;
  class Absence;
  bool begin_watch();
  void watch();
  void follow(std::uint32_t heard);
  void tell_others();
  void call_followers();

  const std::shared_ptr<Transport> transport_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::shared_ptr<Segment> segment_;
  const int place_;
  const SpinPolicy spin_;
  std::vector<Lane> lanes_;  // 2 * peer + is_outgoing
  std::vector<Lane*> lanes_in_use_;
  bool has_sockets_ = false;
  UniqueFd event_fd_;

  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  // Guarded by the gate, except that while there is a watch, what it polls belongs to it.
  bool is_watched_ = false;
  bool has_unwatched_lane_ = false;  // one came into use since the watch went to sleep
  std::vector<pollfd> poll_entries_;
  int poll_ms_ = 0;
  const std::shared_ptr<const Error> out_of_memory_;  // made while there is memory
  std::shared_ptr<const Error> end_;                  // why end() was called first; null before

  std::atomic<bool> is_notified_{false};  // the watch must not sleep
  std::atomic<int> num_followers_{0};     // written under the gate
  std::atomic<std::uint32_t> news_{0};    // the followers' futex
};

}  // namespace ferro

#endif  // FERRO_MESSENGER_HPP
