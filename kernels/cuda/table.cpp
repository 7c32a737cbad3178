// kernels/cuda/table.cpp: the table of pieces, cut once, and what changes from step to step: which
// fragments are summed, and by which rules they are updated.
//
// A1 The host never waits for the device here. What is uploaded lies in pinned memory that is
// written again
//    only when the mark behind its copy is complete; until then another piece of pinned memory is
//    taken.
// A2 set_rules(), norms and update() are given to one stream, or the caller orders the
// streams: all
//    three use the same device memory.
#include "kernels/cuda/table.h"

#include "kernels/check.h"
#include "kernels/cuda/errors.h"
#include "kernels/cuda/launches.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace tandem::kernels::cuda {
namespace {

static_assert(std::variant_size_v<Update> <= 32, "kinds of a bucket are bits of a word");

/// Device memory that is written from the host now and then (A1).
class Upload {
 public:
  Upload(SharedPtr shared, std::size_t bytes)
      : shared_(std::move(shared)), bytes_(bytes), device_(allocate(shared_, bytes)) {}

  /// Where the host may write. Until send().
  [[nodiscard]] std::byte* open() {
    const auto free = std::find_if(buffers_.begin(), buffers_.end(),
                                   [](const Buffer& buffer) { return buffer.sent.complete(); });
    if (free != buffers_.end()) {
      open_ = static_cast<std::size_t>(free - buffers_.begin());
    } else {
      buffers_.push_back({allocate_host(shared_, bytes_), {}});
      open_ = buffers_.size() - 1;
    }
    return buffers_[open_].memory.get();
  }
  /// The first `bytes` of what was written; the device is current.
  void send(Stream& stream, std::size_t bytes) {
    Buffer& buffer = buffers_[open_];
    check(cudaMemcpyAsync(device_.get(), buffer.memory.get(), bytes, cudaMemcpyHostToDevice,
                          native_of(stream)),
          "cudaMemcpyAsync of a table");
    buffer.sent = stream.record();
  }
  [[nodiscard]] const std::byte* device() const { return device_.get(); }

 private:
  struct Buffer {
    std::shared_ptr<std::byte> memory;
    Mark sent;
  };
  const SharedPtr shared_;
  const std::size_t bytes_;
  const std::shared_ptr<std::byte> device_;
  std::vector<Buffer> buffers_;  // one or two, unless the host is far ahead
  std::size_t open_ = 0;
};

/// `data` in device memory. Waits until it is there.
template <class Value>
std::shared_ptr<std::byte> on_device(const SharedPtr& shared, const std::vector<Value>& data) {
  const std::size_t bytes = data.size() * sizeof(Value);
  std::shared_ptr<std::byte> memory = allocate(shared, bytes);
  if (bytes == 0) return memory;
  check(cudaMemcpyAsync(memory.get(), data.data(), bytes, cudaMemcpyHostToDevice,
                        shared->own_stream()),
        "cudaMemcpyAsync of a table");
  check(cudaStreamSynchronize(shared->own_stream()), "cudaStreamSynchronize");
  return memory;
}

class CudaFragmentTable final : public FragmentTable {
 public:
  CudaFragmentTable(SharedPtr shared,
                    const std::vector<UpdateArrays>& fragments,
                    std::vector<std::size_t> bucket_ends)
      : shared_(std::move(shared)),
        fragment_count_(fragments.size()),
        bucket_ends_(std::move(bucket_ends)),
        kinds_(bucket_ends_.size(), 0),
        rules_offset_((fragment_count_ * sizeof(std::int32_t) + alignof(RuleSlot) - 1) /
                      alignof(RuleSlot) * alignof(RuleSlot)),
        rules_(shared_, rules_offset_ + fragment_count_ * sizeof(RuleSlot)),
        chosen_(shared_, fragment_count_) {
    TANDEM_ASSERT(fragment_count_ <= std::numeric_limits<std::int32_t>::max(),
                  "fragments are counted in 32 bits");
    TANDEM_ASSERT((bucket_ends_.empty() ? 0 : bucket_ends_.back()) == fragment_count_,
                  "every fragment lies in a bucket");
    std::vector<Fragment> own;
    std::vector<std::int64_t> numels;
    own.reserve(fragment_count_);
    numels.reserve(fragment_count_);
    for (const UpdateArrays& arrays : fragments) {
      own.push_back(fragment_of(arrays));
      numels.push_back(arrays.numel);
    }
    piece_ends_ = piece_ends(numels, bucket_ends_);
    const CurrentDevice current(shared_->device());
    fragments_ = on_device(shared_, own);
    pieces_ = on_device(shared_, all_pieces(numels));
    sums_ = allocate(shared_, NormLaunch::kPartialBytes + kWordBytes);
    words_ = allocate_host(shared_, kWordBytes);
  }

  void sum_squares(Stream& stream, const std::vector<bool>& chosen) override {
    norm(stream, chosen, {}, launch_sum_squares);
  }
  void sum_powers(Stream& stream, const std::vector<bool>& chosen, const Power& power) override {
    norm(stream, chosen, power, launch_sum_powers);
  }
  void add_sum_to(Superaccumulator& sum) const override {
    Superaccumulator own;
    std::memcpy(own.words().data(), words_.get(), kWordBytes);
    sum.merge(own);
  }

  void find_largest(Stream& stream, const std::vector<bool>& chosen) override {
    norm(stream, chosen, {}, launch_find_largest);
  }
  [[nodiscard]] std::uint32_t largest() const override {
    std::int64_t word = 0;
    std::memcpy(&word, words_.get(), sizeof word);
    return static_cast<std::uint32_t>(word);
  }

