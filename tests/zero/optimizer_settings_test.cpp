// test.zero.optimizer_settings: what settings are refused.
#include "zero/optimizer_shard.h"
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
  }
  expect_refused(AdamW{.beta1 = 1.0}, "AdamW", "beta1");
  expect_refused(AdamW{.beta2 = 1.0}, "AdamW", "beta2");
}

}  // namespace
}  // namespace tandem::zero
