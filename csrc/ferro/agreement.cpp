#include "ferro/agreement.hpp"

#include <tuple>

namespace ferro {

Agreement Agreement::of(int rank, const Fingerprint& fingerprint) {
  Agreement agreement;
  agreement.first_rank = rank;
  agreement.first = fingerprint;
  return agreement;
}

Agreement Agreement::unpaired(const Fingerprint& fingerprint, int sender, std::uint64_t sent, int receiver,
                              std::uint64_t expected) {
  Agreement agreement;
  agreement.state = State::unpaired;
  agreement.first_rank = sender;
  agreement.second_rank = receiver;
  agreement.first = agreement.second = fingerprint;
  agreement.first.count = sent;
  agreement.second.count = expected;
  return agreement;
}

void Agreement::merge(const Agreement& other) {
  // Counts are compared only after all fingerprints were found equal, so an
  // unpaired state never meets a disagreement; of two, the lowest pair stays.
  if (state == State::unpaired || other.state == State::unpaired) {
    const bool is_lower = std::tie(other.first_rank, other.second_rank) < std::tie(first_rank, second_rank);
    if (state != State::unpaired || (other.state == State::unpaired && is_lower)) *this = other;
    return;
  }
  consider(other.first_rank, other.first);
  if (other.state == State::disagreed) consider(other.second_rank, other.second);
}

void Agreement::consider(int rank, const Fingerprint& fingerprint) {
  if (rank < first_rank) {
    const Agreement higher = *this;
    *this = of(rank, fingerprint);
    consider(higher.first_rank, higher.first);
    if (higher.state == State::disagreed) consider(higher.second_rank, higher.second);
    return;
  }
  if (fingerprint == first || (state == State::disagreed && second_rank <= rank)) return;
  state = State::disagreed;
  second_rank = rank;
  second = fingerprint;
}

void Agreement::check(int own_rank) const {
  if (state == State::agreed) return;
  if (state == State::unpaired)
    throw unpaired_error(own_rank, first_rank, first.count, second_rank, second.count);
  throw mismatch_error(own_rank, first_rank, first, second_rank, second);
}

}  // namespace ferro
