// The engine over shared memory, ranks as threads: every collective against a
// plain loop, messages, asynchrony and the ends of groups. Run under
// ThreadSanitizer and AddressSanitizer by tests/csrc/run.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "ferro/communicator.hpp"
#include "ferro/shm_transport.hpp"
#include "loopback.hpp"

using namespace ferro;

// How many allocations of this thread still succeed; negative: all.
thread_local int allocations_left = -1;
// The same for the engine's own threads.
std::atomic<int> background_allocations_left{-1};
thread_local bool is_of_test = false;

bool has_background_memory() {
  if (is_of_test || background_allocations_left.load() < 0) return true;
  return background_allocations_left.fetch_sub(1) != 0;
}

__attribute__((noinline)) void* operator new(std::size_t nbytes) {
  if (!has_background_memory()) throw std::bad_alloc();
  if (allocations_left == 0) {
    allocations_left = -1;  // what is left of the call may have some again
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  if (void* const data = std::malloc(nbytes)) return data;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  return std::malloc(nbytes);
}
__attribute__((noinline)) void operator delete(void* data) noexcept { std::free(data); }
__attribute__((noinline)) void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace {

using test::kTimeout, test::value, test::values, test::Values;
using Group = std::vector<std::shared_ptr<Communicator>>;

void on_each_rank(const Group& group, const std::function<void(Communicator&, int)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank)
    threads.emplace_back([&, rank] { body(*group[rank], static_cast<int>(rank)); });
  for (std::thread& thread : threads) thread.join();
}

std::int32_t sum_at(int size, std::size_t i) {
  std::uint32_t sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += static_cast<std::uint32_t>(value(rank, i));
  return static_cast<std::int32_t>(sum);
}

Collective make(Op op, std::size_t count, const void* in, void* out, int root = 0) {
  Collective c;
  c.op = op;
  c.dtype = DType::int32;
  c.count = count;
  c.in = in;
  c.out = out;
  c.root = root;
  return c;
}

void run(Communicator& comm, const Collective& c) {
  Call call(kTimeout);
  comm.run(call, c);
}

// An array in symmetric or ordinary memory.
class Array {
 public:
  Array(Communicator& comm, bool is_symmetric, const Values& initial)
      : heap_(comm.heap()), size_(initial.size()) {
    Call call(kTimeout);
    data_ = static_cast<std::int32_t*>(is_symmetric ? heap_->allocate(call, size_ * 4)
                                                    : std::malloc(std::max<std::size_t>(1, size_ * 4)));
    if (!is_symmetric) heap_.reset();
    std::copy(initial.begin(), initial.end(), data_);
  }
  ~Array() { heap_ ? heap_->free(data_) : std::free(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  std::int32_t* data() { return data_; }
  std::int32_t operator[](std::size_t i) const { return data_[i]; }

 private:
  std::shared_ptr<Heap> heap_;
  std::int32_t* data_;
  std::size_t size_;
};

void check_collectives(Communicator& comm, int rank, int size, std::size_t n, bool is_symmetric) {
  const auto p = static_cast<std::size_t>(size);
  const int root = size - 1;
  {
    Array x(comm, is_symmetric, values(rank, n)), out(comm, is_symmetric, Values(n));
    run(comm, make(Op::allreduce, n, x.data(), out.data()));
    for (std::size_t i = 0; i < n; ++i) CHECK(out[i] == sum_at(size, i) && x[i] == value(rank, i));
    run(comm, make(Op::allreduce, n, x.data(), x.data()));
    for (std::size_t i = 0; i < n; ++i) CHECK(x[i] == sum_at(size, i));
  }
  {
    Array x(comm, is_symmetric, values(rank, n)), out(comm, is_symmetric, Values(n));
    run(comm, make(Op::broadcast, n, x.data(), out.data(), root));
    for (std::size_t i = 0; i < n; ++i) CHECK(out[i] == value(root, i));
    run(comm, make(Op::reduce, n, x.data(), rank == root ? x.data() : nullptr, root));
    for (std::size_t i = 0; i < n; ++i) CHECK(x[i] == (rank == root ? sum_at(size, i) : value(rank, i)));
  }
  {
    Array x(comm, is_symmetric, values(rank, n)), out(comm, is_symmetric, Values(n * p));
    run(comm, make(Op::all_gather, n, x.data(), out.data()));
    for (std::size_t i = 0; i < n * p; ++i) CHECK(out[i] == value(static_cast<int>(i / n), i % n));
    run(comm, make(Op::gather, n, x.data(), rank == root ? out.data() : nullptr, root));
    if (rank == root)
      for (std::size_t i = 0; i < n * p; ++i) CHECK(out[i] == value(static_cast<int>(i / n), i % n));
  }
  {
    Array x(comm, is_symmetric, values(rank, n * p)), out(comm, is_symmetric, Values(n * p));
    const auto r = static_cast<std::size_t>(rank);
    run(comm, make(Op::reduce_scatter, n, x.data(), out.data()));
    for (std::size_t i = 0; i < n; ++i) CHECK(out[i] == sum_at(size, r * n + i));
    run(comm, make(Op::scatter, n, rank == root ? x.data() : nullptr, out.data(), root));
    for (std::size_t i = 0; i < n; ++i) CHECK(out[i] == value(root, r * n + i));
    run(comm, make(Op::all_to_all, n, x.data(), out.data()));
    for (std::size_t i = 0; i < n * p; ++i) CHECK(out[i] == value(static_cast<int>(i / n), r * n + i % n));
    run(comm, make(Op::all_to_all, n, x.data(), x.data()));
    for (std::size_t i = 0; i < n * p; ++i) CHECK(x[i] == value(static_cast<int>(i / n), r * n + i % n));
  }
}

void check_uneven(Communicator& comm, int rank, int size, std::size_t unit) {
  // Rank s sends unit * (s + 2 d) elements to rank d.
  const auto sent = [&](int src, int dst) { return unit * static_cast<std::size_t>(src + 2 * dst); };
  std::vector<std::size_t> send(static_cast<std::size_t>(size)), recv(send);
  Values x, expected;
  for (int peer = 0; peer < size; ++peer) {
    send[static_cast<std::size_t>(peer)] = sent(rank, peer);
    recv[static_cast<std::size_t>(peer)] = sent(peer, rank);
    for (std::size_t i = 0; i < sent(rank, peer); ++i) x.push_back(value(rank * size + peer, i));
    for (std::size_t i = 0; i < sent(peer, rank); ++i) expected.push_back(value(peer * size + rank, i));
  }
  Values out(expected.size());
  Collective c = make(Op::all_to_all, 0, x.data(), out.data());
  c.send_counts = send.data();
  c.recv_counts = recv.data();
  run(comm, c);
  CHECK(out == expected);
}

void test_collectives(int size, int num_cores) {
  const Group group = Communicator::create_group(size, num_cores);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    for (const std::size_t n : {0u, 1u, 14u, 15u, 1000u, 5000u, 16384u, 16385u, 100003u, 700001u}) {
      if (size > 3 && n > 200000) continue;  // in the same way as 3 ranks
      for (const bool is_symmetric : {false, true}) check_collectives(comm, rank, size, n, is_symmetric);
    }
    for (const std::size_t unit : {0u, 1u, 40000u}) check_uneven(comm, rank, size, unit);
    for (int i = 0; i < 1000; ++i) run(comm, make(Op::barrier, 0, nullptr, nullptr));
  });
}

void test_splits_at_once_are_told_apart() {
  const Group group = Communicator::create_group(2, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    const std::vector<unsigned char> x(8);
    std::vector<unsigned char> out(16);
    Collective split = make(Op::split, rank == 0 ? 4 : 8, x.data(), out.data());
    split.dtype = DType::uint8;
    std::string detail;
    try {
      run(comm, split);
    } catch (const Error& error) {
      detail = error.detail;
    }
    CHECK(detail.find("ranks 0 and 1 are at different steps of split") == 0);
  });
}

