// The fixed header of everything that travels on a stream between two ranks.
#ifndef FERRO_FRAME_HPP
#define FERRO_FRAME_HPP

#include <cstddef>
#include <cstdint>

#include "ferro/agreement.hpp"
#include "ferro/error.hpp"

namespace ferro {

// "FRO1", little-endian as all of our platforms are.
constexpr std::uint32_t kFrameMagic = 0x314f5246;

enum class FrameKind : std::uint8_t {
  collective = 1,  // an Agreement, perhaps with a small payload
  message,         // point-to-point: what follows is described by `first`
  abort,           // why the sender's group ended; nothing follows
  goodbye,         // the sender closed in good order; nothing follows
};

// 64 bytes on the wire, as in memory.
struct Frame {
  std::uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::collective;
  Agreement::State state = Agreement::State::agreed;
  std::uint16_t first_rank = 0;
  std::uint16_t second_rank = 0;
  std::uint16_t reserved = 0;
  std::uint32_t payload_nbytes = 0;  // collective: bytes that follow at once
  Fingerprint first;
  // State agreed: only `count` is used, for the elements of an uneven all_to_all
  // that the sender has for the receiver.
  Fingerprint second;
};
static_assert(sizeof(Frame) == 64, "the wire format has no padding");

// The most that one frame may carry, which bounds what a receiver must buffer.
constexpr std::size_t kMaxInlineNbytes = std::size_t{32} << 10;
constexpr std::size_t kMaxFrameNbytes = sizeof(Frame) + kMaxInlineNbytes;

inline Frame frame_of(const Agreement& agreement) {
  Frame frame;
  frame.state = agreement.state;
  frame.first_rank = static_cast<std::uint16_t>(agreement.first_rank);
  frame.second_rank = static_cast<std::uint16_t>(agreement.second_rank);
  frame.first = agreement.first;
  frame.second = agreement.second;
  return frame;
}

inline Agreement agreement_of(const Frame& frame) {
  Agreement agreement;
  agreement.state = frame.state;
  agreement.first_rank = frame.first_rank;
  agreement.second_rank = frame.second_rank;
  agreement.first = frame.first;
  agreement.second = frame.second;
  return agreement;
}

// Marks the frame that opens the last words of a stream that ended on purpose. Last
// words may stand in the middle of a payload, where only their pattern, 16 bytes of
// it fixed, tells them from data. What follows them, to the end of the stream, has a
// fixed size: in a mesh the rank's testimony (testimony.hpp); on the streams of messages
// nothing.
constexpr std::uint64_t kFarewellMark = 0x6c6c657765726166;  // "farewell"

inline Frame farewell(FrameKind kind, AbortReason reason = {}) {
  Frame frame;
  frame.kind = kind;
  frame.first.count = reason.pack();
  frame.second.count = kFarewellMark;
  return frame;
}

inline bool is_farewell(const Frame& frame) {
  return frame.magic == kFrameMagic && (frame.kind == FrameKind::abort || frame.kind == FrameKind::goodbye) &&
         frame.payload_nbytes == 0 && frame.second.count == kFarewellMark;
}

}  // namespace ferro

#endif  // FERRO_FRAME_HPP
