// The engine over several hosts. Inside a host another TcpTransport stands in for
// shared memory, but for the time after a timeout: to the transport under test one is as
// good as the other.
#include <algorithm>
#include <atomic>

#include "ferro/hosts_transport.hpp"
#include "ferro/segment.hpp"
#include "ferro/shm_transport.hpp"
#include "ferro/tcp_transport.hpp"
#include "ferro/wide_float.hpp"
#include "loopback.hpp"

using namespace ferro;
using namespace ferro::test;

namespace {

using Hosts = std::vector<std::vector<int>>;

struct Group {
  std::vector<std::shared_ptr<TcpMesh>> local_meshes;
  std::vector<std::shared_ptr<TcpMesh>> meshes;
  std::vector<std::unique_ptr<HostsTransport>> ranks;
  int size() const { return static_cast<int>(ranks.size()); }
};

enum class Inside { sockets, memory };

Group make_group(const Hosts& hosts, Inside inside = Inside::sockets) {
  std::vector<int> host_of;
  for (std::size_t host = 0; host < hosts.size(); ++host)
    for (const int rank : hosts[host]) {
      host_of.resize(std::max(host_of.size(), static_cast<std::size_t>(rank) + 1));
      host_of[rank] = static_cast<int>(host);
    }
  const int size = static_cast<int>(host_of.size());
  Group group;
  group.meshes = make_meshes(size, [&](int a, int b) { return host_of[a] != host_of[b]; });
  group.local_meshes = make_meshes(size, [&](int a, int b) { return host_of[a] == host_of[b]; });
  std::vector<std::shared_ptr<Segment>> segments;
  for (const std::vector<int>& locals : hosts)
    segments.push_back(Segment::create(static_cast<int>(locals.size())));
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<int>& locals = hosts[host_of[rank]];
    const auto place = static_cast<int>(std::find(locals.begin(), locals.end(), rank) - locals.begin());
    std::unique_ptr<Transport> local;
    if (locals.size() > 1 && inside == Inside::sockets)
      local = std::make_unique<TcpTransport>(group.local_meshes[rank], locals);
    else if (locals.size() > 1)
      local = std::make_unique<ShmTransport>(segments[host_of[rank]], place, locals,
                                             SpinPolicy::for_ranks(size, 1), false,
                                             std::make_shared<PeerMemory>(segments[host_of[rank]], place));
    group.ranks.push_back(std::make_unique<HostsTransport>(std::move(local), group.meshes[rank], hosts));
  }
  return group;
}

const std::vector<Hosts> kLayouts = {
    {{0, 1}, {2, 3}}, {{0}, {1}}, {{0, 1, 2}, {3}}, {{0, 2}, {1, 3}}, {{0, 1, 4}, {2, 5}, {3}},
};

void all_collectives_match_a_loop() {
  for (const Hosts& hosts : kLayouts) {
    Group group = make_group(hosts);
    on_each_rank(group.size(), [&](int rank) {
      for (const std::size_t count : {0u, 1u, 7u, 1023u, 60013u})
        EveryCollective(*group.ranks[rank], rank, group.size(), count, static_cast<int>(count) % group.size())
            .check();
    });
  }
}

void short_floats_are_rounded_once() {
  const Hosts hosts = {{0, 1, 2}, {3, 4, 5}};
  for (const std::size_t count : {6u, 60000u}) {
    Group group = make_group(hosts);
    on_each_rank(6, [&](int rank) {
      std::vector<float> wide(count, rank == 0 ? 1.0f : 0x1p-8f);
      std::vector<std::uint16_t> array(count);
      from_partial(array.data(), DType::bfloat16, wide.data(), DType::float32, count);
      run(*group.ranks[rank], make(Op::allreduce, DType::bfloat16, count, array.data(), array.data()));
      const float exact = 1.0f + 5 * 0x1p-8f;
      std::uint16_t rounded;
      from_partial(&rounded, DType::bfloat16, &exact, DType::float32, 1);
      expect(array == std::vector<std::uint16_t>(count, rounded), "bfloat16 sum over hosts");
    });
  }
}

void mean_divides_by_the_number_of_ranks() {
  Group group = make_group({{0, 1, 2}, {3}});
  on_each_rank(4, [&](int rank) {
    for (const std::size_t count : {3u, 50001u}) {
      std::vector<float> array(count, static_cast<float>(rank));
      Collective mean = make(Op::allreduce, DType::float32, count, array.data(), array.data());
      mean.reduce_op = ReduceOp::mean;
      run(*group.ranks[rank], mean);
      expect(array == std::vector<float>(count, 1.5f), "mean over hosts");
      std::vector<float> in(4 * count, static_cast<float>(rank)), out(count);
      mean = make(Op::reduce_scatter, DType::float32, count, in.data(), out.data());
      mean.reduce_op = ReduceOp::mean;
      run(*group.ranks[rank], mean);
      expect(out == std::vector<float>(count, 1.5f), "reduce_scatter mean over hosts");
    }
  });
}

