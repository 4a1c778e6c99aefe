// Messages between two ranks of one host, turn by turn: what goes through the ring, and what the
// receiver reads where it stands. Run under ThreadSanitizer and AddressSanitizer by tests/csrc/run.
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "ferro/messenger.hpp"
#include "ferro/peer_memory.hpp"
#include "ferro/shm_channel.hpp"
#include "ferro/shm_transport.hpp"

using namespace ferro;

namespace {

using Values = std::vector<std::int32_t>;
constexpr std::size_t kLong = 1000000;  // elements: more than the ring holds
constexpr std::size_t kShort = 50000;

struct Pair {
  explicit Pair(PeerReads of_sender, PeerReads of_receiver)
      : sender(segment, std::make_shared<PeerMemory>(segment, 0, of_sender), 0, 1, 1),
        receiver(segment, std::make_shared<PeerMemory>(segment, 1, of_receiver), 1, 0, 0) {}
  explicit Pair(PeerReads setting = PeerReads::always) : Pair(setting, setting) {}

  std::shared_ptr<Segment> segment = Segment::create(2);
  ShmChannel sender, receiver;
};

Message send_of(const std::int32_t* x, std::size_t count) {
  return Message({true, 1, const_cast<std::int32_t*>(x), count, DType::int32, 0});
}
Message recv_of(Values& x) { return Message({false, 0, x.data(), x.size(), DType::int32, 0}); }

// 0, 1, 2 and so on. Copied at a stroke, since a sanitizer looks at each element that is written by itself.
const Values kNumbers = [] {
  Values numbers(2 * kLong);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}();
void count_up(std::int32_t* x, std::size_t count, int first) {
  std::memcpy(x, kNumbers.data() + first, count * sizeof *x);
}
Values counted(std::size_t count, int first) {
  return {kNumbers.data() + first, kNumbers.data() + first + count};
}

// Not where a sandbox, or an emulator, refuses process_vm_readv.
bool can_read_other_ranks() {
  const std::shared_ptr<Segment> segment = Segment::create(2);
  const PeerMemory peer(segment, 1);
  return PeerMemory(segment, 0).can_read(1);
}

// As far as it gets alone. True if it is complete.
bool send_on(ShmChannel& sender, Message& message) {
  for (std::size_t before = ~std::size_t{0}; before != message.done;) {
    before = message.done;
    if (sender.try_send(message)) return true;
  }
  return false;
}
bool recv_on(ShmChannel& receiver, Message& message) {
  for (std::size_t before = ~std::size_t{0}; before != message.done;) {
    before = message.done;
    if (receiver.try_recv(message)) return true;
  }
  return false;
}

void test_a_message_moves_in_turns() {
  Pair pair;
  auto* const x = reinterpret_cast<std::int32_t*>(pair.segment->heap(0));
  count_up(x, kLong, 1);
  Message sent = send_of(x, kLong);
  CHECK(!pair.sender.try_send(sent) && sent.done == kTurnNbytes);
  CHECK(!send_on(pair.sender, sent) && sent.done == pair.segment->layout().channel_nbytes);
  Values y(kLong);
  Message received = recv_of(y);
  CHECK(!pair.receiver.try_recv(received) && received.done == kTurnNbytes);
  CHECK(recv_on(pair.receiver, received));
  CHECK(pair.sender.try_send(sent));
  CHECK(y == counted(kLong, 1));
}

void test_a_send_without_receiver_completes() {
  Pair pair;
  const Values x = counted(kShort, 1);
  Message sent = send_of(x.data(), kShort);
  CHECK(pair.sender.try_send(sent));
  Values y(kShort);
  Message received = recv_of(y);
  CHECK(pair.receiver.try_recv(received));
  CHECK(y == x);
}

// Whatever of it the sender has put into the ring when the receiver arrives.
void test_the_receiver_fetches_what_is_lent(bool is_symmetric) {
  for (const int num_turns : {1, 2, 3}) {
    Pair pair(is_symmetric ? PeerReads::never : PeerReads::always);
    Values private_values(kLong);
    std::int32_t* const x =
        is_symmetric ? reinterpret_cast<std::int32_t*>(pair.segment->heap(0)) : private_values.data();
    for (int first = 0; first < 3; ++first) {
      count_up(x, kLong, first);
      Message sent = send_of(x, kLong);
      for (int i = 0; i < num_turns; ++i) CHECK(!pair.sender.try_send(sent));
      Values y(kLong);
      Message received = recv_of(y);
      CHECK(recv_on(pair.receiver, received));
      CHECK(pair.sender.try_send(sent));
      CHECK(y == counted(kLong, first));
    }
  }
}

// Either side may have been told not to.
void test_what_may_not_be_read_comes_through_the_ring() {
  for (const auto& [of_sender, of_receiver] :
       {std::pair{PeerReads::never, PeerReads::always}, std::pair{PeerReads::always, PeerReads::never}}) {
    Pair pair(of_sender, of_receiver);
    const Values x = counted(kLong, 5);
    Values y(kLong);
    Message sent = send_of(x.data(), kLong), received = recv_of(y);
    CHECK(!send_on(pair.sender, sent));
    CHECK(!recv_on(pair.receiver, received));
    while (!recv_on(pair.receiver, received)) send_on(pair.sender, sent);
    CHECK(send_on(pair.sender, sent));
    CHECK(y == x);
  }
}

// Processors let programs read such memory; the kernel does not read it for others.
void test_what_cannot_be_read_is_given_back() {
  constexpr std::size_t kNbytes = kLong * sizeof(std::int32_t);
  void* const memory = mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  auto* const x = static_cast<std::int32_t*>(memory);
  count_up(x, kLong, 3);
  CHECK(mprotect(memory, kNbytes, PROT_WRITE) == 0);
  for (const int num_turns : {1, 3}) {
    Pair pair;
    for (int i = 0; i < 2; ++i) {
      Values y(kLong);
      Message sent = send_of(x, kLong), received = recv_of(y);
      for (int turn = 0; turn < num_turns; ++turn) CHECK(!pair.sender.try_send(sent));
      CHECK(!recv_on(pair.receiver, received));
      while (!recv_on(pair.receiver, received)) send_on(pair.sender, sent);
      CHECK(send_on(pair.sender, sent));
      CHECK(y == counted(kLong, 3));
    }
  }
  munmap(memory, kNbytes);
}

// Nobody may come back to it for long, and a sender waits for whoever has taken over: so not while it is
// writing a piece, nor what takes several turns.
void test_a_patient_receive_holds_up_nobody() {
  Pair pair;
  auto* const x = reinterpret_cast<std::int32_t*>(pair.segment->heap(0));
  count_up(x, kLong, 1);
  Message sent = send_of(x, kShort), does_not_fit = send_of(x, kLong);
  Values y(kShort);
  Message received = recv_of(y), too_short = recv_of(y);
  sent.is_patient = does_not_fit.is_patient = received.is_patient = too_short.is_patient = true;
  CHECK(!pair.sender.try_send(sent));
  std::atomic<std::uint64_t>& staged_nbytes = pair.segment->cells(0, 1)->long_payload.staged_nbytes;
  staged_nbytes = 4096;  // as if it were writing that
  CHECK(!recv_on(pair.receiver, received));
  CHECK(staged_nbytes == 4096);
  staged_nbytes = 0;
  sent.is_patient = false;
  CHECK(pair.sender.try_send(sent));
  CHECK(recv_on(pair.receiver, received));
  CHECK(y == counted(kShort, 1));

  CHECK(!pair.sender.try_send(does_not_fit));
  bool is_refused = false;
  try {
    pair.receiver.try_recv(too_short);
  } catch (const Error& error) {
    is_refused = error.code == ErrorCode::size_mismatch;
  }
  CHECK(is_refused && pair.sender.try_send(does_not_fit));
}

void test_a_message_that_does_not_fit_is_discarded() {
  Pair pair;
  const Values x = counted(kLong, 1), next = counted(kLong / 2, 7);
  Values y(kLong / 2);
  Message sent = send_of(x.data(), kLong), received = recv_of(y);
  bool is_refused = false;
  while (!is_refused) {
    send_on(pair.sender, sent);
    try {
      recv_on(pair.receiver, received);
    } catch (const Error& error) {
      CHECK(error.code == ErrorCode::size_mismatch);
      is_refused = true;
    }
  }
  CHECK(send_on(pair.sender, sent));
  Message sent_next = send_of(next.data(), next.size()), received_next = recv_of(y);
  send_on(pair.sender, sent_next);
  CHECK(recv_on(pair.receiver, received_next));
  CHECK(y == next);
}

// Who has given up may have put something else where the message was.
void test_nothing_is_delivered_of_a_sender_that_has_given_up() {
  for (const bool has_left : {false, true}) {
    Pair pair;
    const Values x = counted(kLong, 1);
    Values y(kLong);
    Message sent = send_of(x.data(), kLong), received = recv_of(y);
    CHECK(!pair.sender.try_send(sent));
    if (has_left) {
      pair.segment->control(0).has_departed.store(1);
    } else {
      pair.segment->abort_word().store(1);
    }
    ErrorCode code = ErrorCode::none;
    try {
      recv_on(pair.receiver, received);
    } catch (const Error& error) {
      code = error.code;
    }
    CHECK(code == ErrorCode::channel_closed);
    CHECK(received.done <= kTurnNbytes);
  }
}

// A receiver would take it for the rest of what was cut off, until it hears of the end.
void test_nothing_follows_what_the_end_has_cut_off() {
  const std::shared_ptr<Segment> segment = Segment::create(2);
  const std::vector<int> members{0, 1};
  const SpinPolicy spin = SpinPolicy::for_ranks(2, 2);
  std::vector<std::shared_ptr<Messenger>> messengers;
  for (const int place : members) {
    const auto memory = std::make_shared<PeerMemory>(segment, place, PeerReads::never);
    std::vector<std::unique_ptr<Channel>> channels(2);
    channels[1 - place] = std::make_unique<ShmChannel>(segment, memory, place, 1 - place, 1 - place);
    const auto transport = std::make_shared<ShmTransport>(segment, place, members, spin, false, memory);
    messengers.push_back(std::make_shared<Messenger>(transport, std::move(channels), segment, place, spin));
  }
  Values x = counted(kLong, 1), y(kLong);
  Batch cut_off({{true, 1, x.data(), kLong, DType::int32, 0}}), next = cut_off;
  Batch receive({{false, 0, y.data(), kLong, DType::int32, 0}});
  messengers[0]->post(cut_off);
  CHECK(messengers[0]->progress() && !cut_off.is_done());
  messengers[0]->end(Error(ErrorCode::timeout));
  messengers[0]->post(next);
  messengers[1]->post(receive);
  while (messengers[1]->progress()) CHECK(!messengers[0]->progress());
  CHECK(!receive.is_done() && next.is_done());
  ErrorCode code = ErrorCode::none;
  try {
    next.rethrow();
  } catch (const Error& error) {
    code = error.code;
  }
  CHECK(code == ErrorCode::timeout);
  messengers[1]->end(Error(ErrorCode::timeout));
}

// Sizes around every limit, from private and symmetric memory, to and fro.
void exchange(ShmChannel& channel, std::int32_t* x, bool is_first, std::uint32_t seed) {
  std::mt19937 random(seed);
  Values y(kLong);
  for (int i = 0; i < 100; ++i) {
    const std::size_t count = std::size_t{1} << random() % 20 | random() % 2000;
    for (const bool is_send : {is_first, !is_first}) {
      if (is_send) {
        count_up(x, count, i);
        Message sent = send_of(x, count);
        while (!channel.try_send(sent)) std::this_thread::yield();
      } else {
        y.resize(count);
        Message received = recv_of(y);
        while (!channel.try_recv(received)) std::this_thread::yield();
        CHECK(y == counted(count, i));
      }
    }
  }
}

void test_messages_arrive_whole(PeerReads setting, bool is_symmetric) {
  Pair pair(setting);
  Values values[2] = {Values(2 * kLong), Values(2 * kLong)};
  std::vector<std::thread> ranks;
  for (const int rank : {0, 1})
    ranks.emplace_back([&, rank] {
      auto* const x =
          is_symmetric ? reinterpret_cast<std::int32_t*>(pair.segment->heap(rank)) : values[rank].data();
      exchange(rank == 0 ? pair.sender : pair.receiver, x, rank == 0, 11);
    });
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

int main() {
  test_a_message_moves_in_turns();
  test_a_send_without_receiver_completes();
  test_the_receiver_fetches_what_is_lent(true);
  if (can_read_other_ranks()) {
    test_the_receiver_fetches_what_is_lent(false);
    test_what_cannot_be_read_is_given_back();
  } else {
    std::puts("channel_test: no reads of private memory, since process_vm_readv is refused");
  }
  test_what_may_not_be_read_comes_through_the_ring();
  test_a_patient_receive_holds_up_nobody();
  test_a_message_that_does_not_fit_is_discarded();
  test_nothing_is_delivered_of_a_sender_that_has_given_up();
  test_nothing_follows_what_the_end_has_cut_off();
  for (const PeerReads setting : {PeerReads::automatic, PeerReads::always, PeerReads::never})
    for (const bool is_symmetric : {false, true}) test_messages_arrive_whole(setting, is_symmetric);
  std::puts("channel_test: passed");
}
