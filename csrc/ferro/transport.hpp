// What carries a group's collectives: shared memory (shm_transport.hpp), TCP
// (tcp_transport.hpp), or the two together (hosts_transport.hpp).
#ifndef FERRO_TRANSPORT_HPP
#define FERRO_TRANSPORT_HPP

#include <cstdint>

#include "ferro/call.hpp"
#include "ferro/error.hpp"
#include "ferro/testimony.hpp"
#include "ferro/types.hpp"

namespace ferro {

// Ranks in errors and in AbortReason are always ranks of the whole group, even
// where a transport joins only some of them.
//
// run() is called by one thread at a time, in the same order on every rank; abort(),
// aborted() and closing may come from any thread at any moment.
class Transport {
 public:
  virtual ~Transport() = default;

  // Runs one collective to its end on this rank. Throws Error{mismatch}, with
  // every buffer untouched and the group still usable, if ranks disagree; after
  // any other Error the group cannot go on. Of a timeout it may say already what find_missing() finds; that
  // gives the same answer again.
  virtual void run(Call& call, const Collective& collective) = 0;

  // Starts a collective whose rest waits for nothing but that the others start it, too, and which nobody
  // waits for. The next run() is given the same one, and does that rest. False, with nothing started, if it
  // can't be divided like this.
  virtual bool begin([[maybe_unused]] const Collective& collective) { return false; }
  // Whether all ranks have come so far with what begin() has started that its rest waits for none of them.
  virtual bool have_all_begun() const { return false; }
  // The same, after a while in which they may come to it: longer for the `call` that waits for them than for
  // one that would rather go on, which is null.
  virtual bool linger_until_all_have_begun([[maybe_unused]] Call* call) const { return false; }

  // Ends the group on every rank, for the first reason that anybody gave.
  // Wakes all waits of this rank and its peers.
  virtual void abort(AbortReason reason) noexcept = 0;
  // The reason that won; code none while the group is well. May look at sockets for it, and pass it on.
  virtual AbortReason aborted() const noexcept = 0;

  // Adds the ranks that are certain to take part no more, since they died or closed.
  // Works after the end of the group, too. Silence convicts nobody.
  virtual void add_lost(RankSet& ranks) = 0;

  // After a timeout, once this rank has called abort(): who is missing. The answer is the same on all
  // ranks, and from then on aborted() is the reason that counts on all. May wait for kInquestSeconds.
  // Empty where the rank that gave up had been waiting for nobody; with kDeadlock if they wait for
  // each other.
  virtual RankSet find_missing() = 0;

  // Adds the ranks for which this rank's collective in progress waits, or those that keep these waiting, as
  // far as that is known. May be called from any thread.
  virtual void add_awaited(RankSet& ranks) const = 0;
  // For a rank that gives up this call, before it calls abort(): lets the others know that it waited for
  // error.missing.
  virtual void testify(const Call& call, const Error& error) noexcept = 0;
  // Called before and after a thread sleeps until a collective is done that another thread of this rank runs.
  virtual void note_waiting_for_collective(const Call& call, bool is_waiting) noexcept = 0;
  // Called before a sleep in a wait for messages, with the ranks awaited, once nothing has moved for a while;
  // with the empty set when something moves again or the wait is over.
  virtual void note_awaited_in_messages(const Call& call, const RankSet& awaited) noexcept = 0;
  // This rank makes calls from several threads. From here on its program does not count as waiting when one
  // of them does: another may do what the others wait for.
  virtual void note_several_callers() noexcept = 0;
  // For a rank that gives up this call, in which it waited for error.missing, before it calls abort(): puts
  // in their place the ranks at which their own waits end, if that is known already.
  virtual void trace([[maybe_unused]] const Call& call, [[maybe_unused]] Error& error) const {}
  // For a transport that joins the ranks of one host only: says to them what this rank testifies; adds what
  // other ranks have said so far, and the reason that stands among them.
  virtual void pass_on([[maybe_unused]] const Testimony& testimony) noexcept {}
  virtual void add_testimonies(Testimonies& testimonies) = 0;

  // A word that ranks of one host share, to agree on who decides which ranks go on in
  // a successor of this group. 0 at first; the meaning of other values is up to them. Ranks
  // that share no memory have no such word: it stays 0, and each of them may advance it.
  virtual std::uint32_t succession() const noexcept { return 0; }
  // Sets the word to `to` if it is `from`; returns whether it was.
  virtual bool advance_succession([[maybe_unused]] std::uint32_t from,
                                  [[maybe_unused]] std::uint32_t to) noexcept {
    return true;
  }

  // Says goodbye: this rank sends nothing more, and peers that wait for it need
  // not wait any longer. Nothing else is called afterwards.
  virtual void close() noexcept = 0;
};

}  // namespace ferro

#endif  // FERRO_TRANSPORT_HPP
