#include "ferro/tcp_agreement.hpp"

#include <algorithm>
#include <cstring>

#include "ferro/recursive_doubling.hpp"
#include "ferro/reduction.hpp"
#include "ferro/tcp_cost.hpp"
#include "ferro/wide_float.hpp"

namespace ferro {
namespace {

// One round's worth of frames to some peers, and what came back.
class Round {
 public:
  Round(Exchange& exchange, const Members& group, Agreement& verdict, Rider* rider)
      : exchange_(exchange), group_(group), verdict_(verdict), rider_(rider) {}

  void send(int peer_index) {
    Frame frame = frame_of(verdict_);
    const void* const data = is_riding() ? rider_->data() : nullptr;
    frame.payload_nbytes = data != nullptr ? static_cast<std::uint32_t>(rider_->nbytes()) : 0;
    exchange_.send_frame(group_.member(peer_index), frame, data);
  }
  void receive(int peer_index) {
    exchange_.receive_frame(group_.member(peer_index), rider_ != nullptr ? rider_->nbytes() : 0);
  }

  // `indices` in rising order; this rank's own stands for what it has itself.
  void combine(const std::vector<int>& indices) {
    for (const int i : indices)
      if (i != group_.index()) verdict_.merge(agreement_of(exchange_.frame(group_.member(i))));
    // Frames of ranks that called something else may carry a payload of another size.
    if (!is_riding()) return;
    std::vector<const void*> sources;
    for (const int i : indices) sources.push_back(i == group_.index() ? rider_->data() : payload_of(i));
    rider_->combine(sources);
  }

 private:
  bool is_riding() const { return rider_ != nullptr && verdict_.state == Agreement::State::agreed; }
  const void* payload_of(int i) const {
    const int peer = group_.member(i);
    const std::size_t nbytes = exchange_.frame(peer).payload_nbytes;
    if (nbytes == 0) return nullptr;
    if (nbytes != rider_->nbytes()) throw Error(ErrorCode::io, peer, "a payload of unexpected size");
    return exchange_.payload(peer);
  }

  Exchange& exchange_;
  const Members& group_;
  Agreement& verdict_;
  Rider* rider_;
};

void agree_directly(Exchange& exchange, const Members& group, Round& round) {
  std::vector<int> indices;
  for (int i = 0; i < group.size(); ++i) indices.push_back(i);
  for (const int i : indices)
    if (i != group.index()) round.send(i);
  for (const int i : indices)
    if (i != group.index()) round.receive(i);
  exchange.finish();
  round.combine(indices);
}

void agree_by_doubling(Exchange& exchange, const Members& group, Round& round) {
  for (const DoublingStep& step : doubling_steps(group.size(), group.index())) {
    if (step.sends) round.send(step.peer);
    if (step.receives) round.receive(step.peer);
    exchange.finish();
    if (step.is_result) {
      round.combine({step.peer});
    } else if (step.receives) {
      round.combine({std::min(step.peer, group.index()), std::max(step.peer, group.index())});
    }
  }
}

}  // namespace

Rider::Rider(const Collective& collective, void* array, bool is_known)
    : array_(array),
      partial_(partial_dtype(collective)),
      count_(collective.count),
      kernel_(has_reduce_op(collective.op) ? kernel_for(partial_, partial_op(collective.reduce_op))
                                           : nullptr),
      is_known_(is_known) {}

void Rider::combine(const std::vector<const void*>& sources) {
  if (kernel_ != nullptr) {
    if (count_ > 0) kernel_(array_, sources.data(), static_cast<int>(sources.size()), count_, 1);
    return;
  }
  if (is_known_) return;
  for (const void* source : sources) {
    if (source == nullptr) continue;
    std::memcpy(array_, source, nbytes());
    is_known_ = true;
    return;
  }
}

void deliver_riding(Call& call, const Collective& collective, void* array, int own_rank, int num_ranks) {
  if (collective.op == Op::broadcast) {
    const std::size_t nbytes = collective.nbytes();
    if (collective.out != nullptr && nbytes > 0) std::memcpy(collective.out, array, nbytes);
    return;
  }
  if (collective.op == Op::reduce && own_rank != collective.root) return;
  const DType partial = partial_dtype(collective);
  if (collective.reduce_op == ReduceOp::mean) divide(call, array, partial, collective.count, num_ranks);
  from_partial(collective.out, collective.dtype, array, partial, collective.count);
}

Agreement agree(Exchange& exchange, const Members& group, Agreement own, Rider* rider) {
  Round round(exchange, group, own, rider);
  if (group.size() <= kDirectRanks)
    agree_directly(exchange, group, round);
  else
    agree_by_doubling(exchange, group, round);
  return own;
}

Agreement agree_on_counts(Exchange& exchange, const Members& group, const Agreement& agreed,
                          const Collective& collective) {
  const auto count_of = [](const std::size_t* counts, std::size_t count, int i) -> std::uint64_t {
    return counts != nullptr ? counts[i] : count;
  };
  const int own = group.index();
  for (int i = 0; i < group.size(); ++i) {
    if (i == own) continue;
    Frame frame = frame_of(agreed);
    frame.second.count = count_of(collective.send_counts, collective.count, i);
    exchange.send_frame(group.member(i), frame, nullptr);
  }
  for (int i = 0; i < group.size(); ++i)
    if (i != own) exchange.receive_frame(group.member(i), 0);
  exchange.finish();
  Agreement verdict = agreed;
  for (int i = 0; i < group.size(); ++i) {
    const std::uint64_t sent = i == own ? count_of(collective.send_counts, collective.count, own)
                                        : exchange.frame(group.member(i)).second.count;
    const std::uint64_t expected = count_of(collective.recv_counts, collective.count, i);
    if (sent != expected)
      verdict.merge(Agreement::unpaired(agreed.first, group.member(i), sent, group.member(own), expected));
  }
  return verdict;
}

}  // namespace ferro
