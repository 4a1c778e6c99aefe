// The engine over TCP, ranks as threads: every collective against a plain loop,
// disagreement, deaths, aborts, and the framing of messages.
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>

#include "ferro/exchange.hpp"
#include "ferro/recursive_doubling.hpp"
#include "ferro/tcp_channel.hpp"
#include "ferro/tcp_cost.hpp"
#include "ferro/tcp_transport.hpp"
#include "ferro/wide_float.hpp"
#include "loopback.hpp"

using namespace ferro;
using namespace ferro::test;

namespace {

using Transports = std::vector<std::unique_ptr<TcpTransport>>;

std::vector<int> ranks_below(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Transports make_group(int size) {
  Transports group;
  for (const auto& mesh : make_meshes(size))
    group.push_back(std::make_unique<TcpTransport>(mesh, ranks_below(size)));
  return group;
}

Collective sum_of(std::vector<float>& array) {
  return make(Op::allreduce, DType::float32, array.size(), array.data(), array.data());
}

void all_collectives_match_a_loop() {
  for (const int size : {1, 2, 3, 4, 5, 9, 12}) {
    Transports group = make_group(size);
    on_each_rank(size, [&](int rank) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1023},
                                      std::size_t{20011}, std::size_t{300007}}) {
        if (size > 3 && count > 30000) continue;
        EveryCollective(*group[rank], rank, size, count, static_cast<int>(count) % size).check();
      }
    });
  }
}

// Sizes at which the ways of one operation hand over to each other.
void every_algorithm_gives_the_same_sums() {
  const int size = 4;
  Transports group = make_group(size);
  for (const std::size_t count : {3000u, 8192u, 16384u, 40000u, 600000u})
    on_each_rank(size, [&](int rank) {
      Values array = values(rank, count);
      run(*group[rank], make(Op::allreduce, DType::int32, count, array.data(), array.data()));
      expect(array == sums(size, count), "allreduce of " + std::to_string(count));
    });
}

// So many ranks that it goes in doubling steps.
void empty_arrays_of_many_ranks_need_no_memory() {
  constexpr int kSize = 24;
  Transports group = make_group(kSize);
  on_each_rank(kSize,
               [&](int rank) { run(*group[rank], make(Op::all_gather, DType::int32, 0, nullptr, nullptr)); });
}

// Played without a network: each rank holds the list of those whose input it has.
void doubling_gives_every_rank_all_inputs_in_order() {
  for (int size = 1; size <= 40; ++size) {
    std::vector<std::vector<DoublingStep>> steps;
    std::vector<std::vector<int>> held;
    for (int rank = 0; rank < size; ++rank) {
      steps.push_back(doubling_steps(size, rank));
      held.push_back({rank});
    }
    std::map<std::pair<int, int>, std::deque<std::vector<int>>> sent;  // by sender and receiver
    std::vector<std::size_t> num_done(steps.size()), num_sent(steps.size());
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (int rank = 0; rank < size; ++rank) {
        if (num_done[rank] == steps[rank].size()) continue;
        const DoublingStep& step = steps[rank][num_done[rank]];
        if (step.sends && num_sent[rank] == num_done[rank]) sent[{rank, step.peer}].push_back(held[rank]);
        num_sent[rank] = num_done[rank] + 1;
        std::deque<std::vector<int>>& incoming = sent[{step.peer, rank}];
        if (step.receives && incoming.empty()) continue;
        if (step.receives) {
          std::vector<int> theirs = incoming.front(), own = step.is_result ? std::vector<int>{} : held[rank];
          if (step.peer > rank) std::swap(theirs, own);
          held[rank] = theirs;
          held[rank].insert(held[rank].end(), own.begin(), own.end());
          incoming.pop_front();
        }
        ++num_done[rank];
        has_moved = true;
      }
    }
    for (const auto& inputs : held)
      expect(inputs == ranks_below(size), "doubling over " + std::to_string(size));
  }
}

void short_floats_are_rounded_once() {
  for (const int size : {2, 3, 5, 11})
    for (const std::size_t count : {5u, 6000u, 20000u, 400000u}) {
      Transports group = make_group(size);
      std::vector<std::vector<std::uint16_t>> results(static_cast<std::size_t>(size));
      on_each_rank(size, [&](int rank) {
        // 1 + size * 2^-8 cannot be reached by adding 2^-8 one at a time in bfloat16.
        const float mine = rank == 0 ? 1.0f : 0x1p-8f;
        std::vector<float> wide(count, mine);
        std::vector<std::uint16_t> array(count);
        from_partial(array.data(), DType::bfloat16, wide.data(), DType::float32, count);
        run(*group[rank], make(Op::allreduce, DType::bfloat16, count, array.data(), array.data()));
        results[rank] = array;
      });
      const float exact = 1.0f + static_cast<float>(size - 1) * 0x1p-8f;
      std::uint16_t rounded;
      from_partial(&rounded, DType::bfloat16, &exact, DType::float32, 1);
      for (const auto& result : results)
        expect(result == std::vector<std::uint16_t>(count, rounded),
               "bfloat16 sum of " + std::to_string(size));
    }
}

void mean_divides_by_the_number_of_ranks() {
  for (const int size : {2, 3, 10})
    for (const std::size_t count : {3u, 50000u}) {
      Transports group = make_group(size);
      on_each_rank(size, [&](int rank) {
        std::vector<float> array(count, static_cast<float>(rank));
        Collective mean = sum_of(array);
        mean.reduce_op = ReduceOp::mean;
        run(*group[rank], mean);
        expect(array == std::vector<float>(count, static_cast<float>(size - 1) / 2), "mean");
      });
    }
}