void test_mismatch_leaves_group_usable(int size) {
  const Group group = Communicator::create_group(size, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    Values x = values(rank, 8), out(8);
    bool has_thrown = false;
    try {
      run(comm, make(Op::allreduce, rank == 1 ? 7 : 8, x.data(), out.data()));
    } catch (const Error& error) {
      has_thrown = error.code == ErrorCode::mismatch && error.sequence == 0 && error.rank == rank;
      CHECK(error.detail.find("count 7") != std::string::npos &&
            error.detail.find("count 8") != std::string::npos);
    }
    CHECK(has_thrown && out == Values(8));
    run(comm, make(Op::allreduce, 8, x.data(), out.data()));
    CHECK(out[3] == sum_at(size, 3));
  });
}

void test_messages(int size) {
  const Group group = Communicator::create_group(size, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    for (const std::size_t n : {0u, 1u, 10u, 11u, 1000u, 300000u, 1000000u}) {
      Values x = values(rank, n), out(n);
      Call call(kTimeout);
      comm.exchange(
          call, Op::sendrecv,
          {{true, next, x.data(), n, DType::int32, 0}, {false, previous, out.data(), n, DType::int32, 0}});
      CHECK(out == values(previous, n));
    }
    // Many at once, more than there are cells.
    Values x(200), out(200);
    std::vector<PointToPoint> batch;
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = value(rank, i);
      batch.push_back({true, next, &x[i], 1, DType::int32, 0});
      batch.push_back({false, previous, &out[i], 1, DType::int32, 0});
    }
    Call call(kTimeout);
    comm.exchange(call, Op::batch, batch);
    CHECK(out == values(previous, 200));
  });
}

void test_message_that_does_not_fit_is_dropped() {
  const Group group = Communicator::create_group(2, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    Values x = values(0, 100000), out(100000);
    Call call(kTimeout);
    if (rank == 0) {
      comm.exchange(call, Op::send, {{true, 1, x.data(), x.size(), DType::int32, 0}});
      comm.exchange(call, Op::send, {{true, 1, x.data(), 5, DType::int32, 0}});
      return;
    }
    bool has_thrown = false;
    try {
      comm.exchange(call, Op::recv, {{false, 0, out.data(), 3, DType::int32, 0}});
    } catch (const Error& error) {
      has_thrown = error.code == ErrorCode::size_mismatch && error.peer == 0;
    }
    CHECK(has_thrown && out[0] == 0);
    comm.exchange(call, Op::recv, {{false, 0, out.data(), 5, DType::int32, 0}});
    CHECK(out[4] == value(0, 4));
  });
}

void test_tasks(int size) {
  const Group group = Communicator::create_group(size, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    constexpr std::size_t kTasks = 30, kCount = 5000;
    std::vector<Values> arrays;
    std::vector<std::shared_ptr<Task>> tasks;
    for (std::size_t i = 0; i < kTasks; ++i) arrays.push_back(values(rank, kCount, i));
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    Values received(kCount), sent = values(rank, kCount);
    tasks.push_back(
        comm.submit(Op::recv, {{false, previous, received.data(), kCount, DType::int32, 0}}, kTimeout));
    for (Values& x : arrays)
      tasks.push_back(comm.submit(make(Op::allreduce, kCount, x.data(), x.data()), kTimeout));
    tasks.push_back(comm.submit(Op::send, {{true, next, sent.data(), kCount, DType::int32, 0}}, kTimeout));
    Values x = values(rank, 3);
    run(comm, make(Op::allreduce, 3, x.data(), x.data()));  // queues behind the others
    CHECK(x[2] == sum_at(size, 2));
    for (const auto& task : tasks) {
      Call call(kTimeout);
      comm.wait(call, *task);
      task->rethrow();
    }
    for (std::size_t i = 0; i < kTasks; ++i) CHECK(arrays[i][7] == sum_at(size, i + 7));
    CHECK(received == values(previous, kCount));
  });
}

void test_closing_rank_is_named() {
  const Group group = Communicator::create_group(3, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    if (rank == 2) {
      comm.close();
      return;
    }
    Values x(5000);
    bool has_thrown = false;
    try {
      run(comm, make(Op::allreduce, x.size(), x.data(), x.data()));
    } catch (const Error& error) {
      has_thrown = error.code == ErrorCode::channel_closed && error.peer == 2;
    }
    CHECK(has_thrown);
  });
}

void test_timeout_names_the_missing() {
  const Group group = Communicator::create_group(4, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    if (rank >= 2) return;
    Call call(5);  // also on a busy machine both are there by then
    bool has_thrown = false;
    try {
      comm.run(call, make(Op::barrier, 0, nullptr, nullptr));
    } catch (const Error& error) {
      has_thrown = error.code == ErrorCode::timeout && error.peer == 2;
    }
    CHECK(has_thrown);
  });
}

