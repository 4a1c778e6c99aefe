#include "ferro/tcp_stream.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

namespace ferro {
namespace {

// Whether the stream goes on after this error.
bool is_passing(int error) {
  return error == EAGAIN || error == EINTR || error == ENOBUFS || error == ENOMEM;
}

void set_option(int fd, int level, int option, int value) {
  // Fails on sockets that are not TCP, which have no need of it.
  setsockopt(fd, level, option, &value, sizeof value);
}

// The address without the port.
std::string host_part(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
    return std::string(reinterpret_cast<const char*>(&in), sizeof in);
  }
  if (address.ss_family != AF_INET6) return {};
  const auto& in6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return std::string(reinterpret_cast<const char*>(&in6), sizeof in6);
}

bool is_on_this_host(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) < 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) < 0) return false;
  return !host_part(own).empty() && host_part(own) == host_part(peer);
}

// Where there is no network there is nothing to pace: BBR, the default of some
// distributions, carries megabytes over loopback 1.3 to 1.8 times slower. Between
// hosts the administrator's choice stands. Reno needs no permission.
void do_not_pace(int fd) {
  for (const char* name : {"cubic", "reno"})
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, static_cast<socklen_t>(std::strlen(name))) == 0)
      return;
}

// A host that lost power or its cable sends no end of stream. The kernel asks for signs of life after so long
// a silence, once a second, and gives the host up if so many are not answered.
constexpr int kIdleSeconds = 5;
constexpr int kNumUnanswered = 5;

// A send or receive buffer; the kernel grants twice as much, for its bookkeeping.
struct Buffer {
  int option;
  int nbytes;
};
// The receiver's is the larger, so that a sender never meets a closed window, even
// while the receiver does not run.
constexpr Buffer kLocalBuffers[] = {{SO_SNDBUF, 2 << 20}, {SO_RCVBUF, 4 << 20}};

// Whether the kernel grants such buffers. It would grant smaller ones silently,
// perhaps smaller than its own choice, and never take that back.
bool may_enlarge_buffers() {
  const UniqueFd probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return std::all_of(std::begin(kLocalBuffers), std::end(kLocalBuffers), [&](const Buffer& buffer) {
    int granted = 0;
    socklen_t size = sizeof granted;
    set_option(probe.get(), SOL_SOCKET, buffer.option, buffer.nbytes);
    return getsockopt(probe.get(), SOL_SOCKET, buffer.option, &granted, &size) == 0 &&
           granted >= 2 * buffer.nbytes;
  });
}

}  // namespace

TcpStream::TcpStream(int peer, UniqueFd fd, std::size_t testimony_nbytes)
    : peer_(peer), fd_(std::move(fd)), tail_(sizeof(Frame) + testimony_nbytes) {
  const int flags = fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) < 0) throw_errno("fcntl", peer);
  set_option(fd_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  if (is_on_this_host(fd_.get())) do_not_pace(fd_.get());
  set_option(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPCNT, kNumUnanswered);
}

TcpStream::Moved TcpStream::moved_or_ended(ssize_t result, const char* call) {
  if (result > 0) return {static_cast<std::size_t>(result), false};
  if (result == 0) return {0, true};
  if (is_passing(errno)) return {};
  switch (errno) {
    case EBADF:
    case EFAULT:
    case EINVAL:
    case ENOTSOCK:
      throw_errno(call, peer_);
    default:  // reset, broken pipe, host or route gone
      note_end(errno);
      return {0, true};
  }
}

// Noted, since the kernel reports the error once, to the call that comes first. The peer's host itself can
// only reset or shut the stream. If it does not answer, the error is what a router or firewall on the way has
// reported, which may be any of several.
void TcpStream::note_end(int error) const {
  const bool is_by_peer = error == 0 || error == ECONNRESET || error == EPIPE;
  if (!is_by_peer && !is_passing(error)) is_cut_.store(true, std::memory_order_relaxed);
}

void TcpStream::enlarge_local_buffers() {
  static const bool is_granted = may_enlarge_buffers();
  if (!is_granted || !is_on_this_host(fd_.get())) return;
  for (const Buffer& buffer : kLocalBuffers) set_option(fd_.get(), SOL_SOCKET, buffer.option, buffer.nbytes);
}

TcpStream::Moved TcpStream::send(const iovec* pieces, int num_pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<std::size_t>(num_pieces);
  return moved_or_ended(sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT), "sendmsg");
}

TcpStream::Moved TcpStream::receive(void* data, std::size_t nbytes) {
  const std::size_t ahead = std::min(nbytes, buffered_nbytes());
  if (ahead == 0) return receive_directly(data, nbytes);
  std::memcpy(data, buffered(), ahead);
  consume(ahead);
  return {ahead, false};
}