// Wherever the odd one sits, and whatever the size.
void disagreement_is_raised_on_all_hosts() {
  for (const int odd : {1, 2, 3})
    for (const std::size_t count : {5u, 100000u}) {
      Group group = make_group({{0, 1}, {2, 3}});
      on_each_rank(4, [&](int rank) {
        std::vector<float> array(count, 1.0f);
        Collective mine = make(Op::allreduce, DType::float32, count, array.data(), array.data());
        if (rank == odd) mine.op = Op::all_to_all, mine.count = 1;
        const Error error = error_of([&] { run(*group.ranks[rank], mine); });
        expect(error.code == ErrorCode::mismatch, "mismatch over hosts");
        expect(error.detail == "rank 0 called allreduce(sum, float32, count " + std::to_string(count) +
                                   "), rank " + std::to_string(odd) + " called all_to_all(float32, count 1)",
               error.detail);
        expect(array == std::vector<float>(count, 1.0f), "buffers after a mismatch");
        mine = make(Op::allreduce, DType::float32, count, array.data(), array.data());
        run(*group.ranks[rank], mine);
        expect(array == std::vector<float>(count, 4.0f), "the group after a mismatch");
      });
    }
}

void unpaired_counts_name_the_pair() {
  // Once inside a host, once between two.
  for (const int sender : {0, 3}) {
    Group group = make_group({{0, 1}, {2, 3}});
    on_each_rank(4, [&](int rank) {
      std::vector<std::size_t> send_counts(4, 2), recv_counts(4, 2);
      if (rank == 1) recv_counts[sender] = 1;
      const Values in(8, 1);
      Values out(8, -1);
      Collective collective = make(Op::all_to_all, DType::int32, 0, in.data(), out.data());
      collective.send_counts = send_counts.data();
      collective.recv_counts = recv_counts.data();
      const Error error = error_of([&] { run(*group.ranks[rank], collective); });
      expect(error.code == ErrorCode::mismatch && out == Values(8, -1), "mismatch of counts");
      expect(
          error.detail == "rank " + std::to_string(sender) + " sends 2 elements to rank 1, which expects 1",
          error.detail);
    });
  }
}

// Rank 3 leaves its own host's peers and those of the other at once.
void a_death_is_named_on_all_hosts() {
  for (const std::size_t count : {1u, 300000u}) {
    Group group = make_group({{0, 1}, {2, 3}});
    on_each_rank(4, [&](int rank) {
      if (rank == 3) {
        group.meshes[3]->abort({ErrorCode::peer_lost, 3, 3, 0});
        group.local_meshes[3]->abort({ErrorCode::peer_lost, 3, 3, 0});
        return;
      }
      std::vector<float> array(count, 1.0f);
      const Error error = error_of([&] {
        run(*group.ranks[rank], make(Op::allreduce, DType::float32, count, array.data(), array.data()));
      });
      expect(error.code == ErrorCode::peer_lost && error.peer == 3, "the dead rank is named");
      expect(group.ranks[rank]->aborted().culprit == 3, "the reason names it too");
    });
  }
}

// Rank 1 waits inside its host for rank 0, which never comes; the news that ends
// the group comes from the other host.
void a_remote_abort_ends_a_local_wait() {
  Group group = make_group({{0, 1}, {2}});
  on_each_rank(3, [&](int rank) {
    if (rank == 0) return;
    if (rank == 2) return group.ranks[2]->abort({ErrorCode::interrupted, 2, 2, 0});
    const Error error =
        error_of([&] { run(*group.ranks[1], make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); });
    expect(error.code == ErrorCode::interrupted && error.peer == 2,
           "a remote abort is heard in a local wait");
  });
}

// Rank 0 waits for the other host; its own host's rank 1 ends the group.
void a_local_abort_ends_a_remote_wait() {
  Group group = make_group({{0, 1}, {2}});
  on_each_rank(3, [&](int rank) {
    if (rank == 2) return;
    if (rank == 1) {
      // Takes the one step of the call that is local, and aborts while rank 0 waits for rank 2.
      TcpTransport local(group.local_meshes[1], {0, 1});
      const Frame header = frame_of(Agreement::of(1, Fingerprint{}));
      Frame headers[2];
      run(local, make(Op::all_gather, DType::uint8, sizeof header, &header, headers));
      group.local_meshes[1]->abort({ErrorCode::interrupted, 1, 1, 0});
      return;
    }
    const Error error =
        error_of([&] { run(*group.ranks[0], make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); });
    expect(error.code == ErrorCode::interrupted && error.peer == 1, "a local abort is heard");
  });
  AbortReason reason;
  while (reason.code == ErrorCode::none) reason = group.ranks[2]->aborted();
  expect(reason.code == ErrorCode::interrupted && reason.culprit == 1, "and passed on to the other host");
}

