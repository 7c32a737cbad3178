// tests/engine/sequencer_world.h: several ranks' sequencers, driven through every interleaving of
// what can happen to them. No threads: an interleaving is a choice of who acts next.
#pragma once

#include "engine/messages.h"
#include "engine/sequencer.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tandem::engine::test {

/// One rank's part of one pass.
struct Script {
  bool runs = true;                           // false: it is at its step and joins
  Bits armed;                                 // per engine
  std::vector<std::pair<int, int>> arrivals;  // (engine, parameter) in order
  std::vector<Bits> frozen;
  Bits allowed;
  bool hold = false;
  bool fails = false;
};

struct Scenario {
  std::string name;
  std::vector<EngineShape> engines;
  std::vector<std::vector<Script>> passes;  // [pass][rank]
};

/// A gradient, told apart from all others: (pass, rank, engine, parameter, occurrence).
using Token = std::vector<int>;

/// One rank: its sequencer, its position in the script, and buckets that hold tokens instead of
/// numbers.
struct Rank {
  std::optional<Sequencer> sequencer;
  std::size_t pass = 0;
  std::size_t next_arrival = 0;
  bool gate_posted = false;
  bool close_posted = false;
  bool gate_taken = false;
  std::vector<Launch> launches;
  std::vector<std::set<Token>> contributed;             // per launch
  std::map<std::pair<int, int>, std::set<Token>> main;  // (engine, bucket)
  std::map<std::pair<int, int>, std::set<Token>> late;
  std::set<Token> arrived;
  std::set<Token> discarded;
};

class SequencerWorld {
 public:
  explicit SequencerWorld(const Scenario& scenario);

  /// Visits every interleaving (states reached twice are visited once); returns how many states
  /// there were. Throws std::logic_error naming the broken invariant.
  std::size_t explore();

 private:
  struct State {
    std::vector<Rank> ranks;
    std::vector<std::optional<comm::Message>> gates;  // per pass, merged so far
    std::vector<int> gate_posts;
    std::vector<std::optional<comm::Message>> closes;
    std::vector<int> close_posts;
  };

  /// Actions of a rank: 0 act (open, arrive, close, join), 1 take the merged gate, 2 take the
  /// merged close.
  [[nodiscard]] bool possible(const State& state, int rank, int action) const;
  void perform(State& state, int rank, int action) const;
  void drain(Rank& rank) const;
  void check(const State& state) const;
  void check_end(State state) const;
  [[nodiscard]] std::string key(const State& state) const;
  void visit(const State& state);
  void fail(const std::string& what) const;

  const Scenario& scenario_;
  int size_;
  std::set<std::string> seen_;
};

}  // namespace tandem::engine::test
