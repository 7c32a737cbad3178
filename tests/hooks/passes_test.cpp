// tests/hooks/passes_test.cpp: which events a backward pass without failures gives, in which order.
#include "tests/hooks/recording_sink.h"

namespace tandem::hooks {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Passes : public ::testing::Test {
 protected:
  RecordingSink sink;
  PassTracker tracker{sink};
};

// loss = sum(3 * w0 * w1), so dw0 = 3 * w1 and dw1 = 3 * w0. The later factor's leaf is met first.
TEST_F(Passes, PlainBackwardOpensDeliversAndCloses) {
  const at::Tensor w0 = leaf(2), w1 = leaf(5);
  const auto hooks = tracker.attach_leaves(7, {w0, w1});
  const at::Tensor output = w0 * 3.0 * w1;
  tracker.track_output(7, output);
  EXPECT_THAT(sink.events(), IsEmpty());

  output.sum().backward();

  EXPECT_THAT(sink.take(),
              ElementsAre("opened", "reached 7", "arrived 7.1", "arrived 7.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 6);
  EXPECT_EQ(value_of(sink.gradients[1]), 15);
  EXPECT_FALSE(w0.grad().defined());
  EXPECT_FALSE(w1.grad().defined());
  EXPECT_FALSE(tracker.pass_open());
  EXPECT_EQ(tracker.known_tasks(), 0U);
}

TEST_F(Passes, TwoEnginesShareOnePass) {
  const at::Tensor a = leaf(2), b = leaf(5);
  const auto hooks_a = tracker.attach_leaves(0, {a});
  const auto hooks_b = tracker.attach_leaves(1, {b});
  const at::Tensor out_a = a * 3.0;
  tracker.track_output(0, out_a);
  const at::Tensor out_b = out_a * b;
  tracker.track_output(1, out_b);

  out_b.sum().backward();

  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 1", "arrived 1.0", "reached 0",
                                       "arrived 0.0", "closed"));
}

TEST_F(Passes, RetainedGraphGivesAPassEachTime) {
  const at::Tensor w = leaf(2);
  const auto hooks = tracker.attach_leaves(0, {w});
  const at::Tensor loss = (w * 3.0).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  loss.backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  // Not 6: nothing of the first pass was left to add to.
  EXPECT_EQ(value_of(sink.gradients[1]), 3);
}

TEST_F(Passes, SiameseUseArrivesOnceSummed) {
  const at::Tensor w = leaf(2);
  const auto hooks = tracker.attach_leaves(0, {w});
  (w * 3.0 + w).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 4);
}

TEST_F(Passes, AutogradGradDeliversNothing) {
  const at::Tensor w = leaf(2), x = leaf(3);
  const auto hooks = tracker.attach_leaves(0, {w});
  const at::Tensor output = x * w;
  tracker.track_output(0, output);
  const at::Tensor gx = torch::autograd::grad({output.sum()}, {x})[0];
  EXPECT_EQ(value_of(gx), 2);
  EXPECT_THAT(sink.take(), IsEmpty()) << "it trains nothing, so it is no pass";
  EXPECT_FALSE(w.grad().defined());
}

// Asked for the output itself, autograd::grad does not run the node that made it.
TEST_F(Passes, AutogradGradOfATrackedOutputIsNoPass) {
  const at::Tensor w = leaf(2);
  const at::Tensor output = w * 3.0;
  tracker.track_output(0, output);
  const at::Tensor g = torch::autograd::grad({(output * 4.0).sum()}, {output})[0];
  EXPECT_EQ(value_of(g), 4);
  EXPECT_THAT(sink.take(), IsEmpty());
}

// y = sum(x * x * w); gx = 2 x w; penalty = sum(gx * gx) = sum(4 x^2 w^2); dw = 8 x^2 w = 144.
TEST_F(Passes, GradientPenaltyIsOnePass) {
  const at::Tensor w = leaf(2), x = leaf(3);
  const auto hooks = tracker.attach_leaves(0, {w});
  const at::Tensor output = x * x * w;
  tracker.track_output(0, output);
  const at::Tensor gx = torch::autograd::grad({output.sum()}, {x}, {}, /*retain_graph=*/true,
                                              /*create_graph=*/true)[0];
  EXPECT_THAT(sink.take(), IsEmpty());
  (gx * gx).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 144);
}

