// The one exception of the engine: facts for the caller to put into words.
#ifndef FERRO_ERROR_HPP
#define FERRO_ERROR_HPP

#include <cerrno>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "ferro/types.hpp"

namespace ferro {

// Values are part of the wire format and of _native/native_error.pyx: append only.
enum class ErrorCode : std::uint8_t {
  none,
  timeout,         // `missing` did not arrive in time
  peer_lost,       // the process of `peer` died
  channel_closed,  // `peer` closed its side
  mismatch,        // ranks called different collectives; the group stays usable
  size_mismatch,   // a message does not fit its receive; the group stays usable
  interrupted,     // a signal handler on `peer` raised
  io,              // a system call failed
  unsupported,     // no such reduction for this dtype; nothing was sent
  closed,          // this rank closed the group
  out_of_memory,
  superseded,   // `peer` went on in a successor of this group
  under_way,    // the caller gave up waiting for a call; the call itself goes on
  unreachable,  // the host of `peer` does not answer: it died, or is cut off and goes on elsewhere
};

// The sequence of a call that has not begun.
constexpr std::uint64_t kNoSequence = ~std::uint64_t{0};

struct Error : std::exception {
  explicit Error(ErrorCode error_code = ErrorCode::none, int culprit = -1, std::string facts = {})
      : code(error_code), peer(culprit), detail(std::move(facts)) {}

  const char* what() const noexcept override { return detail.c_str(); }

  ErrorCode code;
  int peer = -1;               // the culprit, -1 if there is none
  Op op = Op::barrier;         // the call that failed; filled in by the Communicator, as the next two
  std::uint64_t sequence = 0;  // its number in this group, kNoSequence if it has none yet
  int rank = -1;               // the rank that raises
  int reporter = -1;           // the rank that ended the group, if it was not in this call
  std::vector<int> missing;    // timeout, under_way: every rank that was waited for or, if it is known that
                               // those wait themselves, the ranks at which their waits end
  std::vector<int> awaited;    // timeout: every rank that was waited for, whoever is missing
  bool is_deadlock = false;    // timeout: `missing` wait for each other
  double elapsed_s = 0;        // timeout, under_way: for how long
  std::string detail;
  // Communicator::set_global_ranks; filled in like `rank`.
  std::shared_ptr<const std::vector<int>> global_ranks;
};

// What the system call `call` has just failed with. `peer` is whom it was about, if anybody.
[[noreturn]] inline void throw_errno(const char* call, int peer = -1) {
  const int error = errno;
  throw Error(error == ENOMEM ? ErrorCode::out_of_memory : ErrorCode::io, peer,
              std::string(call) + ": " + std::generic_category().message(error));
}

// The exception being handled, as an Error whatever it is. For use in a catch block.
inline Error current_error() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    try {
      return error;
    } catch (const std::bad_alloc&) {
      return Error(error.code, error.peer);
    }
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::out_of_memory, -1, "out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorCode::io, -1, error.what());
  }
}

// Why a group ended, small enough to be agreed on with one compare-and-swap
// and to travel in a frame.
struct AbortReason {
  ErrorCode code = ErrorCode::none;
  int culprit = -1;
  int reporter = -1;
  std::uint32_t sequence = 0;

  bool is_set() const { return code != ErrorCode::none; }
  void throw_if_set() const {
    if (is_set()) throw Error(code, culprit);
  }

  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(code) << 58 | static_cast<std::uint64_t>(culprit + 1) << 45 |
           static_cast<std::uint64_t>(reporter + 1) << 32 | sequence;
  }
  static AbortReason unpack(std::uint64_t word) {
    return {static_cast<ErrorCode>(word >> 58), static_cast<int>(word >> 45 & 0x1fff) - 1,
            static_cast<int>(word >> 32 & 0x1fff) - 1, static_cast<std::uint32_t>(word)};
  }
};
constexpr int kMaxWorldSize = 8190;  // what AbortReason can name

}  // namespace ferro

#endif  // FERRO_ERROR_HPP
