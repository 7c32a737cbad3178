// engine/messages.h: what ranks say in gate and close rounds, and what comes out merged.
//
// A message is comm::Message: words merged by or, min, max and sum. The sections' sizes follow from
// Shape, which changes only by an agreed registration, so all ranks' messages of a round have the
// same size.
//
// M1 encode, merge of any ranks in any order, decode: the same result.
// M2 A value that must be equal among those who say a word travels twice, under min and under max;
// the
//    others contribute the neutral element. Equal means min == max.
// Called by engine (world_state, sequencer). Protocol: docs/agreement.md.
#pragma once

#include "comm/control_plane.h"

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace tandem::engine {

using Bits = std::vector<bool>;

/// What a rank is about to do. Later words (save, load, export) take the next numbers.
enum class Word : std::uint8_t {
  kBackward,
  kStep,
  kZeroGrad,
  kValues,
  kRegister,
  kLeave,
  kGradient,
};
inline constexpr int kWords = 7;
const char* name_of(Word word);
std::uint64_t hash_of(const Bits& bits);

enum class ValueOp : std::uint8_t { kMean, kSum, kAny, kBroadcast };

/// Sizes that all ranks know: of everything registered, retired engines included until they are
/// compacted.
struct Shape {
  int ranks = 1;
  int engines = 0;
  int groups = 0;      // of parameters, of all engines
  int buckets = 0;     // of all engines
  int parameters = 0;  // of all engines
  bool operator==(const Shape&) const = default;
};

/// Settings of one parameter group that may change between steps; equal on all ranks that say step.
struct Tunables {
  double lr = 0.0;
  double weight_decay = 0.0;
  bool operator==(const Tunables&) const = default;
};

struct GateSay {
  Word word = Word::kBackward;
  std::uint64_t world_hash = 0;  // engines, layouts, order: goes with every word
  Bits held_engines;             // goes with every word
  bool refused = false;          // any word: this rank cannot go on; what it explains says why

  // backward
  Bits armed_engines;
  Bits unfrozen_buckets;
  bool hold = false;
  std::uint64_t only_hash = 0;
  double loss_scale = 0.0;  // 0: losses are not scaled

  // backward, step and gradient: by what the windows are multiplied before it
  std::vector<double> multipliers;            // per engine; none: 1
  std::vector<std::int64_t> multiplications;  // per engine: calls that made it; none: 0

  // step
  Bits step_engines;
  double clip_norm = 0.0;  // 0: no clipping
  double norm_type = 2.0;
  std::vector<Tunables> tunables;  // per group of each engine

  // step, gradient and leave: what this rank's window holds
  Bits seen_parameters;
  Bits counted_engines;              // tokens were counted here
  std::vector<std::int64_t> tokens;  // per engine

  // zero_grad
  Bits zero_engines;

  // values
  ValueOp value_op = ValueOp::kSum;
  int value_root = 0;
  double value = 0.0;

  // gradient
  int gradient_engine = 0;
  int gradient_parameter = 0;

  // register
  std::uint64_t register_hash = 0;
};

struct GateMerged {
  std::array<int, kWords> sayers{};  // ranks that said each word
  bool hashes_equal = true;
  Bits held_engines;
  Bits refusing_ranks;

  Bits armed_engines;
  Bits unfrozen_buckets;
  int hold_sayers = 0;
  bool only_equal = true;
  bool scale_equal = true;
  double loss_scale = 0.0;

  /// What those said who say backward, step and gradient; 1 without sayers.
  struct Multipliers {
    std::vector<double> of_engine;
    bool equal = true;
  };
  Multipliers backward_multipliers;
  std::vector<std::int64_t> multiplications;  // per engine, of those
  Multipliers step_multipliers;               // equal: of the engines that are stepped
  Multipliers gradient_multipliers;

  Bits step_engines;
  Bits stepping_ranks;     // that said step; the others of a step have left
  bool step_equal = true;  // masks, clip_norm, norm_type and tunables
  double clip_norm = 0.0;
  double norm_type = 0.0;
  Bits seen_parameters;
  std::vector<Tunables> tunables;
  Bits counted_engines;
  std::vector<std::int64_t> tokens;

  Bits zero_engines;
  bool zero_equal = true;

  ValueOp value_op = ValueOp::kSum;
  int value_root = 0;
  bool value_equal = true;                    // the operation and its root
  std::vector<std::optional<double>> values;  // per rank that said it

  int gradient_engine = 0;
  int gradient_parameter = 0;
  bool gradient_equal = true;

  bool register_equal = true;

  [[nodiscard]] bool said(Word word) const { return sayers[static_cast<int>(word)] > 0; }
  [[nodiscard]] int count(Word word) const { return sayers[static_cast<int>(word)]; }
};

comm::Message encode(const GateSay& say, const Shape& shape, int rank);
GateMerged decode_gate(const comm::Message& message, const Shape& shape);

/// Why a merged gate cannot proceed, or nothing (docs/agreement.md, "Gate").
std::optional<std::string> gate_error(const GateMerged& gate, int ranks);

/// Where a bucket completed: the lowest rank on which it did, and its place in that rank's pass.
inline constexpr std::uint64_t kIncomplete = std::numeric_limits<std::uint64_t>::max();
inline std::uint64_t completion(int rank, std::uint32_t place) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(rank)) << 32U) | place;
}

struct CloseSay {
  Bits took_engines;     // something arrived here in this pass
  Bits holding_engines;  // hold something here
  Bits late_buckets;     // late arrivals of this pass wait here
  bool failed = false;
  std::vector<std::uint64_t> completions;  // per unsettled bucket: completion(), or kIncomplete
};

struct CloseMerged {
  Bits took_engines;
  Bits holding_engines;
  Bits late_buckets;
  Bits failed_ranks;
  std::vector<std::uint64_t> completions;

  [[nodiscard]] bool failed() const;
};

comm::Message encode(const CloseSay& say, const Shape& shape, int rank);
CloseMerged decode_close(const comm::Message& message, const Shape& shape);

}  // namespace tandem::engine
