// zero/gradient_buckets.cpp: copies gradients into staging, sums what is held or late.
#include "zero/gradient_buckets.h"

#include "kernels/check.h"
#include "kernels/fold.h"
#include "zero/tensor_type.h"
#include <tandem/error.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace tandem::zero {
namespace {

using kernels::Dtype;

}  // namespace

GradientBuckets::GradientBuckets(const BucketPlan& plan,
                                 comm::Channel& channel,
                                 TorchDevice& device)
    : plan_(plan),
      channel_(channel),
      torch_(device),
      main_(plan.buckets.size()),
      late_(plan.buckets.size()),
      placement_of_(plan.bucket_of.size(), 0) {
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const std::vector<Placement>& placements = plan.buckets[b].placements;
    main_[b].present.resize(placements.size(), false);
    late_[b].present.resize(placements.size(), false);
    for (std::size_t i = 0; i < placements.size(); ++i) {
      placement_of_[static_cast<std::size_t>(placements[i].parameter)] =
          static_cast<std::int32_t>(i);
    }
  }
}

GradientBuckets::~GradientBuckets() = default;

void GradientBuckets::put_main(std::int32_t parameter, const at::Tensor& gradient, bool hold) {
  const std::int32_t bucket = plan_.bucket_of[static_cast<std::size_t>(parameter)];
  Buffer& main = main_[static_cast<std::size_t>(bucket)];
  const auto placement =
      static_cast<std::size_t>(placement_of_[static_cast<std::size_t>(parameter)]);
  // A sum is never rounded to 16 bits: what is held, and what meets something already there, is
  // fp32.
  const bool sums = hold || main.present[placement];
  if (sums) {
    widen(bucket, main);
    put(bucket, main, Dtype::kFloat32, parameter, gradient);
  } else {
    const Dtype dtype =
        main.count > 0 ? main.dtype : plan_.buckets[static_cast<std::size_t>(bucket)].wire;
    put(bucket, main, dtype, parameter, gradient);
  }
}

void GradientBuckets::put_late(std::int32_t parameter, const at::Tensor& gradient) {
  const std::int32_t bucket = plan_.bucket_of[static_cast<std::size_t>(parameter)];
  put(bucket, late_[static_cast<std::size_t>(bucket)], Dtype::kFloat32, parameter, gradient);
}

void GradientBuckets::put(std::int32_t bucket,
                          Buffer& buffer,
                          Dtype dtype,
                          std::int32_t parameter,
                          const at::Tensor& gradient) {
  const BucketLayout& layout = plan_.buckets[static_cast<std::size_t>(bucket)];
  const auto index = static_cast<std::size_t>(placement_of_[static_cast<std::size_t>(parameter)]);
  const Placement& placement = layout.placements[index];
  if (gradient.numel() != placement.numel) {
    throw InvalidArgument("the gradient of parameter " + std::to_string(parameter) + " has " +
                          std::to_string(gradient.numel()) + " elements, the parameter has " +
                          std::to_string(placement.numel) +
                          "; was the parameter's shape changed after the engine was made?");
  }
  const at::NoGradGuard no_grad;
  const at::Tensor dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();

  if (buffer.count == 0) open(bucket, buffer, dtype);
  TANDEM_ASSERT(buffer.dtype == dtype, "G1 a buffer has one type");
  const std::size_t element = kernels::bytes_of(dtype);
  std::byte* target = buffer.staging.data + static_cast<std::size_t>(placement.offset) * element;
  const bool add = buffer.present[index];
  const bool plain = is_plain(dense);
  kernels::Stream& stream = torch_.current();
  enter(buffer, stream);
  if (placement.numel == 0) {
    // Nothing to copy; it has arrived all the same.
  } else if (!add && plain && dtype_of(dense) == dtype) {
    torch_.device().copy(stream, target, dense.const_data_ptr(),
                         static_cast<std::size_t>(placement.numel) * element);
    torch_.keep(dense);
  } else if (const std::optional<Dtype> source = dtype_of(dense); add && plain && source) {
    fold_one(stream, dense.const_data_ptr(), *source, placement.numel,
             reinterpret_cast<float*>(target), kernels::Accumulator::kContinue);
    torch_.keep(dense);
  } else {
    torch_.before_torch();
    at::Tensor view = torch_.tensor_over(target, dense.sizes(), dtype, nullptr);
    if (add) {
      view.add_(dense);  // in fp32: the target's type is the wider one
    } else {
      view.copy_(dense);
    }
  }
  leave(buffer, stream);
  if (!add) {
    buffer.present[index] = true;
    ++buffer.count;
  }
}

