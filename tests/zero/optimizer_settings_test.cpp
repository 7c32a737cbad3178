// test.zero.optimizer_settings: what settings are refused.
#include "zero/update_rule.h"
#include <tandem/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace tandem::zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void expect_refused(const Optimizer& optimizer, const char* name, const char* field) {
  EXPECT_THAT([&] { check(optimizer); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr(name), HasSubstr(field))));
}

TEST(OptimizerSettings, DefaultsAndEdgesPass) {
  EXPECT_NO_THROW(check(AdamW{}));
  EXPECT_NO_THROW(check(Sgd{}));
  EXPECT_NO_THROW(check(AdamW{.lr = 0.0, .beta1 = 0.0, .beta2 = 0.0, .eps = 0.0}));
  EXPECT_NO_THROW(check(Sgd{.lr = 0.0, .momentum = 1.5}));
  EXPECT_NO_THROW(check(Sgd{.momentum = 0.9, .nesterov = true}));
  EXPECT_NO_THROW(check(Adam{}));
  EXPECT_NO_THROW(check(RmsProp{}));
  EXPECT_NO_THROW(check(RmsProp{.alpha = 1.0}));
  EXPECT_NO_THROW(check(Adagrad{}));
  EXPECT_NO_THROW(check(Lion{}));
}

TEST(OptimizerSettings, NamesTheFieldThatIsOutOfRange) {
  for (const double bad : {kNan, kInfinity, -kInfinity, -1.0, 1e300}) {
    expect_refused(AdamW{.lr = bad}, "AdamW", "lr");
    expect_refused(AdamW{.beta1 = bad}, "AdamW", "beta1");
    expect_refused(AdamW{.beta2 = bad}, "AdamW", "beta2");
    expect_refused(AdamW{.eps = bad}, "AdamW", "eps");
    expect_refused(AdamW{.weight_decay = bad}, "AdamW", "weight_decay");
    expect_refused(Sgd{.lr = bad}, "Sgd", "lr");
    expect_refused(Sgd{.momentum = bad}, "Sgd", "momentum");
    expect_refused(Sgd{.weight_decay = bad}, "Sgd", "weight_decay");
    expect_refused(Sgd{.dampening = bad}, "Sgd", "dampening");
    expect_refused(Adam{.lr = bad}, "Adam", "lr");
    expect_refused(Adam{.beta2 = bad}, "Adam", "beta2");
    expect_refused(RmsProp{.alpha = bad}, "RmsProp", "alpha");
    expect_refused(RmsProp{.eps = bad}, "RmsProp", "eps");
    expect_refused(RmsProp{.momentum = bad}, "RmsProp", "momentum");
    expect_refused(Adagrad{.lr_decay = bad}, "Adagrad", "lr_decay");
    expect_refused(Adagrad{.initial_accumulator_value = bad}, "Adagrad",
                   "initial_accumulator_value");
    expect_refused(Lion{.beta1 = bad}, "Lion", "beta1");
    expect_refused(Lion{.weight_decay = bad}, "Lion", "weight_decay");
  }
  expect_refused(AdamW{.beta1 = 1.0}, "AdamW", "beta1");
  expect_refused(AdamW{.beta2 = 1.0}, "AdamW", "beta2");
  expect_refused(Sgd{.nesterov = true}, "Sgd", "nesterov");
  expect_refused(Sgd{.momentum = 0.9, .dampening = 0.1, .nesterov = true}, "Sgd", "nesterov");
}

TEST(OptimizerSettings, AreDescribedInFull) {
  EXPECT_EQ(describe(Lion{.lr = 0.1, .weight_decay = 0.25}),
            "Lion lr 0.10000000000000001, beta1 0.90000000000000002, beta2 0.98999999999999999, "
            "weight_decay 0.25");
}

}  // namespace
}  // namespace tandem::zero
