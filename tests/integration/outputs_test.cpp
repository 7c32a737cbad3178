// tests/integration/outputs_test.cpp: what a forward may return. That outputs are tracked shows in
// this: the prologue runs at the output, so it is over when the first parameter's own hook runs.
// Without tracking it would only run behind that hook.
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/nn/module.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tandem::testing {

/// A user's own type, found through visit_tensors beside it.
struct Prediction {
  at::Tensor logits;
  std::vector<at::Tensor> states;
  std::string label;
};

template <class Visit>
void visit_tensors(const Prediction& prediction, Visit&& visit) {
  visit(prediction.logits);
  visit(prediction.states);
}

namespace {

/// A module whose forward returns whatever `Make` builds of w * 1.
template <class Make>
class Returning : public torch::nn::Module {
 public:
  explicit Returning(Make make) : make_(std::move(make)) {
    w = register_parameter("w", torch::zeros({1}));
  }
  auto forward() { return make_(w * 1.0); }

  at::Tensor w;

 private:
  Make make_;
};

template <class Make, class Pick>
void expect_tracked(World& world, Make make, Pick pick) {
  Engine net(world, std::make_shared<Returning<Make>>(make),
             {.name = "net", .optimizer = Sgd{.lr = 1.0}});
  std::int64_t prologues = -1;
  net->w.register_hook([&](const at::Tensor& gradient) {
    prologues = net.prologues();
    return gradient;
  });
  const at::Tensor output = pick(net.forward());
  (3.0 * output).sum().backward();
  EXPECT_EQ(prologues, 1) << "the output was not tracked";
  EXPECT_TRUE(world.step().applied);
  EXPECT_EQ(net->w.template item<float>(), -3.0F);
}

TEST(Outputs, OfAllKindsAreTracked) {
  on_ranks(patient(), [](World& world) {
    using at::Tensor;
    expect_tracked(
        world, [](Tensor t) { return t; }, [](const auto& o) { return o; });
    expect_tracked(
        world, [](Tensor t) { return std::make_tuple(1, t, std::string("x")); },
        [](const auto& o) { return std::get<1>(o); });
    expect_tracked(
        world, [](Tensor t) { return std::pair(Tensor(), t); },
        [](const auto& o) { return o.second; });
    expect_tracked(
        world,
        [](Tensor t) {
          return std::vector<Tensor>{t.detach(), t};
        },
        [](const auto& o) { return o[1]; });
    expect_tracked(
        world, [](Tensor t) { return std::optional<Tensor>(t); }, [](const auto& o) { return *o; });
    expect_tracked(
        world,
        [](Tensor t) {
          return std::map<std::string, Tensor>{{"t", t}};
        },
        [](const auto& o) { return o.at("t"); });
    expect_tracked(
        world,
        [](Tensor t) {
          return std::map<std::string, std::vector<std::optional<Tensor>>>{
              {"t", {std::nullopt, t}}};
        },
        [](const auto& o) { return *o.at("t")[1]; });
    expect_tracked(
        world,
        [](Tensor t) {
          return Prediction{Tensor(), {t}, "label"};
        },
        [](const auto& o) { return o.states[0]; });
  });
}

TEST(Outputs, MayBeTrackedByHand) {
  on_ranks(patient(), [](World& world) {
    const at::Tensor w = torch::zeros({1}).requires_grad_();
    Engine net(world, NamedTensors{{"w", w}}, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    std::int64_t prologues = -1;
    w.register_hook([&](const at::Tensor& gradient) {
      prologues = net.prologues();
      return gradient;
    });
    const at::Tensor output = w * 2.0;
    net.track(Prediction{output, {}, ""});
    output.sum().backward();
    EXPECT_EQ(prologues, 1);
    world.step();
    EXPECT_EQ(w.item<float>(), -2.0F);
  });
}

TEST(Outputs, UntrackedOnesLoseNothing) {
  on_ranks(patient(), [](World& world) {
    const at::Tensor w = torch::zeros({1}).requires_grad_();
    Engine net(world, NamedTensors{{"w", w}}, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    (w * 2.0).sum().backward();
    world.step();
    EXPECT_EQ(w.item<float>(), -2.0F);
    EXPECT_EQ(net.prologues(), 1);
    EXPECT_EQ(net.epilogues(), 1);
  });
}

}  // namespace
}  // namespace tandem::testing
