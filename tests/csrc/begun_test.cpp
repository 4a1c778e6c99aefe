// Small asynchronous calls, which begin on the thread that submits them. Ranks share one thread where that
// shows who does what.
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "ferro/communicator.hpp"
#include "loopback.hpp"

using namespace ferro;
using test::kTimeout, test::value, test::Values;
using Group = std::vector<std::shared_ptr<Communicator>>;
using Work = std::shared_ptr<Task>;

namespace {
thread_local bool can_start_threads = true;
}  // namespace

// In place of the system's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return can_start_threads ? create(thread, attributes, body, argument) : EAGAIN;
}

namespace {

// Elements of arrays that are too large
constexpr std::size_t kTooLarge = 20000;  // for a collective to begin at once
constexpr std::size_t kTooMuch = 80000;   // for a receive to be left to whoever asks
constexpr std::size_t kLent = 5000;  // enough for a message in symmetric memory to be read where it stands

Work reduce(Communicator& comm, std::int32_t* x, std::size_t count, double timeout_s = kTimeout) {
  return comm.submit(test::make(Op::allreduce, DType::int32, count, x, x), timeout_s);
}

Work reduce(Communicator& comm, Values& x, double timeout_s = kTimeout) {
  return reduce(comm, x.data(), x.size(), timeout_s);
}

Work recv(Communicator& comm, int src, Values& x) {
  return comm.submit(Op::recv, {{false, src, x.data(), x.size(), DType::int32, 0}}, kTimeout);
}

Work send(Communicator& comm, int dst, std::int32_t* x, std::size_t count) {
  return comm.submit(Op::send, {{true, dst, x, count, DType::int32, 0}}, kTimeout);
}

Work send(Communicator& comm, int dst, Values& x) { return send(comm, dst, x.data(), x.size()); }

std::int32_t* symmetric(Communicator& comm, std::size_t count, std::int32_t value) {
  Call call(kTimeout);
  auto* const x = static_cast<std::int32_t*>(comm.heap()->allocate(call, count * sizeof(std::int32_t)));
  std::fill_n(x, count, value);
  return x;
}

// Without a word from the sender
void check_that_it_comes(Communicator& comm, int src, std::size_t count, std::int32_t value) {
  Values y(count);
  Call call(kTimeout);
  comm.exchange(call, Op::recv, {{false, src, y.data(), count, DType::int32, 0}});
  CHECK(y == Values(count, value));
}

void wait(Communicator& comm, Task& task) {
  Call call(kTimeout);
  comm.wait(call, task);
}

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code;
  }
  return ErrorCode::none;
}

ErrorCode code_of(const Work& work) {
  return code_of([&] { work->rethrow(); });
}

// Stops a thread where it starts to block: inside the gate, if it waits for what has begun.
struct Hold {
  Hooks hooks() {
    const auto hold = [](void* self) noexcept { static_cast<Hold*>(self)->stay(); };
    return {hold, nullptr, this};
  }
  void stay() {
    has_come = true;
    while (!may_go) std::this_thread::yield();
  }
  void await() const {
    while (!has_come) std::this_thread::yield();
  }
  std::atomic<bool> has_come{false}, may_go{false};
};

// By the progress thread: nobody asks.
void await_unasked(const Task& task) {
  while (!task.is_done()) std::this_thread::yield();
}

void the_last_rank_completes_at_once() {
  const Group group = Communicator::create_group(3, 3);
  std::array<Values, 3> x{Values{1}, Values{2}, Values{4}};
  std::array<Work, 3> work;
  for (int rank = 0; rank < 3; ++rank) work[rank] = reduce(*group[rank], x[rank]);
  CHECK(!work[0]->is_done() && !work[1]->is_done() && work[2]->is_done() && x[2][0] == 7);
  CHECK(group[0]->is_done(*work[0]) && x[0][0] == 7);
  wait(*group[1], *work[1]);
  CHECK(work[1]->is_done() && x[1][0] == 7);
}

void what_was_asked_for_too_early_is_done_unasked() {
  for (const bool is_waited_for : {false, true}) {
    const Group group = Communicator::create_group(2, 2);
    Values x{1}, y{2};
    const Work early = reduce(*group[0], x);
    if (is_waited_for) {
      Call brief(0.001);
      CHECK(code_of([&] { group[0]->wait(brief, *early); }) == ErrorCode::under_way);
    } else {
      CHECK(!group[0]->is_done(*early));
    }
    const Work late = reduce(*group[1], y);
    CHECK(late->is_done() && y[0] == 3);
    await_unasked(*early);
    CHECK(x[0] == 3);
  }
}

