// The collectives of HostsTransport. When one of these runs, all ranks have agreed on it.
#include <algorithm>
#include <cstring>

#include "ferro/hosts_transport.hpp"
#include "ferro/passes.hpp"
#include "ferro/reduction.hpp"
#include "ferro/wide_float.hpp"

namespace ferro {

// ---- Reductions ----------------------------------------------------------------

// allreduce and reduce: as many elements as divide evenly among the planes, then
// the few that are left.
void HostsTransport::reduce_all(Call& call, const Collective& collective) {
  const std::size_t left = collective.count % num_planes_;
  const std::size_t even = collective.count - left;
  if (even > 0) reduce_parts(call, collective, {0, even / num_planes_, num_planes_});
  if (left > 0) reduce_parts(call, collective, {even, left, 1});
}

// Part i is reduced inside each host to place i, then over plane i, then shared
// inside the hosts that need it.
void HostsTransport::reduce_parts(Call& call, const Collective& collective, Parts parts) {
  char* const part = reduce_inside(call, collective, parts);
  begin_step(call);
  if (place_ < parts.number) reduce_over_plane(call, collective, part, parts.part_count);
  const bool has_result = collective.op == Op::allreduce || host_of(collective.root) == host_;
  if (!has_result) return;
  begin_step(call);
  share_parts(call, collective, parts, part);
}

// Returns this rank's part as a partial result, if there is one for its place.
char* HostsTransport::reduce_inside(Call& call, const Collective& collective, Parts parts) {
  const DType dtype = collective.dtype, partial = partial_dtype(collective);
  const std::size_t part_nbytes = parts.part_count * item_size(partial);
  const ReduceOp op = partial_op(collective.reduce_op);
  char* own = mutable_bytes(collective.in) + parts.begin * item_size(dtype);
  if (partial != dtype) {
    char* const wide = own_.reserve(parts.number * part_nbytes);
    to_partial(call, wide, partial, own, dtype, parts.count());
    own = wide;
  }
  char* const part = part_.reserve(part_nbytes);
  if (parts.number == num_local()) {
    run_local(call, Collective::of(Op::reduce_scatter, partial, parts.part_count, own, part).reducing(op));
    return part;
  }
  for (int i = 0; i < parts.number; ++i) {
    char* const out = place_ == i ? part : nullptr;
    run_local(call, Collective::of(Op::reduce, partial, parts.part_count, own + i * part_nbytes, out)
                        .rooted(locals()[i])
                        .reducing(op));
  }
  return part;
}

// In place; the result is of the collective's own type.
void HostsTransport::reduce_over_plane(Call& call, const Collective& collective, char* part,
                                       std::size_t part_count) {
  const DType partial = partial_dtype(collective);
  Collective over_plane = Collective::of(collective.op, partial, part_count, part, part)
                              .reducing(partial_op(collective.reduce_op));
  if (has_root(collective.op)) over_plane.root = rank_at(host_of(collective.root), place_);
  plane_->run(call, over_plane);
  if (collective.reduce_op == ReduceOp::mean) divide(call, part, partial, part_count, world_size_);
  from_partial(call, part, collective.dtype, part, partial, part_count);
}

// All ranks of the host take part in the sharing, even if only the root has an output.
void HostsTransport::share_parts(Call& call, const Collective& collective, Parts parts, const char* part) {
  const DType dtype = collective.dtype;
  const std::size_t itemsize = item_size(dtype), part_nbytes = parts.part_count * itemsize;
  const bool has_output = collective.op == Op::allreduce || rank_ == collective.root;
  char* const out = has_output ? mutable_bytes(collective.out) + parts.begin * itemsize
                               : packed_.reserve(parts.number * part_nbytes);
  if (parts.number == num_local())
    return run_local(call, Collective::of(Op::all_gather, dtype, parts.part_count, part, out));
  for (int i = 0; i < parts.number; ++i) {
    char* const part_out = out + i * part_nbytes;
    const char* const in = place_ == i ? part : part_out;
    run_local(call, Collective::of(Op::broadcast, dtype, parts.part_count, in, part_out).rooted(locals()[i]));
  }
}

// Chunks for ranks of other hosts are reduced on this host by an agent, the counterpart of
// their owner. The input is first brought into the order of those agents; in the end each owner
// has one partial result from every host.
void HostsTransport::reduce_scatter(Call& call, const Collective& collective) {
  const DType dtype = collective.dtype, partial = partial_dtype(collective);
  const std::size_t count = collective.count, partial_itemsize = item_size(partial),
                    nbytes = count * partial_itemsize;
  const std::vector<std::vector<int>> owners = owners_by_agent();
  std::size_t most = 0;
  for (const auto& ranks : owners) most = std::max(most, ranks.size());
  const char* const packed = pack_for_agents(call, collective, owners, most);
  char* const reduced = part_.reserve(most * nbytes);
  run_local(call, Collective::of(Op::reduce_scatter, partial, most * count, packed, reduced)
                      .reducing(partial_op(collective.reduce_op)));

  begin_step(call);
  char* const received = received_.reserve(num_hosts() * nbytes);
  std::vector<const char*> sources;  // by host, this one's is `reduced`
  Exchange exchange(*mesh_, call);
  const std::vector<int>& owned = owners[place_];
  for (std::size_t i = 1; i < owned.size(); ++i) exchange.send(owned[i], reduced + i * nbytes, nbytes);
  for (int host = 0; host < num_hosts(); ++host) {
    char* const source = host == host_ ? reduced : received + host * nbytes;
    sources.push_back(source);
    if (host == host_) continue;
    exchange.receive(rank_at(host, counterpart(place_, num_places(host))), source, nbytes);
  }
  exchange.finish();

  const ReduceKernel kernel = kernel_for(partial, collective.reduce_op);
  const int divisor = divisor_of(collective.reduce_op, world_size_);
  std::vector<const void*> pass_sources(sources.size());
  work_in_passes(call, count, partial_itemsize * (sources.size() + 1), [&](Range range) {
    const std::size_t offset = range.first * partial_itemsize;
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
  for (int host = 0; host < num_hosts(); ++host)
    for (int i = 0; host != host_ && i < num_places(host); ++i)
      owners[counterpart(i, num_local())].push_back(rank_at(host, i));
  return owners;
}

// The chunks of the input as partial results, by agent, padded to `most` chunks for each.
const char* HostsTransport::pack_for_agents(Call& call, const Collective& collective,
                                            const std::vector<std::vector<int>>& owners, std::size_t most) {
  const DType partial = partial_dtype(collective);
  const std::size_t itemsize = item_size(collective.dtype), nbytes = collective.count * item_size(partial);
  char* const packed = packed_.reserve(owners.size() * most * nbytes);
  char* next = packed;
  for (const std::vector<int>& ranks : owners) {
    for (const int rank : ranks) {
      const char* const chunk = mutable_bytes(collective.in) + rank * collective.count * itemsize;
      to_partial(call, next, partial, chunk, collective.dtype, collective.count);
      next += nbytes;
    }
    const std::size_t padding = (most - ranks.size()) * nbytes;
    work_in_passes(call, padding, 1, [=](Range range) { std::memset(next + range.first, 0, range.count); });
    next += padding;
  }
  return packed;
}

// ---- Moving --------------------------------------------------------------------

// Inside the root's host first; then each plane carries one part to the other hosts.
void HostsTransport::broadcast(Call& call, const Collective& collective) {
  const std::size_t itemsize = item_size(collective.dtype);
  const int root_host = host_of(collective.root);
  char* out =
      mutable_bytes(rank_ == collective.root && collective.out == nullptr ? collective.in : collective.out);
  if (host_ == root_host) run_local(call, collective.between(collective.in, out));
  const auto part_of = [&](int i) {
    const Range range = chunk_range(collective.count, num_planes_, i);
    return Part{out + range.first * itemsize, range.count};
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
  for (int i = 0; i < num_planes_; ++i) {
    const Part part = part_of(i);
    run_local(call, Collective::of(Op::broadcast, collective.dtype, part.count, part.data, part.data)
                        .rooted(locals()[i]));
  }
}

// Each chunk crosses once to each other host, to the counterpart of its owner,
// which shares it there.
void HostsTransport::all_gather(Call& call, const Collective& collective) {
  const std::size_t nbytes = collective.nbytes();
  const auto chunk_of = [&](int rank) { return mutable_bytes(collective.out) + rank * nbytes; };
  // The input may be a part of the output that is about to be received.
  copy_in_passes(call, chunk_of(rank_), collective.in, nbytes);
  Exchange exchange(*mesh_, call);
  for (int host = 0; host < num_hosts(); ++host) {
    if (host == host_) continue;
    exchange.send(rank_at(host, counterpart(place_, num_places(host))), chunk_of(rank_), nbytes);
    for (int i = place_; i < num_places(host); i += num_local())  // those whose counterpart this rank is
      exchange.receive(rank_at(host, i), chunk_of(rank_at(host, i)), nbytes);
  }
  exchange.finish();
  if (local_ == nullptr) return;
  begin_step(call);
  for (int host = 0; host < num_hosts(); ++host)
    for (int i = 0; i < num_places(host); ++i) {
      const int holder = host == host_ ? i : counterpart(i, num_local());
      char* const chunk = chunk_of(rank_at(host, i));
      run_local(call, Collective::of(Op::broadcast, collective.dtype, collective.count, chunk, chunk)
                          .rooted(locals()[holder]));
    }
}

// Pieces that go to or come from ranks of other hosts, straight to where they belong.
void HostsTransport::exchange_remote(Call& call, const Collective& collective, int root) {
  Exchange exchange(*mesh_, call);
  for (const int index : reach_->peers()) {
    const int peer = reach_->member(index);
    const Piece piece = outgoing_piece(collective, rank_, root, peer);
    exchange.send(peer, piece);
  }
  for (const int index : reach_->peers()) {
    const int peer = reach_->member(index);
    const Piece piece = incoming_piece(collective, rank_, root, peer);
    exchange.receive(peer, piece);
  }
  exchange.finish();
}

void HostsTransport::all_to_all(Call& call, const Collective& collective) {
  const std::size_t in_nbytes = all_to_all_input_nbytes(collective, world_size_);
  // What is received may overwrite what has yet to be sent.
  char* const input = packed_.reserve(in_nbytes);
  copy_in_passes(call, input, collective.in, in_nbytes);
  const Collective from_copy = collective.between(input, collective.out);
  exchange_remote(call, from_copy, -1);
  begin_step(call);
  exchange_local(call, from_copy);
}

// The pieces of an all_to_all that stay on this host, which need not be contiguous.
void HostsTransport::exchange_local(Call& call, const Collective& collective) {
  const std::size_t itemsize = item_size(collective.dtype);
  std::vector<Piece> outgoing, incoming;
  std::vector<std::size_t> send_counts, recv_counts;
  std::size_t send_nbytes = 0, recv_nbytes = 0;
  for (const int rank : locals()) {
    outgoing.push_back(outgoing_piece(collective, rank_, -1, rank));
    incoming.push_back(incoming_piece(collective, rank_, -1, rank));
    send_counts.push_back(outgoing.back().nbytes / itemsize);
    recv_counts.push_back(incoming.back().nbytes / itemsize);
    send_nbytes += outgoing.back().nbytes;
    recv_nbytes += incoming.back().nbytes;
  }
  char* const packed = own_.reserve(send_nbytes);
  char* const received = received_.reserve(recv_nbytes);
  char* next = packed;
  for (const Piece& piece : outgoing) {
    copy_in_passes(call, next, piece.data, piece.nbytes);
    next += piece.nbytes;
  }
  Collective local = collective.between(packed, received);
  if (is_uneven(collective)) {
    local.send_counts = send_counts.data();
    local.recv_counts = recv_counts.data();
  }
  if (local_ != nullptr)
    run_local(call, local);
  else
    copy_in_passes(call, received, packed, send_nbytes);
  next = received;
  for (const Piece& piece : incoming) {
    copy_in_passes(call, piece.data, next, piece.nbytes);
    next += piece.nbytes;
  }
}

void HostsTransport::gather(Call& call, const Collective& original) {
  Collective collective = original;
  const int root = collective.root;
  const std::size_t nbytes = collective.nbytes();
  const bool is_root = rank_ == root;
  if (is_root) {
    // The input may be a part of the output that is about to be received.
    char* const own = mutable_bytes(collective.out) + rank_ * nbytes;
    copy_in_passes(call, own, collective.in, nbytes);
    collective.in = own;
  }
  exchange_remote(call, collective, root);
  begin_step(call);
  if (host_of(root) != host_ || local_ == nullptr) return;
  char* const gathered = is_root ? received_.reserve(nbytes * locals().size()) : nullptr;
  run_local(call, collective.between(collective.in, gathered));
  for (std::size_t i = 0; is_root && i < locals().size(); ++i)
    copy_in_passes(call, mutable_bytes(collective.out) + locals()[i] * nbytes, gathered + i * nbytes, nbytes);
}

void HostsTransport::scatter(Call& call, const Collective& collective) {
  const int root = collective.root;
  const std::size_t nbytes = collective.nbytes();
  exchange_remote(call, collective, root);
  begin_step(call);
  if (host_of(root) != host_) return;
  char* const packed = rank_ == root ? packed_.reserve(nbytes * locals().size()) : nullptr;
  for (std::size_t i = 0; rank_ == root && i < locals().size(); ++i)
    copy_in_passes(call, packed + i * nbytes, outgoing_piece(collective, rank_, root, locals()[i]).data,
                   nbytes);
  run_local(call, collective.between(packed, collective.out));
}

}  // namespace ferro
