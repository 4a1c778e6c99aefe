#include "ferro/testimony.hpp"

namespace ferro {
namespace {

constexpr unsigned kIsInCollective = 1, kWaitsForCollective = 2, kIsStuck = 4;

void pack_set(const RankSet& set, int world_size, char* bytes) {
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(world_size); ++rank)
    if (set.test(rank)) bytes[rank / 8] |= static_cast<char>(1 << rank % 8);
}

RankSet unpack_set(int world_size, const char* bytes) {
  RankSet set;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(world_size); ++rank)
    set[rank] = (bytes[rank / 8] >> rank % 8 & 1) != 0;
  return set;
}

}  // namespace

// Into bytes that are zero.
void Testimony::pack(int world_size, char* bytes) const {
  *bytes++ = static_cast<char>((is_in_collective ? kIsInCollective : 0) |
                               (waits_for_collective ? kWaitsForCollective : 0) | (is_stuck ? kIsStuck : 0));
  for (const RankSet* set : {&in_collective, &in_messages, &given_up}) {
    pack_set(*set, world_size, bytes);
    bytes += set_nbytes(world_size);
  }
}

Testimony Testimony::unpack(int world_size, const char* bytes) {
  const auto facts = static_cast<unsigned char>(*bytes++);
  Testimony testimony;
  testimony.is_in_collective = (facts & kIsInCollective) != 0;
  testimony.waits_for_collective = (facts & kWaitsForCollective) != 0;
  testimony.is_stuck = (facts & kIsStuck) != 0;
  for (RankSet* set : {&testimony.in_collective, &testimony.in_messages, &testimony.given_up}) {
    *set = unpack_set(world_size, bytes);
    bytes += set_nbytes(world_size);
  }
  return testimony;
}

int Testimony::first_awaited() const {
  return ranks_of(in_messages.any() ? in_messages : in_collective).front();
}

void Testimonies::add(int rank, const Testimony& testimony) {
  heard_.set(static_cast<std::size_t>(rank));
  if (testimony.is_empty()) return;
  Testimony& said = waiting_[rank] = testimony;
  // Relied on by first_awaited(), whatever a peer may send.
  said.is_stuck &= said.in_messages.any() || said.in_collective.any();
  in_collectives_ |= testimony.in_collective;
}

RankSet Testimonies::missing() const {
  Awaited behind = given_up();
  const RankSet ends = ends_of(behind);
  if (ends.any()) return ends;
  RankSet cleared;
  for (const int rank : ranks_of(behind.ranks())) {
    const RankSet circle = circle_behind(rank, cleared);
    if (circle.any()) return circle;
  }
  Awaited all = all_awaited();
  return ends_of(all);
}

// What a rank says that waits for nobody, or that has not been heard.
const Testimony& Testimonies::of(int rank) const {
  static const Testimony kNothing;
  const auto waiting = waiting_.find(rank);
  return waiting == waiting_.end() ? kNothing : waiting->second;
}

Testimonies::Awaited Testimonies::given_up() const {
  const Testimony& testimony = of(reason_.reporter);
  if (testimony.given_up.any()) return {testimony.given_up, {}};
  return {{}, testimony.in_collective.any() ? in_collectives_ : RankSet{}};
}

Testimonies::Awaited Testimonies::all_awaited() const {
  Awaited all{{}, in_collectives_};
  for (const auto& waiting : waiting_) all.programs |= waiting.second.in_messages | waiting.second.given_up;
  return all;
}

// The ranks at which these waits end. Adds to them what is awaited on the way.
RankSet Testimonies::ends_of(Awaited& awaited) const {
  RankSet ends;
  Awaited passed, next = awaited;
  while (next.ranks().any()) {
    for (const int rank : ranks_of(next.programs))
      if (ends_at_program(rank, awaited)) ends.set(static_cast<std::size_t>(rank));
    for (const int rank : ranks_of(next.collectives))
      if (ends_at_collective(rank, awaited)) ends.set(static_cast<std::size_t>(rank));
    passed.programs |= next.programs;
    passed.collectives |= next.collectives;
    next = {awaited.programs & ~passed.programs, awaited.collectives & ~passed.collectives};
  }
  // Who gives up a wait is not missing to itself.
  if (waiting_.count(reason_.reporter) != 0) ends.reset(static_cast<std::size_t>(reason_.reporter));
  return ends;
}

// Whether the program of this rank waits for nobody. Else adds what it waits for.
bool Testimonies::ends_at_program(int rank, Awaited& awaited) const {
  const Testimony& testimony = of(rank);
  if (testimony.waits_for_collective) awaited.collectives.set(static_cast<std::size_t>(rank));
  awaited.programs |= testimony.in_messages;
  return !testimony.waits_for_collective && testimony.in_messages.none();
}

// The same of its collective. Who waits in one waits for all that are missing in it, whoever waits for these
// directly.
bool Testimonies::ends_at_collective(int rank, Awaited& awaited) const {
  const Testimony& testimony = of(rank);
  if (!testimony.is_in_collective) awaited.programs.set(static_cast<std::size_t>(rank));
  if (testimony.in_collective.any()) awaited.collectives |= in_collectives_;
  return testimony.is_in_collective && testimony.in_collective.none();
}

// Goes from a stuck rank to the first for which its program waits, until it meets one that it has passed:
// that one is in a circle, which the second loop goes round once. Empty, if it meets one that is not stuck,
// or one of the `cleared`, behind which there is no circle. Adds those that it has passed to them.
RankSet Testimonies::circle_behind(int rank, RankSet& cleared) const {
  RankSet passed, circle;
  for (; of(rank).is_stuck && !passed.test(rank) && !cleared.test(rank); rank = of(rank).first_awaited())
    passed.set(rank);
  for (; passed.test(rank) && !circle.test(rank); rank = of(rank).first_awaited()) circle.set(rank);
  if (circle.any()) circle.set(kDeadlock);
  cleared |= passed;
  return circle;
}

}  // namespace ferro
