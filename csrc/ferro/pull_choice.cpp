#include "ferro/pull_choice.hpp"

#include <chrono>

#include "ferro/fingerprint.hpp"

namespace ferro {

// Where only the root takes, staging is as fast: it puts the givers' cores to work.
bool PullChoice::is_open_to_long(const Collective& collective) const {
  if (setting_ == PeerReads::never || size_ == 1 || is_uneven(collective)) return false;
  const std::size_t nbytes = collective.nbytes();
  const bool is_in_place = collective.in == collective.out;
  switch (collective.op) {
    case Op::broadcast:
      return nbytes >= (place_of_[collective.root] == place_ && is_in_place ? shm_cost::kPullNoCopyNbytes
                                                                            : shm_cost::kPullBroadcastNbytes);
    case Op::scatter:
    case Op::all_gather:
      return nbytes >= shm_cost::kPullNbytes;
    case Op::reduce_scatter:
      return nbytes >= shm_cost::kPullReducedNbytes;
    case Op::all_to_all:
      return nbytes >= shm_cost::kPullNbytes && !is_in_place;
    case Op::allreduce:
      if (shm_cost::pulling_whole_wins(nbytes, size_))
        return nbytes >= shm_cost::kPullWholeNbytes && !is_in_place;
      return nbytes >= shm_cost::kPullSharesNbytes;
    default:
      return false;
  }
}

// One that copies, so that it can tell how long that takes.
int PullChoice::chooser_of(const Collective& collective) const {
  switch (collective.op) {
    case Op::broadcast:
    case Op::scatter:
      return (place_of_[collective.root] + 1) % size_;
    default:
      return 0;
  }
}

bool PullChoice::is_pulled(const Collective& collective) const {
  return are_pulled_[row_of(collective)][CopyChoice::log2_of(collective.nbytes())];
}

void PullChoice::set_pulled(const Collective& collective, bool is_pulled) {
  are_pulled_[row_of(collective)][CopyChoice::log2_of(collective.nbytes())] = is_pulled;
}

bool PullChoice::shall_pull_next(const Collective& collective) const {
  return setting_ == PeerReads::always || times_[row_of(collective)].pulls(collective.nbytes());
}

void PullChoice::note(const Collective& collective, bool was_pulled, Clock::duration time) {
  times_[row_of(collective)].note(collective.nbytes(), was_pulled,
                                  std::chrono::duration<double>(time).count());
}

}  // namespace ferro