void timeout_ends_the_wait_on_every_host() {
  const std::vector<Error> errors = told_together([](const Tell& tell) {
    Group group = make_group({{0, 1}, {2, 3}}, Inside::memory);
    on_each_rank(3, [&](int rank) {
      const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
      tell(error_of([&] { run(*group.ranks[rank], barrier, rank == 2 ? kShortTimeout : kTimeout); }));
    });
  });
  for (const Error& error : errors)
    expect(error.code == ErrorCode::timeout && error.peer == 3,
           "rank 2 waits for rank 3, and tells the others");
}

// All give up at the same time but for the patience with messengers: rank 0 waits
// for rank 2, which waits for rank 3, and rank 1 for rank 0.
void everybody_names_the_rank_that_is_missing() {
  const std::vector<Error> errors = told_together([](const Tell& tell) {
    Group group = make_group({{0, 1}, {2, 3}}, Inside::memory);
    on_each_rank(4, [&](int rank) {
      const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
      run(*group.ranks[rank], barrier);
      if (rank != 3) tell(error_of([&] { run(*group.ranks[rank], barrier, kShortTimeout); }));
    });
  });
  for (const Error& error : errors)
    expect(error.code == ErrorCode::timeout && error.missing == std::vector<int>{3},
           "the missing rank is named");
}

// The first to give up waits for a leader, which waits for one of its own host. Some wait
// inside their host for a leader that waits for another.
void all_missing_ranks_are_named_on_every_host() {
  const Hosts hosts = {{0, 1, 2}, {3, 4}, {5, 6}};
  for (const std::vector<int>& absent : {std::vector<int>{4}, {4, 6}, {1, 5}}) {
    const std::vector<Error> errors = told_together([&](const Tell& tell) {
      Group group = make_group(hosts, Inside::memory);
      on_each_rank(7, [&](int rank) {
        const Collective barrier = make(Op::barrier, DType::uint8, 0, nullptr, nullptr);
        run(*group.ranks[rank], barrier);
        if (std::find(absent.begin(), absent.end(), rank) != absent.end()) return;
        tell(error_of([&] { run(*group.ranks[rank], barrier, rank == 0 ? kShortTimeout : kTimeout); }));
      });
    });
    for (const Error& error : errors)
      expect(error.code == ErrorCode::timeout && error.missing == absent, "those who are absent are named");
  }
}

// Rank 2's end has come, but rank 0 has not looked since when it gives up, too.
void of_hosts_that_give_up_at_once_all_tell_the_same() {
  const Hosts hosts = {{0, 1}, {2, 3}};
  Group group = make_group(hosts, Inside::memory);
  for (const auto& rank : group.ranks) expect(rank->aborted().code == ErrorCode::none, "the group is well");
  for (const int rank : {2, 0}) {
    Error error(ErrorCode::timeout);
    error.missing = {rank + 1};
    group.ranks[rank]->testify(Call(kTimeout), error);
    group.ranks[rank]->abort({ErrorCode::timeout, rank + 1, rank, 0});
  }
  std::vector<AbortReason> told(4);
  on_each_rank(4, [&](int rank) {
    group.ranks[rank]->abort(group.ranks[rank]->aborted());
    group.ranks[rank]->find_missing();
    told[rank] = group.ranks[rank]->aborted();
  });
  for (const AbortReason& reason : told) expect(reason.pack() == told.front().pack(), "all tell one reason");
}

void closing_says_goodbye() {
  Group group = make_group({{0, 1}, {2, 3}});
  on_each_rank(4, [&](int rank) {
    run(*group.ranks[rank], make(Op::barrier, DType::uint8, 0, nullptr, nullptr));
    group.ranks[rank]->close();
    const Error error =
        error_of([&] { run(*group.ranks[rank], make(Op::barrier, DType::uint8, 0, nullptr, nullptr)); });
    expect(error.code == ErrorCode::closed, "use after close");
  });
}

}  // namespace

int main() {
  all_collectives_match_a_loop();
  short_floats_are_rounded_once();
  mean_divides_by_the_number_of_ranks();
  disagreement_is_raised_on_all_hosts();
  unpaired_counts_name_the_pair();
  a_death_is_named_on_all_hosts();
  a_remote_abort_ends_a_local_wait();
  a_local_abort_ends_a_remote_wait();
  timeout_ends_the_wait_on_every_host();
  everybody_names_the_rank_that_is_missing();
  all_missing_ranks_are_named_on_every_host();
  of_hosts_that_give_up_at_once_all_tell_the_same();
  closing_says_goodbye();
  return 0;
}
