// Collectives of the ranks of one host, over memory that they share.
// ALGORITHMS.md gives the steps and costs; segment.hpp who writes what.
#ifndef FERRO_SHM_TRANSPORT_HPP
#define FERRO_SHM_TRANSPORT_HPP

#include <algorithm>
#include <memory>
#include <vector>

#include "ferro/clock.hpp"
#include "ferro/fingerprint.hpp"
#include "ferro/parking.hpp"
#include "ferro/peer_memory.hpp"
#include "ferro/pull_choice.hpp"
#include "ferro/scratch.hpp"
#include "ferro/segment.hpp"
#include "ferro/staging.hpp"
#include "ferro/transport.hpp"
#include "ferro/watchdog.hpp"

namespace ferro {

struct Offer;  // what a header carries

// In here a `peer`, like `place_`, is a place in the segment: members_[place] is the rank that has it,
// place_of_[rank] the place of a rank. Roots, errors and abort reasons name ranks.
class ShmTransport final : public Transport {
 public:
  // `place` is this rank's place in the segment; `members` gives the rank, in the
  // group, at every place. Ranks that are processes of their own are watched for death.
  ShmTransport(std::shared_ptr<Segment> segment, int place, std::vector<int> members, SpinPolicy spin,
               bool are_processes, std::shared_ptr<PeerMemory> peer_memory);
  ~ShmTransport() override;

  void run(Call& call, const Collective& collective) override;
  bool begin(const Collective& collective) override;
  bool have_all_begun() const override;
  bool linger_until_all_have_begun(Call* call) const override;
  void abort(AbortReason reason) noexcept override;
  AbortReason aborted() const noexcept override;

  void add_lost(RankSet& ranks) override;
  RankSet find_missing() override;
  void add_awaited(RankSet& ranks) const override;
  void testify(const Call& call, const Error& error) noexcept override;
  void note_waiting_for_collective(const Call& call, bool is_waiting) noexcept override;
  void note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept override;
  void note_several_callers() noexcept override;
  void trace(const Call& call, Error& error) const override;
  void pass_on(const Testimony& testimony) noexcept override;
  void add_testimonies(Testimonies& testimonies) override;
  std::uint32_t succession() const noexcept override;
  bool advance_succession(std::uint32_t from, std::uint32_t to) noexcept override;

  void close() noexcept override;

 private:
  bool attempt(Call& call, const Collective& collective);

  // ---- Headers (shm_headers.cpp) ----
  void publish_header(const Collective& collective, bool may_lend_symmetric = true);
  void publish_counts(const Collective& collective, HeaderSlot& slot);
  void publish_input(const Collective& collective, HeaderSlot& slot, bool may_lend_symmetric);
  void stage_small(const Collective& collective, std::size_t nbytes, Offer& offer);
  void offer_to_lend(const Collective& collective, std::size_t nbytes, Offer& offer);
  bool may_lend(const Collective& collective, const void* data, std::size_t nbytes) const;
  void check_fingerprints() const;
  void check_counts() const;
  const std::uint64_t* counts_of(int place) const;
  std::size_t small_offset(std::size_t nbytes) const;
  std::size_t next_small(std::size_t nbytes);
  void prepare_next_small();
  void find_inputs(const Collective& collective);
  void find_inline_inputs(const Collective& collective);
  bool is_input_symmetric(int place) const;  // of one that no header carries
  void find_output(int peer, std::uint64_t symmetric, std::uint64_t address);
  bool agree_to_pull(const Collective& collective);
  // A second exchange of headers: no rank leaves it before all have entered. Until then each may read
  // `nbytes` of another's. They say whether their ranks could read all they wanted.
  void fence(Call& call, std::size_t nbytes);
  bool have_all_read() const;

  // ---- Waiting (shm_transport.cpp) ----
  template <class Ready>
  void await(Call& call, int peer, Ready ready);
  template <class Ready>
  void await_slowly(Call& call, int peer, Ready ready);
  template <class Ready>
  bool spin(Ready ready) const;
  template <class Ready>
  void sleep(Call& call, int peer, Ready ready);
  bool is_lost(int peer) const;
  [[noreturn]] void throw_lost(int peer) const;
  void check_caller(Call& call, int peer) const;
  void check_at_work(Call& call) const;
  void check_group() const;
  void wake_sleepers();
  void await_headers(Call& call);
  void await_counter(Call& call, int peer, std::atomic<std::uint64_t> RankControl::* counter,
                     std::uint64_t value);
  void advance(std::atomic<std::uint64_t> RankControl::* counter, std::uint64_t value);