void halves_survive_widening() {
  for (const DType dtype : {DType::float16, DType::bfloat16})
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const std::uint16_t narrow = static_cast<std::uint16_t>(bits);
      float wide;
      std::uint16_t back;
      to_partial(&wide, DType::float32, &narrow, dtype, 1);
      from_partial(&back, dtype, &wide, DType::float32, 1);
      expect(back == narrow || std::isnan(wide), "16-bit float " + std::to_string(bits));
    }
}

// Whole arrays are converted in passes: the same values, and who calls is heard in between.
void long_conversions_hear_signals_and_the_deadline() {
  constexpr std::size_t count = 9000001;
  std::vector<std::uint16_t> narrow(count, 0x3f80), back(count);
  std::vector<float> wide(count);
  Call patient(kTimeout);
  to_partial(patient, wide.data(), DType::float32, narrow.data(), DType::bfloat16, count);
  expect(wide == std::vector<float>(count, 1.0f), "widened in passes");
  from_partial(patient, back.data(), DType::bfloat16, wide.data(), DType::float32, count);
  expect(back == narrow, "narrowed in passes");
  from_partial(patient, wide.data(), DType::bfloat16, wide.data(), DType::float32, count);
  expect(std::memcmp(wide.data(), narrow.data(), count * sizeof narrow[0]) == 0, "narrowed in place");

  Hooks hooks;
  hooks.begin_blocking = [](void*) noexcept { std::this_thread::sleep_for(std::chrono::milliseconds(60)); };
  hooks.interrupted = [](void*) noexcept { return true; };
  for (const ErrorCode wanted : {ErrorCode::interrupted, ErrorCode::timeout}) {
    wide.assign(count, 0);
    const auto convert = [&] {
      Call call = wanted == ErrorCode::timeout ? Call(1e-9) : Call(kTimeout, hooks);
      to_partial(call, wide.data(), DType::float32, narrow.data(), DType::bfloat16, count);
    };
    expect(error_of(convert).code == wanted && wide.front() == 1 && wide.back() == 0, "ended on the way");
  }
}

void disagreement_is_named_and_survived() {
  for (const int size : {2, 4, 5, 11}) {
    Transports group = make_group(size);
    on_each_rank(size, [&](int rank) {
      for (const std::size_t count : {std::size_t{5}, std::size_t{100000}}) {
        std::vector<float> array(count, 1.0f);
        const bool is_odd_one = rank == size - 1;
        Collective mine = sum_of(array);
        if (is_odd_one) mine.op = Op::broadcast;
        const Error error = error_of([&] { run(*group[rank], mine); });
        expect(error.code == ErrorCode::mismatch, "mismatch");
        const std::string last = std::to_string(size - 1), n = std::to_string(count);
        expect(error.detail == "rank 0 called allreduce(sum, float32, count " + n + "), rank " + last +
                                   " called broadcast(float32, count " + n + ", root 0)",
               error.detail);
        expect(error.peer == (is_odd_one ? 0 : size - 1), "culprit of a mismatch");
        expect(array == std::vector<float>(count, 1.0f), "buffers after a mismatch");
        run(*group[rank], sum_of(array));
        expect(array == std::vector<float>(count, static_cast<float>(size)), "the group after a mismatch");
      }
    });
  }
}

// What is sent before the verdict must be off the streams after it, whichever rank sent how much.
void disagreement_about_sizes_leaves_nothing_behind() {
  const int size = 2;
  Transports group = make_group(size);
  on_each_rank(size, [&](int rank) {
    for (const std::size_t mine : {3u, 9000u, 100000u, 131072u, 131073u, 500000u})
      for (const std::size_t other : {0u, 3u, 9000u, 130000u, 131072u, 131073u}) {
        if (mine == other) continue;
        const std::size_t count = rank == 0 ? mine : other;
        std::vector<float> array(count, 1.0f);
        const Error error = error_of([&] { run(*group[rank], sum_of(array)); });
        expect(error.code == ErrorCode::mismatch, "mismatch of sizes");
        expect(array == std::vector<float>(count, 1.0f), "buffers after a mismatch of sizes");
        array.assign(mine, 1.0f);
        run(*group[rank], sum_of(array));
        expect(array == std::vector<float>(mine, 2.0f), "the group after a mismatch of sizes");
      }
  });
}

void unpaired_counts_name_the_pair() {
  for (const int size : {3, 10}) {
    Transports group = make_group(size);
    on_each_rank(size, [&](int rank) {
      std::vector<std::size_t> send_counts(static_cast<std::size_t>(size), 2), recv_counts = send_counts;
      if (rank == 2) recv_counts[1] = 3;
      const Values in(static_cast<std::size_t>(2 * size), 1);
      Values out(static_cast<std::size_t>(2 * size + 1), -1);
      Collective collective = make(Op::all_to_all, DType::int32, 0, in.data(), out.data());
      collective.send_counts = send_counts.data();
      collective.recv_counts = recv_counts.data();
      const Error error = error_of([&] { run(*group[rank], collective); });
      expect(error.code == ErrorCode::mismatch, "mismatch of counts");
      expect(error.detail == "rank 1 sends 2 elements to rank 2, which expects 3", error.detail);
      expect(out == Values(out.size(), -1), "buffers after a mismatch of counts");
      run(*group[rank], make(Op::barrier, DType::uint8, 0, nullptr, nullptr));
    });
  }
}

void undefined_reductions_send_nothing() {
  Transports group = make_group(2);
  Values array(4);
  Collective mean = make(Op::allreduce, DType::int32, 4, array.data(), array.data());
  mean.reduce_op = ReduceOp::mean;
  expect(error_of([&] { run(*group[0], mean); }).code == ErrorCode::unsupported, "mean of integers");
  on_each_rank(2, [&](int rank) { EveryCollective(*group[rank], rank, 2, 3, 0).check(); });
}

