// tests/hooks/slots_test.cpp: the one hook slot of a tensor: who was there before, who came after.
#include "tests/hooks/recording_sink.h"
#include <tandem/error.h>

namespace tandem::hooks {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Somebody else's hook: counts, may throw, may chain.
class Stranger : public torch::autograd::PostAccumulateGradHook {
 public:
  using Occupant = std::unique_ptr<PostAccumulateGradHook>;
  explicit Stranger(std::function<void(const at::Tensor&)> run, Occupant chained = nullptr)
      : run_(std::move(run)), chained_(std::move(chained)) {}
  void operator()(const at::Tensor& tensor) override {
    if (chained_) (*chained_)(tensor);
    run_(tensor);
  }

 private:
  std::function<void(const at::Tensor&)> run_;
  Occupant chained_;
};

class Slots : public ::testing::Test {
 protected:
  RecordingSink sink;
  PassTracker tracker{sink};
  const at::Tensor w = leaf(2);
  int stranger_ran = 0;

  static std::unique_ptr<torch::autograd::PostAccumulateGradHook>& slot_of(
      const at::Tensor& tensor) {
    return torch::autograd::impl::post_acc_grad_hooks(tensor);
  }
  void put_stranger(const at::Tensor& tensor) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<Stranger>([this](const at::Tensor&) { ++stranger_ran; }));
  }
  void backward() { (w * 3.0).sum().backward(); }
};

TEST_F(Slots, PreviousOccupantRunsFirstAndIsRestored) {
  bool had_gradient = false;
  torch::autograd::impl::set_post_acc_grad_hooks(
      w, std::make_unique<Stranger>([&](const at::Tensor& tensor) {
        ++stranger_ran;
        had_gradient = tensor.grad().defined();
        EXPECT_THAT(sink.events(), IsEmpty());
      }));
  const auto* stranger = slot_of(w).get();
  auto hooks = tracker.attach_leaves(0, {w});
  backward();
  EXPECT_EQ(stranger_ran, 1);
  EXPECT_TRUE(had_gradient);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));

  hooks.reset();
  EXPECT_EQ(slot_of(w).get(), stranger);
  backward();
  EXPECT_EQ(stranger_ran, 2);
  EXPECT_THAT(sink.take(), IsEmpty());
}

TEST_F(Slots, PreviousOccupantMayTakeTheGradient) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      w,
      std::make_unique<Stranger>([](const at::Tensor& tensor) { tensor.mutable_grad().reset(); }));
  const auto hooks = tracker.attach_leaves(0, {w});
  backward();
  EXPECT_THAT(sink.take(), IsEmpty());
}

TEST_F(Slots, ThrowOfThePreviousOccupantDropsTheGradient) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      w, std::make_unique<Stranger>([](const at::Tensor&) { throw TestError("a stranger"); }));
  const auto hooks = tracker.attach_leaves(0, {w});
  EXPECT_THROW(backward(), TestError);
  EXPECT_FALSE(w.grad().defined());
  EXPECT_THAT(sink.take(), IsEmpty());
}

TEST_F(Slots, DetachedHooksLeaveGradientsToAutograd) {
  tracker.attach_leaves(0, {w}).reset();
  backward();
  backward();
  EXPECT_THAT(sink.take(), IsEmpty());
  EXPECT_EQ(value_of(w.grad()), 6);
}

TEST_F(Slots, AttachingClearsWhatWasAccumulated) {
  backward();
  const auto hooks = tracker.attach_leaves(0, {w});
  EXPECT_FALSE(w.grad().defined());
  backward();
  EXPECT_EQ(value_of(sink.gradients[0]), 3);
}

// torch::load and optimizers' flat buffers exchange the data under a parameter.
TEST_F(Slots, LeafWithExchangedDataStillReports) {
  const auto hooks = tracker.attach_leaves(0, {w});
  const at::Tensor flat = torch::full({6}, 9.0);
  w.set_data(flat.narrow(0, 2, 2));
  EXPECT_EQ(hooks->first_displaced(), -1);
  (w * w).sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 18);
}

TEST_F(Slots, DisplacedHookIsFoundAndReattached) {
  const at::Tensor other = leaf(5);
  const auto hooks = tracker.attach_leaves(0, {other, w});
  EXPECT_EQ(hooks->first_displaced(), -1);
  put_stranger(w);
  EXPECT_EQ(hooks->first_displaced(), 1);
  backward();
  EXPECT_THAT(sink.take(), IsEmpty());
  w.mutable_grad().reset();

  hooks->reattach();
  EXPECT_EQ(hooks->first_displaced(), -1);
  backward();
  EXPECT_EQ(stranger_ran, 2);
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "closed"));
}

TEST_F(Slots, ReattachingTellsWhatWentPastUs) {
  const at::Tensor other = leaf(5);
  const auto hooks = tracker.attach_leaves(0, {other, w});
  put_stranger(other);
  put_stranger(w);
  backward();
  EXPECT_THAT(hooks->reattach(), ElementsAre(1));
  EXPECT_FALSE(w.grad().defined()) << "or the next backward would add to it";
  EXPECT_THAT(hooks->reattach(), IsEmpty());
}

