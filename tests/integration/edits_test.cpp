// tests/integration/edits_test.cpp: values that users give to parameters after wrapping them:
// loaded, exchanged, clamped, copied, initialised anew. Training goes on from them, as it does
// without Tandem.
#include "tests/support/keyed.h"
#include "tests/support/number.h"
#include "tests/support/oracle.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/nn/init.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

constexpr int kSteps = 8;
constexpr double kLr = 1e-2;
constexpr double kDecay = 0.1;

using Edit = std::function<void(const std::shared_ptr<Mlp>& net, int step)>;
struct Edits {
  Edit before_forward = [](const auto&, int) {};
  Edit before_step = [](const auto&, int) {};
};

/// The same on all ranks, so that the mean over ranks is the gradient of one process.
at::Tensor loss_of(const at::Tensor& output, int step) {
  return (output.to(at::kFloat) - keyed({4, 8}, key_of({7, step}))).square().mean();
}
at::Tensor input_of(int step) { return keyed({4, 8}, key_of({6, step})); }

std::vector<at::Tensor> tensors_of(const std::shared_ptr<Mlp>& net) {
  return unique_parameters({net_of(std::static_pointer_cast<Tower>(net))});
}

/// One process, torch::optim on fp32 masters. An edited parameter wins over its master where it is
/// not what the master rounds to; moments stay.
class Plain {
 public:
  explicit Plain(at::ScalarType dtype)
      : net(mlp(1, dtype)), masters_(masters_of(net)), optimizer_(masters_, options()) {}

  void step(int index, const Edits& edits) {
    edits.before_forward(net, index);
    loss_of(net->forward(input_of(index)), index).backward();
    edits.before_step(net, index);
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> parameters = tensors_of(net);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const at::Tensor edited = parameter.ne(masters_[i].to(parameter.scalar_type()));
      masters_[i].copy_(at::where(edited, parameter.to(at::kFloat), masters_[i]));
      masters_[i].mutable_grad() =
          parameter.grad().defined() ? parameter.grad().to(at::kFloat) : at::Tensor();
      parameter.mutable_grad().reset();
    }
    optimizer_.step();
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(masters_[i]);
  }

  std::shared_ptr<Mlp> net;

 private:
  static std::vector<at::Tensor> masters_of(const std::shared_ptr<Mlp>& net) {
    std::vector<at::Tensor> masters;
    for (const at::Tensor& parameter : tensors_of(net)) {
      masters.push_back(parameter.detach().to(at::kFloat, false, /*copy=*/true).requires_grad_());
    }
    return masters;
  }
  static torch::optim::AdamWOptions options() {
    return torch::optim::AdamWOptions(kLr).weight_decay(kDecay);
  }

  std::vector<at::Tensor> masters_;
  torch::optim::AdamW optimizer_;
};

/// Numerics contract, oracle (b): 1e-5 of the movement in fp32, 5e-2 in bf16.
void expect_like_torch(at::ScalarType dtype, const Edits& edits) {
  Plain plain(dtype);
  const std::vector<at::Tensor> start = copies(tensors_of(plain.net));
  std::vector<std::vector<at::Tensor>> expected;
  for (int step = 0; step < kSteps; ++step) {
    plain.step(step, edits);
    expected.push_back(copies(tensors_of(plain.net)));
  }
  on_ranks(patient(), [&](World& world) {
    const auto net = mlp(1, dtype);
    Engine engine(world, net,
                  {.name = "net", .optimizer = AdamW{.lr = kLr, .weight_decay = kDecay}});
    for (int step = 0; step < kSteps; ++step) {
      edits.before_forward(net, step);
      loss_of(engine.forward(input_of(step)), step).backward();
      edits.before_step(net, step);
      EXPECT_TRUE(world.step().applied);
      const auto& wanted = expected[static_cast<std::size_t>(step)];
      ASSERT_LE(distance(tensors_of(net), wanted, difference(wanted, start)),
                dtype == at::kFloat ? 1e-5 : 5e-2)
          << "step " << step;
    }
    EXPECT_EQ(engine.step_count("first.weight"), kSteps) << "moments and counts stay";
    const auto hash = static_cast<double>(engine.parameter_hash() >> 40U);
    EXPECT_EQ(world.mean(hash), hash) << "ranks differ";
  });
}