// A process that dies says nothing: its kernel closes its sockets.
void die(const TcpMesh::Socket& socket) { close(socket.fd); }

// Sockets of `size` ranks; the last one's are returned raw, for it to die with.
struct Mortal {
  Meshes meshes;
  std::vector<TcpMesh::Socket> last;
};
Mortal make_mortal_group(int size) {
  std::vector<std::vector<TcpMesh::Socket>> sockets(static_cast<std::size_t>(size));
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b) {
      const auto [first, second] = connected_sockets();
      sockets[a].push_back({b, first});
      sockets[b].push_back({a, second});
    }
  Mortal group;
  for (int rank = 0; rank + 1 < size; ++rank)
    group.meshes.push_back(std::make_shared<TcpMesh>(rank, size, sockets[rank], false));
  group.last = sockets.back();
  return group;
}

void every_survivor_names_the_dead_rank() {
  for (const int size : {2, 4, 10})
    for (const std::size_t count : {1u, 500000u}) {
      Mortal group = make_mortal_group(size);
      std::thread victim([&] {
        for (const TcpMesh::Socket& socket : group.last) die(socket);
      });
      on_each_rank(size - 1, [&](int rank) {
        TcpTransport transport(group.meshes[rank], ranks_below(size));
        std::vector<float> array(count, 1.0f);
        const Error error = error_of([&] { run(transport, sum_of(array)); });
        expect(error.code == ErrorCode::peer_lost && error.peer == size - 1,
               "culprit is " + std::to_string(error.peer) + ", code " +
                   std::to_string(static_cast<int>(error.code)));
        expect(transport.aborted().culprit == size - 1, "the reason names the dead rank");
        const Error again = error_of([&] { run(transport, sum_of(array)); });
        expect(again.code == ErrorCode::peer_lost && again.peer == size - 1, "later calls name it too");
      });
      victim.join();
    }
}

// Rank 0 has no stream to the dead rank: it hears of the death from rank 1 alone,
// in the middle of a payload that rank 1 owes it.
void the_messenger_is_not_blamed() {
  Meshes meshes = make_meshes(2);
  std::thread messenger([&] {
    std::vector<char> half(3 << 20);
    Call call(kTimeout);
    {
      Exchange exchange(*meshes[1], call);
      exchange.send(0, half.data(), half.size());
      exchange.finish();
    }
    meshes[1]->abort({ErrorCode::peer_lost, 7, 1, 42});
  });
  std::vector<char> whole(8 << 20);
  const Error error = error_of([&] {
    Call call(kTimeout);
    Exchange exchange(*meshes[0], call);
    exchange.receive(1, whole.data(), whole.size());
    exchange.finish();
  });
  messenger.join();
  expect(error.code == ErrorCode::peer_lost && error.peer == 7, "the messenger's reason is believed");
  expect(error.reporter == 1 && error.sequence == 42, "who told, and when it happened");
}

void goodbye_is_no_death() {
  Meshes meshes = make_meshes(3);
  Transports group;
  for (const auto& mesh : meshes) group.push_back(std::make_unique<TcpTransport>(mesh, ranks_below(3)));
  std::atomic<int> num_done{0};
  on_each_rank(3, [&](int rank) {
    run(*group[rank], make(Op::barrier, DType::uint8, 0, nullptr, nullptr));
    if (rank == 2) return group[rank]->close();
    // Those who go on among themselves are not disturbed.
    TcpTransport pair(meshes[rank], {0, 1});
    std::vector<float> array(200000, 1.0f);
    run(pair, sum_of(array));
    // The first to fail tells the other, who must not be inside the call before.
    for (++num_done; num_done != 2;) std::this_thread::yield();
    const Error error = error_of([&] { run(*group[rank], sum_of(array)); });
    expect(error.code == ErrorCode::channel_closed && error.peer == 2, "a closed peer is named");
  });
  expect(error_of([&] { run(*group[2], make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); }).code ==
             ErrorCode::closed,
         "use after close");
}

void abort_from_another_thread_wakes_all() {
  Transports group = make_group(3);
  std::thread aborter([&] { group[0]->abort({ErrorCode::interrupted, 0, 0, 3}); });
  on_each_rank(2, [&](int rank) {
    const Error error =
        error_of([&] { run(*group[rank], make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); });
    expect(error.code == ErrorCode::interrupted && error.peer == 0, "abort reaches every rank");
  });
  aborter.join();
  // Rank 2 was in no call; it need not be in one to find out.
  AbortReason reason;
  while (reason.code == ErrorCode::none) reason = group[2]->aborted();
  expect(reason.code == ErrorCode::interrupted && reason.culprit == 0, "idle ranks find out as well");
}

void timeout_names_the_missing_ranks() {
  const std::vector<Error> errors = told_together([](const Tell& tell) {
    Transports group = make_group(4);
    on_each_rank(2, [&](int rank) {
      const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
      // Rank 1 has patience: what it raises is what it is told.
      const double timeout_s = rank == 0 ? kShortTimeout : kTimeout;
      const Error error = error_of([&] { run(*group[rank], barrier, timeout_s); });
      if (rank == 0) expect(error.elapsed_s >= kShortTimeout, "the time waited");
      tell(error);
    });
  });
  for (const Error& error : errors) {
    expect(error.code == ErrorCode::timeout, "timeout");
    expect((error.missing == std::vector<int>{2, 3}), "both missing ranks are named to all");
    expect(error.peer == 2, "the first missing rank is the culprit for all");
  }
}

