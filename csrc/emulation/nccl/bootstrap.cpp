#include "emulation/nccl/bootstrap.hpp"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "emulation/environment.hpp"
#include "emulation/nccl/failure.hpp"
#include "emulation/nccl/segment.hpp"
#include "ferro/unique_fd.hpp"

namespace emulation {
namespace {

using ferro::UniqueFd;

constexpr std::uint64_t kMagic = 0x6f72726566'6e6363;  // begins every id and every greeting
constexpr int kPollMs = 20;                            // how late an abort may be seen

struct Address {
  sockaddr_un name{};
  socklen_t nbytes = 0;
};

Address address_of(const ncclUniqueId& id) {
  Address address;
  address.name.sun_family = AF_UNIX;
  std::string path = "ferro-emulated-nccl-";
  for (int i = 8; i < 24; ++i) {
    const auto byte = static_cast<unsigned char>(id.internal[i]);
    path += "0123456789abcdef"[byte >> 4];
    path += "0123456789abcdef"[byte & 15];
  }
  std::memcpy(address.name.sun_path + 1, path.data(), path.size());  // after a zero: abstract
  address.nbytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return address;
}

void look_for_abort(const std::atomic<bool>& stop) {
  if (stop.load(std::memory_order_relaxed)) throw Interrupted{};  // nothing else is published with it
}

void await_readable(int fd, const std::atomic<bool>& stop) {
  pollfd entry{fd, POLLIN, 0};
  while (poll(&entry, 1, kPollMs) <= 0) look_for_abort(stop);
}

UniqueFd new_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  require(fd.get() >= 0, ncclSystemError, "cannot make a socket: ", std::strerror(errno));
  return fd;
}

// The id is no secret on this host: /proc/net/unix shows it.
bool is_of_same_user(int fd) {
  ucred who{};
  socklen_t nbytes = sizeof who;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &nbytes) == 0 && who.uid == geteuid();
}

// What rank 0 answers: a descriptor, or why there is none.
struct Answer {
  std::int32_t code = ncclSuccess;
  char text[232] = {};
};

void send_answer(int fd, const Answer& answer, int segment) {
  iovec data{const_cast<Answer*>(&answer), sizeof answer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (segment >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &segment, sizeof segment);
  }
  sendmsg(fd, &message, MSG_NOSIGNAL);  // may fail, if the rank has died meanwhile
}

