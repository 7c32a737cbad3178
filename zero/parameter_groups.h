// zero/parameter_groups.h: which settings each parameter of an engine is updated with.
//
// Group 0 are the engine's own settings; the others come from EngineOptions::groups. A setting that
// a group does not give itself follows group 0, also when that is changed later.
// Called by zero (optimizer shard) and engine.
#pragma once

#include "zero/bucket_plan.h"
#include <tandem/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::zero {

class ParameterGroups {
 public:
  /// Throws InvalidArgument: settings out of range, a setting that the optimizer does not have, a
  /// name used twice, a group without predicate or without parameters; and what predicates throw.
  ParameterGroups(const Optimizer& optimizer,
                  const std::vector<ParameterGroup>& groups,
                  const std::vector<ParameterInfo>& parameters);

  [[nodiscard]] std::size_t size() const { return groups_.size(); }
  [[nodiscard]] const std::string& name(std::size_t group) const { return groups_[group].name; }
  [[nodiscard]] const Optimizer& settings(std::size_t group) const {
    return groups_[group].settings;
  }
  [[nodiscard]] std::size_t group_of(std::size_t parameter) const { return group_of_[parameter]; }
  /// Throws InvalidArgument listing the names there are.
  [[nodiscard]] std::size_t find(const std::string& name) const;

  [[nodiscard]] double learning_rate(std::size_t group) const;
  [[nodiscard]] double weight_decay(std::size_t group) const;
  /// False: it follows group 0.
  [[nodiscard]] bool owns_learning_rate(std::size_t group) const { return groups_[group].own_lr; }
  /// Group 0: also for the groups that follow it. Another one: its own from now on. Both throw
  /// InvalidArgument as check() does and then change nothing.
  void set_learning_rate(std::size_t group, double lr);
  void set_weight_decay(std::size_t group, double weight_decay);
  /// One group alone, whoever follows it: what the ranks agreed on for a step.
  void adopt(std::size_t group, double lr, double weight_decay);

 private:
  struct Group {
    std::string name;
    Optimizer settings;
    bool own_lr = false;
    bool own_weight_decay = false;
  };

  void set(const char* name, bool Group::*own, std::size_t group, double value);

  std::vector<Group> groups_;
  std::vector<std::size_t> group_of_;  // per parameter
};

}  // namespace tandem::zero