TcpStream::Moved TcpStream::fill(std::size_t nbytes) {
  if (buffer_ == nullptr) buffer_ = std::make_unique<char[]>(kMaxFrameNbytes);
  if (begin_ != 0) {
    std::memmove(buffer_.get(), buffered(), buffered_nbytes());
    end_ -= begin_;
    begin_ = 0;
  }
  const Moved moved = receive_directly(buffer_.get() + end_, std::min(nbytes, kMaxFrameNbytes) - end_);
  end_ += moved.nbytes;
  return moved;
}

TcpStream::Moved TcpStream::receive_directly(void* data, std::size_t nbytes) {
  const Moved moved = moved_or_ended(recv(fd_.get(), data, nbytes, MSG_DONTWAIT), "recv");
  if (moved.nbytes > 0) remember_tail(static_cast<const char*>(data), moved.nbytes);
  return moved;
}

void TcpStream::remember_tail(const char* data, std::size_t nbytes) {
  const std::size_t added = std::min(nbytes, tail_.size());
  std::memmove(tail_.data(), tail_.data() + added, tail_.size() - added);
  std::memcpy(tail_.data() + tail_.size() - added, data + nbytes - added, added);
}

bool TcpStream::has_hung_up() const {
  pollfd entry{fd_.get(), POLLRDHUP, 0};
  int num_ready = 0;
  // Even without a time limit a signal may come first, and whoever asks would blame the wrong rank.
  do num_ready = poll(&entry, 1, 0);
  while (num_ready < 0 && errno == EINTR);
  int error = 0;
  socklen_t size = sizeof error;
  if ((entry.revents & POLLERR) != 0 && getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0)
    note_end(error);
  if (num_ready > 0) return true;
  if (!is_unanswered()) return false;
  note_end(ETIMEDOUT);
  shutdown(fd_.get(), SHUT_RDWR);
  return true;
}

bool TcpStream::is_unanswered() const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return info.tcpi_retransmits + info.tcpi_probes >= kNumUnanswered &&
         info.tcpi_last_ack_recv >= (kIdleSeconds + kNumUnanswered) * 1000;
}

// Reads without consuming: once the end of the stream is known to have arrived,
// nothing follows what is unread now.
std::optional<TcpStream::LastWords> TcpStream::last_words() const {
  int unread = 0;
  if (ioctl(fd_.get(), FIONREAD, &unread) < 0) unread = 0;
  std::vector<char> bytes(tail_.begin(), tail_.end());
  bytes.resize(tail_.size() + static_cast<std::size_t>(unread));
  const ssize_t peeked =
      recv(fd_.get(), bytes.data() + tail_.size(), bytes.size() - tail_.size(), MSG_PEEK | MSG_DONTWAIT);
  if (peeked < 0) note_end(errno);
  bytes.resize(tail_.size() + static_cast<std::size_t>(std::max<ssize_t>(peeked, 0)));
  LastWords words;
  bytes.erase(bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(tail_.size()));
  std::memcpy(&words.frame, bytes.data(), sizeof words.frame);
  if (!is_farewell(words.frame)) return std::nullopt;
  words.testimony.assign(bytes.begin() + sizeof words.frame, bytes.end());
  return words;
}

std::optional<Frame> TcpStream::farewell_inside(std::size_t ahead) const {
  constexpr auto kFirstByte = static_cast<char>(kFrameMagic & 0xff);
  const std::size_t num_kept = buffered_nbytes() - std::min(ahead, buffered_nbytes());
  const auto end = tail_.end() - static_cast<std::ptrdiff_t>(std::min(num_kept, tail_.size()));
  for (auto at = tail_.begin(); (at = std::find(at, end, kFirstByte)) != end; ++at) {
    Frame frame;
    char* const bytes = reinterpret_cast<char*>(&frame);
    const std::size_t known = std::min(sizeof frame, static_cast<std::size_t>(tail_.end() - at));
    std::copy_n(at, known, bytes);
    if (std::memcmp(bytes, &kFrameMagic, std::min(sizeof kFrameMagic, known)) != 0) continue;
    const std::size_t left = sizeof frame - known;
    const ssize_t peeked = left > 0 ? recv(fd_.get(), bytes + known, left, MSG_PEEK | MSG_DONTWAIT) : 0;
    if (peeked < 0) note_end(errno);
    if (peeked == static_cast<ssize_t>(left) && is_farewell(frame)) return frame;
  }
  return std::nullopt;
}

bool TcpStream::has_undelivered() const {
  int nbytes = 0;
  return ioctl(fd_.get(), TIOCOUTQ, &nbytes) == 0 && nbytes > 0;
}

void TcpStream::shut_down() noexcept { shutdown(fd_.get(), SHUT_WR); }

bool TcpStream::discard_unread() noexcept {
  constexpr int kMaxCalls = 64;
  char scratch[16384];
  for (int i = 0; i < kMaxCalls; ++i) {
    const ssize_t nbytes = recv(fd_.get(), scratch, sizeof scratch, MSG_DONTWAIT);
    if (nbytes < 0) note_end(errno);
    if (nbytes <= 0) return i > 0;
    remember_tail(scratch, static_cast<std::size_t>(nbytes));
  }
  return true;
}

}  // namespace ferro
