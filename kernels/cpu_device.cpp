#include "kernels/cpu_device.h"

#include "kernels/bf16.h"
#include "kernels/check.h"
#include "kernels/fp16.h"
#include "kernels/norm.h"
#include "kernels/powers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <span>
#include <sys/mman.h>
#include <utility>

namespace tandem::kernels {
namespace {

constexpr std::size_t kAlignBytes = 64;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kHugeFrom = 2 * kHugePageBytes;  // below, rounding up would waste too much

std::shared_ptr<std::byte> allocate_zeros(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const bool huge = bytes >= kHugeFrom;
  const std::size_t align = huge ? kHugePageBytes : kAlignBytes;
  const std::size_t padded = (bytes + align - 1) / align * align;
  void* const memory = std::aligned_alloc(align, padded);
  if (memory == nullptr) throw std::bad_alloc();
  // Before the first touch, or small pages are there already. Advice: a refusal is no error.
  if (huge) static_cast<void>(madvise(memory, padded, MADV_HUGEPAGE));
  std::memset(memory, 0, bytes);
  return {static_cast<std::byte*>(memory), [](std::byte* start) { std::free(start); }};
}

// A task costs about as much as so many elements: some ten microseconds, long against handing it
// to a thread, short against a bucket.
constexpr std::int64_t kTaskNumel = 64 * kNormBlock;
// What a fragment costs besides its elements, in elements: thousands of scalars are work, too.
constexpr std::int64_t kFragmentCost = 32;

class CpuFragmentTable final : public FragmentTable {
 public:
  CpuFragmentTable(std::vector<UpdateArrays> fragments,
                   const std::vector<std::size_t>& bucket_ends,
                   const ParallelFor& parallel)
      : fragments_(std::move(fragments)), parallel_(parallel) {
    std::size_t begin = 0;
    for (const std::size_t end : bucket_ends) {
      cut_into_tasks(begin, end);
      bucket_tasks_.push_back(task_starts_.size());
      begin = end;
    }
    task_starts_.push_back(fragments_.size());
  }

  void sum_squares(Stream& /*stream*/, const std::vector<bool>& chosen) override {
    sum(chosen, [](const UpdateArrays& fragment, Superaccumulator& own) {
      add_sum_of_squares(fragment.grad, fragment.numel, own);
    });
  }
  void sum_powers(Stream& /*stream*/,
                  const std::vector<bool>& chosen,
                  const Power& power) override {
    sum(chosen, [&](const UpdateArrays& fragment, Superaccumulator& own) {
      add_sum_of_powers(fragment.grad, fragment.numel, power, own);
    });
  }
  void add_sum_to(Superaccumulator& sum) const override { sum.merge(sum_); }

  void find_largest(Stream& /*stream*/, const std::vector<bool>& chosen) override {
    TANDEM_ASSERT(chosen.size() == fragments_.size(), "chosen has a flag for every fragment");
    largest_ = 0;
    std::mutex mutex;  // guards largest_
    for_tasks(0, task_starts_.size() - 1, [&](std::size_t begin, std::size_t end) {
      std::uint32_t own = 0;
      for (std::size_t f = begin; f < end; ++f) {
        if (!chosen[f]) continue;
        own = std::max(own, largest_magnitude(fragments_[f].grad, fragments_[f].numel));
      }
      const std::lock_guard lock(mutex);
      largest_ = std::max(largest_, own);
    });
  }
  [[nodiscard]] std::uint32_t largest() const override { return largest_; }

  void set_rules(Stream& /*stream*/, UpdateRules rules) override {
    TANDEM_ASSERT(rules.rule_of.size() == fragments_.size(), "a rule for every fragment");
    rules_ = std::move(rules);
  }

  void update(Stream& /*stream*/, std::int32_t bucket) override {
    const auto b = static_cast<std::size_t>(bucket);
    for_tasks(b == 0 ? 0 : bucket_tasks_[b - 1], bucket_tasks_[b],
              [&](std::size_t begin, std::size_t end) {
                for (std::size_t f = begin; f < end; ++f) {
                  const std::int32_t rule = rules_.rule_of[f];
                  if (rule == UpdateRules::kSkip) continue;
                  kernels::update(rules_.rules[static_cast<std::size_t>(rule)], fragments_[f]);
                }
              });
  }

