// A group's collectives over TCP alone.
#ifndef FERRO_TCP_TRANSPORT_HPP
#define FERRO_TCP_TRANSPORT_HPP

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ferro/scratch.hpp"
#include "ferro/tcp_agreement.hpp"
#include "ferro/tcp_collectives.hpp"
#include "ferro/tcp_mesh.hpp"
#include "ferro/transport.hpp"

namespace ferro {

class TcpTransport final : public Transport {
 public:
  // `members`: the ranks that take part, in the order of their chunks; own rank is
  // one of them, and the mesh reaches all others. Transports that share a mesh are
  // run by one thread.
  TcpTransport(std::shared_ptr<TcpMesh> mesh, std::vector<int> members);

  void run(Call& call, const Collective& collective) override;
  void abort(AbortReason reason) noexcept override;
  AbortReason aborted() const noexcept override { return mesh_->aborted(); }
  void add_lost(RankSet& ranks) override { mesh_->add_lost(ranks); }
  RankSet find_missing() override {
    return mesh_->find_missing([](Testimonies&) {});
  }
  void add_awaited(RankSet& ranks) const override { ranks |= mesh_->awaited(); }
  void testify(const Call& call, const Error& error) noexcept override {
    mesh_->add_to_testimony(call, error);
  }
  void note_waiting_for_collective(const Call& call, bool is_waiting) noexcept override {
    mesh_->note_waiting_for_collective(call, is_waiting);
  }
  void note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept override {
    mesh_->note_awaited_in_messages(call, awaited);
  }
  void note_several_callers() noexcept override { mesh_->note_several_callers(); }
  void add_testimonies(Testimonies& testimonies) override { mesh_->add_testimonies(testimonies); }
  void close() noexcept override { mesh_->close(); }

 private:
  void run_agreed(Call& call, const Collective& collective, std::uint32_t sequence);
  void run_inline(Exchange& exchange, const Collective& collective, const Agreement& own);
  void run_eager(Exchange& exchange, const Collective& collective, const Agreement& own);
  void run_riding(Call& call, Exchange& exchange, const Collective& collective, const Agreement& own);
  void check(Exchange& exchange, const Agreement& verdict);
  void check_inline_sizes(const Exchange& exchange, const Collective& collective, int root) const;
  void deliver_inline(const Exchange& exchange, const Collective& collective, int root);
  bool is_inline(const Collective& collective) const;

  std::shared_ptr<TcpMesh> mesh_;
  TcpCollectives group_;
  std::uint32_t sequence_ = 0;
  Scratch riding_;
  Scratch discarded_;
};

// Runs `body`, `call` of `transport`, which uses `mesh`. Whatever that throws, except a mismatch, ends
// the group; the error that is passed on names the culprit that then stands as the first and, after a
// timeout, who is missing.
void run_or_abort(Transport& transport, TcpMesh& mesh, const Call& call, std::uint32_t sequence,
                  const std::function<void()>& body);

}  // namespace ferro

#endif  // FERRO_TCP_TRANSPORT_HPP
