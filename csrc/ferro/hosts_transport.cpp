#include "ferro/hosts_transport.hpp"

#include <algorithm>
#include <cstring>

#include "ferro/cost_model.hpp"
#include "ferro/passes.hpp"
#include "ferro/tcp_transport.hpp"
#include "ferro/wide_float.hpp"

namespace ferro {
namespace {

// Whoever waits for a messenger waits that much longer than the messenger does, step
// by step of a call: so the rank that knows who is missing is the first to give up,
// and names it to the others. A call has seven such steps at most.
constexpr double kStepPatienceSeconds = 0.05;

void begin_step(Call& call) { call.extend(kStepPatienceSeconds); }

// A mean is divided once, when the sum over all hosts is known.
ReduceOp step_op(ReduceOp op) { return op == ReduceOp::mean ? ReduceOp::sum : op; }

// The index of no root, for operations without one.
int root_of(const Collective& collective) { return has_root(collective.op) ? collective.root : -1; }

}  // namespace

// While this rank waits in one of its two transports, or works on its memory, it looks
// after both: the hook that asks for signals is called in every long wait and work.
struct HostsTransport::Watch {
  HostsTransport& transport;
  Call& outer;

  static bool look(void* state) noexcept {
    auto& watch = *static_cast<Watch*>(state);
    watch.transport.note_awaited(watch.outer);
    try {
      watch.outer.check_interrupt();
    } catch (const Error&) {
      return true;
    }
    return watch.transport.aborted().code != ErrorCode::none;  // whose reason is thrown then: run_or_abort
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
  host_of_.resize(static_cast<std::size_t>(world_size_));
  for (int host = 0; host < num_hosts(); ++host)
    for (const int rank : hosts_[static_cast<std::size_t>(host)])
      host_of_[static_cast<std::size_t>(rank)] = host;
  host_ = host_of(rank_);
  place_ = static_cast<int>(std::find(locals().begin(), locals().end(), rank_) - locals().begin());
  std::vector<int> plane, reach;
  for (int host = 0; host < num_hosts() && place_ < num_planes_; ++host)
    plane.push_back(rank_at(host, place_));
  for (int rank = 0; rank < world_size_; ++rank)
    if (rank == rank_ || host_of(rank) != host_) reach.push_back(rank);
  if (!plane.empty()) plane_.emplace(*mesh_, std::move(plane));
  reach_.emplace(*mesh_, std::move(reach));
}

void HostsTransport::run(Call& outer, const Collective& collective) {
  if (has_reduce_op(collective.op)) TcpCollectives::kernel_for(collective.dtype, collective.reduce_op);
  const std::uint32_t sequence = sequence_++;
  mesh_->set_sequence(sequence);
  outer.begin_blocking();
  Watch watch{*this, outer};
  Call call(outer.remaining_s(), Hooks{nullptr, &Watch::look, &watch});
  run_or_abort(*mesh_, sequence,
               {[this](AbortReason reason) { abort(reason); },
                [this](Testimonies& testimonies) { add_testimonies(testimonies); }},
               [&] { dispatch(call, collective, sequence); });
}

void HostsTransport::abort(AbortReason reason) noexcept {
  const AbortReason known = aborted();
  spread(known.code != ErrorCode::none ? known : reason);
}

// What one transport knows the other is told at once, before this rank can leave
// because of it: who waits for this rank shall not take it for the culprit.
AbortReason HostsTransport::aborted() const noexcept {
  const AbortReason remote = mesh_->aborted();
  if (local_ == nullptr) return remote;
  const AbortReason inside = local_->aborted();
  const bool has_ended = remote.code != ErrorCode::none;
  if (has_ended != (inside.code != ErrorCode::none)) spread(has_ended ? remote : inside);
  return has_ended ? remote : inside;
}

void HostsTransport::spread(AbortReason reason) const noexcept {
  if (local_ != nullptr) {
    local_->testify(mesh_->testimony());
    local_->abort(reason);
  }
  mesh_->abort(reason);
}

std::vector<int> HostsTransport::find_missing() {
  return mesh_->find_missing([this](Testimonies& testimonies) { add_testimonies(testimonies); });
}

void HostsTransport::add_testimonies(Testimonies& testimonies) {
  if (local_ != nullptr) local_->add_testimonies(testimonies);
}

void HostsTransport::add_awaited(RankSet& ranks) const {
  ranks |= mesh_->awaited();
  if (local_ != nullptr) local_->add_awaited(ranks);
}

// What this rank testifies, should the group end while it waits inside its host.
void HostsTransport::note_awaited(const Call& call) const {
  if (local_ == nullptr || call.elapsed_s() < kPresenceSeconds) return;
  if (call.present_s() < kPresenceSeconds) return mesh_->set_testimony({});
  RankSet ranks;
  local_->add_awaited(ranks);
  if (ranks.any()) mesh_->set_testimony(ranks);
}

void HostsTransport::add_lost(std::vector<int>& ranks) {
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

void HostsTransport::run_local(Call& call, Op op, DType dtype, std::size_t count, const void* in, void* out,
                               int root, ReduceOp reduce_op) {
  if (local_ == nullptr) {
    if (in != nullptr && out != nullptr) copy_in_passes(call, out, in, count * item_size(dtype));
    return;
  }
  Collective collective;
  collective.op = op;
  collective.reduce_op = reduce_op;
  collective.dtype = dtype;
  collective.root = root;
  collective.count = count;
  collective.in = in;
  collective.out = out;
  run_local(call, collective);
}

void HostsTransport::run_local(Call& call, const Collective& collective) {
  try {
    local_->run(call, collective);
  } catch (const Error&) {
    note_awaited(call);
    throw;
  }
}

// ---- Agreeing ------------------------------------------------------------------

// Whatever its ranks called, a host first gathers their headers, so that nothing
// but this header can disagree inside the local transport.
Agreement HostsTransport::agree_locally(Call& call, const Agreement& own) {
  const Frame frame = frame_of(own);
  std::vector<Frame> frames(locals().size());
  run_local(call, Op::all_gather, DType::uint8, sizeof frame, &frame, frames.data(), -1);
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
  run_local(call, Op::broadcast, DType::uint8, sizeof frame, &frame, &frame, locals().front());
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
  run_local(call, Op::all_to_all, DType::uint64, 1, to_local.data(), sent.data(), -1);
  for (std::size_t i = 0; i < sent.size(); ++i)
    if (sent[i] != expected[i])
      verdict.merge(Agreement::unpaired(agreed.first, locals()[i], sent[i], rank_, expected[i]));
  return verdict;
}

bool HostsTransport::is_riding(const Collective& collective) const {
  if (collective.op != Op::allreduce && collective.op != Op::reduce && collective.op != Op::broadcast)
    return false;
  const DType partial = partial_dtype(collective.dtype, collective.reduce_op);
  return collective.count <= inline_limit(num_hosts()) / item_size(partial);
}

// A small array passes through the leaders with their agreement: one round over
// TCP in all. `message_` holds a header and the array, for the local broadcast.
void HostsTransport::run_riding(Call& call, const Collective& collective, const Agreement& own) {
  const bool is_broadcast = collective.op == Op::broadcast;
  const DType partial =
      is_broadcast ? collective.dtype : partial_dtype(collective.dtype, collective.reduce_op);
  const std::size_t nbytes = collective.count * item_size(partial);
  char* const message = message_.reserve(sizeof(Frame) + nbytes);
  char* const array = message + sizeof(Frame);

  Agreement verdict = agree_locally(call, own);
  const bool has_array = verdict.state == Agreement::State::agreed;
  if (has_array) prepare_riding(call, collective, array);
  begin_step(call);
  if (is_leader()) {
    Exchange exchange(*mesh_, call);
    std::unique_ptr<Rider> rider;
    if (has_array && is_broadcast)
      rider = std::make_unique<BroadcastRider>(array, nbytes, host_of(collective.root) == host_);
    else if (has_array)
      rider = std::make_unique<ReductionRider>(array, partial, collective.reduce_op, collective.count);
    verdict = ferro::agree(exchange, *plane_, verdict, rider.get());
    const Frame frame = frame_of(verdict);
    std::memcpy(message, &frame, sizeof frame);
  }
  begin_step(call);
  const std::size_t message_nbytes = sizeof(Frame) + (has_array ? nbytes : 0);
  run_local(call, Op::broadcast, DType::uint8, message_nbytes, message, message, locals().front());
  Frame frame;
  std::memcpy(&frame, message, sizeof frame);
  agreement_of(frame).check(rank_);
  deliver_riding(call, collective, array);
}

// Gives the leader what its host contributes.
void HostsTransport::prepare_riding(Call& call, const Collective& collective, char* array) {
  if (collective.op == Op::broadcast) {
    if (host_of(collective.root) != host_) return;
    return run_local(call, Op::broadcast, collective.dtype, collective.count, collective.in, array,
                     collective.root);
  }
  const DType partial = partial_dtype(collective.dtype, collective.reduce_op);
  char* const own = own_.reserve(collective.count * item_size(partial));
  to_partial(own, partial, collective.in, collective.dtype, collective.count);
  run_local(call, Op::reduce, partial, collective.count, own, is_leader() ? array : nullptr, locals().front(),
            step_op(collective.reduce_op));
}

void HostsTransport::deliver_riding(Call& call, const Collective& collective, char* array) {
  if (collective.op == Op::broadcast) {
    const std::size_t nbytes = collective.count * item_size(collective.dtype);
    if (collective.out != nullptr && nbytes > 0) std::memcpy(collective.out, array, nbytes);
    return;
  }
  if (collective.op == Op::reduce && rank_ != collective.root) return;
  const DType partial = partial_dtype(collective.dtype, collective.reduce_op);
  if (collective.reduce_op == ReduceOp::mean)
    TcpCollectives::divide(call, array, partial, collective.count, world_size_);
  from_partial(collective.out, collective.dtype, array, partial, collective.count);
}

// ---- Reductions ----------------------------------------------------------------

// allreduce and reduce: as many elements as divide evenly among the planes, then
// the few that are left.
void HostsTransport::reduce_all(Call& call, const Collective& collective) {
  const std::size_t left = collective.count % static_cast<std::size_t>(num_planes_);
  const std::size_t even = collective.count - left;
  if (even > 0) reduce_parts(call, collective, 0, even, num_planes_);
  if (left > 0) reduce_parts(call, collective, even, left, 1);
}

// Part i is reduced inside each host to place i, then over plane i, then shared
// inside the hosts that need it. `count` is a multiple of `num_parts`.
void HostsTransport::reduce_parts(Call& call, const Collective& collective, std::size_t begin,
                                  std::size_t count, int num_parts) {
  const DType dtype = collective.dtype, partial = partial_dtype(dtype, collective.reduce_op);
  const std::size_t item = item_size(dtype), partial_item = item_size(partial);
  const std::size_t part_count = count / static_cast<std::size_t>(num_parts);
  const ReduceOp op = step_op(collective.reduce_op);
  const bool is_everywhere = collective.op == Op::allreduce;
  const bool is_even = num_parts == num_local();
  const bool has_part = place_ < num_parts;

  char* own = bytes(collective.in) + begin * item;
  if (partial != dtype) {
    char* const wide = own_.reserve(count * partial_item);
    to_partial(call, wide, partial, own, dtype, count);
    own = wide;
  }
  char* const part = part_.reserve(part_count * partial_item);
  if (is_even) run_local(call, Op::reduce_scatter, partial, part_count, own, part, -1, op);
  for (int i = 0; i < num_parts && !is_even; ++i)
    run_local(call, Op::reduce, partial, part_count,
              own + static_cast<std::size_t>(i) * part_count * partial_item, place_ == i ? part : nullptr,
              locals()[static_cast<std::size_t>(i)], op);

  begin_step(call);
  if (has_part) {
    Collective over_plane;
    over_plane.op = collective.op;
    over_plane.reduce_op = op;
    over_plane.dtype = partial;
    over_plane.count = part_count;
    over_plane.in = over_plane.out = part;
    if (!is_everywhere) over_plane.root = rank_at(host_of(collective.root), place_);
    plane_->run(call, over_plane);
    if (collective.reduce_op == ReduceOp::mean)
      TcpCollectives::divide(call, part, partial, part_count, world_size_);
    from_partial(call, part, dtype, part, partial, part_count);
  }
  if (!is_everywhere && host_of(collective.root) != host_) return;
  begin_step(call);

  // On the root's host all ranks take part in the sharing, but only the root has an output.
  const bool has_output = is_everywhere || rank_ == collective.root;
  char* const out = has_output ? bytes(collective.out) + begin * item : packed_.reserve(count * item);
  if (is_even) return run_local(call, Op::all_gather, dtype, part_count, part, out, -1);
  for (int i = 0; i < num_parts; ++i) {
    char* const place = out + static_cast<std::size_t>(i) * part_count * item;
    run_local(call, Op::broadcast, dtype, part_count, place_ == i ? part : place, place,
              locals()[static_cast<std::size_t>(i)]);
  }
}

// Chunks for ranks of other hosts are reduced on this host by an agent, the counterpart of
// their owner. The input is brought into the order of those agents first; each owner ends
// with one partial result from every host.
void HostsTransport::reduce_scatter(Call& call, const Collective& collective) {
  const DType dtype = collective.dtype, partial = partial_dtype(dtype, collective.reduce_op);
  const std::size_t count = collective.count, partial_item = item_size(partial),
                    nbytes = count * partial_item;
  const std::vector<std::vector<int>> owners = owners_by_agent();
  std::size_t most = 0;
  for (const auto& ranks : owners) most = std::max(most, ranks.size());
  const char* const packed = pack_for_agents(call, collective, owners, most);
  char* const reduced = part_.reserve(most * nbytes);
  run_local(call, Op::reduce_scatter, partial, most * count, packed, reduced, -1,
            step_op(collective.reduce_op));

  begin_step(call);
  char* const received = received_.reserve(static_cast<std::size_t>(num_hosts()) * nbytes);
  std::vector<const char*> sources;  // by host, this one's is `reduced`
  Exchange exchange(*mesh_, call);
  const std::vector<int>& owned = owners[static_cast<std::size_t>(place_)];
  for (std::size_t i = 1; i < owned.size(); ++i) exchange.send(owned[i], reduced + i * nbytes, nbytes);
  for (int host = 0; host < num_hosts(); ++host) {
    char* const place = host == host_ ? reduced : received + static_cast<std::size_t>(host) * nbytes;
    sources.push_back(place);
    if (host == host_) continue;
    const int num_places = static_cast<int>(hosts_[static_cast<std::size_t>(host)].size());
    exchange.receive(rank_at(host, counterpart(place_, num_places)), place, nbytes);
  }
  exchange.finish();

  const ReduceKernel kernel = TcpCollectives::kernel_for(partial, collective.reduce_op);
  const int divisor = collective.reduce_op == ReduceOp::mean ? world_size_ : 1;
  std::vector<const void*> pass_sources(sources.size());
  work_in_passes(call, count, partial_item * (sources.size() + 1), [&](Range range) {
    const std::size_t offset = range.first * partial_item;
    for (std::size_t host = 0; host < sources.size(); ++host) pass_sources[host] = sources[host] + offset;
    kernel(reduced + offset, pass_sources.data(), num_hosts(), range.count, divisor);
  });
  from_partial(call, collective.out, dtype, reduced, partial, count);
}

// The ranks whose chunks each rank of this host reduces: its own first, then those of other
// hosts whose counterpart it is.
std::vector<std::vector<int>> HostsTransport::owners_by_agent() const {
  std::vector<std::vector<int>> owners;
  for (const int rank : locals()) owners.push_back({rank});
  for (int host = 0; host < num_hosts(); ++host) {
    const std::vector<int>& ranks = hosts_[static_cast<std::size_t>(host)];
    for (int i = 0; host != host_ && i < static_cast<int>(ranks.size()); ++i)
      owners[static_cast<std::size_t>(counterpart(i, num_local()))].push_back(
          ranks[static_cast<std::size_t>(i)]);
  }
  return owners;
}

// The chunks of the input as partial results, by agent, padded to `most` for each.
const char* HostsTransport::pack_for_agents(Call& call, const Collective& collective,
                                            const std::vector<std::vector<int>>& owners, std::size_t most) {
  const DType partial = partial_dtype(collective.dtype, collective.reduce_op);
  const std::size_t item = item_size(collective.dtype), nbytes = collective.count * item_size(partial);
  char* const packed = packed_.reserve(owners.size() * most * nbytes);
  char* place = packed;
  for (const std::vector<int>& ranks : owners) {
    for (const int rank : ranks) {
      const char* const chunk =
          bytes(collective.in) + static_cast<std::size_t>(rank) * collective.count * item;
      to_partial(call, place, partial, chunk, collective.dtype, collective.count);
      place += nbytes;
    }
    const std::size_t padding = (most - ranks.size()) * nbytes;
    work_in_passes(call, padding, 1, [=](Range range) { std::memset(place + range.first, 0, range.count); });
    place += padding;
  }
  return packed;
}

// ---- Moving --------------------------------------------------------------------

// Inside the root's host first; then each plane carries one part to the other hosts.
void HostsTransport::broadcast(Call& call, const Collective& collective) {
  const std::size_t item = item_size(collective.dtype);
  const int root_host = host_of(collective.root);
  char* out = bytes(rank_ == collective.root && collective.out == nullptr ? collective.in : collective.out);
  if (host_ == root_host)
    run_local(call, Op::broadcast, collective.dtype, collective.count, collective.in, out, collective.root);
  const auto part_of = [&](int i) {
    const Range range = chunk_range(collective.count, num_planes_, i);
    return Part{out + range.first * item, range.count};
  };
  begin_step(call);
  if (plane_) {
    Collective over_plane = collective;
    over_plane.root = rank_at(root_host, place_);
    over_plane.count = part_of(place_).count;
    over_plane.in = over_plane.out = part_of(place_).data;
    plane_->run(call, over_plane);
  }
  if (host_ == root_host) return;
  begin_step(call);
  for (int i = 0; i < num_planes_; ++i)
    run_local(call, Op::broadcast, collective.dtype, part_of(i).count, part_of(i).data, part_of(i).data,
              locals()[static_cast<std::size_t>(i)]);
}

// Each chunk crosses once to each other host, to the counterpart of its owner,
// which shares it there.
void HostsTransport::all_gather(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.count * item_size(collective.dtype);
  const auto chunk_of = [&](int rank) {
    return bytes(collective.out) + static_cast<std::size_t>(rank) * nbytes;
  };
  // The input may be a part of the output that is about to be received.
  copy_in_passes(call, chunk_of(rank_), collective.in, nbytes);
  Exchange exchange(*mesh_, call);
  for (int host = 0; host < num_hosts(); ++host) {
    const std::vector<int>& ranks = hosts_[static_cast<std::size_t>(host)];
    if (host == host_) continue;
    exchange.send(ranks[static_cast<std::size_t>(counterpart(place_, static_cast<int>(ranks.size())))],
                  chunk_of(rank_), nbytes);
    for (int i = 0; i < static_cast<int>(ranks.size()); ++i)
      if (counterpart(i, num_local()) == place_)
        exchange.receive(ranks[static_cast<std::size_t>(i)], chunk_of(ranks[static_cast<std::size_t>(i)]),
                         nbytes);
  }
  exchange.finish();
  if (local_ == nullptr) return;
  begin_step(call);
  for (int host = 0; host < num_hosts(); ++host)
    for (int i = 0; i < static_cast<int>(hosts_[static_cast<std::size_t>(host)].size()); ++i) {
      const int holder = host == host_ ? i : counterpart(i, num_local());
      char* const chunk = chunk_of(rank_at(host, i));
      run_local(call, Op::broadcast, collective.dtype, collective.count, chunk, chunk,
                locals()[static_cast<std::size_t>(holder)]);
    }
}

// Pieces that go to or come from ranks of other hosts, straight to where they belong.
void HostsTransport::exchange_remote(Call& call, const Collective& collective, int root) {
  Exchange exchange(*mesh_, call);
  for (int step = 1; step < world_size_; ++step) {
    const int peer = (rank_ + step) % world_size_;
    if (host_of(peer) == host_) continue;
    const Piece piece = outgoing_piece(collective, rank_, root, peer);
    exchange.send(peer, piece.data, piece.nbytes);
  }
  for (int step = 1; step < world_size_; ++step) {
    const int peer = (rank_ + step) % world_size_;
    if (host_of(peer) == host_) continue;
    const Piece piece = incoming_piece(collective, rank_, root, peer);
    exchange.receive(peer, piece.data, piece.nbytes);
  }
  exchange.finish();
}

void HostsTransport::all_to_all(Call& call, const Collective& original) {
  Collective collective = original;
  const Piece last = outgoing_piece(collective, rank_, -1, world_size_ - 1);
  const std::size_t in_nbytes = static_cast<std::size_t>(last.data + last.nbytes - bytes(collective.in));
  // Always from a copy inside the host: pieces of its ranks need not lie together,
  // and what is received may replace what has yet to be sent.
  char* const input = packed_.reserve(in_nbytes);
  copy_in_passes(call, input, collective.in, in_nbytes);
  collective.in = input;
  exchange_remote(call, collective, -1);
  begin_step(call);

  std::vector<std::size_t> send_counts, recv_counts;
  std::size_t send_nbytes = 0, recv_nbytes = 0;
  const std::size_t item = item_size(collective.dtype);
  for (const int rank : locals()) {
    send_counts.push_back(outgoing_piece(collective, rank_, -1, rank).nbytes / item);
    recv_counts.push_back(incoming_piece(collective, rank_, -1, rank).nbytes / item);
    send_nbytes += send_counts.back() * item;
    recv_nbytes += recv_counts.back() * item;
  }
  Collective local = collective;
  char* const outgoing = own_.reserve(send_nbytes);
  char* const incoming = received_.reserve(recv_nbytes);
  char* end = outgoing;
  for (const int rank : locals()) {
    const Piece piece = outgoing_piece(collective, rank_, -1, rank);
    copy_in_passes(call, end, piece.data, piece.nbytes);
    end += piece.nbytes;
  }
  local.in = outgoing;
  local.out = incoming;
  if (is_uneven(collective)) {
    local.send_counts = send_counts.data();
    local.recv_counts = recv_counts.data();
  }
  if (local_ != nullptr)
    run_local(call, local);
  else
    copy_in_passes(call, incoming, outgoing, send_nbytes);
  const char* begin = incoming;
  for (const int rank : locals()) {
    const Piece piece = incoming_piece(collective, rank_, -1, rank);
    copy_in_passes(call, piece.data, begin, piece.nbytes);
    begin += piece.nbytes;
  }
}

void HostsTransport::gather(Call& call, const Collective& original) {
  Collective collective = original;
  const int root = root_of(collective);
  const std::size_t nbytes = collective.count * item_size(collective.dtype);
  const bool is_root = rank_ == root;
  if (is_root) {
    // The input may be a part of the output that is about to be received.
    char* const own = bytes(collective.out) + static_cast<std::size_t>(rank_) * nbytes;
    copy_in_passes(call, own, collective.in, nbytes);
    collective.in = own;
  }
  exchange_remote(call, collective, root);
  begin_step(call);
  if (host_of(root) != host_ || local_ == nullptr) return;
  char* const gathered = is_root ? received_.reserve(nbytes * locals().size()) : nullptr;
  run_local(call, Op::gather, collective.dtype, collective.count, collective.in, gathered, root);
  for (std::size_t i = 0; is_root && i < locals().size(); ++i)
    copy_in_passes(call, bytes(collective.out) + static_cast<std::size_t>(locals()[i]) * nbytes,
                   gathered + i * nbytes, nbytes);
}

void HostsTransport::scatter(Call& call, const Collective& collective) {
  const int root = root_of(collective);
  const std::size_t nbytes = collective.count * item_size(collective.dtype);
  exchange_remote(call, collective, root);
  begin_step(call);
  if (host_of(root) != host_) return;
  char* const packed = rank_ == root ? packed_.reserve(nbytes * locals().size()) : nullptr;
  for (std::size_t i = 0; rank_ == root && i < locals().size(); ++i)
    copy_in_passes(call, packed + i * nbytes, outgoing_piece(collective, rank_, root, locals()[i]).data,
                   nbytes);
  run_local(call, Op::scatter, collective.dtype, collective.count, packed, collective.out, root);
}

}  // namespace ferro
