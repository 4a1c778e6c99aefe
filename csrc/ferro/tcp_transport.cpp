#include "ferro/tcp_transport.hpp"

#include <cstring>
#include <new>
#include <utility>

#include "ferro/reduction.hpp"
#include "ferro/tcp_cost.hpp"
#include "ferro/wide_float.hpp"

namespace ferro {
namespace {

AbortReason reason_of(const Error& error, int own_rank, std::uint32_t sequence) {
  return {error.code, error.peer >= 0 ? error.peer : own_rank, own_rank, sequence};
}

// For what this rank testifies, should the group end while it is in a collective.
class Presence {
 public:
  Presence(TcpMesh& mesh, const Call& call) : mesh_(mesh), call_(call) {
    mesh_.note_in_collective(true);
    mesh_.note_waiting_for_collective(call_, true);
  }
  ~Presence() {
    mesh_.note_waiting_for_collective(call_, false);
    mesh_.note_in_collective(false);
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  TcpMesh& mesh_;
  const Call& call_;
};

}  // namespace

void run_or_abort(Transport& transport, TcpMesh& mesh, const Call& call, std::uint32_t sequence,
                  const std::function<void()>& body) {
  const Presence presence(mesh, call);
  const auto ended_by = [&](Error error) {
    const AbortReason reason = reason_of(error, mesh.own_rank(), sequence);
    transport.abort(reason);
    RankSet missing;
    if (mesh.aborted().code == ErrorCode::timeout) missing = transport.find_missing();
    const AbortReason winner = mesh.aborted();
    if (winner.code != reason.code || winner.culprit != reason.culprit) error = mesh.error_of(winner);
    if (winner.code != ErrorCode::timeout) return error;
    error.awaited = error.missing;
    name_missing(error, missing);
    return error;
  };
  try {
    body();
    mesh.clear_awaited_in_collective();
  } catch (const Error& error) {
    if (error.code != ErrorCode::mismatch) throw ended_by(error);
    mesh.clear_awaited_in_collective();
    throw;
  } catch (const std::bad_alloc&) {
    throw ended_by(Error(ErrorCode::out_of_memory));
  }
}

TcpTransport::TcpTransport(std::shared_ptr<TcpMesh> mesh, std::vector<int> members)
    : mesh_(std::move(mesh)), group_(*mesh_, std::move(members)) {}

void TcpTransport::run(Call& call, const Collective& collective) {
  // Before anything is sent: ranks that ask for the impossible each find out by themselves.
  if (has_reduce_op(collective.op)) kernel_for(collective.dtype, collective.reduce_op);
  const std::uint32_t sequence = sequence_++;
  mesh_->set_sequence(sequence);
  run_or_abort(*this, *mesh_, call, sequence, [&] { run_agreed(call, collective, sequence); });
}

void TcpTransport::abort(AbortReason reason) noexcept {
  if (reason.code == ErrorCode::timeout) mesh_->look();
  mesh_->abort(reason);
}

void TcpTransport::run_agreed(Call& call, const Collective& collective, std::uint32_t sequence) {
  const Agreement own = Agreement::of(mesh_->own_rank(), fingerprint_of(collective, sequence));
  {
    Exchange exchange(*mesh_, call);
    if (is_inline(collective) && group_.size() <= kDirectRanks) return run_inline(exchange, collective, own);
    if (is_inline(collective)) return run_riding(call, exchange, collective, own);
    if (eager_nbytes(own.first, group_.size()) > 0) return run_eager(exchange, collective, own);
    const Agreement agreed = agree(exchange, group_, own, nullptr);
    check(exchange, agreed);
    if (is_uneven(collective)) {
      const Agreement paired = agree_on_counts(exchange, group_, agreed, collective);
      agree(exchange, group_, paired, nullptr).check(mesh_->own_rank());
    }
  }
  if (collective.op != Op::barrier) group_.run(call, collective);
}

// Whether agreeing and moving are one step, decided by what must be the same on all ranks.
bool TcpTransport::is_inline(const Collective& collective) const {
  if (group_.size() == 1 || collective.op == Op::barrier || is_uneven(collective)) return false;
  const std::size_t limit = inline_limit(group_.size());
  if (group_.size() <= kDirectRanks) return collective.count <= limit / item_size(collective.dtype);
  const bool is_one_array =
      collective.op == Op::allreduce || collective.op == Op::reduce || collective.op == Op::broadcast;
  return is_one_array && collective.count <= limit / item_size(partial_dtype(collective));
}

// Few ranks: each sends to each what that one needs, behind its header.
void TcpTransport::run_inline(Exchange& exchange, const Collective& collective, const Agreement& own) {
  const int size = group_.size(), index = group_.index();
  const int root = has_root(collective.op) ? group_.index_of(collective.root) : -1;
  for (int step = 1; step < size; ++step) {
    const int peer = (index + step) % size;
    const Piece piece = outgoing_piece(collective, index, root, peer);
    Frame frame = frame_of(own);
    frame.payload_nbytes = static_cast<std::uint32_t>(piece.nbytes);
    exchange.send_frame(group_.member(peer), frame, piece.data);
    exchange.receive_frame(group_.member(peer), incoming_piece(collective, index, root, peer).nbytes);
  }
  exchange.finish();
  Agreement verdict = own;
  for (int i = 0; i < size; ++i)
    if (i != index) verdict.merge(agreement_of(exchange.frame(group_.member(i))));
  check(exchange, verdict);
  check_inline_sizes(exchange, collective, root);
  deliver_inline(exchange, collective, root);
}

// Two ranks: the input follows the header at once; the output waits for the verdict.
void TcpTransport::run_eager(Exchange& exchange, const Collective& collective, const Agreement& own) {
  const int peer = group_.member(1 - group_.index());
  exchange.send_frame(peer, frame_of(own), nullptr);
  exchange.send(peer, collective.in, eager_nbytes(own.first, group_.size()));
  exchange.receive_frame(peer, 0);
  while (!exchange.has_frame(peer)) exchange.wait();
  Agreement verdict = own;
  verdict.merge(agreement_of(exchange.frame(peer)));
  check(exchange, verdict);
  group_.reduce_all(exchange, collective);
}

// Throws unless all agreed. Whatever this rank called, what its peer sent eagerly must
// be off the stream before the next header.
void TcpTransport::check(Exchange& exchange, const Agreement& verdict) {
  if (verdict.state != Agreement::State::agreed && group_.size() == 2) {
    const int peer = group_.member(1 - group_.index());
    const std::size_t nbytes = eager_nbytes(exchange.frame(peer).first, group_.size());
    exchange.receive(peer, discarded_.reserve(nbytes), nbytes);
    exchange.finish();
  }
  verdict.check(mesh_->own_rank());
}

void TcpTransport::check_inline_sizes(const Exchange& exchange, const Collective& collective,
                                      int root) const {
  for (int i = 0; i < group_.size(); ++i) {
    if (i == group_.index()) continue;
    const std::size_t expected = incoming_piece(collective, group_.index(), root, i).nbytes;
    if (exchange.frame(group_.member(i)).payload_nbytes != expected)
      throw Error(ErrorCode::io, group_.member(i), "a payload of unexpected size");
  }
}

void TcpTransport::deliver_inline(const Exchange& exchange, const Collective& collective, int root) {
  const int size = group_.size(), index = group_.index();
  const Piece own = outgoing_piece(collective, index, root, index);
  if (has_reduce_op(collective.op)) {
    if (collective.op == Op::reduce && index != root) return;
    std::vector<const void*> sources;
    for (int i = 0; i < size; ++i)
      sources.push_back(i == index ? own.data : exchange.payload(group_.member(i)));
    kernel_for(collective.dtype, collective.reduce_op)(collective.out, sources.data(), size, collective.count,
                                                       divisor_of(collective.reduce_op, size));
    return;
  }
  // Everything is sent; only the own piece may still lie where another's belongs.
  const Piece place = incoming_piece(collective, index, root, index);
  if (place.data != nullptr && place.nbytes > 0) std::memmove(place.data, own.data, own.nbytes);
  for (int i = 0; i < size; ++i) {
    const Piece piece = incoming_piece(collective, index, root, i);
    if (i != index && piece.nbytes > 0)
      std::memcpy(piece.data, exchange.payload(group_.member(i)), piece.nbytes);
  }
}

// Many ranks: one array is combined on its way through the agreement.
void TcpTransport::run_riding(Call& call, Exchange& exchange, const Collective& collective,
                              const Agreement& own) {
  const int own_rank = mesh_->own_rank();
  const DType partial = partial_dtype(collective);
  char* const array = riding_.reserve(collective.count * item_size(partial));
  const bool is_known = collective.op != Op::broadcast || own_rank == collective.root;
  if (is_known) to_partial(array, partial, collective.in, collective.dtype, collective.count);
  Rider rider(collective, array, is_known);
  agree(exchange, group_, own, &rider).check(own_rank);
  deliver_riding(call, collective, array, own_rank, group_.size());
}

}  // namespace ferro
