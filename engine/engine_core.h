// engine/engine_core.h: what one engine consists of on one rank: geometry, memory, state, window.
//
// A plain struct on purpose: the world's lock covers it, and the files of this room (pass.cpp,
// step.cpp, registration.cpp) read it from top to bottom. Queue jobs share it, so that memory lives
// until they ran. Called by engine/world_state.
#pragma once

#include "comm/data_plane.h"
#include "engine/lane.h"
#include "engine/messages.h"
#include "hooks/pass_tracker.h"
#include "zero/bucket_plan.h"
#include "zero/flat_parameters.h"
#include "zero/gradient_buckets.h"
#include "zero/optimizer_shard.h"
#include <tandem/options.h>
#include <tandem/report.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tandem::engine {

/// Calls of multiply_gradients() that have not been applied. They travel with the gates of passes
/// and steps, where all ranks apply what the sayers of the word say, joiners too; a joiner counts
/// it off its own calls, made already or still to come (docs/agreement.md, "multiplier").
class Multipliers {
 public:
  void add(double factor);
  /// Of the calls not applied yet.
  [[nodiscard]] double product() const;
  /// All of them were said at a gate that proceeds.
  void said() { calls_.clear(); }
  /// How many they are.
  [[nodiscard]] std::int64_t calls() const { return static_cast<std::int64_t>(calls_.size()); }
  /// Others said `product`, of so many calls, at a gate that this rank joined.
  void joined(double product, std::int64_t calls);
  void clear();

 private:
  void settle();
  struct Owed {
    double product;
    std::int64_t calls;
  };
  std::vector<double> calls_;
  std::vector<Owed> owed_;  // joined before this rank's own calls
};

/// Tokens counted as tensors, which nobody has read: sums on their devices.
struct UnreadTokens {
  at::Tensor sum;       // int64
  at::Tensor smallest;  // int64
};

/// An engine's gradients since its last step or zero_grad.
struct Window {
  std::int64_t passes = 0;  // that the engine took part in on any rank; the same on all ranks
  std::int64_t pairs = 0;   // (rank, pass) pairs of those passes; the same on all ranks
  std::int64_t tokens = 0;  // counted on this rank
  std::vector<UnreadTokens> unread;  // one a device
  bool counted = false;
  Multipliers multipliers;
  Bits seen;                 // per parameter: arrived here
  Bits fresh;                // per bucket: the accumulator holds nothing of this window yet
  bool passed_over = false;  // another engine was stepped while this window held a pass

  void clear(std::size_t parameters, std::size_t buckets);
  /// Token counts and multipliers only.
  void drop_arithmetic();
};

struct EngineCore {
  std::int32_t serial = 0;  // tag of its hooks; never used twice in a world
  int index = 0;            // in the sequencer's tables
  std::string name;
  EngineOptions options;

  std::vector<zero::ParameterInfo> infos;
  std::size_t groups = 1;  // of parameters, the engine's own settings included
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    std::int64_t bytes = 0;  // when the engine was made: its place is that large
    std::int64_t place = 0;  // bytes from where the buffers' places begin; a multiple of 16
  };
  std::vector<Buffer> buffers;
  std::uint64_t layout_hash = 0;  // of layout_lines(): what must be equal on all ranks
  zero::BucketPlan plan;
  std::int64_t buffer_bytes = 0;  // packed behind the flat parameters

  Lane* lane = nullptr;  // of the device that the parameters are on; the world's
  // In this order, so that they are destroyed before what they point to.
  std::unique_ptr<comm::Channel> channel;
  std::unique_ptr<zero::FlatParameters> parameters;
  std::unique_ptr<zero::GradientBuckets> gradients;
  std::unique_ptr<zero::OptimizerShard> shard;
  std::unique_ptr<hooks::LeafHooks> hooks;  // null once the engine is gone

  kernels::Mark used;  // by LibTorch's stream, when the engine went

  /// Exchanges learning rates and weight decay with those that code holding the engine's
  /// torch::optim::Optimizer sees (engine/engine_optimizer.cpp), under the world's lock. Returns
  /// what cannot be adopted, empty if nothing. Empty without such an optimizer.
  std::function<std::string()> adopt_settings;

  Window window;
  bool armed = false;    // forward with gradients since it last took part or was stepped
  bool reached = false;  // the prologue has run in the open pass
  std::int64_t prologues = 0;
  std::int64_t epilogues = 0;

  [[nodiscard]] bool retired() const { return hooks == nullptr; }
  [[nodiscard]] std::size_t parameter_count() const { return infos.size(); }
  [[nodiscard]] std::size_t bucket_count() const { return plan.buckets.size(); }
  /// Of each group; of a retired engine zeros.
  [[nodiscard]] std::vector<Tunables> tunables() const;
  void clear_window();
  /// Module buffers to and from their places behind the flat parameters, in the order of LibTorch's
  /// current stream.
  void pack_buffers() const;
  void unpack_buffers();
  /// Throws InvalidArgument if a buffer has outgrown its place or shrunk.
  void check_buffers() const;

 private:
  [[nodiscard]] at::Tensor place_of(const Buffer& buffer) const;
};

/// What must agree across ranks for an engine to be made: one line a fact, the name first.
/// `groups`: none where they were refused.
std::vector<std::string> layout_lines(const EngineCore& core,
                                      c10::DeviceType device,
                                      const std::optional<zero::ParameterGroups>& groups,
                                      const std::vector<std::string>& buffers);

std::uint64_t hash_lines(const std::vector<std::string>& lines);
std::uint64_t parameter_hash(const EngineCore& core);
std::uint64_t hash_of_values(const std::vector<at::Tensor>& tensors);
std::uint64_t combine_hashes(const std::vector<std::uint64_t>& hashes);

}  // namespace tandem::engine