// From other threads, while one collective follows another: of no rank is it ever said that it
// waits for itself.
void test_who_is_awaited_is_never_told_of_a_wait_that_is_over() {
  constexpr int kSize = 3;
  const std::shared_ptr<Segment> segment = Segment::create(kSize);
  std::vector<std::unique_ptr<ShmTransport>> ranks;
  for (int rank = 0; rank < kSize; ++rank)
    ranks.push_back(std::make_unique<ShmTransport>(segment, rank, std::vector<int>{0, 1, 2}, SpinPolicy{0, 0},
                                                   false, std::make_shared<PeerMemory>(segment, rank)));
  std::atomic<int> num_done{0};
  std::vector<std::thread> threads;
  for (const auto& rank : ranks)
    threads.emplace_back([&num_done, transport = rank.get()] {
      for (int i = 0; i < 20000; ++i) test::run(*transport, make(Op::barrier, 0, nullptr, nullptr));
      ++num_done;
    });
  threads.emplace_back([&] {
    while (num_done.load() < kSize)
      for (std::size_t rank = 0; rank < kSize; ++rank) {
        RankSet awaited;
        ranks[rank]->add_awaited(awaited);
        CHECK(!awaited.test(rank));
      }
  });
  for (std::thread& thread : threads) thread.join();
}

// Rank 1 waits for rank 2, which is dead to the world, and is between two slices of its sleep just when rank
// 0 gives up.
void test_a_rank_that_looks_round_is_waiting() {
  const std::shared_ptr<Segment> segment = Segment::create(3);
  const ShmTransport transport(segment, 0, {0, 1, 2}, SpinPolicy{0, 0}, false,
                               std::make_shared<PeerMemory>(segment, 0));
  segment->control(1).awaited_in_messages.store(parked_for(2));
  Error error(ErrorCode::timeout, 1);
  error.op = Op::recv;
  // A busy machine may keep rank 1 from running for longer than it is looked at.
  for (int attempt = 0; attempt < 50 && error.missing != std::vector<int>{2}; ++attempt) {
    segment->message_sleeper(1).store(kAwake);
    std::thread rank_1([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      segment->message_sleeper(1).store(kAnyPeer);
    });
    error.missing = {1};
    Call call(kTimeout);
    transport.trace(call, error);
    rank_1.join();
  }
  CHECK(error.missing == std::vector<int>{2});
  CHECK(error.awaited == std::vector<int>{1});
}

// Whom rank 0 names, which gives up a message of rank 1. That waits for a collective that all three have
// begun, and sleeps until the rank at `behind` goes on in it.
Error given_up_amid_a_collective(int behind, const std::function<void(Segment&)>& set_up) {
  const std::shared_ptr<Segment> segment = Segment::create(3);
  const ShmTransport transport(segment, 0, {0, 1, 2}, SpinPolicy{0, 0}, false,
                               std::make_shared<PeerMemory>(segment, 0));
  for (int place = 0; place < 3; ++place) segment->header(place, 1).flag.store(flag_of(1, 0));
  segment->control(1).is_waiting_for_collective.store(1);
  segment->collective_sleeper(1).store(parked_for(behind));
  set_up(*segment);
  Error error(ErrorCode::timeout, 1);
  error.op = Op::recv;
  error.missing = {1};
  transport.trace(Call(kTimeout), error);
  return error;
}

// Its program may wait for a message of those that it holds up.
void test_a_rank_that_stops_amid_a_collective_is_missing() {
  const Error error = given_up_amid_a_collective(2, [](Segment& segment) {
    segment.control(2).awaited_in_messages.store(parked_for(1));
    segment.message_sleeper(2).store(kAnyPeer);
  });
  CHECK(error.missing == std::vector<int>{2} && !error.is_deadlock);
}

// Rank 0 is in the collective, too.
void test_a_wait_leads_on_through_the_collective_of_the_rank_that_gives_up() {
  const Error error = given_up_amid_a_collective(
      0, [](Segment& segment) { segment.collective_sleeper(0).store(parked_for(2)); });
  CHECK(error.missing == std::vector<int>{2} && !error.is_deadlock);
}

// Also where no peer ever keeps it waiting.
void test_a_timeout_ends_a_call_that_never_waits(int size) {
  for (const Op op : {Op::allreduce, Op::broadcast}) {
    const Group group = Communicator::create_group(size, size);
    on_each_rank(group, [&](Communicator& comm, int rank) {
      Values x(8000000), out(8000000);
      Call call(rank == 0 ? 1e-9 : kTimeout);
      try {
        comm.run(call, make(op, x.size(), x.data(), out.data()));
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.code == ErrorCode::timeout);
      }
    });
  }
}

// ---- Several threads of one rank ---------------------------------------------------

// The same engine over shared memory, and over sockets: ranks that share no memory.
Group group_over_sockets(int size) {
  std::vector<Wiring> wirings(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    Wiring& wiring = wirings[static_cast<std::size_t>(rank)];
    wiring.rank = rank;
    wiring.world_size = size;
    wiring.local_ranks = {rank};
    wiring.collective_sockets.assign(static_cast<std::size_t>(size), -1);
    wiring.message_sockets = wiring.collective_sockets;
    for (int host = 0; host < size; ++host) wiring.hosts.push_back({host});
  }
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b) {
      std::tie(wirings[a].collective_sockets[b], wirings[b].collective_sockets[a]) =
          test::connected_sockets();
      std::tie(wirings[a].message_sockets[b], wirings[b].message_sockets[a]) = test::connected_sockets();
    }
  Group group;
  for (const Wiring& wiring : wirings) group.push_back(Communicator::connect(wiring));
  return group;
}

Group group_of(int size, bool is_over_sockets) {
  return is_over_sockets ? group_over_sockets(size) : Communicator::create_group(size, 2);
}

PointToPoint send_of(int dst, Values& x) { return {true, dst, x.data(), x.size(), DType::int32, 0}; }
PointToPoint recv_of(int src, Values& x) { return {false, src, x.data(), x.size(), DType::int32, 0}; }

// A flag that a call sets once it blocks.
struct Blocked {
  Hooks hooks() {
    Hooks hooks;
    hooks.begin_blocking = [](void* self) noexcept {
      static_cast<Blocked*>(self)->is_set.store(true, std::memory_order_release);
    };
    hooks.state = this;
    return hooks;
  }
  void await() const {
    while (!is_set.load(std::memory_order_acquire)) std::this_thread::yield();
  }
  std::atomic<bool> is_set{false};
};

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception&) {
    return current_error().code;
  }
  return ErrorCode::none;
}

