// Groups of ranks as threads, joined by TCP sockets over loopback, and every
// collective against a plain loop. For the tests of the engine.
#ifndef FERRO_TESTS_LOOPBACK_HPP
#define FERRO_TESTS_LOOPBACK_HPP

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferro/tcp_mesh.hpp"
#include "ferro/testimony.hpp"
#include "ferro/transport.hpp"

namespace ferro::test {

constexpr double kTimeout = 60;
// What must pass, but not before ranks that a busy machine keeps from running have come.
constexpr double kShortTimeout = 3;

inline void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::abort();
}

inline std::pair<int, int> connected_sockets() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  expect(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0, "bind");
  expect(listen(listener, 1) == 0, "listen");
  expect(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0, "getsockname");
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  expect(connect(client, reinterpret_cast<sockaddr*>(&address), size) == 0, "connect");
  const int server = accept(listener, nullptr, nullptr);
  expect(server >= 0, "accept");
  close(listener);
  return {client, server};
}

using Meshes = std::vector<std::shared_ptr<TcpMesh>>;

// Meshes of all ranks; a socket between each two for which `are_joined` holds.
inline Meshes make_meshes(int size, const std::function<bool(int, int)>& are_joined) {
  std::vector<std::vector<TcpMesh::Socket>> sockets(static_cast<std::size_t>(size));
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b) {
      if (!are_joined(a, b)) continue;
      const auto [first, second] = connected_sockets();
      sockets[a].push_back({b, first});
      sockets[b].push_back({a, second});
    }
  Meshes meshes;
  for (int rank = 0; rank < size; ++rank)
    meshes.push_back(std::make_shared<TcpMesh>(rank, size, sockets[rank], rank % 2 == 0));
  return meshes;
}
inline Meshes make_meshes(int size) {
  return make_meshes(size, [](int, int) { return true; });
}

inline void on_each_rank(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        expect(false, "rank " + std::to_string(rank) + " raised code " +
                          std::to_string(static_cast<int>(error.code)) + ", culprit " +
                          std::to_string(error.peer) + ": " + error.detail);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

inline void run(Transport& transport, const Collective& collective, double timeout_s = kTimeout) {
  Call call(timeout_s);
  transport.run(call, collective);
}

inline Collective make(Op op, DType dtype, std::size_t count, const void* in, void* out, int root = 0) {
  Collective collective;
  collective.op = op;
  collective.dtype = dtype;
  collective.count = count;
  collective.in = in;
  collective.out = out;
  collective.root = root;
  return collective;
}

// The Error that `body` throws; fails if it throws none.
inline Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  expect(false, "an error should have been thrown");
  return Error(ErrorCode::none);
}

// What the ranks of a group that ends are told: `attempt` makes a group, and passes on each
// rank's error. Again, where they were not told at one moment: a rank that the machine keeps from
// running just then has stopped, for all that the others can know, and they name it. The last of
// these turns is passed on as it is, for the test to judge.
using Tell = std::function<void(const Error&)>;
inline std::vector<Error> told_together(const std::function<void(const Tell&)>& attempt) {
  using Clock = std::chrono::steady_clock;
  std::mutex mutex;
  std::vector<Error> errors;
  std::vector<Clock::time_point> moments;
  for (int turn = 0; turn < 30; ++turn) {
    errors.clear();
    moments.clear();
    attempt([&](const Error& error) {
      const Clock::time_point now = Clock::now();
      const std::lock_guard<std::mutex> lock(mutex);
      errors.push_back(error);
      moments.push_back(now);
    });
    const auto [first, last] = std::minmax_element(moments.begin(), moments.end());
    if (std::chrono::duration<double>(*last - *first).count() < kInquestSeconds / 2) break;
  }
  return errors;
}

using Values = std::vector<std::int32_t>;

inline std::int32_t value(int rank, std::size_t i) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(rank + 1) * 1000003u +
                                   static_cast<std::uint32_t>(i) * 7u);
}

inline Values values(int rank, std::size_t count, std::size_t first = 0) {
  Values result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = value(rank, first + i);
  return result;
}

inline Values sums(int size, std::size_t count, std::size_t first = 0) {
  Values result(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += static_cast<std::uint32_t>(value(rank, first + i));
    result[i] = static_cast<std::int32_t>(sum);
  }
  return result;
}

