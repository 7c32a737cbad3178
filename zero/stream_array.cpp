// zero/stream_array.cpp: the allocation behind StreamArray.
#include "zero/stream_array.h"

#include <cstring>
#include <new>
#include <sys/mman.h>

namespace tandem::zero {
namespace {

constexpr std::size_t kAlignBytes = 64;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kHugeFrom = 2 * kHugePageBytes;  // below, rounding up would waste too much

}  // namespace

void* allocate_stream(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const bool huge = bytes >= kHugeFrom;
  const std::size_t align = huge ? kHugePageBytes : kAlignBytes;
  const std::size_t padded = (bytes + align - 1) / align * align;
  void* const memory = std::aligned_alloc(align, padded);
  if (memory == nullptr) throw std::bad_alloc();
  // Before the first touch, or small pages are there already. Advice: a refusal is no error.
  if (huge) static_cast<void>(madvise(memory, padded, MADV_HUGEPAGE));
  std::memset(memory, 0, bytes);
  return memory;
}

}  // namespace tandem::zero