// A caller that holds an interpreter lock hears of what takes long before it begins.
void test_an_uneven_all_to_all_tells_that_it_blocks() {
  const Group group = Communicator::create_group(1, 2);
  for (const std::size_t count : {10u, 1000000u}) {
    Values x(count), out(count);
    Collective c = make(Op::all_to_all, 0, x.data(), out.data());
    c.send_counts = c.recv_counts = &count;
    Blocked blocked;
    Call call(kTimeout, blocked.hooks());
    group[0]->run(call, c);
    CHECK(blocked.is_set.load() == (count == 1000000));
  }
}

// Rank 1 answers what rank 0 sends while another thread of rank 0 waits for the answer.
void test_a_blocked_receive_keeps_no_thread_from_sending(bool is_over_sockets, bool is_async) {
  const Group group = group_of(2, is_over_sockets);
  for (const std::size_t count : {1u, 1000u, 1000000u}) {
    Values question = values(0, count), answer(count);
    Blocked blocked;
    std::thread receiver([&] {
      Call call(kTimeout, blocked.hooks());
      group[0]->exchange(call, Op::recv, {recv_of(1, answer)});
    });
    std::thread peer([&] {
      Values heard(count);
      Call call(kTimeout);
      group[1]->exchange(call, Op::recv, {recv_of(0, heard)});
      group[1]->exchange(call, Op::send, {send_of(0, heard)});
    });
    blocked.await();
    Call call(kTimeout);
    if (is_async) {
      const std::shared_ptr<Task> task = group[0]->submit(Op::send, {send_of(1, question)}, kTimeout);
      group[0]->wait(call, *task);
      task->rethrow();
    } else {
      group[0]->exchange(call, Op::send, {send_of(1, question)});
    }
    receiver.join();
    peer.join();
    CHECK(answer == question);
  }
}

// Each pair of threads has a peer of its own, so that the order between two ranks is known.
void test_threads_share_a_group(bool is_over_sockets) {
  constexpr int kSize = 4, kRounds = 100;
  const Group group = group_of(kSize, is_over_sockets);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    std::vector<std::thread> threads;
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer == rank) continue;
      threads.emplace_back([&, peer] {
        for (std::size_t round = 0; round < kRounds; ++round) {
          Values x = values(rank, 1 + round * round);
          Call call(kTimeout);
          if (round % 3 == 0) {
            const std::shared_ptr<Task> task = comm.submit(Op::send, {send_of(peer, x)}, kTimeout);
            comm.wait(call, *task);
            task->rethrow();
          } else {
            comm.exchange(call, Op::send, {send_of(peer, x)});
          }
        }
      });
      threads.emplace_back([&, peer] {
        for (std::size_t round = 0; round < kRounds; ++round) {
          Values out(1 + round * round);
          Call call(kTimeout);
          comm.exchange(call, Op::recv, {recv_of(peer, out)});
          CHECK(out == values(peer, out.size()));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

// What a thread has submitted goes before what it calls next, to the same peer.
void test_calls_keep_their_order_behind_work(bool is_over_sockets) {
  const Group group = group_of(2, is_over_sockets);
  on_each_rank(group, [](Communicator& comm, int rank) {
    for (std::int32_t round = 0; round < 300; ++round) {
      const bool is_sender = rank == 0;
      Values first{is_sender ? 2 * round : -1}, second{is_sender ? 2 * round + 1 : -1};
      const PointToPoint op = is_sender ? send_of(1, first) : recv_of(0, first);
      const std::shared_ptr<Task> task = comm.submit(is_sender ? Op::send : Op::recv, {op}, kTimeout);
      Call call(kTimeout);
      if (is_sender) {
        comm.exchange(call, Op::send, {send_of(1, second)});
      } else {
        comm.exchange(call, Op::recv, {recv_of(0, second)});
      }
      comm.wait(call, *task);
      task->rethrow();
      CHECK(first[0] == 2 * round && second[0] == 2 * round + 1);
    }
  });
}

// Small messages are moved by who submits them, large ones by the progress thread.
void test_work_of_every_size_keeps_its_order(bool is_over_sockets) {
  const Group group = group_of(2, is_over_sockets);
  on_each_rank(group, [](Communicator& comm, int rank) {
    for (std::int32_t round = 0; round < 20; ++round) {
      std::vector<Values> arrays;
      for (std::int32_t i = 0; i < 12; ++i)
        arrays.emplace_back(i % 3 == 0 ? 200000 : 7, rank == 0 ? round + i : -1);
      std::vector<std::shared_ptr<Task>> tasks;
      for (Values& x : arrays)
        tasks.push_back(rank == 0 ? comm.submit(Op::send, {send_of(1, x)}, kTimeout)
                                  : comm.submit(Op::recv, {recv_of(0, x)}, kTimeout));
      for (std::int32_t i = 0; i < 12; ++i) {
        Call call(kTimeout);
        comm.wait(call, *tasks[i]);
        tasks[i]->rethrow();
        CHECK(arrays[i].front() == round + i && arrays[i].back() == round + i);
      }
    }
  });
}

// Posted or still queued: nothing of it may be touched once close() has returned.
void test_close_ends_what_was_submitted(bool is_over_sockets) {
  for (int round = 0; round < 20; ++round) {
    const Group group = group_of(2, is_over_sockets);
    std::vector<Values> arrays(4, Values(1000));
    std::vector<std::shared_ptr<Task>> tasks;
    for (Values& x : arrays) tasks.push_back(group[0]->submit(Op::recv, {recv_of(1, x)}, kTimeout));
    group[0]->close();
    for (const std::shared_ptr<Task>& task : tasks) {
      CHECK(task->is_done());
      CHECK(code_of([&] { task->rethrow(); }) == ErrorCode::closed);
    }
  }
}

// The group ends for all of its threads: each names what it waited for, or hears the reason.
void test_a_timeout_ends_the_calls_of_all_threads(bool is_over_sockets) {
  const Group group = group_of(3, is_over_sockets);
  Blocked blocked;
  Values x(1), y(1), z(1);
  ErrorCode patient = ErrorCode::none;
  std::thread waits([&] {
    Call call(kTimeout, blocked.hooks());
    patient = code_of([&] { group[0]->exchange(call, Op::recv, {recv_of(1, x)}); });
  });
  blocked.await();
  const std::shared_ptr<Task> task = group[0]->submit(Op::recv, {recv_of(1, z)}, kTimeout);
  Call call(1);  // until then, a busy machine has let it pass the thread that moves `task`
  try {
    group[0]->exchange(call, Op::recv, {recv_of(2, y)});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == ErrorCode::timeout && error.missing == std::vector<int>{2});
  }
  waits.join();
  CHECK(patient == ErrorCode::timeout);
  Call unhurried(kTimeout);
  group[0]->wait(unhurried, *task);
  CHECK(code_of([&] { task->rethrow(); }) == ErrorCode::timeout);
}

// Descriptors of this process, and mappings of segments.
std::size_t num_held() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd"), end;
  auto held = static_cast<std::size_t>(std::distance(descriptors, end));
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) held += line.find("memfd:ferro_dist") != line.npos;
  return held;
}

