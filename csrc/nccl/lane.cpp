#include "nccl/lane.hpp"

#include <time.h>

#include <algorithm>
#include <optional>

#include "nccl/device_guard.hpp"
#include "nccl/event.hpp"
#include "nccl/fork.hpp"
#include "nccl/library.hpp"
#include "nccl/reaper.hpp"
#include "nccl/turn.hpp"
#include "nccl/watchdog.hpp"

namespace ferro::nccl {
namespace {

// How long a call goes on after a rank has left without making it: other ranks may be in earlier
// calls, and still need what this one has yet to send them.
constexpr double kDrainGrace = 0.5;  // seconds

// How long CUDA may take to answer whether a call that ought to be done is done.
constexpr double kAnswerGrace = 5;  // seconds

// The default streams are those of the thread's current device, which need not be ours. A lane may
// work on one, too, that it was lent.
class CurrentDeviceGuard {
 public:
  CurrentDeviceGuard(const Lane& lane, Span<cudaStream_t> callers) {
    if (lane.communicator()->needs_current_device() || is_default(lane.stream()) ||
        std::any_of(callers.begin(), callers.end(), is_default))
      guard_.emplace(lane.communicator()->cuda(), lane.communicator()->device());
  }

 private:
  static bool is_default(cudaStream_t stream) {
    return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  }