int receive_answer(int fd, const std::atomic<bool>& stop) {
  await_readable(fd, stop);
  Answer answer;
  iovec data{&answer, sizeof answer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  require(length == sizeof answer, ncclRemoteError, "rank 0 ended while the communicator was being made");
  answer.text[sizeof answer.text - 1] = '\0';
  require(answer.code == ncclSuccess, static_cast<ncclResult_t>(answer.code), answer.text);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  require(header != nullptr && header->cmsg_type == SCM_RIGHTS, ncclInternalError, "rank 0 sent no memory");
  int segment = -1;
  std::memcpy(&segment, CMSG_DATA(header), sizeof segment);
  return segment;
}

std::string objection_to(const std::vector<Newcomer>& known, const Newcomer& other) {
  std::ostringstream text;
  const Newcomer& self = known[0];
  if (other.num_ranks != self.num_ranks) {
    text << "rank " << other.rank << " wants a communicator of " << other.num_ranks
         << " ranks, rank 0 one of " << self.num_ranks;
  } else if (other.rank < 0 || other.rank >= self.num_ranks) {
    text << "there is no rank " << other.rank << " of " << self.num_ranks;
  } else if (known[static_cast<std::size_t>(other.rank)].magic != 0) {
    text << "two ranks call themselves rank " << other.rank;
  } else if (nccl_setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 0) {
    for (const Newcomer& one : known) {
      // With only one emulated device there is no choice but to share it.
      if (one.magic != 0 && one.num_devices > 1 && one.device == other.device && one.host == other.host) {
        text << "Duplicate GPU detected: ranks " << one.rank << " and " << other.rank << " both use device "
             << one.device << "; call cudaSetDevice first, with another device on each rank";
        break;
      }
    }
  }
  return text.str();
}

Answer refusal(const std::string& why) {
  Answer answer;
  answer.code = ncclInvalidUsage;
  why.copy(answer.text, sizeof answer.text - 1);
  return answer;
}

int gather_ranks(const ncclUniqueId& id, const Newcomer& self, const std::atomic<bool>& stop) {
  const UniqueFd listener = new_socket();
  const Address address = address_of(id);
  const bool is_bound =
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address.name), address.nbytes) == 0;
  require(is_bound, ncclInvalidUsage, "another rank 0 uses this unique id already");
  listen(listener.get(), kMaxRanks);

  std::vector<UniqueFd> connections;
  std::vector<Newcomer> known(static_cast<std::size_t>(self.num_ranks));
  known[0] = self;
  while (static_cast<int>(connections.size()) < self.num_ranks - 1) {
    await_readable(listener.get(), stop);
    UniqueFd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() < 0 || !is_of_same_user(connection.get())) continue;
    await_readable(connection.get(), stop);
    Newcomer other;
    if (recv(connection.get(), &other, sizeof other, 0) != sizeof other || other.magic != kMagic) continue;
    const std::string objection = objection_to(known, other);
    if (!objection.empty()) {
      connections.push_back(std::move(connection));
      for (const UniqueFd& waiting : connections) send_answer(waiting.get(), refusal(objection), -1);
      fail(ncclInvalidUsage, objection);
    }
    known[static_cast<std::size_t>(other.rank)] = other;
    connections.push_back(std::move(connection));
  }
  UniqueFd segment(Segment::create(self.num_ranks));
  for (const UniqueFd& connection : connections) send_answer(connection.get(), {}, segment.get());
  return segment.release();
}

int join_rank_0(const ncclUniqueId& id, const Newcomer& self, const std::atomic<bool>& stop) {
  const Address address = address_of(id);
  while (true) {
    const UniqueFd fd = new_socket();
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.name), address.nbytes) == 0) {
      require(is_of_same_user(fd.get()), ncclSystemError, "another user answers under this unique id");
      send(fd.get(), &self, sizeof self, MSG_NOSIGNAL);
      return receive_answer(fd.get(), stop);
    }
    look_for_abort(stop);
    usleep(1000);  // rank 0 is not there yet
  }
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {  // splitmix64
  std::uint64_t z = (hash ^ word) + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

std::uint64_t hash_of_host() {
  const char* name = std::getenv("NCCL_HOSTID");
  std::uint64_t hash = 0;
  for (; name != nullptr && *name != '\0'; ++name) hash = mix(hash, static_cast<unsigned char>(*name));
  return hash;
}

}  // namespace

ncclUniqueId make_unique_id() {
  ncclUniqueId id{};
  std::memcpy(id.internal, &kMagic, sizeof kMagic);
  require(getrandom(id.internal + 8, 16, 0) == 16, ncclSystemError, "cannot get random bytes");
  return id;
}

ncclUniqueId derive_unique_id(const ncclUniqueId& parent, const std::uint64_t* words, int count) {
  ncclUniqueId id = parent;
  std::uint64_t halves[2];
  std::memcpy(halves, parent.internal + 8, sizeof halves);
  for (int i = 0; i < count; ++i) {
    halves[0] = mix(halves[0], words[i]);
    halves[1] = mix(halves[1], halves[0]);
  }
  std::memcpy(id.internal + 8, halves, sizeof halves);
  return id;
}

bool is_unique_id(const ncclUniqueId& id) { return std::memcmp(id.internal, &kMagic, sizeof kMagic) == 0; }

int meet(const ncclUniqueId& id, Newcomer self, const std::atomic<bool>& stop) {
  self.magic = kMagic;
  self.host = hash_of_host();
  return self.rank == 0 ? gather_ranks(id, self, stop) : join_rank_0(id, self, stop);
}

}  // namespace emulation
