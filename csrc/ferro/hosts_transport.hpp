// A group's collectives where its ranks share memory inside hosts and use TCP
// between hosts. ALGORITHMS.md, section Hosts.
#ifndef FERRO_HOSTS_TRANSPORT_HPP
#define FERRO_HOSTS_TRANSPORT_HPP

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ferro/members.hpp"
#include "ferro/scratch.hpp"
#include "ferro/tcp_agreement.hpp"
#include "ferro/tcp_collectives.hpp"
#include "ferro/tcp_mesh.hpp"
#include "ferro/transport.hpp"

namespace ferro {

// Terms used below: each rank has a place on its host, counted from 0; the rank at
// place 0 is the host's leader. A plane consists of the ranks at the same place on all
// hosts; there are as many planes as the smallest host has ranks, and they work at the
// same time.
class HostsTransport final : public Transport {
 public:
  // `local` joins the ranks of this host, and is null where there is only one; `mesh`
  // reaches all ranks of other hosts. `hosts` lists the ranks of each host, ascending.
  HostsTransport(std::unique_ptr<Transport> local, std::shared_ptr<TcpMesh> mesh,
                 std::vector<std::vector<int>> hosts);

  void run(Call& call, const Collective& collective) override;
  void abort(AbortReason reason) noexcept override;
  AbortReason aborted() const noexcept override;
  void add_lost(RankSet& ranks) override;
  RankSet find_missing() override;
  void add_awaited(RankSet& ranks) const override;
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
  void add_testimonies(Testimonies& testimonies) override;
  std::uint32_t succession() const noexcept override;
  bool advance_succession(std::uint32_t from, std::uint32_t to) noexcept override;
  void close() noexcept override;

 private:
  struct Watch;
  // A part of an array, `count` elements long.
  struct Part {
    char* data;
    std::size_t count;
  };
  // What of an array is reduced in one go: `number` parts side by side, each over a plane of its own.
  struct Parts {
    std::size_t begin;
    std::size_t part_count;
    int number;

    std::size_t count() const { return part_count * number; }
  };

  void spread(AbortReason reason) const noexcept;
  // Extends the deadline a little with each step, so that a rank that waits for a go-between
  // waits longer than the go-between does.
  static void begin_step(Call& call);
  void dispatch(Call& call, const Collective& collective, std::uint32_t sequence);

  // The verdict over this host's ranks, the same on each of them.
  Agreement agree_locally(Call& call, const Agreement& own);
  Agreement agree(Call& call, const Agreement& own);
  Agreement agree_on_pairs(Call& call, const Agreement& agreed, const Collective& collective);
  // Riding: an array that is small enough travels with the agreement, as a Rider on the leaders' frames and
  // behind the verdict that a leader tells its host.
  bool is_riding(const Collective& collective) const;
  void run_riding(Call& call, const Collective& collective, const Agreement& own);
  void prepare_riding(Call& call, const Collective& collective, char* array);

  // ---- Collectives (hosts_collectives.cpp) ----
  void reduce_all(Call& call, const Collective& collective);
  void reduce_parts(Call& call, const Collective& collective, Parts parts);
  char* reduce_inside(Call& call, const Collective& collective, Parts parts);
  void reduce_over_plane(Call& call, const Collective& collective, char* part, std::size_t part_count);
  void share_parts(Call& call, const Collective& collective, Parts parts, const char* part);
  void broadcast(Call& call, const Collective& collective);
  void all_gather(Call& call, const Collective& collective);
  void reduce_scatter(Call& call, const Collective& collective);
  std::vector<std::vector<int>> owners_by_agent() const;
  const char* pack_for_agents(Call& call, const Collective& collective,
                              const std::vector<std::vector<int>>& owners, std::size_t most);
  void all_to_all(Call& call, const Collective& collective);
  void exchange_remote(Call& call, const Collective& collective, int root);
  void exchange_local(Call& call, const Collective& collective);
  void gather(Call& call, const Collective& collective);
  void scatter(Call& call, const Collective& collective);

  // One operation among the ranks of this host. For a rank that is alone there, a copy; its operation must
  // not be uneven.
  void run_local(Call& call, const Collective& collective);
  void note_awaited_in_host(const Call& call) const;

  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  int num_places(int host) const { return static_cast<int>(hosts_[host].size()); }
  int num_local() const { return num_places(host_); }
  const std::vector<int>& locals() const { return hosts_[host_]; }
  int rank_at(int host, int place) const { return hosts_[host][place]; }
  int host_of(int rank) const { return host_of_[rank]; }
  // The place on a host of `num_places` ranks that handles what belongs to `place` on another host.
  static int counterpart(int place, int num_places) { return place % num_places; }
  bool is_leader() const { return place_ == 0; }

  std::unique_ptr<Transport> local_;
  std::shared_ptr<TcpMesh> mesh_;
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_;  // by rank
  int world_size_ = 0;
  int rank_ = 0, host_ = 0, place_ = 0;
  int num_planes_ = 0;
  std::optional<TcpCollectives> plane_;  // only if every host has this rank's place
  std::optional<Members> reach_;         // this rank and all ranks of other hosts
  std::uint32_t sequence_ = 0;
  Scratch message_, own_, part_, packed_, received_;
};

}  // namespace ferro

#endif  // FERRO_HOSTS_TRANSPORT_HPP
