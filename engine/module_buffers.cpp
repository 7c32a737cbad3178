// engine/module_buffers.cpp: what becomes of module buffers (BatchNorm's running statistics) at an
// applied step.
#include "engine/world_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <span>
#include <utility>

namespace tandem::engine {

/// Module buffers follow the engine's policy after an applied step. `stepping`: ranks whose buffers
/// are up to date; those that have left only receive.
void WorldState::exchange_buffers(EngineCore& core, const Bits& stepping) {
  if (core.buffers.empty() || group_.size == 1 || core.options.buffers == BufferPolicy::kLeave) {
    return;
  }
  if (core.options.buffers == BufferPolicy::kAverage) {
    average_buffers(core, stepping);
  }
  const auto root =
      static_cast<int>(std::find(stepping.begin(), stepping.end(), true) - stepping.begin());
  kernels::Stream& stream = *core.lane->step;
  if (group_.rank == root) {
    core.pack_buffers();
  }
  const std::uint64_t gather = core.channel->post_gather({stream.record()});
  const auto begin = static_cast<std::size_t>(core.plan.flat_bytes);
  const auto end = begin + static_cast<std::size_t>(core.buffer_bytes);
  core.channel->gather(
      gather,
      [&](int rank) {
        return rank == root ? comm::ByteRange{begin, end} : comm::ByteRange{};
      },
      "module buffers", deadline());
  stream.wait(core.lane->stream->record());
  core.lane->torch->before_torch();
  core.unpack_buffers();
}

/// Floating-point buffers become their mean over the stepping ranks, summed in rank order in fp32;
/// the first one's copy of it is what exchange_buffers() then hands to everyone.
void WorldState::average_buffers(EngineCore& core, const Bits& stepping) {
  std::int64_t numel = 0;
  for (const EngineCore::Buffer& own : core.buffers) {
    const at::Tensor& buffer = own.tensor;
    numel += buffer.is_floating_point() ? buffer.numel() : 0;
  }
  if (numel == 0) {
    return;
  }
  const bool contributes = stepping[static_cast<std::size_t>(group_.rank)];
  zero::TorchDevice& torch = *core.lane->torch;
  kernels::Stream& stream = *core.lane->step;
  comm::Staging staging = core.channel->acquire(static_cast<std::size_t>(numel) * sizeof(float));
  stream.wait(staging.pending);
  torch.before_torch();
  const at::Tensor mine =
      torch.tensor_over(staging.data, std::span(&numel, 1), kernels::Dtype::kFloat32, nullptr);
  std::int64_t offset = 0;
  for (const EngineCore::Buffer& own : core.buffers) {
    const at::Tensor& buffer = own.tensor;
    if (buffer.is_floating_point()) {
      mine.narrow(0, offset, buffer.numel()).copy_(buffer.detach().reshape({-1}));
      offset += buffer.numel();
    }
  }
  staging.pending = {stream.record()};
  if (!contributes) {
    core.channel->give_back(std::exchange(staging, {}));
  }
  const comm::PostId post =
      core.channel->post(staging, kernels::Dtype::kFloat32, [&](int /*rank*/) {
        return comm::ElementRange{0, numel};
      });
  const at::Tensor sum =
      at::empty({numel}, core.buffers.front().tensor.options().dtype(at::kFloat));
  core.lane->stream->wait(stream.record());  // the memory may have had another use before
  core.channel->fold(post, 0, numel, sum.data_ptr<float>(), kernels::Accumulator::kFresh,
                     "module buffers", deadline());
  stream.wait(core.lane->stream->record());
  torch.before_torch();
  sum.div_(static_cast<double>(std::count(stepping.begin(), stepping.end(), true)));
  offset = 0;
  for (const EngineCore::Buffer& own : core.buffers) {
    const at::Tensor& buffer = own.tensor;
    if (buffer.is_floating_point()) {
      buffer.detach().copy_(sum.narrow(0, offset, buffer.numel()).view(buffer.sizes()));
      offset += buffer.numel();
    }
  }
}

}  // namespace tandem::engine
