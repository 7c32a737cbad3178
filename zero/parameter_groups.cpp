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

/// Overrides one setting; throws InvalidArgument where the optimizer has none of that name.
template <class Set>
void set_if_given(const std::optional<double>& value,
                  const char* field,
                  Optimizer& optimizer,
                  Set&& set) {
  if (!value) return;
  const bool known = std::visit([&](auto& settings) { return set(settings, *value); }, optimizer);
  if (!known) {
    throw InvalidArgument(std::string(field) + " is no setting of the engine's optimizer, " +
                          describe(optimizer));
  }
}

Optimizer settings_of(const ParameterGroup& group, Optimizer optimizer) {
  set_if_given(group.lr, "lr", optimizer, [](auto& o, double value) {
    o.lr = value;
    return true;
  });
  set_if_given(group.weight_decay, "weight_decay", optimizer, [](auto& o, double value) {
    o.weight_decay = value;
    return true;
  });
  set_if_given(group.beta1, "beta1", optimizer, [](auto& o, double value) {
    if constexpr (requires { o.beta1; }) o.beta1 = value;
    return requires { o.beta1; };
  });
  set_if_given(group.beta2, "beta2", optimizer, [](auto& o, double value) {
    if constexpr (requires { o.beta2; }) o.beta2 = value;
    return requires { o.beta2; };
  });
  set_if_given(group.eps, "eps", optimizer, [](auto& o, double value) {
    if constexpr (requires { o.eps; }) o.eps = value;
    return requires { o.eps; };
  });
  set_if_given(group.momentum, "momentum", optimizer, [](auto& o, double value) {
    if constexpr (requires { o.momentum; }) o.momentum = value;
    return requires { o.momentum; };
  });
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
      throw InvalidArgument("parameter group '" + name + "' is given twice");
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
  std::vector<Group> changed = groups_;
  changed[group].own_lr = true;
  for (std::size_t g = 0; g < changed.size(); ++g) {
    if (g != group && (group != 0 || changed[g].own_lr)) continue;
    std::visit([&](auto& settings) { settings.lr = lr; }, changed[g].settings);
    check(changed[g].settings);
  }
  groups_ = std::move(changed);
}

void ParameterGroups::set_weight_decay(std::size_t group, double weight_decay) {
  std::vector<Group> changed = groups_;
  changed[group].own_weight_decay = true;
  for (std::size_t g = 0; g < changed.size(); ++g) {
    if (g != group && (group != 0 || changed[g].own_weight_decay)) continue;
    std::visit([&](auto& settings) { settings.weight_decay = weight_decay; }, changed[g].settings);
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