void GradientBuckets::open(std::int32_t bucket, Buffer& buffer, Dtype dtype) {
  clear(buffer);
  const auto numel =
      static_cast<std::size_t>(plan_.buckets[static_cast<std::size_t>(bucket)].numel);
  buffer.staging = channel_.acquire(numel * kernels::bytes_of(dtype));
  buffer.dtype = dtype;
}

void GradientBuckets::enter(const Buffer& buffer, kernels::Stream& stream) {
  bool known = false;
  for (const Use& use : buffer.uses) {
    known = known || use.stream == stream.id();
    if (use.stream != stream.id()) stream.wait(use.mark);
  }
  if (!known) stream.wait(buffer.staging.pending);
}

void GradientBuckets::leave(Buffer& buffer, kernels::Stream& stream) {
  kernels::Mark mark = stream.record();
  if (mark.state() == nullptr) return;
  for (Use& use : buffer.uses) {
    if (use.stream == stream.id()) {
      use.mark = std::move(mark);
      return;
    }
  }
  buffer.uses.push_back({stream.id(), std::move(mark)});
}

comm::Staging GradientBuckets::release(Buffer& buffer) {
  comm::Staging staging = std::exchange(buffer.staging, {});
  if (!buffer.uses.empty()) staging.pending.clear();  // every use came after it
  for (Use& use : buffer.uses) staging.pending.push_back(std::move(use.mark));
  buffer.uses.clear();
  return staging;
}

void GradientBuckets::fold_one(kernels::Stream& stream,
                               const void* data,
                               Dtype dtype,
                               std::int64_t numel,
                               float* sum,
                               kernels::Accumulator state) {
  const kernels::Slice slice{data, dtype};
  torch_.device().fold(stream, std::span(&slice, 1), numel, sum, state);
}