  // ---- Who is missing (shm_testimony.cpp) ----
  int culprit_behind(int peer) const;
  std::uint32_t last_begun(int place) const;
  bool holds_up_collective(int place) const;
  Testimony own_testimony(const Call& call, const Error& error, Clock::time_point start) const;
  Testimony testimony_of(int place, Clock::time_point start) const;
  Testimony waits_in_sleep(int place) const;
  bool holds_up_rank(const Call& call) const;

  // ---- Collectives (shm_collectives.cpp) ----
  void dispatch(Call& call, const Collective& collective);
  void allreduce(Call& call, const Collective& collective);
  void broadcast(Call& call, const Collective& collective);
  void reduce(Call& call, const Collective& collective);
  void all_gather(Call& call, const Collective& collective);
  void reduce_scatter(Call& call, const Collective& collective);
  void all_to_all(Call& call, const Collective& collective);
  void all_to_all_uneven(Call& call, const Collective& collective);
  void gather(Call& call, const Collective& collective);
  void scatter(Call& call, const Collective& collective);

  void complete_inputs(Call& call, const Collective& collective);
  void allreduce_symmetric(Call& call, const Collective& collective);
  void allreduce_pulled(Call& call, const Collective& collective);
  void allreduce_pulled_whole(Call& call, const Collective& collective);
  void allreduce_one_shot(Call& call, const Collective& collective);
  // An allreduce or, if only the root collects results, a reduce.
  void reduce_two_shot(Call& call, const Collective& collective, int sole_collector);
  void all_to_all_rounds(Call& call, const Collective& collective, const std::size_t* send_counts,
                         const std::size_t* recv_counts, std::size_t most);
  void reduce_inputs(const Collective& collective, void* dst, std::size_t first, std::size_t count,
                     std::size_t output_nbytes = 0) const;
  // dst = the elements of `range` of every rank's input, reduced; read in place.
  void reduce_in_passes(Call& call, const Collective& collective, void* dst, Range range);
  // As in passes.hpp, with a look at the group between two passes as well.
  template <class Work>
  void work_in_passes(Call& call, std::size_t count, std::size_t nbytes_each, Work work) const;
  void reduce_foreign(const Collective& collective, void* dst, Range range);
  void pull(int peer, void* dst, const void* src, std::size_t nbytes);
  // Copies an array of `peer`. If it is foreign, `src` is an address in the peer's own memory.
  void copy_from(Call& call, int peer, bool is_foreign, void* dst, const void* src, std::size_t nbytes,
                 std::size_t output_nbytes);
  [[noreturn]] void throw_unreadable(int peer, int error) const;
  // Copies a part of an output that has `output_nbytes` in all.
  void copy_block(Call& call, void* dst, const void* src, std::size_t nbytes,
                  std::size_t output_nbytes) const;

  // What one round of a collective asks of each rank.
  struct Roles {
    static constexpr int kEverybody = -1;
    int producer = kEverybody;  // who stages
    int consumer = kEverybody;  // who reads what was staged

    bool is_producer(int place) const { return producer == kEverybody || producer == place; }
    bool is_consumer(int place) const { return consumer == kEverybody || consumer == place; }
  };
  // How one collective divides the windows: one slot a round, and in it a piece for each
  // reader, or one piece for all of them.
  struct Slots {
    std::size_t piece_nbytes;
    std::size_t nbytes;  // of one slot
    std::uint64_t number;
  };
  Slots slots_for(std::size_t nbytes, int num_pieces) const;
  // Where the piece for `reader` is in a slot of `writer`, which has none for itself.
  static std::size_t piece_offset(const Slots& slots, int writer, int reader) {
    return static_cast<std::size_t>(reader < writer ? reader : reader - 1) * slots.piece_nbytes;
  }
  // Runs `num_rounds` rounds of a collective, each phase one round behind the phase before it.
  template <class... Phases>
  void run_phases(Call& call, std::uint64_t num_rounds, Phases... phases);
  // Runs `num_rounds` rounds: `stage(round, slot)` fills this rank's slot of the
  // window, `consume(round)` reads the peers', found in inputs_.
  template <class Stage, class Consume>
  void run_rounds(Call& call, std::uint64_t num_rounds, const Slots& slots, Roles roles, Stage stage,
                  Consume consume);
  void await_free_slot(Call& call, std::uint64_t round, std::uint64_t num_slots, Roles roles);
  // What a rank's counters of rounds show once it is done with `round` of this collective.
  std::uint64_t count_after(std::uint64_t round) const { return round_ + round + 1; }

