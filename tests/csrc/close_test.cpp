// A rank that leaves while it has work, or seems to. The thread that closes pauses after each mutex that it
// unlocks, so that all others get as far as they ever can between two steps of close(). Not after the first,
// if the work is not to begin before. Where it is to wait for others, these are held until it yields.
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ferro/communicator.hpp"
#include "loopback.hpp"

using namespace ferro;
using test::kTimeout, test::Values;

namespace {

thread_local int unlocks_to_pause = -1;  // how many are left; negative: it never pauses
thread_local int fd_to_hold = -1;        // the thread stays where it polls this one alone
thread_local bool lets_go = false;       // the thread that yields lets those go that are held
std::atomic<bool> is_held{false}, may_go{false};

void hold() {
  is_held = true;
  while (!may_go) std::this_thread::yield();
}

}  // namespace

// In place of the system's.
extern "C" int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  using Unlock = int (*)(pthread_mutex_t*);
  static const auto unlock = reinterpret_cast<Unlock>(dlsym(RTLD_NEXT, "pthread_mutex_unlock"));
  const int result = unlock(mutex);
  if (unlocks_to_pause > 0) --unlocks_to_pause;
  if (unlocks_to_pause == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return result;
}
extern "C" int poll(pollfd* entries, nfds_t count, int timeout_ms) {
  using Poll = int (*)(pollfd*, nfds_t, int);
  static const auto system_poll = reinterpret_cast<Poll>(dlsym(RTLD_NEXT, "poll"));
  if (count == 1 && entries->fd == fd_to_hold) hold();
  return system_poll(entries, count, timeout_ms);
}
extern "C" int sched_yield() noexcept {
  if (lets_go) may_go = true;
  return static_cast<int>(syscall(SYS_sched_yield));
}

