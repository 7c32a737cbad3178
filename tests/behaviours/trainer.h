// tests/behaviours/trainer.h: runs a scenario with Tandem, the way its users would: one world, one
// engine a model, plain loss.backward(), world.step(). No option beyond what the scenario itself
// says.
#pragma once

#include "tests/behaviours/scenario.h"
#include <tandem/tandem.h>

#include <memory>
#include <string>
#include <vector>

namespace behaviours {

/// The same on all ranks.
struct Verdict {
  bool ok = false;
  double difference = 0.0;  // largest, of any element from the oracle's
  double relative = 0.0;    // largest over parameters, of that to the parameter's largest movement
  std::string what_is_wrong;
};

class Trainer {
 public:
  explicit Trainer(const Scenario& scenario);

  [[nodiscard]] tandem::World& world() { return world_; }
  [[nodiscard]] int rank() const { return world_.rank(); }
  [[nodiscard]] int ranks() const { return world_.size(); }

  /// One forward and the plain backward() of each loss.
  void pass(int step, int pass);
  tandem::StepResult step();
  void train();

  /// Collective: parameters of every rank beside `expected`; those of all ranks must have the same
  /// bits.
  Verdict compare(const std::vector<Tensor>& expected);
  /// The same, with something that this rank found wrong already ("" for nothing).
  Verdict compare(const std::vector<Tensor>& expected, const std::string& found_here);

 private:
  const Scenario scenario_;
  tandem::World world_;
  Models models_;
  std::vector<std::unique_ptr<tandem::Engine<std::shared_ptr<Model>>>> engines_;
  Calls calls_;
  std::vector<Tensor> initial_;
};

/// Trains `scenario` with Tandem and compares with the oracle.
Verdict run(const Scenario& scenario);

}  // namespace behaviours