// Whose arrays may be in symmetric memory, which makes no difference to those who have begun.
void nobody_waits_for_a_rank_that_has_begun() {
  for (const bool is_symmetric : {false, true}) {
    const Group group = Communicator::create_group(3, 2);
    Values private_values(kLent);
    std::array<std::int32_t*, 3> x{};
    for (int rank = 0; rank < 3; ++rank) x[rank] = symmetric(*group[rank], kLent, 0);
    if (!is_symmetric) x[0] = private_values.data();
    for (int step = 0; step < 20; ++step) {
      for (int rank = 0; rank < 3; ++rank) std::fill_n(x[rank], kLent, step << rank);
      const Work begun = reduce(*group[0], x[0], kLent);
      CHECK(begun->is_unattended);
      test::on_each_rank(2, [&](int i) {
        Call call(kTimeout);
        group[i + 1]->run(call, test::make(Op::allreduce, DType::int32, kLent, x[i + 1], x[i + 1]));
      });
      CHECK(!begun->is_done() && group[0]->is_done(*begun) && code_of(begun) == ErrorCode::none);
      for (int rank = 0; rank < 3; ++rank) CHECK(x[rank][0] == 7 * step && x[rank][kLent - 1] == 7 * step);
    }
  }
}

// One whose array is in symmetric memory stages it only when all headers are there: it may come to that late.
void nobody_who_has_begun_waits_for_a_rank_either() {
  constexpr std::size_t kCount = 2048;  // the least that is lent, and the most that is brief
  for (const bool is_waited_for : {false, true}) {
    const Group group = Communicator::create_group(2, 2);
    Values x(kCount, 1);
    std::int32_t* const y = symmetric(*group[1], kCount, 2);
    Hold hold;
    std::thread late([&] {
      Call call(kTimeout, hold.hooks());
      group[1]->run(call, test::make(Op::allreduce, DType::int32, kCount, y, y));
    });
    hold.await();
    const Work begun = reduce(*group[0], x);
    CHECK(begun->is_unattended);
    if (is_waited_for) {
      Call brief(0.001);
      CHECK(code_of([&] { group[0]->wait(brief, *begun); }) == ErrorCode::under_way);
    } else {
      CHECK(!group[0]->is_done(*begun));
    }
    hold.may_go = true;
    await_unasked(*begun);
    late.join();
    CHECK(code_of(begun) == ErrorCode::none && x == Values(kCount, 3) && y[kCount - 1] == 3);
  }
}

// Those that may read each other's arrays in place.
void collectives_that_hold_up_peers_do_not_begin() {
  for (const Op op : {Op::reduce, Op::broadcast, Op::all_gather, Op::all_to_all}) {
    const Group group = Communicator::create_group(2, 2);
    std::array<Work, 2> works;
    for (int rank = 0; rank < 2; ++rank) {
      std::int32_t* const x = symmetric(*group[rank], 4 * kLent, 1);
      works[rank] = group[rank]->submit(test::make(op, DType::int32, kLent, x, x + 2 * kLent), kTimeout);
      CHECK(!works[rank]->is_unattended);
    }
    for (int rank = 0; rank < 2; ++rank) wait(*group[rank], *works[rank]);
    for (const Work& work : works) CHECK(code_of(work) == ErrorCode::none);
  }
}

