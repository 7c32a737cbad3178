// tests/support/trainer.h: runs a scenario through Tandem's public API, on one rank, and holds it
// against the oracles.
#pragma once

#include "tests/support/oracle.h"
#include "tests/support/scenario.h"
#include "tests/support/thread_world.h"
#include <tandem/engine.h>
#include <tandem/world.h>

#include <memory>
#include <vector>

namespace tandem::testing {

class Trainer {
 public:
  Trainer(World& world, Scenario scenario);

  /// The passes of this rank, and what multiplies them, without the step.
  void passes(int index);
  StepResult step(int index);
  /// Steps 0 to scenario.steps - 1.
  void run();

  [[nodiscard]] const Nets& nets() const { return nets_; }
  [[nodiscard]] std::vector<at::Tensor> parameters() const { return unique_parameters(nets_); }
  [[nodiscard]] EngineBase& engine(std::size_t net) { return *engines_[net]; }

 private:
  void micro_batch(const Place& place);
  void multiply(int index, int pass);

  World& world_;
  Scenario scenario_;
  Nets nets_;
  std::vector<std::shared_ptr<EngineBase>> engines_;
  double last_schedule_ = 1.0;
};

/// World options that fit the scenario.
WorldOptions options_for(const Scenario& scenario);

/// Largest distances that were met, in the measures of the numerics contract; on rank 0, which runs
/// the oracles.
struct Distances {
  double split =
      0.0;  // to oracle (a), of the parameters' norm; per step from equal state for 16 bits
  double whole = 0.0;        // to oracle (b), of the movement's norm
  std::int64_t bits = 0;     // elements that differ from oracle (c)
  double denominator = 0.0;  // largest difference of a reported divisor
  double norm = 0.0;         // relative
  bool in_16_bits = false;
  bool ranks_agree = false;  // every rank holds rank 0's bits
  bool all_applied = true;
};
Distances train_beside_oracles(World& world, const Scenario& scenario);

/// Asserts the bounds of the numerics contract on Distances.
void expect_within_contract(World& world, const Scenario& scenario);

/// on_ranks with expect_within_contract.
void check(const Scenario& scenario, int smallest = 1);

/// The hash of all parameters after the whole scenario; `world` has options_for(scenario).
std::uint64_t trained_hash(World& world, const Scenario& scenario);
/// The same of a thread world of `size`, after asserting that all its ranks agree.
std::uint64_t trained_hash_on_threads(int size, const Scenario& scenario, WorldOptions options);

/// Asserts that the launcher's world, and alone those of threads, end with the hash of one rank
/// that does everything. `scenario` deals the same micro-batches to any number of ranks.
void expect_same_bits(const Scenario& scenario);

}  // namespace tandem::testing
