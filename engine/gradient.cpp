// engine/gradient.cpp: the whole gradient of one parameter, for people who debug. Every rank gives
// its slice of the accumulators over the control plane: slow, and without memory of its own when
// nobody asks.
#include "engine/world_state.h"
#include <tandem/error.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace tandem::engine {

namespace {

/// Of one round; rooms of the control plane grow to it.
constexpr std::size_t kRoundBytes = std::size_t{256} << 10;

}  // namespace

at::Tensor WorldState::gradient(const EngineCore& core, std::int32_t parameter) {
  return guarded([&] {
    Lock lock(mutex_);
    const TraceSpan span(*trace_, "gradient", Trace::Row::kUser, {.engine = core.serial});
    resolve(lock);
    std::string problem = settle_parameters();
    if (problem.empty()) {
      problem = read_tokens();
    }
    GateSay say;
    say.word = Word::kGradient;
    say.gradient_engine = core.index;
    say.gradient_parameter = parameter;
    say.refused = !problem.empty();
    return gather_gradient(
        lock, agree(lock, say, say.refused ? refusal(problem) : std::vector<std::string>{}));
  });
}

// Those who asked, and those who are at their step. Throws InvalidArgument before anything is said.
at::Tensor WorldState::gather_gradient(Lock& lock, const GateMerged& gate) {
  EngineCore& core = *cores_[static_cast<std::size_t>(gate.gradient_engine)];
  const std::int32_t parameter = gate.gradient_parameter;
  sequencer_.launch_held(gate.held_engines);  // what is held anywhere travels now
  launch_due();

  std::size_t bit = static_cast<std::size_t>(parameter);
  for (int e = 0; e < gate.gradient_engine; ++e) {
    bit += cores_[static_cast<std::size_t>(e)]->parameter_count();
  }
  if (!gate.seen_parameters[bit]) {
    return {};
  }
  const double multiplier =
      gate.gradient_multipliers.of_engine[static_cast<std::size_t>(gate.gradient_engine)];
  const Averaging average = averaging(core, gate, multiplier, "Engine::gradient");
  if (average.denominator == 0.0) {
    return {};
  }
  await_event(queue_->record(), "reductions before a gradient is gathered");

  // This rank's slice, on the host, as the update would see it.
  const zero::OptimizerShard::Piece mine = core.shard->piece(group_, parameter);
  const auto mine_bytes = static_cast<std::size_t>(mine.within.numel()) * sizeof(float);
  Lane& lane = *core.lane;
  const std::shared_ptr<std::byte> host = lane.torch->device().allocate_host(mine_bytes);
  lane.torch->device().copy(*lane.stream, host.get(), mine.data, mine_bytes);
  await_mark(lane, lane.stream->record(), "a gradient on " + lane.where.str());
  auto* const values = reinterpret_cast<float*>(host.get());
  const auto factor = static_cast<float>(average.scaled(1.0));
  for (std::int64_t i = 0; i < mine.within.numel(); ++i) {
    values[i] *= factor;
  }

  std::size_t longest = 0;
  for (int rank = 0; rank < group_.size; ++rank) {
    const auto piece = core.shard->piece({rank, group_.size}, parameter).within;
    longest = std::max(longest, static_cast<std::size_t>(piece.numel()) * sizeof(float));
  }
  const at::Tensor& like = core.parameters->tensors()[static_cast<std::size_t>(parameter)];
  const at::Tensor whole =
      at::empty(like.sizes(), at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
  for (std::size_t begin = 0; begin < longest; begin += kRoundBytes) {
    const auto part_of = [&](std::size_t bytes) {
      return std::min(bytes, begin + kRoundBytes) - std::min(bytes, begin);
    };
    std::string text;
    if (const std::size_t bytes = part_of(mine_bytes); bytes > 0) {
      text.assign(reinterpret_cast<const char*>(host.get()) + begin, bytes);
    }
    const std::vector<std::string> texts =
        gather_texts(lock, text, "the other ranks' slices of a gradient");
    for (int rank = 0; rank < group_.size; ++rank) {
      const std::string& slice = texts[static_cast<std::size_t>(rank)];
      const zero::Range within = core.shard->piece({rank, group_.size}, parameter).within;
      if (!slice.empty()) {
        std::memcpy(static_cast<std::byte*>(whole.mutable_data_ptr()) +
                        static_cast<std::size_t>(within.begin) * sizeof(float) + begin,
                    slice.data(), slice.size());
      }
    }
  }
  return whole.to(like.device());
}

}  // namespace tandem::engine