inline Values concatenated(const std::vector<Values>& parts) {
  Values all;
  for (const Values& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Each operation, out of place and in place, as rank `rank` of `size`.
class EveryCollective {
 public:
  EveryCollective(Transport& transport, int rank, int size, std::size_t count, int root)
      : transport_(transport), rank_(rank), size_(size), count_(count), root_(root) {}

  void check() {
    allreduce();
    broadcast();
    reduce();
    reduce_scatter();
    all_gather();
    all_to_all();
    uneven_all_to_all();
    gather();
    scatter();
    run(transport_, make(Op::barrier, DType::uint8, 0, nullptr, nullptr));
  }

 private:
  std::size_t total() const { return count_ * static_cast<std::size_t>(size_); }
  bool is_root() const { return rank_ == root_; }

  void call(Op op, const void* in, void* out) {
    run(transport_, make(op, DType::int32, count_, in, out, root_));
  }
  void same(const Values& got, const Values& wanted, const char* op, const char* how) const {
    expect(got == wanted, std::string(op) + " " + how + ", rank " + std::to_string(rank_) + " of " +
                              std::to_string(size_) + ", count " + std::to_string(count_) + ", root " +
                              std::to_string(root_));
  }

  void allreduce() {
    const Values in = values(rank_, count_);
    Values out(count_), both = in;
    call(Op::allreduce, in.data(), out.data());
    same(out, sums(size_, count_), "allreduce", "out of place");
    same(in, values(rank_, count_), "allreduce", "leaves its input unchanged");
    call(Op::allreduce, both.data(), both.data());
    same(both, sums(size_, count_), "allreduce", "in place");
  }

  void broadcast() {
    const Values in = values(rank_, count_);
    Values out(count_), both = in;
    call(Op::broadcast, in.data(), out.data());
    same(out, values(root_, count_), "broadcast", "out of place");
    call(Op::broadcast, both.data(), both.data());
    same(both, values(root_, count_), "broadcast", "in place");
  }

  void reduce() {
    const Values in = values(rank_, count_);
    Values out(count_), both = in;
    call(Op::reduce, in.data(), is_root() ? out.data() : nullptr);
    same(out, is_root() ? sums(size_, count_) : Values(count_), "reduce", "out of place");
    call(Op::reduce, both.data(), is_root() ? both.data() : nullptr);
    same(both, is_root() ? sums(size_, count_) : in, "reduce", "in place");
  }

  void reduce_scatter() {
    const Values in = values(rank_, total());
    const std::size_t first = count_ * static_cast<std::size_t>(rank_);
    Values out(count_), both = in;
    call(Op::reduce_scatter, in.data(), out.data());
    same(out, sums(size_, count_, first), "reduce_scatter", "out of place");
    call(Op::reduce_scatter, both.data(), both.data() + first);
    same(Values(both.begin() + first, both.begin() + first + count_), sums(size_, count_, first),
         "reduce_scatter", "into its own chunk");
    both = in;
    call(Op::reduce_scatter, both.data(), both.data());
    both.resize(count_);
    same(both, sums(size_, count_, first), "reduce_scatter", "into the first chunk");
  }

  void all_gather() {
    const Values in = values(rank_, count_);
    std::vector<Values> parts;
    for (int rank = 0; rank < size_; ++rank) parts.push_back(values(rank, count_));
    Values out(total()), both(total());
    call(Op::all_gather, in.data(), out.data());
    same(out, concatenated(parts), "all_gather", "out of place");
    const auto own = both.begin() + static_cast<std::ptrdiff_t>(count_) * rank_;
    std::copy(in.begin(), in.end(), own);
    call(Op::all_gather, both.data() + count_ * static_cast<std::size_t>(rank_), both.data());
    same(both, concatenated(parts), "all_gather", "in place");
  }

  // What `rank` holds for `peer`.
  Values piece(int rank, int peer, std::size_t count) const {
    return values(rank, count, static_cast<std::size_t>(peer) * 1000);
  }

  void all_to_all() {
    std::vector<Values> outgoing, incoming;
    for (int peer = 0; peer < size_; ++peer) {
      outgoing.push_back(piece(rank_, peer, count_));
      incoming.push_back(piece(peer, rank_, count_));
    }
    const Values in = concatenated(outgoing);
    Values out(total()), both = in;
    call(Op::all_to_all, in.data(), out.data());
    same(out, concatenated(incoming), "all_to_all", "out of place");
    call(Op::all_to_all, both.data(), both.data());
    same(both, concatenated(incoming), "all_to_all", "in place");
  }

  void uneven_all_to_all() {
    const auto count_between = [&](int src, int dst) {
      return count_ / 2 * static_cast<std::size_t>(src) + static_cast<std::size_t>(dst);
    };
    std::vector<Values> outgoing, incoming;
    std::vector<std::size_t> send_counts, recv_counts;
    for (int peer = 0; peer < size_; ++peer) {
      send_counts.push_back(count_between(rank_, peer));
      recv_counts.push_back(count_between(peer, rank_));
      outgoing.push_back(piece(rank_, peer, send_counts.back()));
      incoming.push_back(piece(peer, rank_, recv_counts.back()));
    }
    const Values in = concatenated(outgoing), wanted = concatenated(incoming);
    Values out(wanted.size());
    Collective collective = make(Op::all_to_all, DType::int32, 0, in.data(), out.data());
    collective.send_counts = send_counts.data();
    collective.recv_counts = recv_counts.data();
    run(transport_, collective);
    same(out, wanted, "all_to_all", "uneven");
  }

  void gather() {
    const Values in = values(rank_, count_);
    std::vector<Values> parts;
    for (int rank = 0; rank < size_; ++rank) parts.push_back(values(rank, count_));
    Values out(is_root() ? total() : 0);
    call(Op::gather, in.data(), is_root() ? out.data() : nullptr);
    same(out, is_root() ? concatenated(parts) : Values{}, "gather", "out of place");
    if (is_root()) {
      out = Values(total());
      std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(count_) * rank_);
    }
    call(Op::gather, is_root() ? out.data() + count_ * static_cast<std::size_t>(rank_) : in.data(),
         is_root() ? out.data() : nullptr);
    same(out, is_root() ? concatenated(parts) : Values{}, "gather", "in place");
  }

  void scatter() {
    std::vector<Values> parts;
    for (int peer = 0; peer < size_; ++peer) parts.push_back(piece(root_, peer, count_));
    Values in = is_root() ? concatenated(parts) : Values{};
    Values out(count_);
    call(Op::scatter, is_root() ? in.data() : nullptr, out.data());
    same(out, piece(root_, rank_, count_), "scatter", "out of place");
    call(Op::scatter, is_root() ? in.data() : nullptr, is_root() ? in.data() : out.data());
    if (is_root()) out.assign(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(count_));
    same(out, piece(root_, rank_, count_), "scatter", "over its input");
  }

  Transport& transport_;
  int rank_, size_;
  std::size_t count_;
  int root_;
};

}  // namespace ferro::test

#endif  // FERRO_TESTS_LOOPBACK_HPP