 private:
  /// `add`: a fragment to a superaccumulator.
  template <class Add>
  void sum(const std::vector<bool>& chosen, const Add& add) {
    TANDEM_ASSERT(chosen.size() == fragments_.size(), "chosen has a flag for every fragment");
    sum_ = {};
    std::mutex mutex;  // guards sum_; sums are exact, so the order of merging does not matter
    for_tasks(0, task_starts_.size() - 1, [&](std::size_t begin, std::size_t end) {
      Superaccumulator own;
      for (std::size_t f = begin; f < end; ++f) {
        if (chosen[f]) add(fragments_[f], own);
      }
      const std::lock_guard lock(mutex);
      sum_.merge(own);
    });
  }

  /// Of fragments [begin, end), one bucket's.
  void cut_into_tasks(std::size_t begin, std::size_t end) {
    std::int64_t cost = kTaskNumel;  // full: the first fragment opens a task
    for (std::size_t f = begin; f < end; ++f) {
      if (cost + fragments_[f].numel > kTaskNumel) {
        task_starts_.push_back(f);
        cost = 0;
      }
      cost += fragments_[f].numel + kFragmentCost;
    }
  }

  /// body(first fragment, behind the last one), over tasks [begin, end).
  template <class Body>
  void for_tasks(std::size_t begin, std::size_t end, const Body& body) const {
    if (begin == end) return;
    parallel_(static_cast<std::int64_t>(end - begin), [&](std::int64_t first, std::int64_t last) {
      body(task_starts_[begin + static_cast<std::size_t>(first)],
           task_starts_[begin + static_cast<std::size_t>(last)]);
    });
  }

  const std::vector<UpdateArrays> fragments_;
  const ParallelFor parallel_;
  std::vector<std::size_t> task_starts_;   // task t is fragments [t, t + 1) of it
  std::vector<std::size_t> bucket_tasks_;  // behind each bucket's last task
  Superaccumulator sum_;
  std::uint32_t largest_ = 0;
  UpdateRules rules_;
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(ParallelFor parallel) : parallel_(std::move(parallel)) {}

  [[nodiscard]] std::string name() const override { return "cpu"; }
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return allocate_zeros(bytes);
  }
  [[nodiscard]] std::shared_ptr<std::byte> allocate_host(std::size_t bytes) override {
    return allocate_zeros(bytes);
  }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(Priority /*priority*/) override {
    return std::make_unique<ImmediateStream>();
  }

  void copy(Stream& /*stream*/, void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void zero(Stream& /*stream*/, void* to, std::size_t bytes) override {
    if (bytes > 0) std::memset(to, 0, bytes);
  }
  void fill(Stream& /*stream*/, float* to, float value, std::int64_t numel) override {
    std::fill_n(to, numel, value);
  }
  void multiply(Stream& /*stream*/, float* x, float factor, std::int64_t numel) override {
    kernels::multiply(x, factor, numel);
  }
  void widen(
      Stream& /*stream*/, float* to, const void* from, Dtype dtype, std::int64_t numel) override {
    switch (dtype) {
      case Dtype::kFloat32:
        if (numel > 0) std::memcpy(to, from, static_cast<std::size_t>(numel) * sizeof(float));
        return;
      case Dtype::kBFloat16:
        return widen_halves(to, static_cast<const Bf16*>(from), numel);
      case Dtype::kFloat16:
        return widen_halves(to, static_cast<const Fp16*>(from), numel);
    }
  }
  void fold(Stream& /*stream*/,
            std::span<const Slice> slices,
            std::int64_t numel,
            float* acc,
            Accumulator state) override {
    kernels::fold(slices, numel, acc, state);
  }

  [[nodiscard]] std::unique_ptr<FragmentTable> make_table(
      std::vector<UpdateArrays> fragments, std::vector<std::size_t> bucket_ends) override {
    return std::make_unique<CpuFragmentTable>(std::move(fragments), bucket_ends, parallel_);
  }

 private:
  template <class Half>
  static void widen_halves(float* to, const Half* from, std::int64_t numel) {
    for (std::int64_t i = 0; i < numel; ++i) to[i] = to_float(from[i]);
  }

  const ParallelFor parallel_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(ParallelFor parallel) {
  return std::make_unique<CpuDevice>(std::move(parallel));
}

std::unique_ptr<Device> make_cpu_device() {
  return make_cpu_device([](std::int64_t count, const auto& body) { body(0, count); });
}

}  // namespace tandem::kernels