Edit in_step(int wanted, Edit edit) {
  return [wanted, edit = std::move(edit)](const std::shared_ptr<Mlp>& net, int step) {
    if (step == wanted) edit(net, step);
  };
}

class Edited : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void check(const Edits& edits) { expect_like_torch(GetParam(), edits); }
  [[nodiscard]] at::ScalarType dtype() const { return GetParam(); }
};

TEST_P(Edited, Unedited) { check({}); }

TEST_P(Edited, LoadedFromAFile) {
  std::stringstream file;
  torch::save(mlp(7, dtype()), file);
  const Edit load = [text = file.str()](const std::shared_ptr<Mlp>& net, int) {
    std::stringstream again(text);
    auto target = net;
    torch::load(target, again);
  };
  check({.before_forward = in_step(3, load)});
  check({.before_step = in_step(3, load)});
}

TEST_P(Edited, GivenOtherMemory) {
  const Edit exchange = [](const std::shared_ptr<Mlp>& net, int) {
    const at::Tensor other = keyed({8, 16}, 5, 0.3).to(net->second->weight.scalar_type());
    net->second->weight.set_data(other);
    // Transposed: the values count, not the strides.
    net->first->weight.set_data(keyed({8, 16}, 4, 0.3).to(other.scalar_type()).t());
  };
  check({.before_forward = in_step(2, exchange)});
  check({.before_step = in_step(2, exchange)});
}

TEST_P(Edited, ConvertedAndBack) {
  check({.before_forward = in_step(4, [](const std::shared_ptr<Mlp>& net, int) {
           const at::ScalarType type = net->first->weight.scalar_type();
           net->to(at::kDouble);
           net->to(type);
         })});
}

TEST_P(Edited, LoadedLikeAStateDictionary) {
  check({.before_forward = in_step(3, [](const std::shared_ptr<Mlp>& net, int) {
           const at::NoGradGuard no_grad;
           const auto source = mlp(9)->named_parameters();
           for (auto& item : net->named_parameters()) item.value().copy_(source[item.key()]);
         })});
}

// WGAN: the critic's weights are clamped after each step.
TEST_P(Edited, Clamped) {
  check({.before_forward = [](const std::shared_ptr<Mlp>& net, int) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.clamp_(-0.2, 0.2);
  }});
  check({.before_forward = [](const std::shared_ptr<Mlp>& net, int) {
    for (at::Tensor& parameter : net->parameters()) parameter.data().clamp_(-0.2, 0.2);
  }});
}

TEST_P(Edited, InitialisedAnew) {
  const Edit reset = [](const std::shared_ptr<Mlp>& net, int) {
    torch::nn::init::eye_(net->second->weight);
    torch::nn::init::constant_(net->second->bias, 0.25);
  };
  check({.before_forward = in_step(5, reset)});
  check({.before_step = in_step(5, reset)});
}

TEST_P(Edited, CopiedFromAnotherNetEveryOtherStep) {
  check({.before_forward = [](const std::shared_ptr<Mlp>& net, int step) {
    const at::NoGradGuard no_grad;
    const auto source = mlp(static_cast<std::uint64_t>(20 + step))->parameters();
    const auto parameters = net->parameters();
    for (std::size_t i = 0; step % 2 == 1 && i < parameters.size(); ++i) {
      parameters[i].mul_(0.5).add_(source[i].to(parameters[i].scalar_type()), 0.5);
    }
  }});
}