TEST_F(Slots, GradientsSetByHandAreFoundAndDropped) {
  const at::Tensor other = leaf(5);
  const auto hooks = tracker.attach_leaves(0, {other, w});
  backward();
  EXPECT_EQ(hooks->first_with_gradient(), -1);
  other.mutable_grad() = torch::zeros({5});
  EXPECT_EQ(hooks->first_with_gradient(), -1) << "zeros give nothing";
  w.mutable_grad() = torch::tensor({0.0F, std::nanf("")});
  EXPECT_EQ(hooks->first_with_gradient(), 1);
  hooks->drop_gradients();
  EXPECT_FALSE(w.grad().defined());
  EXPECT_FALSE(other.grad().defined());
}

TEST_F(Slots, KnowsWhoseHookIsOnATensor) {
  RecordingSink elsewhere_sink;
  auto elsewhere = std::make_unique<PassTracker>(elsewhere_sink);
  EXPECT_EQ(tracker.taken_by(w), std::nullopt);
  EXPECT_EQ(tracker.taken_by(at::Tensor()), std::nullopt);
  put_stranger(w);
  EXPECT_EQ(tracker.taken_by(w), std::nullopt);
  auto theirs = elsewhere->attach_leaves(0, {w}, "critic");
  const auto ours = tracker.attach_leaves(0, {w}, "actor");
  EXPECT_EQ(tracker.taken_by(w), "critic") << "below ours";
  EXPECT_EQ(elsewhere->taken_by(w), "actor");
  theirs.reset();
  EXPECT_EQ(tracker.taken_by(w), std::nullopt);
  theirs = elsewhere->attach_leaves(0, {w}, "critic");
  elsewhere.reset();
  EXPECT_EQ(tracker.taken_by(w), std::nullopt) << "of a tracker that is gone";
}

TEST_F(Slots, EmptiedSlotIsDisplaced) {
  const auto hooks = tracker.attach_leaves(0, {w});
  slot_of(w).reset();
  EXPECT_EQ(hooks->first_displaced(), 0);
  hooks->reattach();
  backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
}

// Whoever displaced us may have chained us, as we do: the gradient still arrives once.
TEST_F(Slots, ReattachingOverAChainDeliversOnce) {
  auto hooks = tracker.attach_leaves(0, {w});
  slot_of(w) = std::make_unique<Stranger>([this](const at::Tensor&) { ++stranger_ran; },
                                          std::move(slot_of(w)));
  EXPECT_EQ(hooks->first_displaced(), 0);
  backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  hooks->reattach();
  backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  EXPECT_EQ(stranger_ran, 2);
  hooks.reset();
  backward();
  EXPECT_EQ(stranger_ran, 3);
  EXPECT_THAT(sink.take(), IsEmpty());
  EXPECT_EQ(value_of(w.grad()), 3);
}

// Hooks that lie in a stranger's chain cannot be taken out, but do nothing any more.
TEST_F(Slots, DetachedInsideAChainOnlyPassesOn) {
  put_stranger(w);
  auto hooks = tracker.attach_leaves(0, {w});
  slot_of(w) = std::make_unique<Stranger>([](const at::Tensor&) {}, std::move(slot_of(w)));
  hooks.reset();
  backward();
  EXPECT_EQ(stranger_ran, 1);
  EXPECT_THAT(sink.take(), IsEmpty());
  EXPECT_TRUE(w.grad().defined());
}

TEST_F(Slots, TwoSetsOverOneLeafComeOffInAnyOrder) {
  for (const bool first_goes_first : {true, false}) {
    put_stranger(w);
    const auto* stranger = slot_of(w).get();
    auto first = tracker.attach_leaves(0, {w});
    auto second = tracker.attach_leaves(1, {w});
    backward();
    // The first set was the second's previous occupant, and took the gradient.
    EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
    (first_goes_first ? first : second).reset();
    backward();
    EXPECT_THAT(sink.take(),
                ElementsAre("opened", first_goes_first ? "arrived 1.0" : "arrived 0.0", "closed"));
    (first_goes_first ? second : first).reset();
    EXPECT_EQ(slot_of(w).get(), stranger);
  }
}

TEST_F(Slots, LeafNamedTwiceArrivesOnce) {
  auto hooks = tracker.attach_leaves(0, {w, w});
  backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.0", "closed"));
  hooks.reset();
  EXPECT_EQ(slot_of(w).get(), nullptr);
}

TEST_F(Slots, RefusesWhatIsNoLeaf) {
  for (const at::Tensor& bad : {at::Tensor(), w * 2.0}) {
    std::string message;
    try {
      (void)tracker.attach_leaves(3, {w, bad});
    } catch (const InvalidArgument& error) {
      message = error.what();
    }
    EXPECT_THAT(message, HasSubstr("parameter 1 of engine 3"));
    EXPECT_EQ(slot_of(w).get(), nullptr);
  }
}

}  // namespace
}  // namespace tandem::hooks