void test_close_ends_the_calls_of_all_threads(bool is_over_sockets) {
  const std::size_t num_held_before = num_held();
  const Group group = group_of(2, is_over_sockets);
  Blocked blocked[3];
  Values x[3] = {Values(1), Values(1), Values(1)};
  ErrorCode codes[3];
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      Call call(kTimeout, blocked[i].hooks());
      codes[i] = code_of([&] { group[0]->exchange(call, Op::recv, {recv_of(1, x[i])}); });
    });
  for (const Blocked& each : blocked) each.await();
  const ErrorCode peer = [&] {
    ErrorCode code = ErrorCode::none;
    Blocked is_in;
    Values y(1);
    std::thread other([&] {
      Call call(kTimeout, is_in.hooks());
      code = code_of([&] { group[1]->exchange(call, Op::recv, {recv_of(0, y)}); });
    });
    is_in.await();
    group[0]->close();
    other.join();
    return code;
  }();
  for (std::thread& thread : threads) thread.join();
  for (const ErrorCode code : codes) CHECK(code == ErrorCode::closed);
  CHECK(peer == ErrorCode::channel_closed);
  CHECK(num_held() > num_held_before);
  CHECK(group[1]->close());
  CHECK(num_held() == num_held_before);
  CHECK(group[0]->close());                                      // once more
  CHECK(group[0]->aborted().code == ErrorCode::channel_closed);  // which it was under its own calls
  CHECK(code_of([&] { group[0]->lost_ranks(); }) == ErrorCode::closed);
}

void test_more_ranks_than_a_round_divides_among_are_refused() {
  CHECK(code_of([] { Segment::create_file(1025); }) == ErrorCode::unsupported);
  const SegmentLayout layout(1024, 0);
  CHECK(layout.window_nbytes / SegmentLayout::kRoundSlots / 1024 >= kLinePair);
}

// ---- Signals inside long work ------------------------------------------------------

// Symmetric arrays are reduced without a wait; the caller's signals are heard all the same.
void test_a_signal_ends_a_long_reduction_of_symmetric_arrays() {
  // Strikes once a part of the result is there. The call begins late, so that the first look is due after
  // one pass, and once its peer waits for it: else it would wait itself, and look too early.
  struct Signal {
    const volatile std::int32_t* first;
    const std::atomic<bool>& is_peer_waiting;
    static void begin(void* self) noexcept {
      while (!static_cast<Signal*>(self)->is_peer_waiting.load()) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
    }
    static bool strike(void* self) noexcept { return *static_cast<Signal*>(self)->first != 0; }
    static bool note_wait(void* is_waiting) noexcept {
      static_cast<std::atomic<bool>*>(is_waiting)->store(true);
      return false;
    }
  };
  const Group group = Communicator::create_group(2, 2);
  std::atomic<bool> is_waiting{false};
  on_each_rank(group, [&](Communicator& comm, int rank) {
    constexpr std::size_t n = 16000000;
    Array x(comm, true, Values(n, 1)), out(comm, true, Values(n, 0));
    Signal signal{out.data(), is_waiting};
    Call call(kTimeout, rank == 0 ? Hooks{Signal::begin, Signal::strike, &signal}
                                  : Hooks{nullptr, Signal::note_wait, &is_waiting});
    const ErrorCode code = code_of([&] { comm.run(call, make(Op::allreduce, n, x.data(), out.data())); });
    CHECK(code == ErrorCode::interrupted);
    CHECK(rank == 1 || out[n / 2 - 1] == 0);
    comm.close();  // the peer may be in the middle of a pass over these arrays until it knows
  });
}

// Rank 0 gives up in the fence while rank 1 is in the middle of its array, and then changes it.
void test_a_symmetric_array_that_its_owner_changes_too_early_is_not_given_out() {
  constexpr std::size_t n = std::size_t{4} << 20;  // two passes
  struct Meeting {
    std::atomic<bool> is_owner_waiting{false}, is_reader_halfway{false}, has_changed{false};
    Array* out = nullptr;  // of the reader
    static Meeting& of(void* self) noexcept { return *static_cast<Meeting*>(self); }
    static bool give_up(void* self) noexcept {
      of(self).is_owner_waiting = true;
      return of(self).is_reader_halfway;
    }
    // Long enough that between the two passes it is time for a look at the signals.
    static void linger(void*) noexcept { std::this_thread::sleep_for(std::chrono::milliseconds(60)); }
    static bool read_on(void* self) noexcept {
      const Array& out = *of(self).out;
      of(self).is_reader_halfway = out[0] != 0 && out[n - 1] == 0;
      while (of(self).is_reader_halfway && !of(self).has_changed) std::this_thread::yield();
      return false;
    }
  } meeting;
  const Group group = Communicator::create_group(2, 2);
  on_each_rank(group, [&](Communicator& comm, int rank) {
    Array x(comm, true, Values(n, rank == 0 ? 1 : 0));
    const Collective broadcast = make(Op::broadcast, n, x.data(), x.data(), 0);
    if (rank == 0) {
      Call call(kTimeout, {nullptr, Meeting::give_up, &meeting});
      CHECK(code_of([&] { comm.run(call, broadcast); }) == ErrorCode::interrupted);
      std::fill_n(x.data(), n, 2);
      meeting.has_changed = true;
    } else {
      meeting.out = &x;
      while (!meeting.is_owner_waiting) std::this_thread::yield();
      Call call(kTimeout, {Meeting::linger, Meeting::read_on, &meeting});
      CHECK(code_of([&] { comm.run(call, broadcast); }) == ErrorCode::interrupted);
    }
  });
}

// Of arrays in symmetric memory nothing is timed.
void test_calls_that_need_no_copy_leave_the_choice_open() {
  constexpr std::size_t n = std::size_t{4} << 20;
  CopyChoice choice;
  for (int i = 0; i < 100; ++i) choice.pulls(n);
  int num_tried[2] = {0, 0};
  for (int i = 0; i < 6; ++i) {
    const bool is_pulled = choice.pulls(n);
    ++num_tried[is_pulled];
    choice.note(n, is_pulled, is_pulled ? 2.0 : 1.0);
  }
  CHECK(num_tried[0] == 3 && num_tried[1] == 3);
  CHECK(choice.pulls(n) == false);
}