// Recursive doubling: most ranks wait for one that is waiting itself, and no rank for both
// that are missing.
void a_rank_that_waits_is_not_missing() {
  const std::vector<int> absent = {5, 10};
  const std::vector<Error> errors = told_together([&](const Tell& tell) {
    Transports group = make_group(12);
    on_each_rank(12, [&](int rank) {
      const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
      run(*group[rank], barrier);
      if (std::find(absent.begin(), absent.end(), rank) != absent.end()) return;
      tell(error_of([&] { run(*group[rank], barrier, rank % 3 == 0 ? kShortTimeout : kTimeout); }));
    });
  });
  for (const Error& error : errors)
    expect(error.code == ErrorCode::timeout && error.missing == absent, "those who are absent are named");
}

// The same of ranks that are stopped in their call, and go on when the others have given up.
void a_rank_that_was_stopped_is_missing() {
  const std::vector<int> stopped = {5, 10};
  const std::vector<Error> errors = told_together([&](const Tell& tell) {
    const Meshes meshes = make_meshes(12);
    on_each_rank(12, [&](int rank) {
      TcpTransport transport(meshes[rank], ranks_below(12));
      const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
      run(transport, barrier);
      Hooks hooks;
      if (std::find(stopped.begin(), stopped.end(), rank) != stopped.end()) {
        hooks.begin_blocking = [](void* mesh) noexcept {
          while (static_cast<TcpMesh*>(mesh)->aborted().code == ErrorCode::none)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        };
        hooks.state = meshes[rank].get();
      }
      Call call(rank % 3 == 0 ? kShortTimeout : kTimeout, hooks);
      tell(error_of([&] { transport.run(call, barrier); }));
    });
  });
  for (const Error& error : errors)
    expect(error.code == ErrorCode::timeout && error.missing == stopped, "those who were stopped are named");
}

// None knows of the others' end when it gives up.
void of_several_that_give_up_at_once_all_tell_the_same() {
  const AbortReason gave_up[] = {
      {ErrorCode::timeout, 1, 0, 0}, {ErrorCode::timeout, 2, 1, 0}, {ErrorCode::timeout, 0, 2, 0}};
  const AbortReason interrupted{ErrorCode::interrupted, 2, 2, 0};
  for (const AbortReason& last : {gave_up[2], interrupted}) {
    const Meshes meshes = make_meshes(3);
    const AbortReason reasons[] = {gave_up[0], gave_up[1], last};
    for (int rank = 0; rank < 3; ++rank) {
      Error error(ErrorCode::timeout);
      error.op = Op::recv;
      error.missing = {reasons[rank].culprit};
      meshes[rank]->add_to_testimony(Call(kTimeout), error);
      meshes[rank]->abort(reasons[rank]);
    }
    const AbortReason& first = last.code == ErrorCode::timeout ? reasons[0] : last;
    for (int rank = 0; rank < 3; ++rank) {
      const std::vector<int> missing = ranks_of(meshes[rank]->find_missing([](Testimonies&) {}));
      expect(missing == std::vector<int>{first.culprit}, "all name one culprit");
      expect(meshes[rank]->aborted().pack() == first.pack(), "all tell one reason");
    }
  }
}

// What a rank testifies, in the order of the ranks.
Testimony idle() { return {}; }
Testimony awaits_messages(const std::vector<int>& peers, bool is_stuck = true) {
  Testimony testimony;
  testimony.in_messages = set_of(peers);
  testimony.is_stuck = is_stuck;
  return testimony;
}
Testimony in_collective(const std::vector<int>& peers) {
  Testimony testimony;
  testimony.in_collective = set_of(peers);
  testimony.is_in_collective = testimony.waits_for_collective = true;
  return testimony;
}
Testimony in_background(const std::vector<int>& peers, Testimony testimony = {}) {
  testimony.in_collective = set_of(peers);
  testimony.is_in_collective = true;
  return testimony;
}
Testimony gave_up(const std::vector<int>& peers, Testimony testimony = {}) {
  testimony.given_up = set_of(peers);
  return testimony;
}

void expect_missing(const std::vector<Testimony>& said, const std::vector<int>& ranks,
                    bool is_deadlock = false) {
  Testimonies testimonies;
  testimonies.add({ErrorCode::timeout, 1, 0, 0});
  for (std::size_t rank = 0; rank < said.size(); ++rank) testimonies.add(static_cast<int>(rank), said[rank]);
  const RankSet missing = testimonies.missing();
  expect(ranks_of(missing) == ranks && missing.test(kDeadlock) == is_deadlock, "who is missing");
}

// Rank 0 has given up.
void waits_lead_to_who_is_missing_or_round_a_circle() {
  const auto gave_up_recv = [](const std::vector<int>& peers) {
    return gave_up(peers, awaits_messages(peers));
  };
  expect_missing({gave_up_recv({1}), awaits_messages({2}), idle()}, {2});
  expect_missing({gave_up_recv({1}), awaits_messages({2}), awaits_messages({0})}, {0, 1, 2}, true);
  expect_missing({gave_up({1}), awaits_messages({2}), awaits_messages({1})}, {1, 2}, true);
  expect_missing({gave_up_recv({1, 3}), awaits_messages({0}), idle(), idle()}, {3});
  expect_missing({gave_up_recv({1}), awaits_messages({0}), awaits_messages({3}), idle()}, {0, 1}, true);
  expect_missing({gave_up_recv({1}), awaits_messages({0}, false)}, {});
  const Testimony unsure = awaits_messages({1}, false);
  expect_missing({gave_up({1, 3}), awaits_messages({2}), unsure, awaits_messages({1})}, {});
  expect_missing({gave_up({1, 3}), awaits_messages({2}), unsure, awaits_messages({4}), awaits_messages({3})},
                 {3, 4}, true);
  expect_missing({gave_up_recv({1}), awaits_messages({0}, false), awaits_messages({3}), idle()}, {3});
}

