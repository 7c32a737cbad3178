// zero/gradient_buckets.h: where gradients wait between autograd and the reduction.
//
// For each bucket up to two buffers in the channel's staging memory:
//   main: what arrived first in a pass. In the bucket's wire type; in fp32 where something is held
//         over passes (hold), because a held sum is summed and travels in fp32, once.
//   late: further arrivals of a pass, and arrivals of frozen parameters, summed in fp32.
// G1 A gradient is copied once, into main, or added once, into late or a held main.
// G2 take_*() fills what did not arrive with zeros, so that staging never shows old bytes of a
// parameter.
//    Padding is left as it is: nobody reads it as a parameter.
// G3 Work is given to the caller's stream of the moment, which first waits for what other streams
//    did with the same buffer; a contribution carries the marks of all of them.
// Thread safety: none; the caller's lock covers every call, the copying included.
// Called by engine.
#pragma once

#include "comm/data_plane.h"
#include "zero/bucket_plan.h"
#include "zero/torch_device.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace tandem::zero {

/// What a bucket contributes to one reduction: staging with elements of `wire`, ready when its
/// pending work is. Empty staging: zeros.
struct Contribution {
  comm::Staging staging;
  kernels::Dtype wire = kernels::Dtype::kFloat32;
};

class GradientBuckets {
 public:
  /// All outlive the buckets. Staging sizes: see channel_spec().
  GradientBuckets(const BucketPlan& plan, comm::Channel& channel, TorchDevice& device);
  ~GradientBuckets();
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;
  GradientBuckets(GradientBuckets&&) = delete;
  GradientBuckets& operator=(GradientBuckets&&) = delete;

  /// The first arrival of a parameter in a pass. `hold`: this pass holds, so main is (or becomes)
  /// fp32 and the gradient is added to what is held; without it a main that holds something is
  /// added to as well, and an empty one is copied into in the wire type. Sparse gradients
  /// are made dense, strided ones copied with their strides. Throws InvalidArgument on a gradient
  /// of another number of elements, OutOfMemory; then nothing has changed.
  void put_main(std::int32_t parameter, const at::Tensor& gradient, bool hold);
  /// Adds to the bucket's late buffer. Throws as put_main() does.
  void put_late(std::int32_t parameter, const at::Tensor& gradient);

  /// True if main (late) holds anything of this bucket.
  [[nodiscard]] bool has_main(std::int32_t bucket) const;
  [[nodiscard]] bool has_late(std::int32_t bucket) const;

  /// Takes main for a reduction, missing parameters zeroed. `wire` is what all ranks agreed on for
  /// this reduction: the bucket's wire type, or fp32 where the engine is held on any rank (a 16-bit
  /// main is then widened). Empty if nothing is there.
  [[nodiscard]] Contribution take_main(std::int32_t bucket, kernels::Dtype wire);
  /// Takes late, fp32.
  [[nodiscard]] Contribution take_late(std::int32_t bucket);
  /// For engines that hold: adds late to main (fp32) and empties late.
  void add_late_to_main(std::int32_t bucket);
  /// Multiplies what is held (main, fp32 then) by `factor`.
  void multiply(float factor);
  /// Drops everything (a discarded or cleared window); staging goes back to the channel.
  void discard();

  /// Bytes of staging that hold something now.
  [[nodiscard]] std::size_t held_bytes() const;

  /// What a channel for this plan needs.
  static comm::ChannelSpec channel_spec(const BucketPlan& plan, std::string name);

 private:
  /// The last work of a stream on a buffer.
  struct Use {
    std::uintptr_t stream = 0;
    kernels::Mark mark;
  };
  struct Buffer {
    comm::Staging staging;
    std::vector<Use> uses;  // one a stream; none on the CPU
    kernels::Dtype dtype = kernels::Dtype::kFloat32;
    std::vector<bool> present;  // per placement of the bucket
    std::int64_t count = 0;     // of present
  };

  void put(std::int32_t bucket,
           Buffer& buffer,
           kernels::Dtype dtype,
           std::int32_t parameter,
           const at::Tensor& gradient);
  void open(std::int32_t bucket, Buffer& buffer, kernels::Dtype dtype);
  /// Before and after work of `stream` on a buffer.
  static void enter(const Buffer& buffer, kernels::Stream& stream);
  static void leave(Buffer& buffer, kernels::Stream& stream);
  /// The buffer's staging, with what is pending on it.
  [[nodiscard]] static comm::Staging release(Buffer& buffer);
  void fold_one(kernels::Stream& stream,
                const void* data,
                kernels::Dtype dtype,
                std::int64_t numel,
                float* sum,
                kernels::Accumulator state);
  [[nodiscard]] bool is_plain(const at::Tensor& tensor) const;
  void clear(Buffer& buffer);
  void widen(std::int32_t bucket, Buffer& buffer);
  Contribution take(std::int32_t bucket, Buffer& buffer, kernels::Dtype wire);

  const BucketPlan& plan_;
  comm::Channel& channel_;
  TorchDevice& torch_;
  std::vector<Buffer> main_;
  std::vector<Buffer> late_;
  std::vector<std::int32_t> placement_of_;  // per parameter, index in its bucket
};

}  // namespace tandem::zero
