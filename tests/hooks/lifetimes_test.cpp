// tests/hooks/lifetimes_test.cpp: tracker, leaf hooks, module and graph die in any order, and
// nothing accumulates over many passes.
#include "tests/hooks/recording_sink.h"

#include <fstream>
#include <optional>
#include <unistd.h>

namespace tandem::hooks {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Lifetimes : public ::testing::Test {
 protected:
  RecordingSink sink;
  std::optional<PassTracker> tracker{std::in_place, sink};
  at::Tensor w = leaf(2);
};

TEST_F(Lifetimes, TrackerDiesBeforeTheGraph) {
  auto hooks = tracker->attach_leaves(0, {w});
  const at::Tensor output = w * 3.0;
  tracker->track_output(0, output);
  tracker.reset();
  output.sum().backward();
  EXPECT_THAT(sink.take(), IsEmpty());
  EXPECT_EQ(value_of(w.grad()), 3);
  EXPECT_EQ(hooks->first_displaced(), -1);
  hooks.reset();
  EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(w).get(), nullptr);
}

TEST_F(Lifetimes, TrackerDiesInsideAPass) {
  const at::Tensor second = leaf(5);
  const auto hooks = tracker->attach_leaves(0, {w, second});
  (detour(w * 1.0, [&] { tracker.reset(); }) * second).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1"));
  EXPECT_EQ(value_of(w.grad()), 5);
}

TEST_F(Lifetimes, LeafHooksDieBeforeTheGraph) {
  auto hooks = tracker->attach_leaves(0, {w});
  const at::Tensor output = w * 3.0;
  tracker->track_output(0, output);
  hooks.reset();
  output.sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 0", "closed"));
  EXPECT_EQ(value_of(w.grad()), 3);
}

TEST_F(Lifetimes, LeafHooksDieInsideTheirOwnHook) {
  auto hooks = tracker->attach_leaves(0, {w});
  sink.after = [&](const std::string& event) {
    if (event == "arrived 0.0") hooks.reset();
  };
  (w * 3.0).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  (w * 3.0).sum().backward();
  EXPECT_THAT(sink.take(), IsEmpty());
}

TEST_F(Lifetimes, LeavesAndGraphDieBeforeTheHooks) {
  auto hooks = tracker->attach_leaves(0, {w});
  {
    const at::Tensor output = w * 3.0;
    tracker->track_output(0, output);
  }
  w = at::Tensor();
  EXPECT_EQ(hooks->first_displaced(), -1);
  hooks.reset();
  EXPECT_THAT(sink.take(), IsEmpty());
}

TEST_F(Lifetimes, LeavesOutliveEverything) {
  auto hooks = tracker->attach_leaves(0, {w});
  hooks.reset();
  tracker.reset();
  (w * 3.0).sum().backward();
  EXPECT_EQ(value_of(w.grad()), 3);
}

std::int64_t resident_bytes() {
  std::int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// With create_graph a gradient left in `.grad` keeps its graph, and the graph keeps the leaf: 4 MB
// of weight a pass would be 400 MB over 400 passes. 64 MB is the allocator's freedom.
TEST_F(Lifetimes, ManyRetainedGraphsKeepMemoryFlat) {
  const at::Tensor big = torch::ones({1 << 18}, torch::TensorOptions().requires_grad(true));
  const auto hooks = tracker->attach_leaves(0, {big});
  std::int64_t start = 0;
  for (int i = 0; i < 500; ++i) {
    const at::Tensor output = big * big;
    tracker->track_output(0, output);
    output.sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    ASSERT_EQ(tracker->known_tasks(), 0U);
    sink.gradients.clear();
    if (i == 99) start = resident_bytes();
  }
  EXPECT_EQ(sink.take().size(), 500U * 4U);
  EXPECT_LT(resident_bytes() - start, 64 << 20);
}

TEST_F(Lifetimes, ManyFailedPassesLeaveNothingKnown) {
  const auto hooks = tracker->attach_leaves(0, {w});
  const at::Tensor loss = (w * 3.0).sum();
  for (const char* event : {"opened", "arrived 0.0", "closed"}) {
    sink.after = throw_at(event);
    for (int i = 0; i < 500; ++i) {
      ASSERT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
      ASSERT_EQ(tracker->known_tasks(), 0U);
      ASSERT_FALSE(w.grad().defined());
    }
  }
}

}  // namespace
}  // namespace tandem::hooks
