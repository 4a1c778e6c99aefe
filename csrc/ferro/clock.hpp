// The one clock of the engine: deadlines, pauses, and what is measured.
#ifndef FERRO_CLOCK_HPP
#define FERRO_CLOCK_HPP

#include <chrono>
#include <cstdint>

namespace ferro {

using Clock = std::chrono::steady_clock;

// As a number, which fits into an atomic.
inline std::int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

}  // namespace ferro

#endif  // FERRO_CLOCK_HPP
