// The one exception of the NCCL part: facts for the caller to put into words.
#ifndef FERRO_NCCL_ERROR_HPP
#define FERRO_NCCL_ERROR_HPP

#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "abi/alarm.hpp"
#include "abi/nccl.h"

namespace ferro::nccl {

// Values are part of _native/libnccl.pxd: append only.
enum class ErrorKind : unsigned char {
  none,
  nccl,         // `function` returned `result`
  cuda,         // `function` returned `result`, a cudaError_t
  timeout,      // not done after `elapsed_s`
  interrupted,  // a signal handler raised
  aborted,      // this rank aborted the communicator
  closed,       // this rank closed the communicator
  forked,       // the communicator belongs to the parent process
  too_old,      // the loaded library has no `function`; `detail` is the version that has it
  out_of_memory,
  peer_lost,  // an Alarm told that rank `result` died, or that its host does not answer
  peer_left,  // an Alarm told that rank `result` ended its group in another way
  deserted,   // rank `result` has left without making the call
  system,     // `function` failed with errno `result`
};

struct Error : std::exception {
  explicit Error(ErrorKind error_kind = ErrorKind::none, const char* failed_function = "",
                 int error_result = 0, std::string facts = {})
      : kind(error_kind), function(failed_function), result(error_result), detail(std::move(facts)) {}

  const char* what() const noexcept override { return detail.c_str(); }

  ErrorKind kind;
  const char* function;  // NCCL's or CUDA's, a literal
  int result;
  double elapsed_s = 0;
  bool is_attended = false;  // timeout: `missing` are those that have not made the call
  std::vector<int> missing;
  bool is_fatal = false;     // the communicator is unusable afterwards
  const char* meaning = "";  // NCCL's words for `result`, a literal of the library
  std::string detail;        // its words for this very error, if it has any
};

// ErrorKind::none where no rank is lost.
inline Error error_of_loss(const Loss& loss, const char* function = "") {
  if (loss.rank < 0) return Error();
  return Error(loss.is_dead ? ErrorKind::peer_lost : ErrorKind::peer_left, function, loss.rank);
}

// The exception being handled, as an Error whatever it is. For use in a catch block.
inline Error current_error() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::out_of_memory);
  } catch (const std::exception& error) {
    return Error(ErrorKind::nccl, "", ncclInternalError, error.what());
  }
}

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_ERROR_HPP