// DQN and its relatives: the target is an engine too (for its buffers, or to be trained later).
TEST_P(Edited, ATargetNetworkFollowsAndIsLeftAloneBySteps) {
  on_ranks(patient(), [&](World& world) {
    const auto online_net = mlp(1, dtype());
    const auto target_net = mlp(2, dtype());
    Engine online(world, online_net, {.name = "online", .optimizer = AdamW{.lr = kLr}});
    Engine target(world, target_net, {.name = "target", .optimizer = AdamW{.lr = kLr}});
    std::vector<at::Tensor> expected = copies(tensors_of(target_net));
    for (int step = 0; step < 4; ++step) {
      const at::Tensor goal = target.forward(input_of(step)).detach();
      (loss_of(online.forward(input_of(step)), step) +
       (online.forward(input_of(step)) - goal).to(at::kFloat).square().mean())
          .backward();
      EXPECT_TRUE(world.step().applied);
      const at::NoGradGuard no_grad;
      const auto from = tensors_of(online_net);
      const auto to = tensors_of(target_net);
      for (std::size_t i = 0; i < to.size(); ++i) {
        const bool hard = step == 2;
        if (hard) {
          to[i].copy_(from[i]);
          expected[i].copy_(from[i]);
        } else {
          to[i].mul_(0.75).add_(from[i], 0.25);
          expected[i].mul_(0.75).add_(from[i], 0.25);
        }
      }
      EXPECT_EQ(differing_bits(tensors_of(target_net), expected), 0) << "step " << step;
    }
    EXPECT_EQ(target.step_count("first.weight"), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Edits,
                         Edited,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) {
                           return std::string(info.param == at::kFloat ? "fp32" : "bf16");
                         });

// The same values on all ranks are the user's to give. If not, each element is what its owner says,
// from the next update on: 2,048 elements on two ranks, of which rank 1 owns the second half.
TEST(Edits, OfOneRankAloneCountWhereItOwns) {
  on_exactly(2, patient(), [](World& world) {
    const auto module = std::make_shared<Scale>(2048, 0.0);
    Engine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    if (world.rank() == 1) {
      module->w.set_data(torch::full({2048}, 5.0));
    }
    net.forward(torch::ones({2048})).sum().backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_TRUE(module->w.narrow(0, 0, 1024).eq(-1.0).all().item<bool>());
    EXPECT_TRUE(module->w.narrow(0, 1024, 1024).eq(4.0).all().item<bool>());
  });
}

// A graph that was made with the loaded values is as good as before they were put in place, and one
// that a step has outdated is an error.
TEST(Edits, LoadingOutdatesNoGraphAndSteppingDoes) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net", 2.0);
    net->w.set_data(torch::full({1}, 3.0));
    const at::Tensor loss = (net->w * net->w).sum();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -3.0F) << "3 - 2 * 3";
    EXPECT_ANY_THROW(loss.backward());
    EXPECT_EQ(world.step().reason, StepReason::kEmpty) << "nothing arrived of it";
  });
}

TEST(Edits, ParameterHashSeesWhatWasLoaded) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net", 2.0);
    const std::uint64_t before = net.parameter_hash();
    const std::uint64_t world_before = world.parameter_hash();
    net->w.set_data(torch::full({1}, 3.0));
    EXPECT_NE(net.parameter_hash(), before);
    EXPECT_NE(world.parameter_hash(), world_before);
  });
}

// Loaded just before the rank left: its slices are the loaded ones in the others' steps.
TEST(Edits, OfARankThatLeavesCount) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net", 2.0);
        net->w.set_data(torch::full({1}, 10.0));
        if (world.rank() == 0) {
          world.leave();
          return;
        }
        gradient_of(net, world.size()).backward();
        EXPECT_TRUE(world.step().applied);
        // The mean over those that ran the pass: all but rank 0.
        EXPECT_EQ(value_of(net), 10.0F - static_cast<float>(world.size()));
        world.leave();
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
