// tests/integration/buffers_test.cpp: BatchNorm's running statistics under the three buffer
// policies.
#include "tests/support/models.h"
#include "tests/support/scenarios.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <vector>

namespace tandem::testing {
namespace {

class Normed : public Tower {
 public:
  Normed() { norm = register_module("norm", torch::nn::BatchNorm1d(8)); }
  at::Tensor forward(const at::Tensor& input) override { return norm(input); }

  torch::nn::BatchNorm1d norm{nullptr};
};

struct Statistics {
  at::Tensor mean;
  at::Tensor batches;
};

constexpr int kSteps = 3;

/// What a rank's own statistics become after `steps` batches, starting from `mean`.
at::Tensor mean_after(at::Tensor mean, const Place& place) {
  // BatchNorm's momentum is 0.1.
  return 0.9 * mean + 0.1 * batch(place).mean(0);
}

Statistics train(World& world, BufferPolicy policy, int steps = kSteps) {
  const auto module = std::make_shared<Normed>();
  Engine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 0.1}, .buffers = policy});
  for (int step = 0; step < steps; ++step) {
    net.forward(batch({step, 0, world.rank(), world.size()})).square().sum().backward();
    EXPECT_TRUE(world.step().applied);
  }
  return {module->norm->running_mean.clone(), module->norm->num_batches_tracked.clone()};
}

TEST(Buffers, AreRankZerosByDefault) {
  on_ranks(patient(), [](World& world) {
    const Statistics statistics = train(world, BufferPolicy::kBroadcast);
    at::Tensor expected = torch::zeros({8});
    for (int step = 0; step < kSteps; ++step) {
      expected = mean_after(expected, {step, 0, 0, world.size()});
    }
    EXPECT_TRUE(torch::allclose(statistics.mean, expected, 1e-5, 1e-7));
    EXPECT_EQ(statistics.batches.item<std::int64_t>(), kSteps);
  });
}

TEST(Buffers, AreAveraged) {
  on_ranks(patient(), [](World& world) {
    const Statistics statistics = train(world, BufferPolicy::kAverage);
    at::Tensor expected = torch::zeros({8});
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor sum = torch::zeros({8});
      for (int rank = 0; rank < world.size(); ++rank) {
        sum += mean_after(expected, {step, 0, rank, world.size()});
      }
      expected = sum / world.size();
    }
    EXPECT_TRUE(torch::allclose(statistics.mean, expected, 1e-5, 1e-7));
    EXPECT_EQ(statistics.batches.item<std::int64_t>(), kSteps);
  });
}

TEST(Buffers, AreLeftAlone) {
  on_ranks(patient(), [](World& world) {
    const Statistics statistics = train(world, BufferPolicy::kLeave);
    at::Tensor expected = torch::zeros({8});
    for (int step = 0; step < kSteps; ++step) {
      expected = mean_after(expected, {step, 0, world.rank(), world.size()});
    }
    EXPECT_TRUE(torch::allclose(statistics.mean, expected, 1e-5, 1e-7));
  });
}

}  // namespace
}  // namespace tandem::testing
