// test.zero.parameter_groups: who belongs where, what is inherited, what is refused.
#include "zero/parameter_groups.h"

#include <tandem/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace tandem::zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<ParameterInfo> model() {
  return {{"encoder.weight", {4, 3}, 12},
          {"encoder.bias", {4}, 4},
          {"norm.weight", {4}, 4},
          {"head.weight", {2, 4}, 8},
          {"scale", {}, 1}};
}

std::vector<std::size_t> groups_of(const ParameterGroups& groups) {
  std::vector<std::size_t> all;
  for (std::size_t p = 0; p < model().size(); ++p) all.push_back(groups.group_of(p));
  return all;
}

TEST(ParameterGroups, WithoutGroupsEverythingIsTheEngines) {
  const ParameterGroups groups(AdamW{.lr = 0.5}, {}, model());
  EXPECT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups_of(groups), (std::vector<std::size_t>{0, 0, 0, 0, 0}));
  EXPECT_EQ(groups.learning_rate(0), 0.5);
}

TEST(ParameterGroups, VectorsAreBiasesNormsAndScalars) {
  const ParameterGroups groups(AdamW{.weight_decay = 0.25}, {no_decay(is_vector())}, model());
  EXPECT_EQ(groups_of(groups), (std::vector<std::size_t>{0, 1, 1, 0, 1}));
  EXPECT_EQ(groups.weight_decay(0), 0.25);
  EXPECT_EQ(groups.weight_decay(1), 0.0);
  EXPECT_EQ(groups.find("no_decay"), 1U);
}

TEST(ParameterGroups, TheFirstThatMatchesWins) {
  const ParameterGroups groups(AdamW{},
                               {{.name = "head", .where = name_matches("^head\\.")},
                                {.where = name_matches("weight$"), .lr = 0.125}},
                               model());
  EXPECT_EQ(groups_of(groups), (std::vector<std::size_t>{2, 0, 2, 1, 0}));
  EXPECT_EQ(groups.name(2), "group2");
  EXPECT_EQ(groups.learning_rate(2), 0.125);
}

TEST(ParameterGroups, OverridesWhatIsGivenAndInheritsTheRest) {
  const ParameterGroups groups(AdamW{.lr = 0.5, .beta1 = 0.25, .eps = 1e-3, .weight_decay = 0.75},
                               {{.where = is_vector(), .beta1 = 0.5, .beta2 = 0.625, .eps = 1e-4}},
                               model());
  const auto& settings = std::get<AdamW>(groups.settings(1));
  EXPECT_EQ(settings.lr, 0.5);
  EXPECT_EQ(settings.beta1, 0.5);
  EXPECT_EQ(settings.beta2, 0.625);
  EXPECT_EQ(settings.eps, 1e-4);
  EXPECT_EQ(settings.weight_decay, 0.75);
  EXPECT_EQ(std::get<AdamW>(groups.settings(0)).beta1, 0.25);
}

TEST(ParameterGroups, FollowTheEngineUntilTheyHaveSettingsOfTheirOwn) {
  ParameterGroups groups(Sgd{.lr = 1.0},
                         {{.name = "own", .where = name_matches("^head"), .lr = 2.0},
                          {.name = "follows", .where = is_vector()}},
                         model());
  groups.set_learning_rate(0, 0.5);
  groups.set_weight_decay(0, 0.25);
  EXPECT_EQ(groups.learning_rate(0), 0.5);
  EXPECT_EQ(groups.learning_rate(groups.find("own")), 2.0);
  EXPECT_EQ(groups.learning_rate(groups.find("follows")), 0.5);
  EXPECT_EQ(groups.weight_decay(groups.find("own")), 0.25);
  groups.set_learning_rate(groups.find("follows"), 4.0);
  groups.set_learning_rate(0, 0.125);
  EXPECT_EQ(groups.learning_rate(groups.find("follows")), 4.0);
  EXPECT_EQ(groups.learning_rate(0), 0.125);
  EXPECT_THROW(groups.set_learning_rate(0, -1.0), InvalidArgument);
  EXPECT_EQ(groups.learning_rate(0), 0.125);
}

void expect_refused(const Optimizer& optimizer,
                    const std::vector<ParameterGroup>& groups,
                    const char* first,
                    const char* second) {
  EXPECT_THAT([&] { ParameterGroups(optimizer, groups, model()); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr(first), HasSubstr(second))));
}

TEST(ParameterGroups, RefusesWhatCannotBeMeant) {
  expect_refused(AdamW{}, {{.name = "typo", .where = name_matches("haed")}}, "typo",
                 "no parameter");
  expect_refused(AdamW{},
                 {{.where = is_vector()}, {.name = "shadowed", .where = name_matches("bias")}},
                 "shadowed", "earlier group");
  expect_refused(AdamW{}, {{.name = "x", .lr = 1.0}}, "'x'", "where");
  expect_refused(AdamW{}, {{.name = "x", .where = is_vector(), .momentum = 0.9}}, "momentum",
                 "AdamW");
  expect_refused(Sgd{}, {{.name = "x", .where = is_vector(), .beta1 = 0.9}}, "beta1", "Sgd");
  expect_refused(Lion{}, {{.name = "x", .where = is_vector(), .eps = 0.9}}, "eps", "Lion");
  expect_refused(AdamW{}, {{.name = "x", .where = is_vector(), .beta2 = 1.0}}, "'x'", "beta2");
  expect_refused(
      AdamW{}, {{.name = "x", .where = is_vector()}, {.name = "x", .where = name_matches("head")}},
      "'x'", "twice");
  expect_refused(Sgd{.momentum = 0.9, .nesterov = true},
                 {{.name = "x", .where = is_vector(), .momentum = 0.0}}, "'x'", "nesterov");
  EXPECT_THAT([] { static_cast<void>(name_matches("(")); },
              ThrowsMessage<InvalidArgument>(HasSubstr("'('")));
  const ParameterGroups groups(AdamW{}, {no_decay(is_vector())}, model());
  EXPECT_THAT([&] { static_cast<void>(groups.find("decay")); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("'decay'"), HasSubstr("no_decay"))));
}

}  // namespace
}  // namespace tandem::zero
