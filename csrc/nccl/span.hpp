// std::span<const T>, which C++17 does not have.
#ifndef FERRO_NCCL_SPAN_HPP
#define FERRO_NCCL_SPAN_HPP

#include <cstddef>

namespace ferro::nccl {

template <typename T>
class Span {
 public:
  Span() = default;
  Span(const T* data, std::size_t size) noexcept : data_(data), size_(size) {}

  const T* begin() const noexcept { return data_; }
  const T* end() const noexcept { return data_ + size_; }
  std::size_t size() const noexcept { return size_; }
  const T& front() const noexcept { return *data_; }

 private:
  const T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace ferro::nccl

#endif  // FERRO_NCCL_SPAN_HPP
