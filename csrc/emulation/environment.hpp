// Settings of the emulation: FERRO_EMULATION_<name> in the environment.
#ifndef EMULATION_ENVIRONMENT_HPP
#define EMULATION_ENVIRONMENT_HPP

#include <cerrno>
#include <cstdlib>
#include <string>

#include "emulation/complaint.hpp"

namespace emulation {

inline std::string setting(const char* name) {
  const char* value = std::getenv((std::string("FERRO_EMULATION_") + name).c_str());
  return value == nullptr ? "" : value;
}

// A whole number within [least, most], `otherwise` where it is not set.
inline long setting(const char* name, long otherwise, long least, long most) {
  const std::string text = setting(name);
  if (text.empty()) return otherwise;
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (errno != 0 || *end != '\0' || value < least || value > most) {
    die("FERRO_EMULATION_", name, " is '", text, "', not a whole number from ", least, " to ", most);
  }
  return value;
}

// A number among the variables of NCCL itself, read as NCCL reads it.
inline long nccl_setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtol(text, nullptr, 0);
}

}  // namespace emulation

#endif  // EMULATION_ENVIRONMENT_HPP
