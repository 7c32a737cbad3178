// zero/float_array.cpp: the allocation behind FloatArray.
#include "zero/float_array.h"

#include <cstring>
#include <new>
#include <sys/mman.h>

namespace tandem::zero {
namespace {

constexpr std::size_t kAlignBytes = 64;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kHugeFrom = 2 * kHugePageBytes;  // below, rounding up would waste too much

}  // namespace

FloatArray::FloatArray(std::int64_t numel) : numel_(numel) {
  if (numel == 0) return;
  const bool huge = bytes() >= kHugeFrom;
  const std::size_t align = huge ? kHugePageBytes : kAlignBytes;
  const std::size_t padded = (bytes() + align - 1) / align * align;
  data_.reset(static_cast<float*>(std::aligned_alloc(align, padded)));
  if (!data_) throw std::bad_alloc();
  // Before the first touch, or small pages are there already. Advice: a refusal is no error.
  if (huge) static_cast<void>(madvise(data_.get(), padded, MADV_HUGEPAGE));
  std::memset(data_.get(), 0, bytes());
}

}  // namespace tandem::zero