// A message comes from a program, which a collective holds up only if it waits for that.
void a_message_waits_for_no_collective_in_the_background() {
  const auto waits = gave_up({1}, awaits_messages({1}));
  expect_missing({waits, in_background({0, 2}), idle()}, {1});
  expect_missing({waits, in_collective({0, 2}), idle()}, {2});
  expect_missing({waits, in_background({0, 2}, awaits_messages({3})), idle(), idle()}, {3});
  expect_missing({waits, awaits_messages({2}), in_background({0, 3}), idle()}, {2});
  expect_missing({waits, in_background({2}, awaits_messages({0})), idle()}, {0, 1}, true);
  expect_missing({gave_up({1}, in_background({2})), idle(), idle()}, {1});
}

// A collective comes from a program only where it has yet to begin.
void a_collective_waits_for_collectives_in_the_background() {
  expect_missing({in_collective({1}), in_background({2}), idle()}, {2});
  expect_missing({in_background({1}, awaits_messages({3})), in_background({2}), idle(), idle()}, {2});
  expect_missing({in_collective({1}), in_background({2}, awaits_messages({3})), idle(), idle()}, {2});
  expect_missing({in_collective({1, 2}), awaits_messages({3}), in_collective({1}), idle()}, {3});
  // One that works in it, or was stopped there, waits for nobody.
  expect_missing({in_collective({1}), in_background({}, awaits_messages({2})), idle()}, {1});
  // Who waits in it waits for all that are missing.
  expect_missing({in_collective({1}), idle(), in_collective({3}), idle()}, {1, 3});
}

// As no rank sends it.
void one_that_is_stuck_and_awaits_nobody_is_in_no_circle() {
  Testimony stuck = gave_up({2});
  stuck.is_stuck = stuck.waits_for_collective = true;
  expect_missing({gave_up({1}), stuck, awaits_messages({1})}, {});
}

void a_testimony_travels_as_it_is() {
  Testimony testimony = gave_up({4, 9}, in_background({0, 8}, awaits_messages({7})));
  for (const bool waits : {false, true}) {
    testimony.waits_for_collective = waits;
    testimony.is_stuck = !waits;
    std::vector<char> bytes(Testimony::nbytes(10));
    testimony.pack(10, bytes.data());
    const Testimony read = Testimony::unpack(10, bytes.data());
    expect(read.in_collective == testimony.in_collective && read.in_messages == testimony.in_messages &&
               read.given_up == testimony.given_up,
           "who is awaited");
    expect(read.is_in_collective && read.waits_for_collective == waits && read.is_stuck != waits, "in what");
  }
}

// Those from whom something is still due or, where that is nobody, those that take nothing: not
// only when a wait comes to an end.
void who_is_awaited_is_known_at_every_moment() {
  Meshes meshes = make_meshes(3);
  const auto is_awaited = [&](const std::vector<int>& ranks) {
    return ranks_of(meshes[0]->awaited()) == ranks;
  };
  std::vector<char> data(100);
  Call call(kTimeout);
  {
    Exchange exchange(*meshes[0], call);
    exchange.receive(1, data.data(), 10);
    exchange.receive(2, data.data() + 10, 10);
    exchange.send(2, data.data() + 20, 10);
    expect(is_awaited({1, 2}), "who owes something is awaited");
    Exchange sender(*meshes[1], call);
    sender.send(0, data.data() + 30, 10);
    sender.finish();
    while (exchange.num_received(1) < 10) exchange.wait();
    expect(is_awaited({2}), "who has sent everything is not");
  }
  expect(is_awaited({}), "nobody is awaited between exchanges");
  Exchange exchange(*meshes[0], call);
  exchange.send(1, data.data(), 10);
  expect(is_awaited({1}), "who has yet to take what is sent is awaited");
}

void signals_end_a_wait() {
  Meshes meshes = make_meshes(2);
  TcpTransport transport(meshes[0], {0, 1});
  Hooks hooks;
  hooks.interrupted = [](void*) noexcept { return true; };
  const Error error = error_of([&] {
    Call call(kTimeout, hooks);
    transport.run(call, make(Op::barrier, DType::uint8, 0, nullptr, nullptr));
  });
  expect(error.code == ErrorCode::interrupted, "interrupted");
}

void garbage_is_refused() {
  const auto [ours, theirs] = connected_sockets();
  auto mesh = std::make_shared<TcpMesh>(0, 2, std::vector<TcpMesh::Socket>{{1, ours}}, false);
  TcpTransport transport(mesh, {0, 1});
  const std::vector<char> garbage(4096, 'x');
  expect(write(theirs, garbage.data(), garbage.size()) == 4096, "write");
  const Error error = error_of([&] { run(transport, make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); });
  expect(error.code == ErrorCode::io && error.peer == 1, "garbage on a stream");
  close(theirs);
}

void unknown_types_are_refused() {
  const auto [ours, theirs] = connected_sockets();
  auto mesh = std::make_shared<TcpMesh>(0, 2, std::vector<TcpMesh::Socket>{{1, ours}}, false);
  TcpTransport transport(mesh, {0, 1});
  Frame frame;
  frame.first.op = Op::allreduce;
  frame.first.dtype = static_cast<DType>(200);
  frame.first.count = 100000;
  expect(write(theirs, &frame, sizeof frame) == sizeof frame, "write");
  const Error error = error_of([&] { run(transport, make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); });
  expect(error.code == ErrorCode::io && error.peer == 1, "a dtype that is none");
  close(theirs);
}