// The slower way takes twice as long, or a tenth longer.
void test_trials_of_the_slower_way_cost_little() {
  constexpr std::size_t n = std::size_t{256} << 10;
  for (const double slower : {2.0, 1.1}) {
    CopyChoice choice;
    const auto run = [&](int number) {
      double seconds = 0;
      for (int i = 0; i < number; ++i) {
        const bool is_pulled = choice.pulls(n);
        const double taken = is_pulled ? 1.0 : slower;
        choice.note(n, is_pulled, taken);
        seconds += taken;
      }
      return seconds / number;
    };
    run(100);
    const double mean = run(10000);
    CHECK(mean > 1.0 && mean < 1.011);
  }
}

void test_a_signal_ends_the_backing_of_symmetric_memory() {
  const Group group = Communicator::create_group(2, 2);
  Call call(kTimeout, {[](void*) noexcept { std::this_thread::sleep_for(std::chrono::milliseconds(60)); },
                       [](void*) noexcept { return true; }, nullptr});
  call.begin_blocking();
  CHECK(code_of([&] { group[0]->heap()->allocate(call, std::size_t{256} << 20); }) == ErrorCode::interrupted);
  Call patient(kTimeout);
  void* const data = group[0]->heap()->allocate(patient, std::size_t{64} << 20);
  group[0]->heap()->free(data);
}

// ---- Calls that queue --------------------------------------------------------------

// A task that cannot even start makes the peers wait like one that fails.
void test_a_task_that_cannot_start_ends_the_group() {
  const Group group = Communicator::create_group(2, 2);
  Blocked blocked;
  ErrorCode patient = ErrorCode::none;
  Values x(1), y(1);
  std::thread waits([&] {
    Call call(kTimeout, blocked.hooks());
    patient = code_of([&] { group[0]->run(call, make(Op::allreduce, 1, x.data(), x.data())); });
  });
  blocked.await();
  const std::shared_ptr<Task> task = group[0]->submit(make(Op::broadcast, 1, y.data(), y.data()), 0.05);
  Call call(kTimeout);
  group[0]->wait(call, *task);
  try {
    task->rethrow();
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == ErrorCode::timeout && error.op == Op::broadcast && error.rank == 0);
    CHECK(error.sequence == 1);
  }
  waits.join();
  CHECK(patient == ErrorCode::timeout && group[1]->has_ended());
}

// It names whom the call before it waits for, which has more patience.
void test_a_queued_call_that_times_out_names_who_is_missing(bool is_over_sockets) {
  const Group group = group_of(3, is_over_sockets);
  const std::shared_ptr<Task> before = group[0]->submit(make(Op::barrier, 0, nullptr, nullptr), kTimeout);
  const auto names_both = [](const Error& error) { return error.missing == std::vector<int>{1, 2}; };
  for (bool has_begun = false; !has_begun;) {
    Call glance(0.01);
    has_begun = names_both(test::error_of([&] { group[0]->wait(glance, *before); }));
  }
  Values x(1);
  Call call(0.05);
  const Error error =
      test::error_of([&] { group[0]->run(call, make(Op::allreduce, 1, x.data(), x.data())); });
  CHECK(error.code == ErrorCode::timeout && error.op == Op::allreduce && error.rank == 0);
  CHECK(names_both(error) && error.peer == 1 && error.elapsed_s >= 0.05);
  const Error first = test::error_of([&] { before->rethrow(); });
  CHECK(first.code == ErrorCode::timeout && first.op == Op::barrier && first.peer == 1);
}

// Interrupted in the moment in which what it had queued for is done after all.
void test_a_queued_call_that_ends_too_late_says_which_it_was() {
  const Group group = Communicator::create_group(2, 2);
  struct Interruption {
    Communicator& comm;
    std::atomic<bool> is_queued{false};
    static void begin(void* self) noexcept { static_cast<Interruption*>(self)->is_queued.store(true); }
    static bool strike(void* self) noexcept {
      // Behind the queued call: once this is done, so is that.
      const std::shared_ptr<Task> last =
          static_cast<Interruption*>(self)->comm.submit(make(Op::barrier, 0, nullptr, nullptr), kTimeout);
      Call call(kTimeout);
      return last->wait(call);
    }
  } interruption{*group[0]};
  on_each_rank(group, [&](Communicator& comm, int rank) {
    Values x(1), y(20000);
    const Collective allreduce = make(Op::allreduce, 1, x.data(), x.data());
    const Collective before =
        make(Op::allreduce, y.size(), y.data(), y.data());  // too large to begin at once
    if (rank == 1) {
      while (!interruption.is_queued.load()) std::this_thread::yield();
      run(comm, before);
      run(comm, allreduce);
      run(comm, make(Op::barrier, 0, nullptr, nullptr));
      return;
    }
    comm.submit(before, kTimeout);
    Call call(kTimeout, {Interruption::begin, Interruption::strike, &interruption});
    try {
      comm.run(call, allreduce);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code == ErrorCode::interrupted && error.op == Op::allreduce);
      CHECK(error.sequence == 1 && error.rank == 0 && error.peer == 0);
    }
  });
}

void test_a_queue_that_was_joined_starts_no_thread() {
  TaskQueue queue;
  queue.join();
  const auto task = std::make_shared<Task>(make(Op::barrier, 0, nullptr, nullptr), 1, kTimeout);
  CHECK(code_of([&] { queue.push(task, [] {}); }) == ErrorCode::closed);
}

// close() tells the peers, however soon the queue's thread abandons it.
void test_a_queue_that_is_stopped_says_whether_it_had_work() {
  TaskQueue queue, idle;
  const auto task = std::make_shared<Task>(make(Op::barrier, 0, nullptr, nullptr), 1, kTimeout);
  queue.push(task, [&queue] {
    while (!queue.is_stopped()) std::this_thread::yield();
    queue.abandon([](const Task&) { return Error(ErrorCode::closed); });
  });
  CHECK(queue.stop() && !idle.stop());
  queue.join();
  CHECK(task->is_done() && !queue.stop());
}

// ---- Memory that runs out ----------------------------------------------------------

