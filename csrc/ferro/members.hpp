// Some ranks of a mesh, by their places among each other.
#ifndef FERRO_MEMBERS_HPP
#define FERRO_MEMBERS_HPP

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ferro/error.hpp"

namespace ferro {

class Members {
 public:
  // `ranks` in the order of their chunks, own rank among them.
  Members(int own_rank, std::vector<int> ranks) : members_(std::move(ranks)), index_(index_of(own_rank)) {
    for (int step = 1; step < size(); ++step) peers_.push_back((index_ + step) % size());
  }

  int size() const { return static_cast<int>(members_.size()); }
  int index() const { return index_; }
  int member(int index) const { return members_[index]; }
  const std::vector<int>& members() const { return members_; }
  // All other indices, in the order in which this rank addresses them: each rank begins with
  // its successor, so that not all write to the same one first.
  const std::vector<int>& peers() const { return peers_; }
  // Throws Error{io} if the rank is not a member.
  int index_of(int rank) const {
    const auto found = std::find(members_.begin(), members_.end(), rank);
    if (found == members_.end())
      throw Error(ErrorCode::io, rank, "rank " + std::to_string(rank) + " is not in this group");
    return static_cast<int>(found - members_.begin());
  }

 private:
  std::vector<int> members_;
  int index_;
  std::vector<int> peers_;
};

}  // namespace ferro

#endif  // FERRO_MEMBERS_HPP