  void set_rules(Stream& stream, UpdateRules given) override {
    TANDEM_ASSERT(given.rule_of.size() == fragment_count_, "a rule for every fragment");
    std::fill(kinds_.begin(), kinds_.end(), 0);
    if (fragment_count_ == 0) return;
    const CurrentDevice current(shared_->device());
    std::byte* const upload = rules_.open();
    // Only rules that a fragment has: never more than there are fragments.
    std::vector<std::int32_t> slot_of(given.rules.size(), UpdateRules::kSkip);
    std::int32_t slots = 0;
    std::size_t f = 0;
    for (std::size_t b = 0; b < bucket_ends_.size(); ++b) {
      for (; f < bucket_ends_[b]; ++f) {
        std::int32_t slot = UpdateRules::kSkip;
        if (given.rule_of[f] != UpdateRules::kSkip) {
          const auto rule = static_cast<std::size_t>(given.rule_of[f]);
          const Update& update = given.rules.at(rule);
          kinds_[b] |= std::uint32_t{1} << update.index();
          if (slot_of[rule] == UpdateRules::kSkip) {
            slot_of[rule] = slots;
            write_slot(upload, slots++, update);
          }
          slot = slot_of[rule];
        }
        std::memcpy(upload + f * sizeof slot, &slot, sizeof slot);
      }
    }
    rules_.send(stream, rules_offset_ + static_cast<std::size_t>(slots) * sizeof(RuleSlot));
  }

  void update(Stream& stream, std::int32_t bucket) override {
    const auto b = static_cast<std::size_t>(bucket);
    const std::int64_t begin = b == 0 ? 0 : piece_ends_[b - 1];
    if (kinds_.at(b) == 0) return;
    const CurrentDevice current(shared_->device());
    UpdateLaunch launch;
    launch.pieces = pieces() + begin;
    launch.count = piece_ends_[b] - begin;
    launch.fragments = fragments();
    launch.rule_of = reinterpret_cast<const std::int32_t*>(rules_.device());
    launch.rules = reinterpret_cast<const RuleSlot*>(rules_.device() + rules_offset_);
    for (std::uint32_t kinds = kinds_[b]; kinds != 0; kinds &= kinds - 1) {
      launch_update(native_of(stream), std::countr_zero(kinds), launch);
    }
  }

 private:
  static constexpr std::size_t kWordBytes = Superaccumulator::kWords * sizeof(std::int64_t);

  void norm(Stream& stream,
            const std::vector<bool>& chosen,
            const Power& power,
            void (*launch)(cudaStream_t, const NormLaunch&)) {
    TANDEM_ASSERT(chosen.size() == fragment_count_, "chosen has a flag for every fragment");
    if (piece_count() == 0) return;  // the words are zeros from the beginning
    const CurrentDevice current(shared_->device());
    std::byte* const flags = chosen_.open();
    for (std::size_t f = 0; f < fragment_count_; ++f) flags[f] = std::byte{chosen[f]};
    chosen_.send(stream, fragment_count_);
    NormLaunch norm;
    norm.pieces = pieces();
    norm.count = piece_count();
    norm.fragments = fragments();
    norm.chosen = reinterpret_cast<const unsigned char*>(chosen_.device());
    norm.partials = reinterpret_cast<std::int64_t*>(sums_.get());
    norm.words = reinterpret_cast<std::int64_t*>(sums_.get() + NormLaunch::kPartialBytes);
    norm.power = power;
    launch(native_of(stream), norm);
    check(cudaMemcpyAsync(words_.get(), norm.words, kWordBytes, cudaMemcpyDeviceToHost,
                          native_of(stream)),
          "cudaMemcpyAsync of the norm");
  }

  void write_slot(std::byte* upload, std::int32_t index, const Update& update) const {
    RuleSlot slot;
    slot.kind = static_cast<std::int32_t>(update.index());
    std::visit([&](const auto& functor) { std::memcpy(slot.functor, &functor, sizeof functor); },
               update);
    std::memcpy(upload + rules_offset_ + static_cast<std::size_t>(index) * sizeof slot, &slot,
                sizeof slot);
  }

  [[nodiscard]] const Piece* pieces() const {
    return reinterpret_cast<const Piece*>(pieces_.get());
  }
  [[nodiscard]] const Fragment* fragments() const {
    return reinterpret_cast<const Fragment*>(fragments_.get());
  }
  [[nodiscard]] std::int64_t piece_count() const {
    return piece_ends_.empty() ? 0 : piece_ends_.back();
  }

  const SharedPtr shared_;
  const std::size_t fragment_count_;
  const std::vector<std::size_t> bucket_ends_;
  std::vector<std::uint32_t> kinds_;  // per bucket: a bit for each kind of rule in it
  const std::size_t rules_offset_;    // of the slots, behind the rule of each fragment
  Upload rules_;
  Upload chosen_;
  std::vector<std::int64_t> piece_ends_;
  std::shared_ptr<std::byte> fragments_;
  std::shared_ptr<std::byte> pieces_;
  std::shared_ptr<std::byte> sums_;   // partial words, then the words
  std::shared_ptr<std::byte> words_;  // on the host
};

}  // namespace

std::unique_ptr<FragmentTable> make_table(const SharedPtr& shared,
                                          const std::vector<UpdateArrays>& fragments,
                                          std::vector<std::size_t> bucket_ends) {
  return std::make_unique<CudaFragmentTable>(shared, fragments, std::move(bucket_ends));
}

}  // namespace tandem::kernels::cuda
