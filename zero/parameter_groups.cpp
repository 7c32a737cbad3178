#include "zero/parameter_groups.h"

#include "zero/update_rule.h"
#include <tandem/error.h>

#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <utility>
#include <variant>

namespace tandem::zero {
namespace {

/// The optimizer with what the group overrides. Throws InvalidArgument for what it does not have.
Optimizer settings_of(const ParameterGroup& group, Optimizer optimizer) {
  const std::pair<const char*, const std::optional<double>&> overrides[] = {
      {"lr", group.lr},       {"weight_decay", group.weight_decay},
      {"beta1", group.beta1}, {"beta2", group.beta2},
      {"eps", group.eps},     {"momentum", group.momentum}};
  for (const auto& [name, value] : overrides) {
    if (!value) continue;
    double* const setting = find_setting(optimizer, name);
    if (setting == nullptr) {
      throw InvalidArgument(std::string(name) + " is no setting of the engine's optimizer, " +
                            describe(optimizer) + "; leave it out");
    }
    *setting = *value;
  }
  check(optimizer);
  return optimizer;
}

}  // namespace

ParameterGroups::ParameterGroups(const Optimizer& optimizer,
                                 const std::vector<ParameterGroup>& groups,
                                 const std::vector<ParameterInfo>& parameters)
    : group_of_(parameters.size(), 0) {
  check(optimizer);
  groups_.push_back({"", optimizer, true, true});
  std::set<std::string> names;
  for (const ParameterGroup& group : groups) {
    const std::string name =
        group.name.empty() ? "group" + std::to_string(groups_.size()) : group.name;
    if (!names.insert(name).second) {
      throw InvalidArgument("parameter group '" + name +
                            "' is given twice; give each group a name of its own");
    }
    if (!group.where) {
      throw InvalidArgument("parameter group '" + name +
                            "' has no `where`; say which parameters belong to it");
    }
    try {
      groups_.push_back({name, settings_of(group, optimizer), group.lr.has_value(),
                         group.weight_decay.has_value()});
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("parameter group '" + name + "': " + error.what());
    }
  }

  std::vector<bool> used(groups_.size(), false);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const ParameterView view{parameters[p].name, parameters[p].shape};
    for (std::size_t g = 1; g < groups_.size() && group_of_[p] == 0; ++g) {
      if (groups[g - 1].where(view)) group_of_[p] = g;
    }
    used[group_of_[p]] = true;
  }
  for (std::size_t g = 1; g < groups_.size(); ++g) {
    if (used[g]) continue;
    throw InvalidArgument("parameter group '" + groups_[g].name +
                          "' gets no parameter: its `where` holds for none that an earlier group "
                          "has not taken; correct it or leave the group out");
  }
}

std::size_t ParameterGroups::find(const std::string& name) const {
  std::string known;
  for (std::size_t g = 1; g < groups_.size(); ++g) {
    if (groups_[g].name == name) return g;
    known += " '" + groups_[g].name + "'";
  }
  throw InvalidArgument(
      "there is no parameter group '" + name + "'; " +
      (known.empty() ? "the engine was made without groups" : "there are" + known));
}

double ParameterGroups::learning_rate(std::size_t group) const {
  return std::visit([](const auto& settings) { return settings.lr; }, settings(group));
}

double ParameterGroups::weight_decay(std::size_t group) const {
  return std::visit([](const auto& settings) { return settings.weight_decay; }, settings(group));
}

void ParameterGroups::set_learning_rate(std::size_t group, double lr) {
  set("lr", &Group::own_lr, group, lr);
}

void ParameterGroups::set_weight_decay(std::size_t group, double weight_decay) {
  set("weight_decay", &Group::own_weight_decay, group, weight_decay);
}

void ParameterGroups::set(const char* name, bool Group::*own, std::size_t group, double value) {
  std::vector<Group> changed = groups_;
  changed[group].*own = true;
  for (std::size_t g = 0; g < changed.size(); ++g) {
    const bool follows = group == 0 && !(changed[g].*own);
    if (g != group && !follows) continue;
    *find_setting(changed[g].settings, name) = value;
    check(changed[g].settings);
  }
  groups_ = std::move(changed);
}

void ParameterGroups::adopt(std::size_t group, double lr, double weight_decay) {
  std::visit(
      [&](auto& settings) {
        settings.lr = lr;
        settings.weight_decay = weight_decay;
      },
      groups_[group].settings);
}

}  // namespace tandem::zero

namespace tandem {

ParameterPredicate name_matches(const std::string& regex) {
  std::shared_ptr<const std::regex> compiled;
  try {
    compiled = std::make_shared<const std::regex>(regex);
  } catch (const std::regex_error& error) {
    throw InvalidArgument("name_matches: '" + regex +
                          "' is no regular expression: " + error.what());
  }
  return [compiled](const ParameterView& parameter) {
    return std::regex_search(parameter.name.begin(), parameter.name.end(), *compiled);
  };
}

ParameterPredicate is_vector() {
  return [](const ParameterView& parameter) { return parameter.shape.size() <= 1; };
}

ParameterGroup no_decay(ParameterPredicate where) {
  ParameterGroup group;
  group.name = "no_decay";
  group.where = std::move(where);
  group.weight_decay = 0.0;
  return group;
}

}  // namespace tandem
