// Which of two ways of copying between ranks is the faster one, by trying both.
//
// That depends on how far apart the cores are, on the size of pages, on the processor and its
// virtual machine, and it changes while a program runs. Both ways give the same result, so the choice
// may rest on measurements: one rank makes it, and its header tells the others.
#ifndef FERRO_COPY_CHOICE_HPP
#define FERRO_COPY_CHOICE_HPP

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace ferro {

// Whether large arrays outside of the symmetric heaps are read straight out of the peer's memory, where
// that is possible. `automatic` takes the faster way; the others are set for a whole program, for
// measurements and tests.
enum class PeerReads : std::uint8_t { automatic, always, never };

class CopyChoice {
 public:
  static std::size_t log2_of(std::size_t nbytes) {
    std::size_t log2 = 0;
    while (nbytes >>= 1) ++log2;
    return log2;
  }

  // For the next copy of about `nbytes`: whether readers should pull it from where it lies,
  // instead of having it staged for them.
  bool pulls(std::size_t nbytes) const {
    const Record& record = records_[log2_of(nbytes)];
    const bool is_pull_faster = record.seconds[1] <= record.seconds[0];
    if (record.number < kTrials + 2 * kRingNbytes / nbytes) return record.number % 2 == 1;
    const double ratio =
        is_pull_faster ? record.seconds[0] / record.seconds[1] : record.seconds[1] / record.seconds[0];
    const double interval =
        std::min(kLongestInterval, std::max(kShortestInterval, (ratio - 1) / kTrialShare));
    const bool is_trial = record.number % static_cast<std::uint32_t>(interval) == 0;
    return is_pull_faster != is_trial;
  }

  // Records how long it took. Only recorded copies count: one may turn out to need neither way.
  void note(std::size_t nbytes, bool was_pulled, double seconds) {
    Record& record = records_[log2_of(nbytes)];
    ++record.number;
    double& known = record.seconds[was_pulled ? 1 : 0];
    // The recent minimum: interruptions only ever add time, and as the old minimum ages, a change of
    // conditions shows in time.
    known = std::min(seconds, known * kForgetting);
  }

 private:
  struct Record {
    std::array<double, 2> seconds{1e9, 1e9};
    std::uint32_t number = 0;  // of copies that were timed
  };
  // The first copies of a size go both ways in turn: several each, and as many more as meet untouched pages
  // while staging goes once round its ring.
  static constexpr std::size_t kTrials = 6;
  static constexpr std::size_t kRingNbytes = std::size_t{2} << 20;
  // Later ones go the slower way as often as costs this share of the time, within bounds.
  static constexpr double kTrialShare = 0.01;
  static constexpr double kShortestInterval = 16, kLongestInterval = 512;
  static constexpr double kForgetting = 1.125;

  std::array<Record, 64> records_{};  // one for each power of two
};

}  // namespace ferro

#endif  // FERRO_COPY_CHOICE_HPP
