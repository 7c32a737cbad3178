// kernels/device.h: what arithmetic runs on: the CPU or one GPU, behind one interface, so that
// everything above is written once.
//
// D1 Work is done in the order of its stream. On a GPU the calls return at once: memory given to
//    them stays as it is until a mark recorded afterwards is complete. On the CPU they block.
// D2 All devices give the same bits: folds, norms and updates are those of kernels/fold.h, norm.h
//    and update.h, element for element. Norms of types that are no integer: R3 of
//    kernels/powers.h.
// Thread safety: any thread; one thread at a time for one stream and for one FragmentTable.
// Called by comm (folds, copies), zero (gradients, optimizer state).
#pragma once

#include "kernels/dtype.h"
#include "kernels/fold.h"
#include "kernels/powers.h"
#include "kernels/stream.h"
#include "kernels/superaccumulator.h"
#include "kernels/update.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tandem::kernels {

/// Which rule each fragment of a table is updated by: an index into `rules`, or kSkip.
struct UpdateRules {
  static constexpr std::int32_t kSkip = -1;
  std::vector<Update> rules;
  std::vector<std::int32_t> rule_of;  // per fragment
};

/// The fragments of one optimizer shard, in buckets, laid out for one device.
///
/// T1 A fragment begins at a multiple of kNormBlock elements of its parameter or at its start.
class FragmentTable {
 public:
  FragmentTable() = default;
  virtual ~FragmentTable() = default;
  FragmentTable(const FragmentTable&) = delete;
  FragmentTable& operator=(const FragmentTable&) = delete;
  FragmentTable(FragmentTable&&) = delete;
  FragmentTable& operator=(FragmentTable&&) = delete;

  /// Sums the squares of the gradients of chosen fragments (kernels/norm.h). `chosen`: per
  /// fragment. Reads 4 bytes an element.
  virtual void sum_squares(Stream& stream, const std::vector<bool>& chosen) = 0;
  /// The same of (|x| / divisor)^p (kernels/powers.h).
  virtual void sum_powers(Stream& stream, const std::vector<bool>& chosen, const Power& power) = 0;
  /// Adds what the last of these two found, once a mark recorded after it is complete and before
  /// the next find_largest().
  virtual void add_sum_to(Superaccumulator& sum) const = 0;

  /// Finds the largest magnitude of the gradients of chosen fragments. Reads 4 bytes an element.
  virtual void find_largest(Stream& stream, const std::vector<bool>& chosen) = 0;
  /// What the last find_largest() found (kernels/powers.h), once a mark recorded after it is
  /// complete and before the next sum.
  [[nodiscard]] virtual std::uint32_t largest() const = 0;

  /// What the following update() calls do.
  virtual void set_rules(Stream& stream, UpdateRules rules) = 0;
  /// Updates the fragments of one bucket (kernels/update.h). One launch for each kind of optimizer
  /// among them, whatever their number.
  virtual void update(Stream& stream, std::int32_t bucket) = 0;
};

enum class Priority : std::uint8_t { kNormal, kHigh };

class Device {
 public:
  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  Device(Device&&) = delete;
  Device& operator=(Device&&) = delete;

  /// "cpu", "cuda:0"; for errors.
  [[nodiscard]] virtual std::string name() const = 0;

  /// [bytes] zeros, 64-byte aligned at least; freed with its last owner, who sees to it that no
  /// work uses it any more. 0 bytes: null. Throws OutOfDeviceMemory, std::bad_alloc.
  [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  /// The same on the host, from where and to where copies need no other memory.
  [[nodiscard]] virtual std::shared_ptr<std::byte> allocate_host(std::size_t bytes) = 0;
  /// Independent of every other stream. Outlived by the device.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream(Priority priority) = 0;

  /// Memory of the device or the host, either way. The ranges do not overlap.
  virtual void copy(Stream& stream, void* to, const void* from, std::size_t bytes) = 0;
  virtual void zero(Stream& stream, void* to, std::size_t bytes) = 0;
  /// to[i] = value, i in [0, numel).
  virtual void fill(Stream& stream, float* to, float value, std::int64_t numel) = 0;
  /// x[i] *= factor, in fp32. Moves 8 bytes an element.
  virtual void multiply(Stream& stream, float* x, float factor, std::int64_t numel) = 0;
  /// to[i] = from[i] in fp32, exactly.
  virtual void widen(
      Stream& stream, float* to, const void* from, Dtype dtype, std::int64_t numel) = 0;
  /// kernels/fold.h.
  virtual void fold(Stream& stream,
                    std::span<const Slice> slices,
                    std::int64_t numel,
                    float* acc,
                    Accumulator state) = 0;

  /// `bucket_ends[b]`: how many fragments lie in buckets up to b. Arrays as kernels/update.h says;
  /// `state` pointers beyond what an optimizer keeps may be null.
  [[nodiscard]] virtual std::unique_ptr<FragmentTable> make_table(
      std::vector<UpdateArrays> fragments, std::vector<std::size_t> bucket_ends) = 0;
};

/// [numel] zeros of a device's memory.
template <typename Number>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(Device& device, std::int64_t numel)
      : numel_(numel), memory_(device.allocate(bytes())) {}

  [[nodiscard]] Number* data() const { return reinterpret_cast<Number*>(memory_.get()); }
  [[nodiscard]] std::int64_t numel() const { return numel_; }
  [[nodiscard]] bool empty() const { return numel_ == 0; }
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(numel_) * sizeof(Number);
  }

 private:
  std::int64_t numel_ = 0;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace tandem::kernels
