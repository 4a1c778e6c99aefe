// The watchdogs of a segment. Ranks are processes, which leave in order or are killed at any moment.
#include "ferro/watchdog.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>

#include "check.hpp"
#include "ferro/life_sign.hpp"
#include "ferro/segment.hpp"

using namespace ferro;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int kRanks = 4, kRounds = 100, kStillRounds = 5;
constexpr auto kPatience = std::chrono::seconds(60);
// A watchdog looks once a second by itself. One that has slept for a while, and is not woken, is later than
// this.
constexpr auto kSoon = std::chrono::milliseconds(500);
constexpr auto kForAWhile = std::chrono::milliseconds(100);

template <class Condition>
Clock::duration time_until(Condition condition) {
  const auto begin = Clock::now();
  while (!condition()) {
    CHECK(Clock::now() - begin < kPatience);
    std::this_thread::sleep_for(microseconds(50));
  }
  return Clock::now() - begin;
}

// Rank 0 stays until `stays` ends; the others leave after a while.
[[noreturn]] void be_rank(const std::shared_ptr<Segment>& segment, int place, int stays, microseconds delay) {
  {
    Watchdog watchdog(segment, place, {0, 1, 2, 3});
    char nothing;
    if (place == 0)
      CHECK(read(stays, &nothing, 1) == 0);
    else
      std::this_thread::sleep_for(delay);
    segment->control(place).has_departed.store(1);
  }
  CHECK(segment->control(place).liveness.load() == 0);
  _exit(0);
}

bool is_told(Segment& segment) { return segment.abort_word().load() != 0; }

// Ranks leave or are killed, all at random moments; or, if it is still, all but rank 0 are killed together
// after a while. True if there was a death, and the survivor was told soon.
bool is_told_soon(std::mt19937& random, bool is_still) {
  const auto segment = Segment::create(kRanks);
  const auto delay = [&random](int most_us) { return microseconds(random() % most_us); };
  int stays[2];
  CHECK(pipe(stays) == 0);
  std::array<pid_t, kRanks> ranks;
  for (int place = 0; place < kRanks; ++place) {
    const microseconds until_it_leaves = is_still ? kPatience : delay(8000);
    ranks[place] = fork();
    CHECK(ranks[place] >= 0);
    if (ranks[place] == 0) {
      close(stays[1]);
      be_rank(segment, place, stays[0], until_it_leaves);
    }
  }
  // Ranks that have left hold nothing any more.
  for (int place = 0; place < kRanks; ++place)
    time_until(
        [&] { return segment->control(place).liveness.load() != 0 || segment->control(place).has_left(); });
  const int num_killed = is_still ? kRanks - 1 : static_cast<int>(random() % kRanks);
  std::this_thread::sleep_for(is_still ? kForAWhile : delay(2000));
  for (int place = kRanks - num_killed; place < kRanks; ++place) kill(ranks[place], SIGKILL);
  int status;
  bool is_one_dead = false;
  for (int place = 1; place < kRanks; ++place) {
    CHECK(waitpid(ranks[place], &status, 0) == ranks[place]);
    CHECK(WIFEXITED(status) ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL);
    is_one_dead = is_one_dead || segment->control(place).is_dead();
  }
  bool is_soon = false;
  if (is_one_dead) {
    is_soon = time_until([&] { return is_told(*segment); }) < kSoon;
    const AbortReason reason = AbortReason::unpack(segment->abort_word().load());
    CHECK(reason.code == ErrorCode::peer_lost);
    CHECK(segment->control(reason.culprit).is_dead());
  }
  close(stays[1]);
  CHECK(waitpid(ranks[0], &status, 0) == ranks[0]);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(is_told(*segment) == is_one_dead);
  close(stays[0]);
  return is_soon;
}

}  // namespace

int main() {
  if (!kernel_notices_deaths()) {
    std::puts("skipped: robust futexes are refused here");
    return 0;
  }
  std::mt19937 random(1);
  for (int round = 0; round < kRounds; ++round) is_told_soon(random, false);
  bool is_ever_soon = false;  // a busy machine may hold up some
  for (int round = 0; round < kStillRounds; ++round) is_ever_soon |= is_told_soon(random, true);
  CHECK(is_ever_soon);
}
