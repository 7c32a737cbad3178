// tests/hooks/nested_test.cpp: backward passes started inside backward passes, as checkpointing
// does.
#include "tests/hooks/recording_sink.h"

namespace tandem::hooks {
namespace {

using ::testing::ElementsAre;

class Nested : public ::testing::Test {
 protected:
  RecordingSink sink;
  PassTracker tracker{sink};
  const at::Tensor before = leaf(2), inside = leaf(3), after = leaf(5);
  std::unique_ptr<LeafHooks> hooks = tracker.attach_leaves(0, {before, inside, after});
  const Segment segment = [this](const at::Tensor& x) { return x * inside; };
};

// loss = sum(checkpoint(before) * after). `after` is met first, then the checkpoint's node, whose
// nested backward meets `inside`, then `before`. Gradients: before * inside = 6, before * after =
// 10, 3 * 5 = 15.
TEST_F(Nested, InnerAfterAnOuterHookJoins) {
  (checkpoint(segment, before * 1.0) * after).sum().backward();
  EXPECT_THAT(sink.take(),
              ElementsAre("opened", "arrived 0.2", "arrived 0.1", "arrived 0.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 6);
  EXPECT_EQ(value_of(sink.gradients[1]), 10);
  EXPECT_EQ(value_of(sink.gradients[2]), 15);
  EXPECT_EQ(tracker.known_tasks(), 0U);
}

TEST_F(Nested, InnerBeforeAnyOuterHookIsItsOwnPass) {
  checkpoint(segment, before * 1.0).sum().backward();
  EXPECT_THAT(sink.take(),
              ElementsAre("opened", "arrived 0.1", "closed", "opened", "arrived 0.0", "closed"));
}

// The tracked output is what keeps a checkpointed engine's pass in one piece.
TEST_F(Nested, TrackedOutputMakesItOnePass) {
  const at::Tensor output = checkpoint(segment, before * 1.0);
  tracker.track_output(0, output);
  output.sum().backward();
  EXPECT_THAT(sink.take(),
              ElementsAre("opened", "reached 0", "arrived 0.1", "arrived 0.0", "closed"));
}

// One leaf in two segments arrives once in each graph task.
TEST_F(Nested, LeafOfTwoSegmentsArrivesTwice) {
  const at::Tensor output = checkpoint(segment, checkpoint(segment, before * 1.0));
  tracker.track_output(0, output);
  output.sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 0", "arrived 0.1", "arrived 0.1",
                                       "arrived 0.0", "closed"));
  // The outer segment's input is before * inside = 6, the inner one's before = 2, times inside = 3.
  EXPECT_EQ(value_of(sink.gradients[0]), 6);
  EXPECT_EQ(value_of(sink.gradients[1]), 6);
}

TEST_F(Nested, CheckpointInsideACheckpointJoins) {
  const Segment outer = [this](const at::Tensor& x) { return checkpoint(segment, x) * after; };
  const at::Tensor output = checkpoint(outer, before * 1.0);
  tracker.track_output(0, output);
  output.sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 0", "arrived 0.2", "arrived 0.1",
                                       "arrived 0.0", "closed"));
  EXPECT_EQ(tracker.known_tasks(), 0U);
}

TEST_F(Nested, InnerEndDoesNotCloseTheOuter) {
  bool open_behind_inner = false;
  const at::Tensor input = detour(before * 1.0, [&] { open_behind_inner = tracker.pass_open(); });
  const at::Tensor output = checkpoint(segment, input);
  tracker.track_output(0, output);
  output.sum().backward();
  EXPECT_TRUE(open_behind_inner);
  EXPECT_FALSE(tracker.pass_open());
}

TEST_F(Nested, ThrowInTheInnerAbandonsThePassOnce) {
  sink.after = throw_at("arrived 0.1");
  const at::Tensor loss = (checkpoint(segment, before * 1.0) * after).sum();
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.2", "arrived 0.1", "abandoned"));
  EXPECT_FALSE(tracker.pass_open());
  EXPECT_EQ(tracker.known_tasks(), 0U);

  sink.after = nullptr;
  loss.backward();
  EXPECT_THAT(sink.take(),
              ElementsAre("opened", "arrived 0.2", "arrived 0.1", "arrived 0.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients.back()), 15);
}

TEST_F(Nested, ThrowInTheOuterBehindAFinishedInnerAbandons) {
  const at::Tensor input = detour(before * 1.0, [] { throw TestError("behind the segment"); });
  const at::Tensor output = checkpoint(segment, input);
  tracker.track_output(0, output);
  EXPECT_THROW(output.sum().backward(), TestError);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 0", "arrived 0.1", "abandoned"));
}

// A pass that lost its inner part stays abandoned, even if the node that ran it swallows the
// exception.
TEST_F(Nested, SwallowedInnerFailureIsSaidByTheOuterPass) {
  const at::Tensor inner_loss = (inside * 1.0).sum();
  const at::Tensor input = detour(before * 1.0, [&] {
    sink.after = throw_at("arrived 0.1");
    EXPECT_THROW(inner_loss.backward({}, /*retain_graph=*/true), TestError);
    sink.after = nullptr;
    EXPECT_FALSE(tracker.pass_open());
    // Half a pass must not be taken for a new one.
    EXPECT_THROW(inner_loss.backward(), BackwardFailed);
  });
  EXPECT_THROW((input * after).sum().backward(), BackwardFailed);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.2", "arrived 0.1", "abandoned"));
  EXPECT_FALSE(before.grad().defined());
  EXPECT_FALSE(inside.grad().defined());
  EXPECT_EQ(tracker.known_tasks(), 0U);
}

}  // namespace
}  // namespace tandem::hooks
