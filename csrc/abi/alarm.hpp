// How one connection between ranks tells another one between the same ranks that a rank is gone.
#ifndef FERRO_ALARM_HPP
#define FERRO_ALARM_HPP

#include <functional>

namespace ferro {

struct Loss {
  int rank = -1;         // who ended the group; -1 while it is well
  bool is_dead = false;  // died, or its host does not answer: it did not just leave
};

// May be asked from any thread, now and then. It keeps nothing alive.
using Alarm = std::function<Loss()>;

}  // namespace ferro

#endif  // FERRO_ALARM_HPP