  bool is_root(const Collective& collective) const { return members_[place_] == collective.root; }

  // Where the input of every rank can be read, by place, once all headers have arrived. Every rank finds one
  // and the same of these:
  //
  //                                                                 complete  borrowed  pulled  symmetric
  //   copies, in headers and rings                                      1         0        0        0
  //   arrays in symmetric memory; not of an allreduce                   1         1        0        0
  //   arrays in symmetric memory, and so are all outputs                1         1        0        1
  //   arrays in their ranks' own memory, or in symmetric memory         1         1        1        0
  //   nowhere yet: all go in rounds through the windows                 0         0        0        0
  //
  // In the second, some may be copies. A rank that is alone finds its own array, with the flags of the
  // first. An uneven all_to_all finds nothing, and always takes rounds.
  struct Inputs {
    std::vector<const unsigned char*> at;
    std::vector<unsigned char*> output_at;            // if they are pulled or symmetric, else meaningless
    std::vector<bool> is_foreign, is_output_foreign;  // an address in that rank's own process
    bool are_complete = true;                         // no rounds are needed
    bool are_borrowed = false;     // some are the peers' own arrays: no rank may leave before all have read
    bool are_pulled = false;       // some are read out of their ranks' memory
    bool are_symmetric = true;     // all are, and so are all outputs
    bool is_choice_open = true;    // no rank's input must be staged
    bool are_kept = true;          // whatever becomes of the collective: it can be repeated
    std::uint32_t staging_ns = 0;  // of the small ones, the longest
    bool were_read = true;         // by this rank, as far as they were pulled

    void reset() {
      if (are_pulled) std::fill(is_foreign.begin(), is_foreign.end(), false);
      are_complete = are_symmetric = is_choice_open = were_read = true;
      are_borrowed = are_pulled = false;
      staging_ns = 0;
    }
  };

  std::shared_ptr<Segment> segment_;
  const int place_;
  const int size_;
  const std::vector<int> members_;
  const SpinPolicy spin_;
  const bool are_processes_;   // the ranks, or else threads of one
  std::vector<int> place_of_;  // place in the segment, by rank of the group
  std::uint32_t sequence_ = 0;
  std::uint64_t round_ = 0;  // rounds of all collectives before this one
  std::uint64_t own_flag_ = 0;
  bool has_begun_ = false;        // the header of the next run() is out
  bool may_lack_inputs_ = false;  // then; peers may yet have to stage some: see complete_inputs()
  // Set by publish_header() for the rest of run().
  bool is_inline_ = false;        // this rank's header carries its whole input
  std::size_t small_nbytes_ = 0;  // of the payload that it staged in its ring
  // False while a collective is repeated whose arrays could not be read where they stand.
  bool lends_ = true;
  bool looks_before_lending_ = false;  // ever after
  // Set by fence() for the wait in it: what peers may be reading meanwhile.
  std::size_t read_nbytes_ = 0;
  // In the slow part of a wait: the peer waited for, and in which sequence, as flag_of(sequence,
  // place). kNobody otherwise. Informs other threads, orders nothing.
  static constexpr std::uint64_t kNobody = ~std::uint64_t{0};
  std::atomic<std::uint64_t> awaited_{kNobody};
  std::size_t next_small_ = 0;  // where this rank's ring of small payloads goes on
  Inputs inputs_;
  StagingWriter staging_;
  const std::shared_ptr<PeerMemory> peer_memory_;
  PullChoice pull_choice_;
  Scratch fetched_;                           // the block of foreign inputs that is being reduced
  mutable std::vector<const void*> sources_;  // scratch of reductions
  std::vector<void*> outputs_;                // the same
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace ferro

#endif  // FERRO_SHM_TRANSPORT_HPP
