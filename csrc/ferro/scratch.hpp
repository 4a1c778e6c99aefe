// Memory that an algorithm needs for the duration of one call.
#ifndef FERRO_SCRATCH_HPP
#define FERRO_SCRATCH_HPP

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "ferro/error.hpp"

namespace ferro {

// Grows to the largest size asked for and keeps it: fresh pages cost more than the
// copy into them. Never null, even for zero bytes. Contents do not survive the next reserve().
class Scratch {
 public:
  char* reserve(std::size_t nbytes) {
    if (nbytes > capacity_ || bytes_ == nullptr) {
      bytes_.reset();
      capacity_ = 0;
      // Not make_unique: it would write zeros.
      bytes_.reset(new (std::nothrow) char[nbytes > 0 ? nbytes : 1]);
      if (bytes_ == nullptr)
        throw Error(ErrorCode::out_of_memory, -1, std::to_string(nbytes) + " bytes of scratch memory");
      capacity_ = nbytes;
    }
    return bytes_.get();
  }

 private:
  std::unique_ptr<char[]> bytes_;
  std::size_t capacity_ = 0;
};

}  // namespace ferro

#endif  // FERRO_SCRATCH_HPP