// Each completes the one before it, or is queued behind it.
void calls_of_every_kind_keep_their_order() {
  constexpr int kSize = 3;
  const Group group = Communicator::create_group(kSize, 2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator& comm = *group[rank];
      std::mt19937 alike(7), own(static_cast<unsigned>(rank));  // what all ranks do alike, and what each does
      for (int step = 0; step < 500; ++step) {
        std::vector<Values> arrays;
        std::vector<Work> works;
        const unsigned num_calls = 1 + alike() % 4;
        for (unsigned i = 0; i < num_calls; ++i)
          arrays.emplace_back(alike() % 8 == 0 ? kTooLarge : 1 + alike() % 500, 1 << rank);
        for (Values& x : arrays) {
          if (own() % 4 != 0) {
            works.push_back(reduce(comm, x));
          } else {
            Call call(kTimeout);
            comm.run(call, test::make(Op::allreduce, DType::int32, x.size(), x.data(), x.data()));
          }
          if (own() % 8 == 0) std::this_thread::yield();
          if (own() % 4 == 0 && !works.empty()) comm.is_done(*works[own() % works.size()]);
        }
        for (; !works.empty(); works.pop_back()) {  // the last first
          if (own() % 4 == 0)
            while (!comm.is_done(*works.back())) std::this_thread::yield();
          wait(comm, *works.back());
          works.back()->rethrow();
        }
        for (const Values& x : arrays) CHECK(x.front() == 7 && x.back() == 7);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A call that has to queue, although what it found under way is done before it has.
void a_call_that_queues_is_not_left_alone() {
  for (int round = 0; round < 10; ++round) {
    const Group group = Communicator::create_group(2, 2);
    test::on_each_rank(2, [&group, round](int rank) {
      std::mt19937 own(static_cast<unsigned>(rank + 2 * round));
      Values large(kTooLarge), small(4);
      for (int step = 0; step < 200; ++step) {
        const Work before = reduce(*group[rank], large);
        for (volatile unsigned i = own() % 20000; i > 0; --i) continue;
        Call call(kTimeout);
        group[rank]->run(call,
                         test::make(Op::allreduce, DType::int32, small.size(), small.data(), small.data()));
      }
    });
  }
}

// Although it found nothing under way when it came to the gate.
void a_call_goes_behind_what_begins_before_it_gets_in() {
  const Group group = Communicator::create_group(2, 2);
  std::array<Values, 3> x{Values{1}, Values{10}, Values{100}}, y{Values{2}, Values{20}, Values{200}};
  std::array<Hold, 2> holds;
  const auto run = [&](int i) {
    Call call(kTimeout, holds[i / 2].hooks());
    group[0]->run(call, test::make(Op::allreduce, DType::int32, 1, x[i].data(), x[i].data()));
  };
  std::thread inside(run, 0);
  holds[0].await();
  std::thread at_gate(run, 2);
  holds[1].await();
  holds[0].may_go = true;
  wait(*group[1], *reduce(*group[1], y[0]));
  inside.join();
  const Work begun = reduce(*group[0], x[1]);
  CHECK(!begun->is_done());
  holds[1].may_go = true;
  for (const int i : {1, 2}) wait(*group[1], *reduce(*group[1], y[i]));
  at_gate.join();
  wait(*group[0], *begun);
  CHECK(x[0][0] == 3 && x[1][0] == 30 && x[2][0] == 300);
}

// Although the later one is in front of it on its way to the progress thread.
void work_is_done_before_what_was_submitted_later() {
  const Group group = Communicator::create_group(2, 2);
  Values x{1}, y{2}, large(kTooLarge, 1), others(kTooLarge, 2);
  const Work first = reduce(*group[0], x);
  Hold hold;
  std::thread asker([&] {
    Call call(kTimeout, hold.hooks());
    group[0]->wait(call, *first);
  });
  hold.await();
  const Work second = reduce(*group[0], large);
  hold.may_go = true;
  while (first->is_unattended) std::this_thread::yield();
  CHECK(reduce(*group[1], y)->is_done());
  asker.join();
  CHECK(first->is_done() && x[0] == 3 && !second->is_done());
  wait(*group[1], *reduce(*group[1], others));
  wait(*group[0], *second);
  CHECK(code_of(second) == ErrorCode::none && large.back() == 3);
}

// Whoever finds another thread at it relies on that one, which may fail to hand it over.
void work_that_no_thread_can_be_started_for_is_left_to_those_who_wait() {
  const Group group = Communicator::create_group(2, 2);
  Values x{1}, y{2};
  const Work work = reduce(*group[0], x);
  Hold first, second;
  second.may_go = true;
  ErrorCode code_of_first = ErrorCode::none, code_of_second = ErrorCode::none;
  const auto wait_for_work = [&](Hold& hold) {
    Call call(test::kShortTimeout, hold.hooks());
    return code_of([&] { group[0]->wait(call, *work); });
  };
  std::thread first_waiter([&] {
    can_start_threads = false;
    code_of_first = wait_for_work(first);
  });
  first.await();
  std::thread second_waiter([&] { code_of_second = wait_for_work(second); });
  second.await();
  first.may_go = true;
  first_waiter.join();
  CHECK(code_of_first == ErrorCode::io && !group[1]->has_ended());
  wait(*group[1], *reduce(*group[1], y));
  second_waiter.join();
  CHECK(code_of_second == ErrorCode::none && x[0] == 3 && y[0] == 3);
}

void a_mismatch_ends_the_work_alone() {
  const Group group = Communicator::create_group(2, 2);
  Values x(3), y(4), z{1};
  const Work three = reduce(*group[0], x), four = reduce(*group[1], y);
  wait(*group[0], *three);
  CHECK(code_of(three) == ErrorCode::mismatch && code_of(four) == ErrorCode::mismatch);
  const Work right = reduce(*group[0], z), left = reduce(*group[1], z);
  wait(*group[0], *right);
  CHECK(code_of(right) == ErrorCode::none && code_of(left) == ErrorCode::none);
  // Nor is anybody waited for who will not stage what it has announced.
  Values plain(kLent + 1);
  std::int32_t* const lent = symmetric(*group[1], kLent, 0);
  const Work longer = reduce(*group[0], plain);
  CHECK(code_of([&] {
          Call call(kTimeout);
          group[1]->run(call, test::make(Op::allreduce, DType::int32, kLent, lent, lent));
        }) == ErrorCode::mismatch);
  CHECK(group[0]->is_done(*longer) && code_of(longer) == ErrorCode::mismatch);
}

void a_rank_that_never_comes_is_missed() {
  const Group group = Communicator::create_group(2, 2);
  Values x{1};
  const Work work = reduce(*group[0], x, 0.01);
  wait(*group[0], *work);
  CHECK(code_of(work) == ErrorCode::timeout && group[1]->has_ended());
}

// What all ranks have come to counts, although nobody has asked for it; else the peers are told.
void a_rank_closes_with_work_begun() {
  for (const bool have_all_come : {false, true}) {
    const Group group = Communicator::create_group(2, 2);
    Values x{1}, y{2}, received{0}, sent{5};
    const Work reduced = reduce(*group[0], x), message = recv(*group[0], 1, received);
    if (have_all_come) CHECK(reduce(*group[1], y)->is_done() && send(*group[1], 0, sent)->is_done());
    CHECK(!reduced->is_done() && !message->is_done());
    group[0]->close();
    CHECK(reduced->is_done() && message->is_done());
    const ErrorCode expected = have_all_come ? ErrorCode::none : ErrorCode::closed;
    CHECK(code_of(reduced) == expected && code_of(message) == expected);
    CHECK(group[1]->has_ended() != have_all_come);
    if (have_all_come) CHECK(x[0] == 3 && received[0] == 5);
  }
}

void a_message_that_has_come_is_received_when_asked_for() {
  for (const bool is_waited_for : {false, true}) {
    const Group group = Communicator::create_group(2, 2);
    Values received{0}, sent{5};
    const Work work = recv(*group[0], 1, received);
    CHECK(send(*group[1], 0, sent)->is_done() && !work->is_done());
    if (is_waited_for) wait(*group[0], *work);
    CHECK(group[0]->is_done(*work) && received[0] == 5);
  }
}

// A caller that holds an interpreter's lock lets go of it, though there is nobody to wait for.
void moving_much_counts_as_blocking() {
  for (const std::size_t count : {std::size_t{1}, kLent}) {
    const Group group = Communicator::create_group(2, 2);
    Values x(count, 1), y(count, 2), received(count);
    const std::array<Work, 2> works{reduce(*group[0], x), recv(*group[0], 1, received)};
    CHECK(reduce(*group[1], y)->is_done() && send(*group[1], 0, y)->is_done());
    for (const Work& work : works) {
      bool is_blocking = false;
      const auto note = [](void* flag) noexcept { *static_cast<bool*>(flag) = true; };
      Call call(kTimeout, {note, nullptr, &is_blocking});
      group[0]->wait(call, *work);
      CHECK(is_blocking == (count == kLent));
    }
    CHECK(x.back() == 3 && received.back() == 3);
  }
}

// Those that were asked for too early, those that are large, and those behind them.
void other_messages_are_received_unasked() {
  const Group group = Communicator::create_group(2, 2);
  std::vector<Values> sent(20, Values{5}), received(20, Values{0});
  sent.front() = Values(kTooMuch, 5), received.front() = Values(kTooMuch, 0);
  std::vector<Work> works;
  for (Values& x : received) works.push_back(recv(*group[0], 1, x));
  CHECK(!group[0]->is_done(*works[1]));
  std::vector<Work> sends;
  for (Values& x : sent) sends.push_back(send(*group[1], 0, x));
  for (const std::size_t i : {0, 1, 12, 19}) {
    await_unasked(*works[i]);
    CHECK(received[i].back() == 5);
  }
  for (std::size_t i = works.size(); i-- > 0;) {
    wait(*group[0], *works[i]);
    CHECK(received[i].back() == 5);
  }
  for (const Work& work : sends) wait(*group[1], *work);
}

// More messages than a sender finds cells for.
void receives_that_would_hold_up_their_sender_are_done_unasked() {
  for (const auto& [num_messages, num_batches] : {std::pair{100, 1}, std::pair{1, 100}}) {
    const Group group = Communicator::create_group(2, 2);
    const auto num_values = static_cast<std::size_t>(num_messages * num_batches);
    Values received(num_values), sent(num_values, 5);
    std::vector<Work> works;
    for (std::size_t i = 0; i < num_values;) {
      std::vector<PointToPoint> batch;
      for (int j = 0; j < num_messages; ++j) batch.push_back({false, 1, &received[i++], 1, DType::int32, 0});
      works.push_back(group[0]->submit(Op::recv, batch, kTimeout));
    }
    for (std::int32_t& x : sent) {
      Call call(kTimeout);
      group[1]->exchange(call, Op::send, {{true, 0, &x, 1, DType::int32, 0}});
    }
    for (const Work& work : works) wait(*group[0], *work);
    CHECK(received == sent);
  }
}

// Although it comes while the sender is at work on the message. The receiver asks for it only once it has met
// the sender elsewhere.
void a_receive_that_is_left_holds_up_no_sender() {
  for (const bool is_symmetric : {false, true}) {
    const Group group = Communicator::create_group(2, 2, PeerReads::always);
    Values private_values(kLent, 5);
    std::int32_t* const x = is_symmetric ? symmetric(*group[0], kLent, 5) : private_values.data();
    test::on_each_rank(2, [&](int rank) {
      std::mt19937 own(7);
      for (int i = 0; i < 1000; ++i) {
        Values y(kLent), token{1};
        std::vector<Work> works;
        for (volatile unsigned pause = own() % 3000; rank == 1 && pause > 0; --pause) continue;
        for (int j = 0; j < 1 + i % 2; ++j) {
          if (rank == 1) {
            works.push_back(recv(*group[1], 0, y));
            continue;
          }
          Call call(kTimeout);
          group[0]->exchange(call, Op::send, {{true, 1, x, kLent, DType::int32, 0}});
        }
        Call call(kTimeout);
        group[rank]->run(call, test::make(Op::allreduce, DType::int32, 1, token.data(), token.data()));
        for (const Work& work : works) wait(*group[1], *work);
        CHECK(rank == 0 || y.back() == 5);
      }
    });
  }
}

// Of a sender that does nothing meanwhile.
void a_message_that_is_left_to_its_receiver_is_fetched() {
  const Group group = Communicator::create_group(2, 2);
  std::int32_t* const x = symmetric(*group[0], kLent, 5);
  const Work sent = send(*group[0], 1, x, kLent);
  CHECK(sent->is_unattended);
  check_that_it_comes(*group[1], 0, kLent, 5);
  CHECK(!sent->is_done() && group[0]->is_done(*sent));
  const Work does_not_fit = send(*group[0], 1, x, kLent);
  CHECK(code_of([&] { check_that_it_comes(*group[1], 0, kLent - 1, 5); }) == ErrorCode::size_mismatch);
  CHECK(group[0]->is_done(*does_not_fit));
  const Work next = send(*group[0], 1, x, kLent);
  check_that_it_comes(*group[1], 0, kLent, 5);
  wait(*group[0], *next);
  Values private_values(kLent);  // which perhaps nobody else can read
  CHECK(send(*group[0], 1, private_values)->is_done());
}

// Once it is asked for, or others stand behind it, or its group is closed.
void a_message_is_left_to_its_receiver_for_as_long_as_that_matters_to_nobody() {
  for (const char* reason : {"wait", "question", "asynchronous", "blocking", "close"}) {
    const Group group = Communicator::create_group(2, 2);
    std::int32_t* const x = symmetric(*group[0], kLent, 5);
    const Work sent = send(*group[0], 1, x, kLent);
    CHECK(!sent->is_done());
    const bool has_second = *reason == 'a' || *reason == 'b';
    if (*reason == 'w') wait(*group[0], *sent);
    if (*reason == 'q') {
      group[0]->is_done(*sent);
      await_unasked(*sent);
    }
    if (*reason == 'a') CHECK(send(*group[0], 1, x, kLent)->is_done());
    if (*reason == 'b') {
      Call call(kTimeout);
      group[0]->exchange(call, Op::send, {{true, 1, x, kLent, DType::int32, 0}});
    }
    if (*reason == 'c') group[0]->close();
    CHECK(*reason == 'b' ? group[0]->is_done(*sent) : sent->is_done());
    CHECK(code_of(sent) == ErrorCode::none);
    std::fill_n(x, kLent, 6);
    for (int i = 0; i < (has_second ? 2 : 1); ++i) check_that_it_comes(*group[1], 0, kLent, 5);
  }
}

void a_wait_for_messages_ends_in_time_and_ends_nothing() {
  const Group group = Communicator::create_group(2, 2);
  Values first{0}, second{0}, sent{5};
  const Work held = recv(*group[0], 1, first), work = recv(*group[0], 1, second);
  Hold hold;
  std::thread holder([&] {
    Call call(kTimeout, hold.hooks());
    group[0]->wait(call, *held);
  });
  hold.await();
  Call brief(0.01);
  CHECK(code_of([&] { group[0]->wait(brief, *work); }) == ErrorCode::under_way);
  hold.may_go = true;
  wait(*group[1], *send(*group[1], 0, sent));
  wait(*group[1], *send(*group[1], 0, sent));
  holder.join();
  wait(*group[0], *work);
  CHECK(code_of(work) == ErrorCode::none && second[0] == 5);
}

// Threads of one rank ask for the same work, send, and receive, until one of them closes the group.
void threads_get_into_each_others_way() {
  for (int round = 0; round < 50; ++round) {
    const Group group = Communicator::create_group(2, 2);
    Values x{1}, y{1}, received{0}, sent{5};
    const Work reduced = reduce(*group[0], x), message = recv(*group[0], 1, received);
    std::vector<std::thread> threads;
    for (const Work& work : {reduced, message, reduced, message}) {
      threads.emplace_back([&group, work] { wait(*group[0], *work); });
      threads.emplace_back([&group, work] {
        while (!group[0]->is_done(*work)) std::this_thread::yield();
      });
    }
    threads.emplace_back([&] {
      code_of([&] { wait(*group[0], *send(*group[0], 1, sent)); });
      if (round % 2 == 0) group[0]->close();
    });
    if (round % 4 != 0) {
      code_of([&] { wait(*group[1], *reduce(*group[1], y)); });
      code_of([&] { wait(*group[1], *send(*group[1], 0, sent)); });
    }
    for (std::thread& thread : threads) thread.join();
    if (round % 2 != 0) CHECK(x[0] == 2 && received[0] == 5);
  }
}

}  // namespace

int main() {
  the_last_rank_completes_at_once();
  what_was_asked_for_too_early_is_done_unasked();
  nobody_waits_for_a_rank_that_has_begun();
  nobody_who_has_begun_waits_for_a_rank_either();
  collectives_that_hold_up_peers_do_not_begin();
  calls_of_every_kind_keep_their_order();
  a_call_that_queues_is_not_left_alone();
  a_call_goes_behind_what_begins_before_it_gets_in();
  work_is_done_before_what_was_submitted_later();
  work_that_no_thread_can_be_started_for_is_left_to_those_who_wait();
  a_mismatch_ends_the_work_alone();
  a_rank_that_never_comes_is_missed();
  a_rank_closes_with_work_begun();
  a_message_that_has_come_is_received_when_asked_for();
  moving_much_counts_as_blocking();
  other_messages_are_received_unasked();
  receives_that_would_hold_up_their_sender_are_done_unasked();
  a_receive_that_is_left_holds_up_no_sender();
  a_message_that_is_left_to_its_receiver_is_fetched();
  a_message_is_left_to_its_receiver_for_as_long_as_that_matters_to_nobody();
  a_wait_for_messages_ends_in_time_and_ends_nothing();
  threads_get_into_each_others_way();
  std::puts("begun_test: passed");
}