// Memory ends with the n-th allocation of rank 0's call: either nothing was sent, and the
// group goes on, or the group has ended, for all and for that reason.
void test_memory_runs_out(bool is_over_sockets, Op op) {
  bool is_over = false;
  for (int n = 1; !is_over; ++n) {
    const Group group = group_of(2, is_over_sockets);
    std::thread peer([&] {
      Values x(3000), y(3000);
      for (int i = 0; i < 2; ++i) {  // what rank 0 tried, then what it tries again
        Call call(kTimeout);
        const ErrorCode code = code_of([&] {
          if (op == Op::sendrecv) {
            group[1]->exchange(call, op, {send_of(0, x), recv_of(0, y)});
          } else {
            group[1]->run(call, make(op, x.size(), x.data(), y.data()));
          }
        });
        if (code == ErrorCode::none) continue;
        CHECK(code == ErrorCode::out_of_memory || code == ErrorCode::channel_closed);
        return;
      }
    });
    Values x(3000), y(3000);
    const std::vector<PointToPoint> messages{send_of(1, x), recv_of(1, y)};
    const auto attempt = [&](int allocations) {
      Call call(kTimeout);
      const ErrorCode code = code_of([&] {
        allocations_left = allocations;
        if (op == Op::sendrecv) {
          group[0]->exchange(call, op, messages);
        } else {
          group[0]->run(call, make(op, x.size(), x.data(), y.data()));
        }
      });
      allocations_left = -1;
      return code;
    };
    const ErrorCode code = attempt(n - 1);
    is_over = code == ErrorCode::none;
    CHECK(is_over || code == ErrorCode::out_of_memory);
    CHECK(!is_over || !group[0]->has_ended());
    const ErrorCode again = attempt(-1);
    CHECK((again == ErrorCode::none) == !group[0]->has_ended());
    if (!is_over && again == ErrorCode::none) group[0]->close();  // rank 1 is ahead by one call
    peer.join();
  }
}

// Memory ends with the n-th allocation of the thread that moves what rank 0 has submitted.
void test_memory_runs_out_behind_the_caller(bool is_over_sockets) {
  is_of_test = true;
  bool is_over = false;
  for (int n = 0; !is_over; ++n) {
    const Group group = group_of(2, is_over_sockets);
    std::vector<Values> x, y;
    for (std::size_t i = 0; i < 40; ++i) {
      const std::size_t count = i % 2 == 0 ? 200000 : 7;  // moved by the progress thread, by the submitter
      x.push_back(values(0, count));
      y.emplace_back(count);
    }
    std::vector<std::shared_ptr<Task>> tasks;
    background_allocations_left.store(n);
    for (Values& each : y) tasks.push_back(group[0]->submit(Op::recv, {recv_of(1, each)}, kTimeout));
    std::thread peer([&] {
      is_of_test = true;
      for (Values& each : x) {
        Call call(kTimeout);
        if (code_of([&] { group[1]->exchange(call, Op::send, {send_of(0, each)}); }) != ErrorCode::none)
          return;
      }
    });
    bool is_whole = true;
    for (const std::shared_ptr<Task>& task : tasks) {
      if (!is_whole) group[0]->close();  // else a later one might get what was meant for it
      Call call(kTimeout);
      group[0]->wait(call, *task);
      const ErrorCode code = code_of([&] { task->rethrow(); });
      CHECK(code == ErrorCode::none || code == ErrorCode::out_of_memory || code == ErrorCode::closed ||
            code == ErrorCode::size_mismatch);
      is_whole &= code == ErrorCode::none;
    }
    is_over = background_allocations_left.exchange(-1) > 0;
    CHECK(is_whole || !is_over);
    group[0]->close();
    peer.join();
  }
}

// Memory ends with the n-th allocation that the heap itself makes: none of what it manages is lost.
void test_memory_runs_out_in_the_heap() {
  const std::shared_ptr<Segment> segment = Segment::create(1);
  Heap heap(segment, 0);
  Call call(kTimeout);
  void* const first = heap.allocate(call, 1);
  heap.free(first);
  for (int n = 0; n < 3; ++n) {
    void* data = nullptr;
    allocations_left = n;
    try {
      data = heap.allocate(call, 1);
    } catch (const std::bad_alloc&) {
      CHECK(n < 2);
    }
    CHECK((data != nullptr) == (n == 2));
    allocations_left = 0;
    if (data != nullptr) heap.free(data);
    allocations_left = -1;
    CHECK(heap.allocate(call, 1) == first);
    heap.free(first);
  }
}

// ---- Messages that keep moving ------------------------------------------------------

// To a peer that always takes another byte, and never the last.
class EndlessChannel final : public Channel {
 public:
  bool try_send(Message& message) override {
    ++message.done;
    return false;
  }
  bool try_recv(Message&) override { return false; }
};

void test_moving_data_keeps_nobody_waiting() {
  const std::shared_ptr<Segment> segment = Segment::create(2);
  const SpinPolicy spin = SpinPolicy::for_ranks(2, 2);
  const auto transport = std::make_shared<ShmTransport>(segment, 0, std::vector<int>{0, 1}, spin, false,
                                                        std::make_shared<PeerMemory>(segment, 0));
  std::shared_ptr<Messenger> messenger;
  const auto renew_messenger = [&] {
    std::vector<std::unique_ptr<Channel>> channels(2);
    channels[1] = std::make_unique<EndlessChannel>();
    messenger = std::make_shared<Messenger>(transport, std::move(channels), segment, 0, spin);
  };
  Values x(1);
  const auto end_of_send = [&](Call call) {
    Batch batch({send_of(1, x)});
    const Gate::Pass pass(*messenger->gate(), call);
    messenger->post(batch);
    return code_of([&] { messenger->run(call, batch); });
  };
  renew_messenger();
  CHECK(end_of_send(Call(0.05)) == ErrorCode::timeout);
  Hooks hooks;
  hooks.interrupted = [](void*) noexcept { return true; };
  renew_messenger();
  CHECK(end_of_send(Call(kTimeout, hooks)) == ErrorCode::interrupted);

  renew_messenger();
  Blocked blocked;
  std::thread other([&] {
    blocked.await();
    Call call(kTimeout / 2);
    const Gate::Pass pass(*messenger->gate(), call);
    messenger->end(Error(ErrorCode::closed));
  });
  CHECK(end_of_send(Call(kTimeout, blocked.hooks())) == ErrorCode::closed);
  other.join();
}

// More than can be moved while a test waits, however fast the peer is.
std::vector<PointToPoint> endless(const PointToPoint& message) {
  return std::vector<PointToPoint>(20000, message);
}

