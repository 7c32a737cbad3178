// tests/hooks/failures_test.cpp: passes that do not reach their end.
#include "tests/hooks/recording_sink.h"
#include <tandem/error.h>

#include <torch/csrc/autograd/engine.h>

namespace tandem::hooks {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The loss is sum(first * second). A leaf is met as soon as its node is ready, so `second` comes
// first.
class Failures : public ::testing::Test {
 protected:
  RecordingSink sink;
  PassTracker tracker{sink};
  const at::Tensor first = leaf(2), second = leaf(5);
  std::unique_ptr<LeafHooks> hooks = tracker.attach_leaves(0, {first, second});

  [[nodiscard]] at::Tensor product() const { return first * 1.0 * second; }

  void expect_clean() {
    EXPECT_FALSE(first.grad().defined());
    EXPECT_FALSE(second.grad().defined());
    EXPECT_FALSE(tracker.pass_open());
    EXPECT_EQ(tracker.known_tasks(), 0U);
  }
  void expect_good_pass(const at::Tensor& loss) {
    sink.take();
    sink.gradients.clear();
    sink.after = nullptr;
    loss.backward();
    EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "arrived 0.0", "closed"));
    EXPECT_EQ(value_of(sink.gradients[0]), 2);
    EXPECT_EQ(value_of(sink.gradients[1]), 5);
    expect_clean();
  }
};

TEST_F(Failures, ThrowInANodeAbandons) {
  bool fail = true;
  const at::Tensor through = detour(first * 1.0, [&] {
    if (fail) throw TestError("in a node");
  });
  const at::Tensor loss = (through * second).sum();
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "abandoned"));
  expect_clean();
  fail = false;
  expect_good_pass(loss);
}

TEST_F(Failures, ThrowBeforeTheFirstHookIsNoPass) {
  const at::Tensor output = product();
  const at::Tensor through = detour(output, [] { throw TestError("before the first hook"); });
  EXPECT_THROW(through.sum().backward({}, /*retain_graph=*/true), TestError);
  EXPECT_THAT(sink.take(), IsEmpty());
  expect_clean();
  expect_good_pass(output.sum());
}

TEST_F(Failures, BackwardOfAConstantIsNoPass) {
  EXPECT_ANY_THROW(torch::ones({1}).sum().backward());
  EXPECT_THAT(sink.take(), IsEmpty());
}

TEST_F(Failures, ThrowInArrivedAbandons) {
  const at::Tensor loss = product().sum();
  for (const char* event : {"arrived 0.1", "arrived 0.0"}) {
    sink.take();
    sink.after = throw_at(event);
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
    const Events events = sink.take();
    EXPECT_EQ(events.back(), "abandoned");
    EXPECT_EQ(std::count(events.begin(), events.end(), "abandoned"), 1);
    expect_clean();
  }
  expect_good_pass(loss);
}

TEST_F(Failures, ThrowInReachedAbandons) {
  const at::Tensor output = product();
  tracker.track_output(0, output);
  sink.after = throw_at("reached 0");
  EXPECT_THROW(output.sum().backward(), TestError);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 0", "abandoned"));
  expect_clean();
}

TEST_F(Failures, ThrowInClosedReachesTheCallerAndLeavesNoPass) {
  const at::Tensor loss = product().sum();
  sink.after = throw_at("closed");
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
  // closed() was its end: abandoned() does not follow.
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "arrived 0.0", "closed"));
  expect_clean();
  expect_good_pass(loss);
}

// A callback of somebody else that was queued earlier runs earlier, and its throw skips ours.
TEST_F(Failures, ThrowInAnEarlierCallbackAbandons) {
  const at::Tensor through = detour(product(), [] {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [] { throw TestError("in an end callback"); });
  });
  EXPECT_THROW(through.sum().backward(), TestError);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "arrived 0.0", "abandoned"));
  expect_clean();
}

TEST_F(Failures, DisarmedPassEndsWithoutAnEvent) {
  const at::Tensor loss = product().sum();
  sink.after = [&](const std::string& event) {
    if (event == "arrived 0.1") tracker.disarm();
  };
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), BackwardFailed) << "its gradients went";
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1"));
  expect_clean();
  expect_good_pass(loss);
}

TEST_F(Failures, DisarmedPassIsNotAbandoned) {
  const at::Tensor loss = product().sum();
  sink.after = [&](const std::string& event) {
    if (event != "arrived 0.1") return;
    tracker.disarm();
    throw TestError("after disarm");
  };
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1"));
  expect_clean();
  expect_good_pass(loss);
}

TEST_F(Failures, DisarmWithoutAPassDoesNothing) {
  tracker.disarm();
  expect_good_pass(product().sum());
}

}  // namespace
}  // namespace tandem::hooks