/// True if the tensor's memory is its values, one after another, where the buckets are.
bool GradientBuckets::is_plain(const at::Tensor& tensor) const {
  return torch_.holds(tensor) && tensor.is_contiguous() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

void GradientBuckets::clear(Buffer& buffer) {
  if (buffer.staging) channel_.give_back(release(buffer));
  buffer.present.assign(buffer.present.size(), false);
  buffer.count = 0;
}

void GradientBuckets::widen(std::int32_t bucket, Buffer& buffer) {
  if (buffer.count == 0 || buffer.dtype == Dtype::kFloat32) return;
  const BucketLayout& layout = plan_.buckets[static_cast<std::size_t>(bucket)];
  comm::Staging wide = channel_.acquire(static_cast<std::size_t>(layout.numel) * sizeof(float));
  kernels::Stream& stream = torch_.current();
  enter(buffer, stream);
  stream.wait(wide.pending);
  for (std::size_t i = 0; i < layout.placements.size(); ++i) {
    const Placement& placement = layout.placements[i];
    if (!buffer.present[i] || placement.numel == 0) continue;
    fold_one(stream,
             buffer.staging.data +
                 static_cast<std::size_t>(placement.offset) * kernels::bytes_of(buffer.dtype),
             buffer.dtype, placement.numel, reinterpret_cast<float*>(wide.data) + placement.offset,
             kernels::Accumulator::kFresh);
  }
  leave(buffer, stream);
  channel_.give_back(release(buffer));
  buffer.staging = std::move(wide);
  leave(buffer, stream);
  buffer.dtype = Dtype::kFloat32;
}

bool GradientBuckets::has_main(std::int32_t bucket) const {
  return main_[static_cast<std::size_t>(bucket)].count > 0;
}

bool GradientBuckets::has_late(std::int32_t bucket) const {
  return late_[static_cast<std::size_t>(bucket)].count > 0;
}

Contribution GradientBuckets::take_main(std::int32_t bucket, Dtype wire) {
  Buffer& main = main_[static_cast<std::size_t>(bucket)];
  if (wire == Dtype::kFloat32) widen(bucket, main);
  TANDEM_ASSERT(main.count == 0 || main.dtype == wire, "a held sum travels in fp32");
  return take(bucket, main, wire);
}

Contribution GradientBuckets::take_late(std::int32_t bucket) {
  return take(bucket, late_[static_cast<std::size_t>(bucket)], Dtype::kFloat32);
}

Contribution GradientBuckets::take(std::int32_t bucket, Buffer& buffer, Dtype wire) {
  if (buffer.count == 0) return {{}, wire};
  const BucketLayout& layout = plan_.buckets[static_cast<std::size_t>(bucket)];
  const std::size_t element = kernels::bytes_of(buffer.dtype);
  if (buffer.count < static_cast<std::int64_t>(layout.placements.size())) {
    kernels::Stream& stream = torch_.current();
    enter(buffer, stream);
    for (std::size_t i = 0; i < layout.placements.size(); ++i) {
      if (buffer.present[i]) continue;
      const Placement& placement = layout.placements[i];
      torch_.device().zero(
          stream, buffer.staging.data + static_cast<std::size_t>(placement.offset) * element,
          static_cast<std::size_t>(placement.numel) * element);
    }
    leave(buffer, stream);
  }
  Contribution taken{release(buffer), buffer.dtype};
  clear(buffer);
  return taken;
}

void GradientBuckets::add_late_to_main(std::int32_t bucket) {
  Buffer& main = main_[static_cast<std::size_t>(bucket)];
  Buffer& late = late_[static_cast<std::size_t>(bucket)];
  if (late.count == 0) return;
  if (main.count == 0) {
    clear(main);
    std::swap(main, late);
    return;
  }
  widen(bucket, main);
  const std::vector<Placement>& placements =
      plan_.buckets[static_cast<std::size_t>(bucket)].placements;
  kernels::Stream& stream = torch_.current();
  enter(main, stream);
  enter(late, stream);
  const auto* source = reinterpret_cast<const float*>(late.staging.data);
  auto* target = reinterpret_cast<float*>(main.staging.data);
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!late.present[i]) continue;
    const std::int64_t offset = placements[i].offset;
    fold_one(stream, source + offset, Dtype::kFloat32, placements[i].numel, target + offset,
             main.present[i] ? kernels::Accumulator::kContinue : kernels::Accumulator::kFresh);
    if (!main.present[i]) {
      main.present[i] = true;
      ++main.count;
    }
  }
  leave(main, stream);
  leave(late, stream);
  clear(late);
}

void GradientBuckets::multiply(float factor) {
  for (std::size_t b = 0; b < main_.size(); ++b) {
    Buffer& main = main_[b];
    if (main.count == 0) continue;
    widen(static_cast<std::int32_t>(b), main);
    kernels::Stream& stream = torch_.current();
    enter(main, stream);
    const std::vector<Placement>& placements = plan_.buckets[b].placements;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      if (!main.present[i] || placements[i].numel == 0) continue;
      torch_.device().multiply(stream,
                               reinterpret_cast<float*>(main.staging.data) + placements[i].offset,
                               factor, placements[i].numel);
    }
    leave(main, stream);
  }
}

void GradientBuckets::discard() {
  for (Buffer& main : main_) clear(main);
  for (Buffer& late : late_) clear(late);
}

std::size_t GradientBuckets::held_bytes() const {
  std::size_t bytes = 0;
  for (const Buffer& main : main_) bytes += main.staging.bytes;
  for (const Buffer& late : late_) bytes += late.staging.bytes;
  return bytes;
}

comm::ChannelSpec GradientBuckets::channel_spec(const BucketPlan& plan, std::string name) {
  comm::ChannelSpec spec;
  spec.name = std::move(name);
  spec.parameter_bytes = static_cast<std::size_t>(plan.flat_bytes);
  for (const BucketLayout& bucket : plan.buckets) {
    spec.largest_staging =
        std::max(spec.largest_staging, static_cast<std::size_t>(bucket.numel) * sizeof(float));
  }
  // A main and a late of every bucket, of a pass in flight and of one that fills; some to spare
  // while a main is widened.
  spec.staging_slots = 4 * plan.buckets.size() + 2;
  spec.posts_in_flight = 4 * plan.buckets.size() + 8;
  return spec;
}

}  // namespace tandem::zero