// ---- Several threads of one rank (for ThreadSanitizer) ----------------------------

// One thread tells a peer that reads nothing of the end, another looks for what it says.
void a_stream_is_read_while_its_peer_is_told() {
  const auto [ours, theirs] = connected_sockets();
  TcpMesh mesh(0, 2, {{1, ours}}, false);
  const std::vector<char> noise(1 << 16);
  while (send(ours, noise.data(), noise.size(), MSG_DONTWAIT) > 0) continue;
  std::atomic<bool> is_told{false};
  std::thread teller([&mesh, &is_told] {
    mesh.abort({ErrorCode::timeout, 1, 0, 0});
    is_told.store(true);
  });
  std::thread peer([&, peer = theirs] {
    while (!is_told.load()) send(peer, noise.data(), 64, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
  while (!is_told.load()) {
    Testimonies testimonies;
    mesh.add_testimonies(testimonies);
  }
  teller.join();
  peer.join();
  close(theirs);
}

// Signals come while a rank waits for its peer to make room for last words. It gives up after a while:
// where the machine was too busy for the peer to read in time, again.
void signals_cut_no_last_words_short() {
  struct sigaction before, counting{};
  counting.sa_handler = [](int) {};
  sigaction(SIGUSR1, &counting, &before);
  const auto is_told = [] {
    const auto [ours, theirs] = connected_sockets();
    TcpMesh mesh(0, 2, {{1, ours}}, false);
    const std::vector<char> noise(1 << 16);
    while (send(ours, noise.data(), noise.size(), MSG_DONTWAIT) > 0) continue;
    std::thread teller([&mesh] { mesh.abort({ErrorCode::timeout, 1, 0, 0}); });
    for (int i = 0; i < 20; ++i) {
      pthread_kill(teller.native_handle(), SIGUSR1);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    TcpStream peer(0, UniqueFd(theirs), Testimony::nbytes(2));
    while (!peer.has_hung_up()) peer.discard_unread();
    teller.join();
    return peer.last_words().has_value();
  };
  bool was_told = false;
  for (int turn = 0; turn < 30 && !was_told; ++turn) was_told = is_told();
  sigaction(SIGUSR1, &before, nullptr);
  expect(was_told, "a peer that reads late, of the end");
}

// A rank gives up and closes its socket while its peer, which has yet to receive the last words, still
// sends. It waits for a while only: where the machine was too busy for the peer to read in time, again.
void closing_cuts_no_last_words_short() {
  const auto is_told = [] {
    const auto [ours, theirs] = connected_sockets();
    auto mesh = std::make_unique<TcpMesh>(0, 2, std::vector<TcpMesh::Socket>{{1, ours}}, false);
    TcpStream peer(0, UniqueFd(theirs), Testimony::nbytes(2));
    std::vector<char> noise(1 << 16);
    const iovec piece{noise.data(), noise.size()};
    while (send(ours, noise.data(), noise.size(), MSG_DONTWAIT) > 0) continue;
    pollfd room{ours, POLLOUT, 0};
    while (poll(&room, 1, 0) == 0) peer.receive(noise.data(), noise.size());
    mesh->abort({ErrorCode::timeout, 1, 0, 0});
    std::atomic<bool> is_closing{false};
    std::thread peers([&, &peer = peer] {
      while (!is_closing.load()) std::this_thread::yield();
      while (!peer.has_hung_up()) {
        peer.send(&piece, 1);
        peer.receive(noise.data(), 4096);
      }
    });
    is_closing.store(true);
    mesh.reset();
    peers.join();
    return peer.last_words().has_value();
  };
  int num_told = 0;
  for (int turn = 0; turn < 30 && num_told < 3; ++turn) num_told += is_told();
  expect(num_told == 3, "a peer that still sends, of the end");
}

// One thread waits for a peer while another finds that a third rank has left.
void a_goodbye_is_found_beside_a_wait() {
  for (int round = 0; round < 20; ++round) {
    Meshes meshes = make_meshes(3);
    std::thread waits([&meshes] {
      Call call(kTimeout);
      Exchange exchange(*meshes[0], call);
      char payload[4096];  // more than last words fill
      exchange.receive(2, payload, sizeof payload);
      expect(error_of([&] { exchange.finish(); }).peer == 2, "who kept a rank waiting");
    });
    meshes[1]->close();
    while (!meshes[0]->has_said_goodbye(1)) std::this_thread::yield();
    meshes[2]->close();
    waits.join();
  }
}

// A rank that gives up before it has sent what its peer waits for: the peer finds last words in its place.
void last_words_are_not_taken_for_a_payload() {
  for (const std::size_t nbytes : {1u, 4u, 44u, 64u, 65u, 66u, 200u}) {
    Meshes meshes = make_meshes(2);
    std::vector<char> data(200, 'F');
    Call call(kTimeout);
    {
      Exchange sender(*meshes[1], call);
      sender.send(0, data.data(), 7);
      sender.finish();
    }
    meshes[1]->abort({ErrorCode::interrupted, 1, 1, 0});
    Exchange exchange(*meshes[0], call);
    exchange.receive(1, data.data(), 7);
    exchange.receive(1, data.data(), nbytes);
    const Error error = error_of([&] { exchange.finish(); });
    expect(error.code == ErrorCode::interrupted && error.peer == 1,
           "the end in place of " + std::to_string(nbytes) + " bytes");
  }
}

// A full buffer may have taken the beginning of a header before its rank gave up.
void last_words_end_a_header() {
  for (std::size_t begun = 1; begun < sizeof(Frame); ++begun) {
    const auto [ours, theirs] = connected_sockets();
    auto mesh = std::make_shared<TcpMesh>(0, 2, std::vector<TcpMesh::Socket>{{1, ours}}, false);
    TcpTransport transport(mesh, {0, 1});
    const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
    const Frame header = frame_of(Agreement::of(1, fingerprint_of(barrier, 0)));
    expect(write(theirs, &header, begun) == static_cast<ssize_t>(begun), "write");
    TcpMesh(1, 2, {{0, theirs}}, false).abort({ErrorCode::interrupted, 1, 1, 0});
    const Error error = error_of([&] { run(transport, barrier); });
    expect(error.code == ErrorCode::interrupted && error.peer == 1,
           "the end after " + std::to_string(begun) + " bytes of a header, code " +
               std::to_string(static_cast<int>(error.code)));
  }
}

// ---- Messages ------------------------------------------------------------------

PointToPoint message_of(bool is_send, Values& values, std::uint32_t tag = 0) {
  PointToPoint op;
  op.is_send = is_send;
  op.data = values.data();
  op.count = values.size();
  op.dtype = DType::int32;
  op.tag = tag;
  return op;
}

void complete(Channel& channel, const PointToPoint& op) {
  Message message(op);
  while (!(op.is_send ? channel.try_send(message) : channel.try_recv(message))) std::this_thread::yield();
}

void messages_arrive_in_order() {
  const auto [first, second] = connected_sockets();
  TcpChannel a(1, first), b(0, second);
  std::thread sender([&a = a] {
    for (const std::size_t count : {0u, 1u, 17u, 1000003u, 2u}) {
      Values sent = values(3, count);
      complete(a, message_of(true, sent));
    }
  });
  for (const std::size_t count : {0u, 1u, 17u, 1000003u, 2u}) {
    Values got(count);
    complete(b, message_of(false, got));
    expect(got == values(3, count), "a message of " + std::to_string(count));
  }
  sender.join();
}

// All ends have sent more than the other's kernel takes while it reads nothing. One rank leaves.
void what_was_sent_outlives_a_sender_that_has_not_read() {
  std::vector<std::unique_ptr<Channel>> leaves(1), stay;  // the first place is the rank's own
  Values unread = values(2, 500000), sent = values(3, 250000), got(sent.size());
  for (int peer = 1; peer <= 8; ++peer) {
    const auto [first, second] = connected_sockets();
    leaves.push_back(std::make_unique<TcpChannel>(peer, first));
    stay.push_back(std::make_unique<TcpChannel>(0, second));
    complete(*stay.back(), message_of(true, unread));
    complete(*leaves.back(), message_of(true, sent));
  }
  for (const auto& channel : leaves)
    if (channel != nullptr) channel->close(false);
  discard_rest(leaves);
  leaves.clear();
  for (const auto& channel : stay) {
    complete(*channel, message_of(false, got));
    expect(got == sent, "what was sent before the sender left");
  }
}

void messages_that_do_not_fit_are_dropped_whole() {
  const auto [first, second] = connected_sockets();
  TcpChannel a(1, first), b(0, second);
  std::thread sender([&a = a] {
    Values large = values(1, 300000), tagged = values(2, 4), good = values(3, 4);
    complete(a, message_of(true, large));
    complete(a, message_of(true, tagged, 9));
    complete(a, message_of(true, good));
  });
  Values got(4, -1);
  const Error wrong_count = error_of([&] { complete(b, message_of(false, got)); });
  expect(wrong_count.code == ErrorCode::size_mismatch && wrong_count.peer == 0, "a message of another size");
  expect(wrong_count.detail.find("300000") != std::string::npos, wrong_count.detail);
  const Error wrong_tag = error_of([&] { complete(b, message_of(false, got)); });
  expect(wrong_tag.code == ErrorCode::size_mismatch, "a message with another tag");
  expect(got == Values(4, -1), "the receiver's array after a mismatch");
  complete(b, message_of(false, got));
  expect(got == values(3, 4), "the message after those");
  sender.join();
}

void lengths_are_checked_before_they_are_believed() {
  const auto [ours, theirs] = connected_sockets();
  TcpChannel channel(1, ours);
  Frame header;
  header.kind = FrameKind::message;
  header.first.dtype = DType::float64;
  header.first.count = SIZE_MAX / 4;
  header.second.count = header.first.count * 8;
  expect(write(theirs, &header, sizeof header) == sizeof header, "write");
  Values got(4);
  const Error error = error_of([&] { complete(channel, message_of(false, got)); });
  expect(error.code == ErrorCode::io && error.peer == 1, "a length that overflows");
  close(theirs);
}

void ends_of_channels_are_told_apart() {
  {
    const auto [first, second] = connected_sockets();
    TcpChannel channel(1, first);
    {
      const TcpChannel leaves(0, second);
    }
    Values got(1);
    expect(error_of([&] { complete(channel, message_of(false, got)); }).code == ErrorCode::channel_closed,
           "goodbye on a channel");
  }
  const auto [first, second] = connected_sockets();
  TcpChannel channel(1, first);
  close(second);
  Values got(1);
  const Error error = error_of([&] { complete(channel, message_of(false, got)); });
  expect(error.code == ErrorCode::peer_lost && error.peer == 1, "death on a channel");
}

// As a channel sends it ahead of these values.
Frame header_of(const Values& values) {
  Frame header;
  header.kind = FrameKind::message;
  header.first.dtype = DType::int32;
  header.first.count = values.size();
  header.second.count = values.size() * sizeof values[0];
  return header;
}

void a_goodbye_is_not_taken_for_a_payload() {
  for (const std::size_t missing : {1u, 10u, 16u, 17u}) {
    const auto [first, second] = connected_sockets();
    TcpChannel channel(1, first);
    Values got(100);
    const Frame header = header_of(got);
    expect(write(second, &header, sizeof header) == sizeof header, "write");
    const auto sent = static_cast<ssize_t>((got.size() - missing) * sizeof got[0]);
    expect(write(second, got.data(), sent) == sent, "write");
    TcpChannel(0, second).close(false);
    expect(error_of([&] { complete(channel, message_of(false, got)); }).code == ErrorCode::channel_closed,
           "a goodbye in place of " + std::to_string(missing) + " elements");
  }
}

void a_goodbye_ends_a_header() {
  for (std::size_t begun = 1; begun < sizeof(Frame); ++begun) {
    const auto [first, second] = connected_sockets();
    TcpChannel channel(1, first);
    Values got(100);
    const Frame header = header_of(got);
    expect(write(second, &header, begun) == static_cast<ssize_t>(begun), "write");
    TcpChannel(0, second).close(false);
    const Error error = error_of([&] { complete(channel, message_of(false, got)); });
    expect(error.code == ErrorCode::channel_closed, "a goodbye after " + std::to_string(begun) +
                                                        " bytes of a header, code " +
                                                        std::to_string(static_cast<int>(error.code)));
  }
}

// The kernel names the reason once: here to the look for a farewell behind a payload that could begin one.
void a_host_that_does_not_answer_is_not_taken_for_dead() {
  const auto [first, second] = connected_sockets();
  TcpChannel channel(1, first);
  Values got(1);
  const Frame header = header_of(got);
  const std::uint32_t payload = kFrameMagic << 24;
  const iovec pieces[] = {{const_cast<Frame*>(&header), sizeof header},
                          {const_cast<std::uint32_t*>(&payload), sizeof payload}};
  expect(writev(second, pieces, 2) == sizeof header + sizeof payload, "write");
  // Nobody reads at the other end, which is as good as no answer with this option.
  const unsigned patience_ms = 1;
  setsockopt(first, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms, sizeof patience_ms);
  pollfd entry{first, 0, 0};
  const std::vector<char> unread(1 << 20);
  while (poll(&entry, 1, 10) == 0) send(first, unread.data(), unread.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  complete(channel, message_of(false, got));
  expect(error_of([&] { complete(channel, message_of(false, got)); }).code == ErrorCode::unreachable,
         "nobody has answered");
  close(second);
}

// The stream of a rank that closed when its peer had yet to read all that it can hold.
void a_goodbye_without_room_is_no_death() {
  Meshes meshes = make_meshes(2);
  const auto [first, second] = connected_sockets();
  TcpChannel channel(1, first, meshes[0]);
  expect(write(second, "cut off", 7) == 7, "write");
  close(second);
  Values got(1);
  Message message(message_of(false, got));
  expect(!channel.try_recv(message), "an end whose reason may be on its way");
  meshes[1]->close();
  const Error error = error_of([&] {
    while (!channel.try_recv(message)) std::this_thread::yield();
  });
  expect(error.code == ErrorCode::channel_closed && error.peer == 1, "a goodbye on the mesh alone");
}

void a_channel_asks_the_mesh_for_the_culprit() {
  Meshes meshes = make_meshes(2);
  const auto [first, second] = connected_sockets();
  TcpChannel channel(1, first, meshes[0]);
  meshes[1]->abort({ErrorCode::peer_lost, 5, 1, 0});
  close(second);
  Values got(1);
  const Error error = error_of([&] { complete(channel, message_of(false, got)); });
  expect(error.code == ErrorCode::peer_lost && error.peer == 5, "the culprit, not the messenger");
}

}  // namespace

int main() {
  all_collectives_match_a_loop();
  every_algorithm_gives_the_same_sums();
  empty_arrays_of_many_ranks_need_no_memory();
  doubling_gives_every_rank_all_inputs_in_order();
  short_floats_are_rounded_once();
  mean_divides_by_the_number_of_ranks();
  halves_survive_widening();
  long_conversions_hear_signals_and_the_deadline();
  disagreement_is_named_and_survived();
  disagreement_about_sizes_leaves_nothing_behind();
  unpaired_counts_name_the_pair();
  undefined_reductions_send_nothing();
  every_survivor_names_the_dead_rank();
  the_messenger_is_not_blamed();
  goodbye_is_no_death();
  abort_from_another_thread_wakes_all();
  timeout_names_the_missing_ranks();
  a_rank_that_waits_is_not_missing();
  a_rank_that_was_stopped_is_missing();
  of_several_that_give_up_at_once_all_tell_the_same();
  waits_lead_to_who_is_missing_or_round_a_circle();
  a_message_waits_for_no_collective_in_the_background();
  a_collective_waits_for_collectives_in_the_background();
  one_that_is_stuck_and_awaits_nobody_is_in_no_circle();
  a_testimony_travels_as_it_is();
  who_is_awaited_is_known_at_every_moment();
  signals_end_a_wait();
  garbage_is_refused();
  unknown_types_are_refused();
  a_stream_is_read_while_its_peer_is_told();
  signals_cut_no_last_words_short();
  closing_cuts_no_last_words_short();
  a_goodbye_is_found_beside_a_wait();
  last_words_are_not_taken_for_a_payload();
  last_words_end_a_header();
  messages_arrive_in_order();
  what_was_sent_outlives_a_sender_that_has_not_read();
  messages_that_do_not_fit_are_dropped_whole();
  lengths_are_checked_before_they_are_believed();
  ends_of_channels_are_told_apart();
  a_goodbye_is_not_taken_for_a_payload();
  a_goodbye_ends_a_header();
  a_host_that_does_not_answer_is_not_taken_for_dead();
  a_goodbye_without_room_is_no_death();
  a_channel_asks_the_mesh_for_the_culprit();
  return 0;
}