  std::optional<DeviceGuard> guard_;
};

// A call that has been written down.
struct Entered {
  const Attendance* attendance;
  const Attendance::Entry* entry;
};

void tell_missing(const void* entered, Error& error) {
  const auto& [attendance, entry] = *static_cast<const Entered*>(entered);
  error.missing = attendance->missing(*entry);
  error.is_attended = true;
}

// To a few milliseconds, at a quarter of the price of the exact clock.
double now_s() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

Lane::Lane(std::shared_ptr<Communicator> communicator, cudaStream_t stream)
    : communicator_(std::move(communicator)),
      cuda_(communicator_->cuda()),
      owns_stream_(stream == nullptr),
      num_forks_(num_forks()),
      stream_(stream) {
  const DeviceGuard guard(cuda_, communicator_->device());
  check(cuda_.cudaEventCreateWithFlags(&arrival_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  if (owns_stream_)
    check(cuda_.cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  last_stream_ = stream_;
}

// Whoever drops the last reference, a collector in any thread or the watchdog, may be on another device. To
// destroy an event there, or to go back there afterwards, makes a context on that one.
void Lane::destroy(Lane* lane) noexcept {
  int current = -1;
  const bool is_own = lane->num_forks_ == num_forks();
  if (!is_own ||
      (lane->cuda_.cudaGetDevice(&current) == cudaSuccess && current == lane->communicator_->device())) {
    delete lane;
    return;
  }
  Reaper::instance().run([lane] {
    stay_on_device(lane->cuda_, lane->communicator_->device());
    delete lane;
    return true;
  });
}

// Events and streams may be destroyed with work under way: CUDA frees them when it is done.
Lane::~Lane() {
  if (num_forks_ != num_forks()) return;  // the parent's
  for (const Flight& flight : flights_) cuda_.cudaEventDestroy(flight.done);
  for (cudaEvent_t event : spare_events_) cuda_.cudaEventDestroy(event);
  if (next_event_ != nullptr) cuda_.cudaEventDestroy(next_event_);
  if (arrival_ != nullptr) cuda_.cudaEventDestroy(arrival_);
  if (owns_stream_ && stream_ != nullptr) cuda_.cudaStreamDestroy(stream_);
}

std::shared_ptr<Lane> Lane::open(std::shared_ptr<Communicator> communicator, cudaStream_t stream) {
  const std::shared_ptr<Lane> lane(new Lane(std::move(communicator), stream), destroy);
  Watchdog::instance().watch(lane);
  return lane;
}

std::uint64_t Lane::launch(Span<Operation> operations, Span<cudaStream_t> callers, bool is_async,
                           double timeout_s, Patience& patience) {
  for (const Operation& each : operations) check_available(each.op);
  const Op op = operations.front().op;
  Turn turn(*communicator_, function_of(op), patience);
  communicator_->check_in_service(function_of(op));
  const CurrentDeviceGuard guard(*this, callers);
  const bool is_captured = is_capturing(callers);
  const cudaStream_t stream = place_of(callers, is_async);
  order_after(stream, callers);
  // What is captured may wait for nothing outside its graph.
  if (!is_captured) order_after_last(stream);
  check_usable();  // CUDA may have blocked there until the communicator was ended
  Attendance::Entry entry = issue_attended(operations, stream, is_captured, turn, patience);
  const cudaEvent_t done = take_event();
  check(cuda_.cudaEventRecord(done, stream), "cudaEventRecord");
  if (!is_async || is_captured) order_behind(stream, done, callers);
  if (!is_captured) return take_off({done, op, timeout_s, now_s(), std::move(entry)}, stream);
  give_to_graph(done);
  return 0;
}

// Writes the call down before it is launched, unless it goes into a graph, and strikes it out if it is
// refused.
Attendance::Entry Lane::issue_attended(Span<Operation> operations, cudaStream_t stream, bool is_captured,
                                       Turn& turn, Patience& patience) {
  const Op op = operations.front().op;
  Attendance::Entry entry;
  const Entered entered{attendance_.get(), &entry};
  if (attendance_ != nullptr && !is_captured) {
    entry = attendance_->enter(operations);
    last_op_.store(op, std::memory_order_relaxed);  // it only goes into a message
    // The first use of a connection needs the other ranks, and so may time out.
    patience.complete_with(tell_missing, &entered);
  }
  try {
    const ncclResult_t result = issue_all(operations, stream);
    std::optional<Connecting> connecting;
    if (result == ncclInProgress && attendance_ != nullptr) connecting.emplace(*this, op, entry);
    turn.settle(result);
  } catch (const Error&) {
    if (attendance_ != nullptr && !communicator_->has_failed()) attendance_->retract(entry);
    throw;
  }
  patience.complete_with(nullptr, nullptr);
  return entry;
}

// Returns the call's ticket.
std::uint64_t Lane::take_off(Flight flight, cudaStream_t stream) {
  bool is_crowded = false;
  std::uint64_t ticket = 0;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    flights_.push_back(std::move(flight));
    last_stream_ = stream;
    ticket = num_launched_.load(std::memory_order_relaxed) + 1;
    num_launched_.store(ticket, std::memory_order_release);
    is_crowded = flights_.size() >= retire_at_;
    prepare_event();
  }
  if (is_crowded) look_for_done();
  return ticket;
}

// The graph keeps the event's place in it; the event itself may be recorded anew.
void Lane::give_to_graph(cudaEvent_t done) {
  const std::lock_guard<std::mutex> lock(lock_);
  spare_events_.push_back(done);
  prepare_event();
}

Lane::Connecting::Connecting(Lane& own_lane, Op own_op, const Attendance::Entry& own_entry)
    : lane(own_lane), op(own_op), entry(own_entry) {
  const std::lock_guard<std::mutex> lock(lane.lock_);
  lane.connecting_ = this;
}

Lane::Connecting::~Connecting() {
  const std::lock_guard<std::mutex> lock(lane.lock_);
  lane.connecting_ = nullptr;
}

cudaStream_t Lane::place_of(Span<cudaStream_t> callers, bool is_async) const noexcept {
  if (is_async || !owns_stream_ || callers.size() == 0) return stream_;
  // NCCL may launch in a thread of its own, which has another stream of this name.
  return callers.front() == cudaStreamPerThread ? stream_ : callers.front();
}

void Lane::order_after(cudaStream_t stream, Span<cudaStream_t> callers) {
  for (const cudaStream_t caller : callers) {
    if (caller == stream) continue;
    check(cuda_.cudaEventRecord(arrival_, caller), "cudaEventRecord");
    check(cuda_.cudaStreamWaitEvent(stream, arrival_, 0), "cudaStreamWaitEvent");
  }
}

void Lane::order_after_last(cudaStream_t stream) {
  if (stream == last_stream_) return;
  cudaEvent_t last = nullptr;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    if (!flights_.empty()) last = flights_.back().done;
  }
  // It may be retired meanwhile, but only a later launch records it anew.
  if (last != nullptr) check(cuda_.cudaStreamWaitEvent(stream, last, 0), "cudaStreamWaitEvent");
}

void Lane::order_behind(cudaStream_t stream, cudaEvent_t done, Span<cudaStream_t> callers) {
  for (const cudaStream_t caller : callers)
    if (caller != stream) check(cuda_.cudaStreamWaitEvent(caller, done, 0), "cudaStreamWaitEvent");
}

// Whether the call goes into a graph. Refuses streams that take no work now, while that spoils no capture.
bool Lane::is_capturing(Span<cudaStream_t> callers) const {
  bool is_captured = false;
  for (const cudaStream_t caller : callers) {
    const Capture capture = capture_of(cuda_, caller);
    if (capture == Capture::implicit) check(cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing");
    is_captured |= capture == Capture::active;
  }
  return is_captured;
}

bool Lane::is_captured() const {
  const CurrentDeviceGuard guard(*this, {});
  return is_capturing({&stream_, 1});
}

ncclResult_t Lane::issue_all(Span<Operation> operations, cudaStream_t stream) {
  if (operations.size() == 1) return communicator_->issue_on(operations.front(), stream);
  CallGroup group;
  for (auto each = operations.begin(); each != operations.end() && group.is_well(); ++each)
    group.note(communicator_->issue_on(*each, stream));
  return group.end();
}

cudaEvent_t Lane::take_event() {
  if (next_event_ != nullptr) return std::exchange(next_event_, nullptr);
  cudaEvent_t event = nullptr;
  const DeviceGuard guard(cuda_, communicator_->device());
  check(cuda_.cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void Lane::prepare_event() {
  // One that was retired while hand_back() uses it must not be recorded anew.
  if (spare_events_.empty() || num_borrowed_ != 0) return;
  next_event_ = spare_events_.back();
  spare_events_.pop_back();
}

void Lane::hand_back(std::uint64_t ticket, Span<cudaStream_t> callers) {
  check_good(ticket);
  cudaEvent_t done = nullptr;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    const std::uint64_t num_done = num_done_.load(std::memory_order_relaxed);
    if (ticket <= num_done) return;
    done = flights_[ticket - num_done - 1].done;
    ++num_borrowed_;
  }
  struct Loan {
    ~Loan() {
      const std::lock_guard<std::mutex> lock(lane.lock_);
      --lane.num_borrowed_;
    }
    Lane& lane;
  };
  const Loan loan{*this};
  const CurrentDeviceGuard guard(*this, callers);
  is_capturing(callers);  // for its refusal
  order_behind(stream_, done, callers);
}

void Lane::synchronize(std::uint64_t ticket, Patience& patience) {
  if (num_forks_ != num_forks()) throw Error(ErrorKind::forked);  // NCCL would be asked below
  patience.complete_with(
      [](const void* context, Error& error) {
        const auto* lane = static_cast<const Lane*>(context);
        const std::lock_guard<std::mutex> lock(lane->lock_);
        lane->tell_awaited(error);
      },
      this);
  while (!is_done(ticket)) {
    check_usable();
    patience.pause("cudaEventQuery");
  }
  // A call that was aborted counts as done, too, and one that failed may: the watchdog would only look
  // for the error later.
  for (;;) {
    if (communicator_->discover_error(true)) Reaper::instance().end(communicator_);
    if (!communicator_->is_in_doubt()) break;
    check_usable();
    patience.pause("ncclCommGetAsyncError");
  }
  check_good(ticket);
}

void Lane::check_good(std::uint64_t ticket) const {
  if (num_forks_ == num_forks() && ticket <= num_seen_done() && communicator_->is_closed_in_order()) return;
  check_usable();
}

void Lane::check_usable() const {
  const bool is_stopped = communicator_->is_stopped();  // first, as an error that stops it comes before
  communicator_->check_open();
  if (is_stopped) throw Error(ErrorKind::aborted);
}

bool Lane::is_done(std::uint64_t ticket) { return ticket <= num_seen_done() || ticket <= num_done(); }

std::uint64_t Lane::num_done() {
  // In a forked child the parent's watchdog may hold the lock for good.
  if (num_forks_ != num_forks()) throw Error(ErrorKind::forked);
  const std::lock_guard<std::mutex> lock(retire_lock_);
  retire();
  return num_done_.load(std::memory_order_acquire);
}

// Calls end in order: the events are searched for the last one that has passed.
void Lane::retire() {
  const double begin_s = now_s();
  std::size_t done = 0;
  std::size_t not_done = num_flights();
  if (not_done != 0 && has_passed(cuda_, event_of(not_done - 1))) done = not_done;
  while (done < not_done) {
    const std::size_t middle = done + (not_done - done) / 2;
    if (has_passed(cuda_, event_of(middle)))
      done = middle + 1;
    else
      not_done = middle;
  }
  remove(done);
  const std::lock_guard<std::mutex> lock(lock_);
  asked_s_ = begin_s;
}

// Either the older half is done, or nothing is taken away: a question costs several times what the rest of
// a call does.
void Lane::look_for_done() {
  const std::unique_lock<std::mutex> lock(retire_lock_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // somebody else is asking
  const std::size_t half = (num_flights() + 1) / 2;
  const bool is_half_done = half != 0 && has_passed(cuda_, event_of(half - 1));
  remove(is_half_done ? half : 0);
}

void Lane::remove(std::size_t count) {
  const std::lock_guard<std::mutex> lock(lock_);
  for (std::size_t i = 0; i < count; ++i) {
    spare_events_.push_back(flights_.front().done);
    flights_.pop_front();
  }
  num_done_.fetch_add(count, std::memory_order_release);
  retire_at_ = std::max(kMinFlights, 2 * flights_.size());
}

std::size_t Lane::num_flights() {
  const std::lock_guard<std::mutex> lock(lock_);
  return flights_.size();
}

cudaEvent_t Lane::event_of(std::size_t flight) {
  const std::lock_guard<std::mutex> lock(lock_);
  return flights_[flight].done;
}

void Lane::heed(Alarm alarm) {
  {
    const std::lock_guard<std::mutex> lock(lock_);
    alarm_ = std::move(alarm);
  }
  bear_witness();
}

void Lane::attend(int fd, const std::vector<int>& members) {
  auto attendance = std::make_unique<Attendance>(fd, members, communicator_->rank());
  {
    const std::lock_guard<std::mutex> lock(lock_);
    attendance_ = std::move(attendance);
  }
  bear_witness();
}

void Lane::bear_witness() {
  communicator_->hear([weak = weak_from_this()] {
    const auto lane = weak.lock();
    return lane != nullptr ? lane->culprit() : Error();
  });
}

void Lane::leave(bool is_aborting) noexcept {
  if (attendance_ == nullptr || num_forks_ != num_forks()) return;
  attendance_->leave(!is_aborting && !communicator_->has_failed() && !communicator_->is_stopped());
  has_left_.store(true, std::memory_order_release);
}

void Lane::observe() noexcept {
  stay_on_device(cuda_, communicator_->device());
  try {
    num_done();
  } catch (const Error&) {
    // Whoever calls next is told. Relaxed: nothing is published with it.
    is_device_lost_.store(true, std::memory_order_relaxed);
  }
}

void Lane::look_after() noexcept {
  if (communicator_->is_aborted()) return;  // it has ended for that reason, whatever other ranks do
  for (const auto look_for :
       {&Lane::lost_rank, &Lane::overdue_call, &Lane::deserted_call, &Lane::forsaken_end}) {
    const Error reason = (this->*look_for)();
    if (reason.kind == ErrorKind::none) continue;
    communicator_->fail(reason);
    return Reaper::instance().end(communicator_);
  }
}

Error Lane::culprit() noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  const Error lost = culprit_of_loss();
  return lost.kind != ErrorKind::none ? lost : culprit_of_desertion();
}

Error Lane::culprit_of_loss() const { return alarm_ ? error_of_loss(alarm_()) : Error(); }

// Calls that have failed may count as done, and are in flight no longer.
Error Lane::culprit_of_desertion() const {
  if (attendance_ == nullptr) return Error();
  return desertion(last_op_.load(std::memory_order_relaxed), attendance_->entered());
}

Error Lane::desertion(Op op, const Attendance::Entry& entry) const {
  const int deserter = attendance_ != nullptr ? attendance_->deserter(entry) : -1;
  return deserter < 0 ? Error() : Error(ErrorKind::deserted, function_of(op), deserter);
}

Error Lane::lost_rank() noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  return communicator_->has_failed() ? Error() : culprit_of_loss();
}

Error Lane::overdue_call() noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  if (flights_.empty() || is_device_lost_.load(std::memory_order_relaxed)) return Error();
  const Flight& oldest = flights_.front();
  Error error(ErrorKind::timeout, function_of(oldest.op));
  error.elapsed_s = now_s() - oldest.begin_s;
  if (error.elapsed_s < oldest.timeout_s) return Error();
  // It may have been done in time without anybody having asked since.
  const bool has_asked = asked_s_ > oldest.begin_s + oldest.timeout_s;
  if (!has_asked && error.elapsed_s < oldest.timeout_s + kAnswerGrace) return Error();
  tell_awaited(error);
  return error;
}

void Lane::tell_awaited(Error& error) const {
  if (attendance_ == nullptr || flights_.empty()) return;
  const Entered entered{attendance_.get(), &flights_.front().entry};
  tell_missing(&entered, error);
}

Error Lane::deserted_call() noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  if (communicator_->has_failed()) return Error();
  Error error;
  if (!flights_.empty())
    error = desertion(flights_.front().op, flights_.front().entry);
  else if (connecting_ != nullptr)
    error = desertion(connecting_->op, connecting_->entry);
  if (error.kind == ErrorKind::none) {
    deserted_since_s_ = 0;
    return Error();
  }
  if (deserted_since_s_ == 0) deserted_since_s_ = now_s();
  return now_s() - deserted_since_s_ < kDrainGrace ? Error() : error;
}

Error Lane::forsaken_end() noexcept {
  if (!has_left_.load(std::memory_order_acquire) || communicator_->has_failed()) return Error();
  const int quitter = attendance_->quitter();
  return quitter < 0 ? Error() : Error(ErrorKind::deserted, "ncclCommFinalize", quitter);
}

}  // namespace ferro::nccl
