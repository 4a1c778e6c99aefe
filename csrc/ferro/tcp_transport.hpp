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
  void abort(AbortReason reason) noexcept override { mesh_->abort(reason); }
  AbortReason aborted() const noexcept override { return mesh_->aborted(); }
  void add_lost(std::vector<int>& ranks) override { mesh_->add_lost(ranks); }
  void close() noexcept override { mesh_->close(); }

 private:
  void run_agreed(Call& call, const Collective& collective, std::uint32_t sequence);
  void run_inline(Exchange& exchange, const Collective& collective, const Agreement& own);
  void run_riding(Exchange& exchange, const Collective& collective, const Agreement& own);
  void check_inline_sizes(const Exchange& exchange, const Collective& collective, int root) const;
  void deliver_inline(const Exchange& exchange, const Collective& collective, int root);
  bool is_inline(const Collective& collective) const;

  std::shared_ptr<TcpMesh> mesh_;
  TcpCollectives group_;
  std::uint32_t sequence_ = 0;
  Scratch riding_;
};

// Runs `body`; whatever but a mismatch it throws ends the group through `abort`,
// and the culprit that then stands as the first is the one that is thrown.
void run_or_abort(TcpMesh& mesh, std::uint32_t sequence, const std::function<void(AbortReason)>& abort,
                  const std::function<void()>& body);

}  // namespace ferro

#endif  // FERRO_TCP_TRANSPORT_HPP
