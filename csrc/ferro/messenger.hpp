// Point-to-point messages of one rank: many at once, over any channels.
//
// Messages to one peer, and from one peer, keep their order; everything else
// moves as it can. All that is posted is progressed together, so that a send
// and a receive that wait for each other both get on.
#ifndef FERRO_MESSENGER_HPP
#define FERRO_MESSENGER_HPP

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "ferro/channel.hpp"
#include "ferro/parking.hpp"
#include "ferro/transport.hpp"

namespace ferro {

// Messages that complete together. Belongs to the caller until then.
class Batch {
 public:
  explicit Batch(const std::vector<PointToPoint>& ops)
      : messages_(ops.begin(), ops.end()), remaining_(ops.size()) {}

  bool is_done() const { return remaining_ == 0; }
  // The first message that did not fit. The others have been delivered.
  void rethrow() const {
    if (error_ != nullptr) throw *error_;
  }

 private:
  friend class Messenger;
  std::vector<Message> messages_;
  std::size_t remaining_;
  std::unique_ptr<Error> error_;
};

class Messenger {
 public:
  // `channels` by rank of the group, null for this rank itself. `segment` is the
  // one of this host, null where no peer shares it.
  Messenger(const Transport& transport, std::vector<std::unique_ptr<Channel>> channels,
            std::shared_ptr<Segment> segment, int index, SpinPolicy spin);
  ~Messenger();

  // The four below are called by one thread at a time.
  void post(Batch& batch);
  // Moves what can be moved. False if nothing could. Throws what ended a peer or the group.
  bool progress();
  // Drops all that was posted: the group has ended.
  void clear();

  // Tells all peers that this rank has left. Nothing is posted afterwards.
  void close() noexcept;

  // Progresses until `batch` is done.
  void run(Call& call, Batch& batch);
  // Sleeps until a peer may have made progress possible, notify() is called, or a
  // slice has passed.
  void sleep();
  // Ends a sleep(), now or the next one. From any thread.
  void notify();

  // Throws timeout, naming the peers that something is still due from or to.
  [[noreturn]] void throw_timeout() const;
  bool is_idle() const { return lanes_in_use_.empty(); }

 private:
  struct Lane {  // one direction of one channel
    Channel* channel;
    std::deque<std::pair<Message*, Batch*>> messages;
    int peer;
    bool is_outgoing;
  };
  bool progress(Lane& lane);
  void check_group() const;

  const Transport& transport_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::shared_ptr<Segment> segment_;
  const int index_;
  const SpinPolicy spin_;
  std::vector<Lane> lanes_;  // 2 * peer + is_outgoing
  std::vector<Lane*> lanes_in_use_;
  bool has_sockets_ = false;
  int event_fd_ = -1;
  std::atomic<bool> is_notified_{false};
};

}  // namespace ferro

#endif  // FERRO_MESSENGER_HPP