// What ends rank 0's endless send to rank 1, which keeps pace.
ErrorCode end_of_stream(
    const Group& group, bool is_async, Call call, const std::function<void()>& meanwhile = [] {}) {
  Values x(4000000), y(4000000);
  std::thread receiver([&] {
    Call patient(kTimeout);
    code_of([&] { group[1]->exchange(patient, Op::batch, endless(recv_of(0, y))); });
  });
  ErrorCode code = ErrorCode::none;
  std::thread sender([&] {
    code = code_of([&] {
      const std::vector<PointToPoint> messages = endless(send_of(1, x));
      if (!is_async) return group[0]->exchange(call, Op::batch, messages);
      const std::shared_ptr<Task> task = group[0]->submit(Op::batch, messages, call.timeout_s());
      Call patient(kTimeout);
      group[0]->wait(patient, *task);
      task->rethrow();
    });
  });
  meanwhile();
  sender.join();
  receiver.join();
  return code;
}

void test_a_stream_ends_at_its_deadline(bool is_over_sockets) {
  for (const bool is_async : {false, true})
    CHECK(end_of_stream(group_of(2, is_over_sockets), is_async, Call(0.1)) == ErrorCode::timeout);
}

void test_signals_end_a_stream(bool is_over_sockets) {
  Hooks hooks;
  hooks.interrupted = [](void*) noexcept { return true; };
  CHECK(end_of_stream(group_of(2, is_over_sockets), false, Call(kTimeout, hooks)) == ErrorCode::interrupted);
}

void test_other_threads_get_in_beside_a_stream(bool is_over_sockets) {
  for (const bool is_async : {false, true}) {
    const Group group = group_of(3, is_over_sockets);
    const ErrorCode code = end_of_stream(group, is_async, Call(kTimeout), [&group] {
      std::thread peer([&group] {
        Values heard(1);
        for (int i = 0; i < 10; ++i) {
          Call call(kTimeout);
          group[2]->exchange(call, Op::recv, {recv_of(0, heard)});
        }
      });
      Values word(1);
      for (int i = 0; i < 10; ++i) {
        Call call(kTimeout / 2);
        group[0]->exchange(call, Op::send, {send_of(2, word)});
      }
      peer.join();
      group[0]->close();
    });
    CHECK(code == ErrorCode::closed);
  }
}

void test_a_large_message_tells_that_it_blocks() {
  const Group group = Communicator::create_group(2, 2);
  for (const std::size_t count : {10u, 100000u}) {
    Values x(count);
    Blocked blocked;
    Call call(kTimeout, blocked.hooks());
    group[0]->exchange(call, Op::send, {send_of(1, x)});  // the ring has room for it
    CHECK(blocked.is_set.load() == (count == 100000));
  }
}

void test_several_threads(bool is_over_sockets) {
  test_a_blocked_receive_keeps_no_thread_from_sending(is_over_sockets, false);
  test_a_blocked_receive_keeps_no_thread_from_sending(is_over_sockets, true);
  test_threads_share_a_group(is_over_sockets);
  test_calls_keep_their_order_behind_work(is_over_sockets);
  for (int round = 0; round < 10; ++round) test_a_timeout_ends_the_calls_of_all_threads(is_over_sockets);
  for (int round = 0; round < 20; ++round) test_close_ends_the_calls_of_all_threads(is_over_sockets);
}

// Every thread of the group ends its call, whatever another one does meanwhile.
void test_close_during_calls() {
  for (int round = 0; round < 20; ++round) {
    const Group group = Communicator::create_group(2, 2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&group, rank] {
        Values x(20000);
        std::shared_ptr<Task> receive;
        try {
          receive =
              group[rank]->submit(Op::recv, {{false, 1 - rank, x.data(), 10, DType::int32, 0}}, kTimeout);
          for (;;) run(*group[rank], make(Op::allreduce, x.size(), x.data(), x.data()));
        } catch (const Error& error) {
          CHECK(error.code == ErrorCode::closed || error.code == ErrorCode::channel_closed);
        }
        Call call(kTimeout);
        if (receive) group[rank]->wait(call, *receive);
      });
    }
    threads.emplace_back([&group] { group[0]->close(); });
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace

int main() {
  for (int size = 1; size <= 4; ++size) {
    test_collectives(size, 2);
    if (size > 1) test_mismatch_leaves_group_usable(size);
    if (size > 1) test_messages(size);
    if (size > 1) test_tasks(size);
  }
  test_collectives(5, 8);
  test_splits_at_once_are_told_apart();
  test_message_that_does_not_fit_is_dropped();
  test_an_uneven_all_to_all_tells_that_it_blocks();
  for (const int size : {2, 3}) test_a_timeout_ends_a_call_that_never_waits(size);
  test_a_signal_ends_a_long_reduction_of_symmetric_arrays();
  test_a_symmetric_array_that_its_owner_changes_too_early_is_not_given_out();
  test_calls_that_need_no_copy_leave_the_choice_open();
  test_trials_of_the_slower_way_cost_little();
  test_a_signal_ends_the_backing_of_symmetric_memory();
  test_a_task_that_cannot_start_ends_the_group();
  test_a_queued_call_that_ends_too_late_says_which_it_was();
  for (const bool is_over_sockets : {false, true})
    test_a_queued_call_that_times_out_names_who_is_missing(is_over_sockets);
  test_a_queue_that_was_joined_starts_no_thread();
  test_a_queue_that_is_stopped_says_whether_it_had_work();
  test_more_ranks_than_a_round_divides_among_are_refused();
  test_closing_rank_is_named();
  test_timeout_names_the_missing();
  test_who_is_awaited_is_never_told_of_a_wait_that_is_over();
  test_a_rank_that_looks_round_is_waiting();
  test_a_rank_that_stops_amid_a_collective_is_missing();
  test_a_wait_leads_on_through_the_collective_of_the_rank_that_gives_up();
  test_close_during_calls();
  for (const bool is_over_sockets : {false, true}) {
    test_work_of_every_size_keeps_its_order(is_over_sockets);
    test_close_ends_what_was_submitted(is_over_sockets);
  }
  test_several_threads(false);
  test_several_threads(true);
  for (const bool is_over_sockets : {false, true})
    for (const Op op : {Op::sendrecv, Op::allreduce}) test_memory_runs_out(is_over_sockets, op);
  test_memory_runs_out_in_the_heap();
  test_a_large_message_tells_that_it_blocks();
  test_moving_data_keeps_nobody_waiting();
  for (const bool is_over_sockets : {false, true}) {
    test_a_stream_ends_at_its_deadline(is_over_sockets);
    test_signals_end_a_stream(is_over_sockets);
    test_other_threads_get_in_beside_a_stream(is_over_sockets);
    test_memory_runs_out_behind_the_caller(is_over_sockets);
  }
  std::puts("engine_test: passed");
}
