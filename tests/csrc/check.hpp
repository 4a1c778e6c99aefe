// Ends a test where a condition does not hold, and says which.
#ifndef FERRO_TESTS_CHECK_HPP
#define FERRO_TESTS_CHECK_HPP

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

#endif  // FERRO_TESTS_CHECK_HPP
