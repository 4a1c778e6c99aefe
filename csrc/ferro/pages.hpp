// What the parts of the shared segment that place and back memory have in common.
#ifndef FERRO_PAGES_HPP
#define FERRO_PAGES_HPP

#include <cstddef>

namespace ferro {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older kernels refuse it harmlessly
constexpr std::size_t kHugePage = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace ferro

#endif  // FERRO_PAGES_HPP
