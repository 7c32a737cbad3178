// tandem/report.h: what a step did, and what memory and wire it took.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

enum class StepReason : std::uint8_t {
  kApplied,    // parameters were updated
  kNonFinite,  // an infinity or NaN in a gradient on some rank: nothing was changed on any
  kEmpty,  // no engine of the step had anything to step: no pass reached one, or all tokens were 0
};

const char* to_string(StepReason reason);

struct EngineStep {
  std::string name;
  double norm = 0.0;            // of this engine's averaged gradient, before clipping; a p-norm of
                                // the step's norm_type
  double denominator = 0.0;     // what its gradient sum was divided by; 0 if it was not seen
  double multiplier = 1.0;      // of multiply_gradients() since the last pass
  std::int64_t passes = 0;      // of the window, that it took part in on any rank
  std::int64_t pairs = 0;       // (rank, pass) pairs of those passes; pairs / passes ranks ran them
  std::int64_t tokens = 0;      // counted on all ranks
  std::int64_t parameters = 0;  // tensors that were stepped (or would have been)
  bool finite = true;
};

/// Seconds spent by this rank; not the same on all ranks.
struct StepTimes {
  double reduction =
      0.0;  // of buckets since the last step, waiting for peers included; on a GPU, of its stream
  double exposed = 0.0;  // of that, what step() still had to wait for
  double norm = 0.0;
  double update = 0.0;
  double gather = 0.0;  // exposed part of exchanging updated parameters and buffers
};

/// The same on all ranks, but for `times`.
struct StepResult {
  bool applied = false;
  StepReason reason = StepReason::kEmpty;
  double norm = 0.0;  // joint, over the engines of the step, after averaging, before clipping; a
                      // p-norm of the step's norm_type
  double clip_factor = 1.0;         // what clipping multiplied gradients by, <= 1
  double denominator = 0.0;         // if it was one for all engines seen, else 0; see engines
  double loss_scale = 1.0;          // of this step's window; norms and gradients are without it
  std::int64_t updates = 0;         // applied steps of this world so far, this one included
  std::vector<EngineStep> engines;  // those of this step, in registration order
  StepTimes times;
};

/// Bytes on this rank, measured, beside what the formula says.
struct MemoryLine {
  std::string
      what;  // "parameters", "gradient shard", "moments", "master weights", "staging", "held"
  std::int64_t bytes = 0;
  std::int64_t expected = -1;  // at rest; -1: depends on the moment
  std::string formula;
};

struct MemoryReport {
  std::int64_t parameters = 0;  // elements, over all engines, without padding
  std::vector<MemoryLine> lines;

  [[nodiscard]] std::int64_t total_bytes() const;
  [[nodiscard]] std::string to_string() const;  // a table
};

/// Counted since the world was made, on this rank; transfers within the rank itself not counted.
struct WireReport {
  std::int64_t reduce_bytes = 0;         // gradient slices read from peers
  std::int64_t gather_bytes = 0;         // parameters read from peers
  std::int64_t between_nodes_bytes = 0;  // of both, what this rank received from other nodes
  std::int64_t control_bytes = 0;        // of agreement rounds
  std::int64_t control_rounds = 0;
  std::int64_t launches = 0;  // bucket reductions

  [[nodiscard]] std::string to_string() const;
};

}  // namespace tandem
