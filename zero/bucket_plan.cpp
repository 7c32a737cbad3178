// zero/bucket_plan.cpp: cuts parameters into buckets and lays each bucket out, in one pass.
#include "zero/bucket_plan.h"

#include "kernels/check.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace tandem::zero {
namespace {

constexpr std::int64_t kAlignBytes = 64;  // of small parameters
constexpr std::int64_t kPageBytes = 4096;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A bucket that still takes parameters. Large parameters come first in the finished bucket and
/// always fill whole blocks, so small ones can be packed against offsets that count from the end of
/// the large ones: what a parameter would add is known at once, and planning stays linear.
class OpenBucket {
 public:
  explicit OpenBucket(kernels::Dtype dtype)
      : dtype_(dtype), align_(kAlignBytes / static_cast<std::int64_t>(kernels::bytes_of(dtype))) {}

  [[nodiscard]] std::int64_t bytes_with(std::int64_t numel) const {
    const std::int64_t total = is_large(numel)
                                   ? padded(large_numel_ + round_up(numel, kBlock), small_numel_)
                                   : padded(large_numel_, small_start(numel) + numel);
    return total * static_cast<std::int64_t>(kernels::bytes_of(dtype_));
  }

  void add(std::int32_t parameter, std::int64_t numel) {
    if (is_large(numel)) {
      large_.push_back({parameter, large_numel_, numel});
      large_numel_ += round_up(numel, kBlock);
    } else {
      const std::int64_t start = small_start(numel);
      small_.push_back({parameter, start, numel});
      small_numel_ = start + numel;
    }
  }

  void finish_into(BucketLayout& bucket) {
    bucket.dtype = dtype_;
    bucket.numel = padded(large_numel_, small_numel_);
    bucket.placements = std::move(large_);
    bucket.placements.reserve(bucket.placements.size() + small_.size());
    for (Placement placement : small_) {
      placement.offset += large_numel_;
      bucket.placements.push_back(placement);
    }
  }

 private:
  static bool is_large(std::int64_t numel) { return numel >= kBlock; }

  /// At least one block, so that a bucket of nothing but empty parameters needs no special case.
  static std::int64_t padded(std::int64_t large_numel, std::int64_t small_numel) {
    return std::max(kBlock, large_numel + round_up(small_numel, kBlock));
  }

  /// Where a small parameter would start, counted from the end of the large ones.
  [[nodiscard]] std::int64_t small_start(std::int64_t numel) const {
    const std::int64_t start = round_up(small_numel_, align_);
    const bool straddles = start % kBlock + numel > kBlock;
    return straddles ? round_up(start, kBlock) : start;
  }

  kernels::Dtype dtype_;
  std::int64_t align_;  // in elements
  std::vector<Placement> large_;
  std::vector<Placement> small_;
  std::int64_t large_numel_ = 0;  // a multiple of kBlock
  std::int64_t small_numel_ = 0;
};

}  // namespace

BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters,
                        std::int64_t bucket_bytes,
                        std::optional<kernels::Dtype> wire) {
  TANDEM_ASSERT(bucket_bytes > 0, "bucket_bytes is checked where options are given");
  BucketPlan plan;
  plan.bucket_of.resize(parameters.size());
  plan.offset_of.resize(parameters.size());

  // A bucket is numbered when it is opened, by its first parameter (B4); `open_of[dtype]` is the
  // one that takes the next parameter of that type.
  std::vector<OpenBucket> open;
  std::array<std::int32_t, 3> open_of = {-1, -1, -1};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& info = parameters[i];
    TANDEM_ASSERT(info.numel >= 0, "a parameter has no negative number of elements");
    std::int32_t& current = open_of[static_cast<std::size_t>(info.dtype)];
    if (current < 0 ||
        open[static_cast<std::size_t>(current)].bytes_with(info.numel) > bucket_bytes) {
      current = static_cast<std::int32_t>(open.size());
      open.emplace_back(info.dtype);
    }
    open[static_cast<std::size_t>(current)].add(static_cast<std::int32_t>(i), info.numel);
    plan.bucket_of[i] = current;
  }

  plan.buckets.resize(open.size());
  for (std::size_t b = 0; b < open.size(); ++b) {
    BucketLayout& bucket = plan.buckets[b];
    open[b].finish_into(bucket);
    bucket.wire = wire.value_or(bucket.dtype);
    bucket.flat_offset = plan.flat_bytes;
    plan.flat_bytes += round_up(
        bucket.numel * static_cast<std::int64_t>(kernels::bytes_of(bucket.dtype)), kPageBytes);
    for (const Placement& placement : bucket.placements) {
      plan.offset_of[static_cast<std::size_t>(placement.parameter)] = placement.offset;
    }
  }
  return plan;
}

std::vector<std::string> describe(const std::vector<ParameterInfo>& parameters) {
  std::vector<std::string> lines;
  lines.reserve(parameters.size());
  for (const ParameterInfo& info : parameters) {
    std::string line = info.name + " " + kernels::name_of(info.dtype) + " [";
    for (std::size_t d = 0; d < info.shape.size(); ++d) {
      line += (d == 0 ? "" : ", ") + std::to_string(info.shape[d]);
    }
    lines.push_back(line + "]");
  }
  return lines;
}

}  // namespace tandem::zero
