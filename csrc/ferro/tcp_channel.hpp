// Messages between two ranks over a socket of their own.
#ifndef FERRO_TCP_CHANNEL_HPP
#define FERRO_TCP_CHANNEL_HPP

#include <cstddef>
#include <memory>
#include <optional>

#include "ferro/channel.hpp"
#include "ferro/clock.hpp"
#include "ferro/frame.hpp"
#include "ferro/scratch.hpp"
#include "ferro/tcp_mesh.hpp"
#include "ferro/tcp_stream.hpp"

namespace ferro {

class TcpChannel final : public Channel {
 public:
  // Takes the connected socket over, even if it throws. When the stream ends, `mesh`, if
  // the group has one, is asked why: the peer may have left because of another rank, or
  // had no room for a goodbye here.
  TcpChannel(int peer, int fd, std::shared_ptr<TcpMesh> mesh = nullptr);
  // Closes the channel if that has not been done.
  ~TcpChannel() override;

  bool try_send(Message& message) override;
  bool try_recv(Message& message) override;
  // Idempotent.
  void close(bool is_superseded) noexcept override;
  bool has_peer_left() override;
  bool discard_unread() noexcept override;
  int poll_fd() const noexcept override { return stream_.fd(); }

 private:
  void say_goodbye() noexcept;
  bool try_recv_header(Message& message);
  void begin_payload(Message& message, const Frame& header);
  void throw_if_certain();
  bool may_mesh_tell_more();

  TcpStream stream_;
  bool is_closed_ = false;
  std::optional<Clock::time_point> ended_at_;  // when the end was first seen
  std::shared_ptr<TcpMesh> mesh_;
  Frame outgoing_;                   // header of the message that is being sent
  std::size_t outgoing_nbytes_ = 0;  // how much of it has been sent
  Scratch dropped_;                  // takes the payloads that do not fit
};

}  // namespace ferro

#endif  // FERRO_TCP_CHANNEL_HPP
