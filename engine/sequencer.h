// engine/sequencer.h: which bucket is reduced when: the agreement protocol as a pure state machine.
//
// No MPI, no autograd, no threads, no clock. It is fed with what happens on this rank (a pass
// opens, gradients arrive, the pass closes) and with merged rounds, and answers with what to post
// and what to launch.
//
// I1 The launch sequence is identical on all ranks, for all interleavings.
// I2 Every launched bucket is launched by every rank.
// I3 Each arrived gradient is contributed exactly once, or discarded with its window on all ranks.
// I5 With every rank complete and nothing late, no launch waits for the close.
// Thread safety: none; the world's lock covers it.
// Called by engine/world_state. Protocol and words: docs/agreement.md.
#pragma once

#include "engine/messages.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tandem::engine {

/// One reduction. Every rank makes the same ones in the same order.
struct Launch {
  int engine = 0;  // index in registration order
  int bucket = 0;  // of that engine
  bool late = false;
  bool fp32 = false;  // travels in fp32 because something was held, or is late
  bool operator==(const Launch&) const = default;
};

struct EngineShape {
  std::string name;
  std::vector<int> bucket_of;  // per parameter
  int buckets = 0;
  bool honours_hold = false;  // stage 1
  int groups = 1;             // of parameters
};

/// What this rank finds when it opens a pass of its own; it holds for the whole pass.
struct Opening {
  Bits armed;                // per engine
  std::vector<Bits> frozen;  // per engine and parameter; an empty one: nothing is frozen
  Bits allowed;              // per engine, the `only` scope; empty: all
  bool hold = false;
};

/// What becomes of a gradient.
enum class Arrival : std::uint8_t { kMain, kLate, kDropped };

/// What a resolved pass means for this rank's windows.
struct Resolution {
  bool failed = false;
  Bits failed_ranks;
  int ranks_in_pass = 0;             // that ran it, empty participants not counted
  Bits took_engines;                 // on any rank: they count the pass
  std::vector<Launch> late_to_main;  // this rank's late buffers to add to main, in order
};

class Sequencer {
 public:
  Sequencer(int rank, int ranks);

  // --- registration, agreed by all ranks; no pass is open ---
  void add_engine(EngineShape shape);
  /// Takes an engine out of every later gate; its numbers stay until compact().
  void retire_engine(int engine);
  /// Drops retired engines; later engines move up.
  void compact();
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] std::uint64_t order_hash() const;
  /// Bucket numbers over all engines, in launch order.
  [[nodiscard]] const std::vector<int>& order() const { return order_; }

  // --- one pass ---
  /// Opens this rank's pass. Fills what a gate says of it.
  void open(Opening opening, GateSay& say);
  /// Takes part in the others' pass with nothing; its gate is merged already, so close() follows at
  /// once.
  void join(const GateMerged& gate);
  [[nodiscard]] bool in_pass() const { return pass_.has_value(); }
  [[nodiscard]] bool closed() const { return pass_.has_value() && pass_->closed; }
  [[nodiscard]] bool gate_known() const { return pass_.has_value() && pass_->gate.has_value(); }

  /// Where the gradient that just came belongs. kMain and kLate: copy it, then call arrived().
  [[nodiscard]] Arrival classify(int engine, int parameter) const;
  void arrived(int engine, int parameter, Arrival place);
  /// True if gradients of this pass are summed locally here (this rank says hold and the engine
  /// honours it).
  [[nodiscard]] bool holds(int engine) const;

  /// The merged gate of the open pass. `error`: it cannot proceed; the pass counts as failed.
  void gate_merged(const GateMerged& gate, bool error);
  /// Ends arrivals; nothing arrives afterwards. Fills what the close says.
  [[nodiscard]] CloseSay close(bool failed);
  /// The merged close: makes the rest of the launches and ends the pass.
  Resolution close_merged(const CloseMerged& close);

  // --- outside a pass ---
  /// Launches everything of engines that hold something on any rank (at a step).
  void launch_held(const Bits& held_engines);
  /// Forgets what an engine holds here: its window was stepped, cleared or discarded.
  void clear_window(int engine);

  /// Launches that have become due, in order; each is returned once.
  [[nodiscard]] std::vector<Launch> take_launches();

  /// Engines that hold something here.
  [[nodiscard]] Bits held_engines() const;

 private:
  struct Engine {
    EngineShape shape;
    int first_bucket = 0;
    int first_parameter = 0;
    bool retired = false;
    bool settled = false;
  };
  struct Pass {
    bool own = false;  // this rank runs it
    bool closed = false;
    bool failed = false;
    bool hold = false;
    std::optional<GateMerged> gate;
    std::size_t cursor = 0;  // in order_, of the walk before the close is merged
    std::uint32_t next_place = 0;
    Bits allowed;                          // per engine
    Bits took;                             // per engine: something arrived
    std::vector<Bits> frozen;              // per engine and parameter
    std::vector<Bits> present;             // per engine and parameter: arrived in main
    std::vector<int> missing;              // per bucket: unfrozen parameters still to come
    Bits launched;                         // per bucket
    Bits late;                             // per bucket
    std::vector<std::uint64_t> completed;  // per bucket: completion(), or kIncomplete
  };

  [[nodiscard]] int engine_of(int bucket) const {
    return engine_of_[static_cast<std::size_t>(bucket)];
  }
  [[nodiscard]] bool complete(int bucket) const;
  [[nodiscard]] bool holds_back(int engine) const;  // in H
  [[nodiscard]] bool skipped(int bucket) const;     // frozen everywhere and not held
  [[nodiscard]] bool travels_fp32(int engine) const;
  void note_completion(int bucket);
  void launch(int bucket, bool late);
  void walk();
  void settle(const CloseMerged& close);
  [[nodiscard]] std::vector<int> unsettled_buckets() const;
  void start_pass();

  int rank_;
  int ranks_;
  Shape shape_;
  std::vector<Engine> engines_;
  std::vector<int> engine_of_;  // per bucket
  std::vector<int> order_;      // buckets; settled ones first
  Bits holding_;                // per bucket: arrived in a held pass, not launched yet
  std::optional<Pass> pass_;
  std::vector<Launch> due_;
};

}  // namespace tandem::engine
