// Deaths, ends and agreement; the collectives themselves are in hosts_collectives.cpp.
#include "ferro/hosts_transport.hpp"

#include <algorithm>
#include <cstring>

#include "ferro/passes.hpp"
#include "ferro/reduction.hpp"
#include "ferro/tcp_cost.hpp"
#include "ferro/tcp_transport.hpp"
#include "ferro/wide_float.hpp"

namespace ferro {

// While this rank waits in one of its two transports, or works on its memory, it keeps an eye
// on both: the hook that asks for signals is called in every long wait and piece of work.
struct HostsTransport::Watch {
  HostsTransport& transport;
  Call& outer;

  static bool look(void* state) noexcept {
    auto& watch = *static_cast<Watch*>(state);
    watch.transport.note_awaited_in_host(watch.outer);
    try {
      watch.outer.check_interrupt();
    } catch (const Error&) {
      return true;
    }
    return watch.transport.aborted().is_set();  // run_or_abort then throws that reason
  }
};

HostsTransport::HostsTransport(std::unique_ptr<Transport> local, std::shared_ptr<TcpMesh> mesh,
                               std::vector<std::vector<int>> hosts)
    : local_(std::move(local)), mesh_(std::move(mesh)), hosts_(std::move(hosts)), rank_(mesh_->own_rank()) {
  num_planes_ = static_cast<int>(hosts_.front().size());
  for (const std::vector<int>& ranks : hosts_) {
    world_size_ += static_cast<int>(ranks.size());
    num_planes_ = std::min(num_planes_, static_cast<int>(ranks.size()));
  }
  host_of_.resize(world_size_);
  for (int host = 0; host < num_hosts(); ++host)
    for (const int rank : hosts_[host]) host_of_[rank] = host;
  host_ = host_of(rank_);
  place_ = static_cast<int>(std::find(locals().begin(), locals().end(), rank_) - locals().begin());
  std::vector<int> plane, reach;
  for (int host = 0; host < num_hosts() && place_ < num_planes_; ++host)
    plane.push_back(rank_at(host, place_));
  for (int rank = 0; rank < world_size_; ++rank)
    if (rank == rank_ || host_of(rank) != host_) reach.push_back(rank);
  if (!plane.empty()) plane_.emplace(*mesh_, std::move(plane));
  reach_.emplace(rank_, std::move(reach));
}

void HostsTransport::run(Call& outer, const Collective& collective) {
  if (has_reduce_op(collective.op)) kernel_for(collective.dtype, collective.reduce_op);
  const std::uint32_t sequence = sequence_++;
  mesh_->set_sequence(sequence);
  outer.begin_blocking();
  Watch watch{*this, outer};
  Call call(outer.remaining_s(), Hooks{nullptr, &Watch::look, &watch});
  run_or_abort(*this, *mesh_, outer, sequence, [&] { dispatch(call, collective, sequence); });
}

// A rank that gives up looks at other hosts before its own hears of it: the reason that its host then
// agrees on is the one that other hosts are told.
void HostsTransport::abort(AbortReason reason) noexcept {
  if (reason.code == ErrorCode::timeout) mesh_->look();
  const AbortReason known = aborted();
  spread(known.is_set() ? known : reason);
}

// What one transport knows, the other is told at once, before this rank can leave
// because of it: ranks that wait for this one must not take it for the culprit.
AbortReason HostsTransport::aborted() const noexcept {
  const AbortReason remote = mesh_->aborted();
  if (local_ == nullptr) return remote;
  const AbortReason inside = local_->aborted();
  const bool has_ended = remote.is_set();
  if (has_ended != inside.is_set()) spread(has_ended ? remote : inside);
  return has_ended ? remote : inside;
}

void HostsTransport::spread(AbortReason reason) const noexcept {
  if (local_ != nullptr) {
    local_->pass_on(mesh_->testimony());
    local_->abort(reason);
    reason = local_->aborted();  // of several reasons on one host, all its ranks give the one that won
  }
  mesh_->abort(reason);
}

RankSet HostsTransport::find_missing() {
  return mesh_->find_missing([this](Testimonies& testimonies) { add_testimonies(testimonies); });
}

void HostsTransport::add_testimonies(Testimonies& testimonies) {
  if (local_ != nullptr) local_->add_testimonies(testimonies);
}

void HostsTransport::add_awaited(RankSet& ranks) const {
  ranks |= mesh_->awaited();
  if (local_ != nullptr) local_->add_awaited(ranks);
}

// For what this rank testifies, should the group end while it waits inside its host.
void HostsTransport::note_awaited_in_host(const Call& call) const {
  if (local_ == nullptr || call.elapsed_s() < kPresenceSeconds) return;
  if (call.present_s() < kPresenceSeconds) return mesh_->note_awaited_in_collective({});
  RankSet ranks;
  local_->add_awaited(ranks);
  if (ranks.any()) mesh_->note_awaited_in_collective(ranks);
}

void HostsTransport::add_lost(RankSet& ranks) {
  mesh_->add_lost(ranks);
  if (local_ != nullptr) local_->add_lost(ranks);
}

std::uint32_t HostsTransport::succession() const noexcept {
  return local_ == nullptr ? 0 : local_->succession();
}

bool HostsTransport::advance_succession(std::uint32_t from, std::uint32_t to) noexcept {
  return local_ == nullptr || local_->advance_succession(from, to);
}

void HostsTransport::close() noexcept {
  aborted();  // may be the last chance to tell of a death
  if (local_ != nullptr) local_->close();
  mesh_->close();
}

// So the rank that knows who is missing is the first to give up, and tells the others. A call has
// seven such steps at most.
void HostsTransport::begin_step(Call& call) {
  constexpr double kPatienceSeconds = 0.05;
  call.extend(kPatienceSeconds);
}

void HostsTransport::dispatch(Call& call, const Collective& collective, std::uint32_t sequence) {
  const Agreement own = Agreement::of(rank_, fingerprint_of(collective, sequence));
  if (is_riding(collective)) return run_riding(call, collective, own);
  const Agreement agreed = agree(call, own);
  agreed.check(rank_);
  begin_step(call);
  switch (collective.op) {
    case Op::allreduce:
    case Op::reduce:
      return reduce_all(call, collective);
    case Op::broadcast:
      return broadcast(call, collective);
    case Op::all_gather:
    case Op::split:
      return all_gather(call, collective);
    case Op::reduce_scatter:
      return reduce_scatter(call, collective);
    case Op::all_to_all:
      if (is_uneven(collective)) agree(call, agree_on_pairs(call, agreed, collective)).check(rank_);
      return all_to_all(call, collective);
    case Op::gather:
      return gather(call, collective);
    case Op::scatter:
      return scatter(call, collective);
    default:
      return;  // a barrier is an agreement
  }
}

void HostsTransport::run_local(Call& call, const Collective& collective) {
  if (local_ == nullptr) {
    if (collective.in != nullptr && collective.out != nullptr)
      copy_in_passes(call, collective.out, collective.in, collective.nbytes());
    return;
  }
  try {
    local_->run(call, collective);
  } catch (const Error&) {
    note_awaited_in_host(call);
    throw;
  }
}

// ---- Agreeing ------------------------------------------------------------------

// Whatever its ranks called, a host first gathers their headers by one and the same local
// collective, so that inside the local transport nothing can disagree.
Agreement HostsTransport::agree_locally(Call& call, const Agreement& own) {
  const Frame frame = frame_of(own);
  std::vector<Frame> frames(locals().size());
  run_local(call, Collective::of(Op::all_gather, DType::uint8, sizeof frame, &frame, frames.data()));
  Agreement verdict = own;
  for (const Frame& theirs : frames) verdict.merge(agreement_of(theirs));
  return verdict;
}

// The leaders tell each other what their hosts agreed on, and their hosts the result.
Agreement HostsTransport::agree(Call& call, const Agreement& own) {
  Agreement verdict = agree_locally(call, own);
  begin_step(call);
  if (is_leader()) {
    Exchange exchange(*mesh_, call);
    verdict = ferro::agree(exchange, *plane_, verdict, nullptr);
  }
  begin_step(call);
  Frame frame = frame_of(verdict);
  const int leader = locals().front();
  run_local(call, Collective::of(Op::broadcast, DType::uint8, sizeof frame, &frame, &frame).rooted(leader));
  return agreement_of(frame);
}

Agreement HostsTransport::agree_on_pairs(Call& call, const Agreement& agreed, const Collective& collective) {
  const auto counts_with = [&](const std::size_t* counts, const std::vector<int>& ranks) {
    std::vector<std::size_t> chosen;
    for (const int rank : ranks) chosen.push_back(counts != nullptr ? counts[rank] : collective.count);
    return chosen;
  };
  const std::vector<std::size_t> to_reach = counts_with(collective.send_counts, reach_->members());
  const std::vector<std::size_t> from_reach = counts_with(collective.recv_counts, reach_->members());
  Collective remote = collective;
  remote.send_counts = to_reach.data();
  remote.recv_counts = from_reach.data();
  Agreement verdict;
  {
    Exchange exchange(*mesh_, call);
    verdict = agree_on_counts(exchange, *reach_, agreed, remote);
  }
  static_assert(sizeof(std::size_t) == 8, "counts travel as uint64");
  begin_step(call);
  const std::vector<std::size_t> to_local = counts_with(collective.send_counts, locals());
  const std::vector<std::size_t> expected = counts_with(collective.recv_counts, locals());
  std::vector<std::size_t> sent(locals().size());
  run_local(call, Collective::of(Op::all_to_all, DType::uint64, 1, to_local.data(), sent.data()));
  for (std::size_t i = 0; i < sent.size(); ++i)
    if (sent[i] != expected[i])
      verdict.merge(Agreement::unpaired(agreed.first, locals()[i], sent[i], rank_, expected[i]));
  return verdict;
}

bool HostsTransport::is_riding(const Collective& collective) const {
  if (collective.op != Op::allreduce && collective.op != Op::reduce && collective.op != Op::broadcast)
    return false;
  return collective.count <= inline_limit(num_hosts()) / item_size(partial_dtype(collective));
}

// A small array passes through the leaders with their agreement: one round over
// TCP in all. `message_` holds a header and the array, for the local broadcast.
void HostsTransport::run_riding(Call& call, const Collective& collective, const Agreement& own) {
  const std::size_t nbytes = collective.count * item_size(partial_dtype(collective));
  char* const message = message_.reserve(sizeof(Frame) + nbytes);
  char* const array = message + sizeof(Frame);

  Agreement verdict = agree_locally(call, own);
  const bool has_array = verdict.state == Agreement::State::agreed;
  if (has_array) prepare_riding(call, collective, array);
  begin_step(call);
  if (is_leader()) {
    Exchange exchange(*mesh_, call);
    Rider rider(collective, array, collective.op != Op::broadcast || host_of(collective.root) == host_);
    verdict = ferro::agree(exchange, *plane_, verdict, has_array ? &rider : nullptr);
    const Frame frame = frame_of(verdict);
    std::memcpy(message, &frame, sizeof frame);
  }
  begin_step(call);
  const std::size_t message_nbytes = sizeof(Frame) + (has_array ? nbytes : 0);
  run_local(
      call,
      Collective::of(Op::broadcast, DType::uint8, message_nbytes, message, message).rooted(locals().front()));
  Frame frame;
  std::memcpy(&frame, message, sizeof frame);
  agreement_of(frame).check(rank_);
  deliver_riding(call, collective, array, rank_, world_size_);
}

// Gives the leader what its host contributes.
void HostsTransport::prepare_riding(Call& call, const Collective& collective, char* array) {
  if (collective.op == Op::broadcast) {
    if (host_of(collective.root) != host_) return;
    return run_local(call, collective.between(collective.in, array));
  }
  const DType partial = partial_dtype(collective);
  char* const own = own_.reserve(collective.count * item_size(partial));
  to_partial(own, partial, collective.in, collective.dtype, collective.count);
  run_local(call, Collective::of(Op::reduce, partial, collective.count, own, is_leader() ? array : nullptr)
                      .rooted(locals().front())
                      .reducing(partial_op(collective.reduce_op)));
}

}  // namespace ferro
