// tandem/options.h: what a world, an engine and a step can be told. Every member has a default, so
// that designated initialisers read well: Engine(world, net, {.name = "critic", .stage = 1}).
#pragma once

#include <tandem/optimizer.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

class EngineBase;

// clang-format off
/// What a window's gradient is divided by, once, in the update. R is the number of ranks that ran a
/// pass, P the passes of the window that the engine took part in, pairs the (rank, pass) pairs of those
/// passes (R * P if even), N the tokens counted on all ranks.
///
/// | value         | divisor   | fits                                                       |
/// |---------------|-----------|------------------------------------------------------------|
/// | kRanks        | pairs / P | one pass a step, or several losses that add up (DDP's way) |
/// | kMicroBatches | pairs     | several micro-batches a step, each with a mean loss        |
/// | kTokens       | N         | losses that are sums over tokens; see count_tokens()       |
/// | kNone         | 1         | losses that are scaled already                             |
// clang-format on
enum class Average : std::uint8_t { kRanks, kMicroBatches, kTokens, kNone };

/// Dynamic loss scaling (World::scale), in the manner and with the defaults of
/// torch.amp.GradScaler. All three factors are powers of two, so that scaling rounds nothing.
struct LossScaling {
  double initial = 65536.0;             // > 0; from the first World::scale() on
  double growth_factor = 2.0;           // >= 1; after growth_interval applied steps in a row
  double backoff_factor = 0.5;          // in (0, 1]; after a step that found an infinity or NaN
  std::int64_t growth_interval = 2000;  // > 0; applied steps
};

struct WorldOptions {
  // --- changes results ---
  /// Divisor of every engine's gradients.
  Average average = Average::kRanks;
  /// How the scale of losses moves, once World::scale() is used.
  LossScaling loss_scaling = {};

  // --- changes when an error is raised ---
  /// Longest wait for other ranks before Timeout; > 0, at most a year.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);

  // --- test instruments: change timing only ---
  /// Largest pseudo-random pause, in microseconds, before each job of each queue, and in process
  /// before each message between nodes; 0 for none.
  std::int64_t queue_delay_us = 0;
  /// Seed of those pauses (the rank is mixed in).
  std::uint64_t queue_delay_seed = 0;
  /// Above 0: every so many consecutive ranks are treated as a node of their own, which shares no
  /// memory with the others. 0: the ranks of a host are a node, as are those of one process.
  int ranks_per_node = 0;
};

/// What becomes of module buffers (BatchNorm's running statistics) at each applied step.
enum class BufferPolicy : std::uint8_t {
  kBroadcast,  // rank 0's values go to every rank
  kAverage,    // floating-point buffers become the mean over ranks (others: rank 0's)
  kLeave,      // every rank keeps its own
};

/// The type in which gradients travel between ranks; sums are fp32 whatever it is.
enum class Wire : std::uint8_t {
  kParameter,  // each parameter's own type
  kFloat32,
  kBFloat16,  // rounded to nearest, halves to even, like Tensor::to
  kFloat16,   // likewise; beyond 65,504 it is infinite, and the step is skipped
};

/// How the fp32 master weights of 16-bit parameters are kept. An update reads and writes the master
/// and rounds it into the parameter. Where a parameter was edited in place, the parameter wins.
enum class Masters : std::uint8_t {
  kSeparate,   // fp32, 4 bytes an element
  kRemainder,  // bfloat16 only: the 16 bits that the parameter lacks, 2 bytes an element. The same
               // bits; an edited parameter keeps its old remainder (half a unit at most).
};

struct EngineOptions {
  // --- changes results ---
  /// Unique among the engines of a world; names errors, reports and files. Empty: "engine<N>".
  std::string name = {};
  Optimizer optimizer = AdamW{};
  /// Parameters with settings of their own.
  std::vector<ParameterGroup> groups = {};
  /// The type in which gradients travel.
  Wire wire = Wire::kParameter;
  /// 1: sharded optimizer states, and World::hold() is honoured. 2: sharded gradients as well:
  /// every pass is reduced, hold() has no effect on this engine.
  int stage = 2;
  /// Copies rank 0's parameters and buffers to every rank when the engine is made. Without it the
  /// ranks must already hold equal values: they are compared, and a difference is an error.
  bool broadcast = true;
  BufferPolicy buffers = BufferPolicy::kBroadcast;

  // --- changes speed and memory only ---
  Masters masters = Masters::kSeparate;
  /// The ranks of a node hold one copy of the parameters instead of one each, and a step copies
  /// none inside the node. What a rank writes into a parameter is seen by all ranks of the node at
  /// once: an edit in place that every rank makes is made once per rank (`p.mul_(0.5)` on two ranks
  /// leaves a quarter), possibly under another rank's forward. So edit on one rank of each node,
  /// between two joint calls (World::sum). Other memory (torch::load, set_data) is refused.
  bool share_parameters_on_node = false;
  /// Size at which gradients are cut into buckets, in bytes, > 0.
  std::int64_t bucket_bytes = 25 * 1024 * 1024;
};

struct StepOptions {
  /// Largest joint gradient norm over the engines of this step, > 0; nothing: no clipping. Clipping
  /// multiplies all their gradients by min(1, clip_norm / (norm + 1e-6)).
  std::optional<double> clip_norm = std::nullopt;
  /// p of that norm, > 0 or infinity: (sum of |x|^p)^(1 / p) over all gradient elements, or the
  /// largest |x|, as torch.nn.utils.clip_grad_norm_. 2, infinity and p <= 1 read the gradients once
  /// and take one small message, other p both twice. A norm beyond the largest double (p far below
  /// 1) skips the step as an infinite gradient does. The same on every rank.
  double norm_type = 2.0;
  /// Engines that step, the same on every rank; empty: all.
  std::vector<EngineBase*> engines = {};
};

}  // namespace tandem