namespace {

constexpr int kRounds = 10;

void close_slowly(Communicator& comm, int first_pause = 2) {
  unlocks_to_pause = first_pause;
  comm.close();
  unlocks_to_pause = -1;
}

std::int32_t* symmetric(Communicator& comm, std::size_t count, std::int32_t value) {
  Call call(kTimeout);
  auto* const x = static_cast<std::int32_t*>(comm.heap()->allocate(call, count * sizeof(std::int32_t)));
  std::fill_n(x, count, value);
  return x;
}

// Whether a call has begun is a matter of chance.
void peers_hear_of_calls_that_have_not_begun() {
  for (int round = 0; round < kRounds; ++round) {
    const auto group = Communicator::create_group(2, 2);
    Values x(1);
    group[0]->submit(test::make(Op::allreduce, DType::int32, 1, x.data(), x.data()), kTimeout);
    close_slowly(*group[0]);
    CHECK(group[1]->aborted().code == ErrorCode::channel_closed);
  }
}

void peers_hear_of_them_from_either_of_two_threads_that_close() {
  for (int round = 0; round < kRounds; ++round) {
    const auto group = Communicator::create_group(2, 2);
    Values x(1);
    std::atomic<bool> is_there{false};
    std::thread other([&] {
      is_there.store(true);
      while (!group[0]->is_closed()) std::this_thread::yield();
      group[0]->close();
    });
    while (!is_there.load()) std::this_thread::yield();
    group[0]->submit(test::make(Op::allreduce, DType::int32, 1, x.data(), x.data()), kTimeout);
    close_slowly(*group[0], 1);
    other.join();
    CHECK(group[1]->aborted().code == ErrorCode::channel_closed);
  }
}

// Until then, a peer may take what it reads of them for the message.
void peers_hear_of_it_before_arrays_are_given_back() {
  for (int round = 0; round < kRounds; ++round) {
    const auto group = Communicator::create_group(2, 2);
    Values x(100000);
    const std::vector<PointToPoint> send{{true, 1, x.data(), x.size(), DType::int32, 0}};
    std::shared_ptr<Task> task;
    std::atomic<bool> is_submitted{false}, has_ended{false};
    std::thread owner([&] {
      while (!is_submitted.load()) std::this_thread::yield();
      Call call(kTimeout);
      CHECK(task->wait(call));
      has_ended.store(group[1]->has_ended());
    });
    do task = group[0]->submit(Op::send, send, kTimeout);  // until the ring is full, each is done at once
    while (task->is_done());
    is_submitted.store(true);
    close_slowly(*group[0]);
    owner.join();
    CHECK(has_ended.load());
  }
}

// A group of two over TCP, and the socket of rank 0 for messages.
std::vector<std::shared_ptr<Communicator>> connect_two(int& message_socket) {
  const auto [first, second] = test::connected_sockets();
  const auto [message_first, message_second] = test::connected_sockets();
  message_socket = message_first;
  std::vector<std::shared_ptr<Communicator>> group;
  for (int rank = 0; rank < 2; ++rank) {
    Wiring wiring;
    wiring.rank = rank;
    wiring.world_size = 2;
    wiring.local_ranks = {rank};
    wiring.hosts = {{0}, {1}};
    wiring.collective_sockets = rank == 0 ? std::vector<int>{-1, first} : std::vector<int>{second, -1};
    wiring.message_sockets =
        rank == 0 ? std::vector<int>{-1, message_first} : std::vector<int>{message_second, -1};
    group.push_back(Communicator::connect(wiring));
  }
  return group;
}

// It is no call: the peers may still receive what this rank has sent them. Several tries, since a thread that
// the machine keeps from running cannot be told from one in a call.
void a_thread_that_only_looks_does_not_end_the_group() {
  bool has_ended = true;
  for (int round = 0; round < kRounds && has_ended; ++round) {
    int message_socket = -1;
    const auto group = connect_two(message_socket);
    is_held = may_go = false;
    std::thread looking([&] {
      fd_to_hold = message_socket;
      group[0]->lost_ranks();
    });
    while (!is_held) std::this_thread::yield();
    std::thread releasing([&] {
      while (!group[0]->is_closed()) std::this_thread::yield();
      may_go = true;
    });
    group[0]->close();
    has_ended = group[1]->has_ended();
    looking.join();
    releasing.join();
  }
  CHECK(!has_ended);
}

// The same where it looks after work that the one that closes would do itself.
void a_thread_that_attends_to_work_does_not_end_the_group() {
  constexpr std::size_t kCount = 2000;  // enough to be left to the receiver, and little enough to hold here
  bool has_ended = true;
  for (int round = 0; round < kRounds && has_ended; ++round) {
    const auto group = Communicator::create_group(2, 2);
    std::int32_t* const x = symmetric(*group[0], kCount, 5);
    is_held = may_go = false;
    const auto sent = group[0]->submit(Op::send, {{true, 1, x, kCount, DType::int32, 0}}, kTimeout);
    std::thread attending([&] {
      Call call(kTimeout, {[](void*) noexcept { hold(); }, nullptr, nullptr});
      group[0]->wait(call, *sent);
    });
    while (!is_held) std::this_thread::yield();
    std::thread releasing([&] {
      while (!may_go && !group[1]->has_ended()) std::this_thread::yield();
      may_go = true;
    });
    lets_go = true;
    group[0]->close();
    lets_go = false;
    has_ended = group[1]->has_ended();
    attending.join();
    releasing.join();
  }
  CHECK(!has_ended);
}

// An array that stops the first thread to write to it, and lets it go on in the end.
class SlowArray {
 public:
  explicit SlowArray(std::size_t count) : nbytes_(count * sizeof(std::int32_t)) {
    data_ = mmap(nullptr, nbytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data_ != MAP_FAILED);
    written_ = this;
    struct sigaction action{};
    action.sa_handler = [](int) {
      hold();
      CHECK(mprotect(written_->data_, written_->nbytes_, PROT_READ | PROT_WRITE) == 0);
    };
    sigaction(SIGSEGV, &action, &previous_);
  }
  ~SlowArray() {
    sigaction(SIGSEGV, &previous_, nullptr);
    munmap(data_, nbytes_);
  }
  SlowArray(const SlowArray&) = delete;
  SlowArray& operator=(const SlowArray&) = delete;
  std::int32_t* data() const { return static_cast<std::int32_t*>(data_); }

 private:
  static inline SlowArray* written_ = nullptr;
  std::size_t nbytes_;
  void* data_;
  struct sigaction previous_;
};

// It is as good as there, though its receiver was at work on it when this rank left.
void a_message_that_is_being_read_arrives() {
  constexpr std::size_t kCount = 65536;
  const auto group = Communicator::create_group(2, 2);
  std::int32_t* const x = symmetric(*group[0], kCount, 5);
  const SlowArray y(kCount);
  is_held = may_go = false;
  const auto sent = group[0]->submit(Op::send, {{true, 1, x, kCount, DType::int32, 0}}, kTimeout);
  ErrorCode code = ErrorCode::none;
  std::thread receiver([&] {
    try {
      Call patient(kTimeout);
      group[1]->exchange(patient, Op::recv, {{false, 0, y.data(), kCount, DType::int32, 0}});
    } catch (const Error& error) {
      code = error.code;
    }
  });
  while (!is_held) std::this_thread::yield();
  lets_go = true;
  group[0]->close();
  lets_go = false;
  may_go = true;
  receiver.join();
  CHECK(code == ErrorCode::none && y.data()[0] == 5 && y.data()[kCount - 1] == 5);
  CHECK(sent->is_done());
}

}  // namespace

int main() {
  peers_hear_of_calls_that_have_not_begun();
  peers_hear_of_them_from_either_of_two_threads_that_close();
  peers_hear_of_it_before_arrays_are_given_back();
  a_thread_that_only_looks_does_not_end_the_group();
  a_thread_that_attends_to_work_does_not_end_the_group();
  a_message_that_is_being_read_arrives();
  std::puts("close_test: passed");
}
