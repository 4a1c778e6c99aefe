// One connected stream to a peer: bytes in both directions, never waiting.
#ifndef FERRO_TCP_STREAM_HPP
#define FERRO_TCP_STREAM_HPP

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "ferro/frame.hpp"
#include "ferro/unique_fd.hpp"

namespace ferro {

// The most that one system call moves: enough to make the call's own cost
// vanish, little enough that the other direction is not starved.
constexpr std::size_t kCallNbytes = std::size_t{1} << 20;

class TcpStream {
 public:
  // What a call moved. `has_ended`: the peer shut its side, or the connection broke.
  struct Moved {
    std::size_t nbytes = 0;
    bool has_ended = false;
  };

  // How a stream ended on purpose: a farewell, and what follows it.
  struct LastWords {
    Frame frame;
    std::vector<char> testimony;
  };

  // Makes the socket non-blocking. Throws Error{io} if that is not possible. What follows
  // a farewell on this stream has `testimony_nbytes`.
  TcpStream(int peer, UniqueFd fd, std::size_t testimony_nbytes = 0);

  // Between processes of one host, where the kernel permits it: makes the socket's buffers
  // larger than the kernel itself would. Its own start small and grow late, which costs
  // allreduces of megabytes up to a fifth.
  void enlarge_local_buffers();

  int peer() const { return peer_; }
  int fd() const { return fd_.get(); }

  Moved send(const iovec* pieces, int num_pieces);
  Moved receive(void* data, std::size_t nbytes);

  // Bytes taken off the socket before their receiver asked for them, so that a header and
  // the small payload after it cost one system call. receive() hands them out first.
  const char* buffered() const { return buffer_.get() + begin_; }
  std::size_t buffered_nbytes() const { return end_ - begin_; }
  // Adds what has arrived until there are `nbytes`, at most a frame of the largest size.
  // Asking for no more than a frame saves what follows it a copy.
  Moved fill(std::size_t nbytes);
  void consume(std::size_t nbytes) { begin_ += nbytes; }

  // Whether the peer's side is shut, even if there are unread bytes before its end.
  bool has_hung_up() const;
  // Whether it ended because nobody answered, and not by the doing of the peer's host. Known once a call
  // has told of the end.
  bool is_cut() const { return is_cut_.load(std::memory_order_relaxed); }
  // The peer's last words, once it has hung up; nothing if it died without any.
  std::optional<LastWords> last_words() const;
  // The farewell that begins among the bytes handed out, of which `ahead` are still buffered: it filled up
  // a header or a payload that will never be completed. One of which a part is still under way, as can happen
  // between hosts, is not recognized: its beginning cannot be told from data, and to wait for more could be
  // for ever.
  std::optional<Frame> farewell_inside(std::size_t ahead = 0) const;

  // Whether some of what was sent has yet to reach the peer's host.
  bool has_undelivered() const;

  // Ends this side, after which the peer reads what was sent, then the end.
  void shut_down() noexcept;
  // Throws away what has arrived, but remembers last words. Closing with unread bytes
  // resets the connection, and a reset may overtake our last words.
  // False if there was nothing.
  bool discard_unread() noexcept;

 private:
  Moved moved_or_ended(ssize_t result, const char* call);
  // Whether the peer's host has acknowledged nothing of what is on its way for as long as the kernel would
  // wait for a sign of life. It asks for none then, and sends again for a quarter of an hour; with its
  // TCP_USER_TIMEOUT it would also give up a host whose process does not read.
  bool is_unanswered() const;
  void note_end(int error) const;
  Moved receive_directly(void* data, std::size_t nbytes);
  void remember_tail(const char* data, std::size_t nbytes);

  int peer_;
  UniqueFd fd_;
  mutable std::atomic<bool> is_cut_{false};
  std::unique_ptr<char[]> buffer_;  // of kMaxFrameNbytes; allocated when first needed
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  // The last bytes received: last words may have been received as payload.
  std::vector<char> tail_;
};

}  // namespace ferro

#endif  // FERRO_TCP_STREAM_HPP