// d sum(w * w) = 2 w, which with create_graph depends on w.
TEST_F(Passes, CreateGraphHandsOverDetachedGradients) {
  const at::Tensor w = leaf(2);
  const auto hooks = tracker.attach_leaves(0, {w});
  (w * w).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_EQ(sink.gradients.size(), 1U);
  EXPECT_EQ(value_of(sink.gradients[0]), 4);
  EXPECT_FALSE(sink.gradients[0].requires_grad());
  EXPECT_FALSE(w.grad().defined());
}

TEST_F(Passes, UnusedAndFrozenLeavesDoNotArrive) {
  const at::Tensor used = leaf(2), unused = leaf(3), frozen = leaf(4);
  frozen.requires_grad_(false);
  const auto hooks = tracker.attach_leaves(0, {used, unused, frozen});
  (used * frozen).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
}

TEST_F(Passes, LeafThawedAfterAttachingArrives) {
  const at::Tensor w = torch::full({2}, 2.0);  // no autograd metadata at all yet
  const auto hooks = tracker.attach_leaves(0, {w});
  w.requires_grad_(true);
  (w * 3.0).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
}

TEST_F(Passes, SparseGradientIsHandedOverAsItIs) {
  const at::Tensor table = torch::ones({4, 2}, torch::TensorOptions().requires_grad(true));
  const auto hooks = tracker.attach_leaves(0, {table});
  torch::embedding(table, torch::tensor({1, 3}, torch::kLong), -1, false, /*sparse=*/true)
      .sum()
      .backward();
  ASSERT_EQ(sink.gradients.size(), 1U);
  EXPECT_TRUE(sink.gradients[0].is_sparse());
  EXPECT_FALSE(table.grad().defined());
}

// A node of two outputs runs the hooks of both whenever one has a gradient.
TEST_F(Passes, SiblingOfATrackedOutputDoesNotReach) {
  const at::Tensor w = leaf(2);
  const std::vector<at::Tensor> halves = torch::split(w * 3.0, 1);
  tracker.track_output(0, halves[0]);
  tracker.track_output(1, halves[1]);
  halves[1].sum().backward({}, /*retain_graph=*/true);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 1", "closed"));
}

TEST_F(Passes, OutputsWithoutGraphAreNotTracked) {
  const at::Tensor w = leaf(2);
  tracker.track_output(0, at::Tensor());
  tracker.track_output(0, torch::ones({2}));
  tracker.track_output(0, w);  // a leaf: the hook would stay for ever
  (w * 3.0).sum().backward();
  EXPECT_THAT(sink.take(), IsEmpty());
}

// For hooks of the user's own; the pass then ends with the graph task that they ran in.
TEST_F(Passes, UserCodeInAGraphTaskReachesAnEngine) {
  const at::Tensor w = leaf(2);
  const auto hooks = tracker.attach_leaves(0, {w});
  detour(w * 3.0, [&] { tracker.reach(4); }).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 4", "arrived 0.0", "closed"));
  EXPECT_THROW(tracker.reach(4), InvalidArgument);
}

TEST_F(Passes, TheTrackerAnswersFromInsideEvents) {
  const at::Tensor w = leaf(2);
  const auto hooks = tracker.attach_leaves(0, {w});
  int events = 0;
  sink.after = [&](const std::string& event) {
    ++events;
    EXPECT_TRUE(PassTracker::inside_graph_task());
    EXPECT_EQ(tracker.pass_open(), event == "arrived 0.0") << event;
    EXPECT_EQ(tracker.opened_by_this_thread(), event == "arrived 0.0") << event;
  };
  (w * 3.0).sum().backward();
  EXPECT_EQ(events, 3);
  EXPECT_FALSE(PassTracker::inside_graph_task());
}

TEST_F(Passes, TrackersAreIndependent) {
  RecordingSink other_sink;
  PassTracker other(other_sink);
  const at::Tensor a = leaf(2), b = leaf(5);
  const auto hooks_a = tracker.attach_leaves(0, {a});
  const auto hooks_b = other.attach_leaves(0, {b});
  (a * b).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  EXPECT_THAT(other_sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
}

}  // namespace
}  // namespace tandem::hooks
