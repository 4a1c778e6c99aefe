// A rank that leaves while it has work. The thread that closes pauses after each mutex that it unlocks, so
// that all others get as far as they ever can between two steps of close(). Not after the first, if the work
// is not to begin before.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
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

namespace {

constexpr int kRounds = 10;

void close_slowly(Communicator& comm, int first_pause = 2) {
  unlocks_to_pause = first_pause;
  comm.close();
  unlocks_to_pause = -1;
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

}  // namespace

int main() {
  peers_hear_of_calls_that_have_not_begun();
  peers_hear_of_them_from_either_of_two_threads_that_close();
  peers_hear_of_it_before_arrays_are_given_back();
  std::puts("close_test: passed");
}
