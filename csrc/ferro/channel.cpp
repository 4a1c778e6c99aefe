#include "ferro/channel.hpp"

#include "ferro/fingerprint.hpp"

namespace ferro {
namespace {

std::string describe(DType dtype, std::uint64_t count, std::uint32_t tag) {
  std::string text = std::to_string(count) + " x " + name_of(dtype);
  if (tag != 0) text += " with tag " + std::to_string(tag);
  return text;
}

}  // namespace

void Message::check_fits(DType dtype, std::uint64_t count, std::uint32_t tag, int src) {
  if (dtype == op.dtype && count == op.count && tag == op.tag) return;
  is_discarding = true;
  mismatch = "rank " + std::to_string(src) + " sent " + describe(dtype, count, tag) + ", but " +
             describe(op.dtype, op.count, op.tag) + " was to be received";
}

}  // namespace ferro
