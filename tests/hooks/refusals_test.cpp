// tests/hooks/refusals_test.cpp: graph tasks that get no pass: refused by the sink, or begun by a
// second thread.
#include "tests/hooks/recording_sink.h"
#include <tandem/error.h>

#include <future>
#include <thread>

namespace tandem::hooks {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Refusals : public ::testing::Test {
 protected:
  RecordingSink sink;
  PassTracker tracker{sink};
  const at::Tensor first = leaf(2), second = leaf(5);
  std::unique_ptr<LeafHooks> hooks = tracker.attach_leaves(0, {first, second});

  // `second` is met first.
  [[nodiscard]] at::Tensor product() const { return first * 1.0 * second; }
};

TEST_F(Refusals, ThrowInOpenedRefusesTheTask) {
  const at::Tensor loss = product().sum();
  sink.after = throw_at("opened");
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), TestError);
    // No pass was opened, so none is abandoned.
    EXPECT_THAT(sink.take(), ElementsAre("opened"));
    EXPECT_FALSE(first.grad().defined());
    EXPECT_FALSE(second.grad().defined());
    EXPECT_FALSE(tracker.pass_open());
    EXPECT_EQ(tracker.known_tasks(), 0U);
  }
  sink.after = nullptr;
  loss.backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "arrived 0.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 2);
  EXPECT_EQ(value_of(sink.gradients[1]), 5);
}

// On a GPU other hooks of a refused graph task may still run beside the one that threw. Here a node
// runs a leaf's hook by hand and swallows what it throws; the task's own hooks come after that.
TEST_F(Refusals, OtherHooksOfARefusedTaskOnlyDrop) {
  sink.after = throw_at("opened");
  const at::Tensor through = detour(product(), [&] {
    second.mutable_grad() = torch::ones({2});
    EXPECT_THROW((*torch::autograd::impl::post_acc_grad_hooks(second))(second), TestError);
    EXPECT_FALSE(second.grad().defined());
    EXPECT_EQ(tracker.known_tasks(), 1U);
  });
  through.sum().backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened"));
  EXPECT_FALSE(first.grad().defined());
  EXPECT_FALSE(second.grad().defined());
  EXPECT_EQ(tracker.known_tasks(), 0U);
}

TEST_F(Refusals, HookOutsideABackwardPassIsRefused) {
  first.mutable_grad() = torch::ones({2});
  EXPECT_THROW((*torch::autograd::impl::post_acc_grad_hooks(first))(first), InvalidArgument);
  EXPECT_FALSE(first.grad().defined());
}

TEST_F(Refusals, SecondThreadIsRefusedWhileAPassIsOpen) {
  const at::Tensor other = leaf(7);
  const auto other_hooks = tracker.attach_leaves(1, {other});
  const at::Tensor other_output = other * 3.0;
  tracker.track_output(1, other_output);
  const at::Tensor other_loss = other_output.sum();

  std::promise<void> inside, go_on;
  sink.after = [&](const std::string& event) {
    if (event != "arrived 0.1") return;
    inside.set_value();
    EXPECT_EQ(go_on.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  };
  std::thread holder([&] { product().sum().backward(); });
  inside.get_future().wait();

  EXPECT_TRUE(tracker.pass_open());
  EXPECT_FALSE(tracker.opened_by_this_thread());
  std::string message;
  try {
    other_loss.backward({}, /*retain_graph=*/true);
  } catch (const InvalidArgument& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("second thread"));
  EXPECT_FALSE(other.grad().defined());
  // A leaf's own hook is refused alike, and drops its gradient.
  EXPECT_THROW((other * 3.0).sum().backward(), InvalidArgument);
  EXPECT_FALSE(other.grad().defined());
  EXPECT_TRUE(tracker.pass_open());

  go_on.set_value();
  holder.join();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "arrived 0.0", "closed"));
  EXPECT_EQ(tracker.known_tasks(), 0U);

  sink.after = nullptr;
  sink.gradients.clear();
  other_loss.backward();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "reached 1", "arrived 1.0", "closed"));
  EXPECT_EQ(value_of(sink.gradients[0]), 3);
}

// The other thread waits behind opened() and is refused then; it does not slip into the pass.
TEST_F(Refusals, SecondThreadIsRefusedDuringOpening) {
  const at::Tensor other = leaf(7);
  const auto other_hooks = tracker.attach_leaves(1, {other});
  std::promise<void> inside, refused;
  std::thread second_thread;
  sink.after = [&](const std::string& event) {
    if (event == "opened") {
      second_thread = std::thread([&] {
        inside.set_value();
        EXPECT_THROW((other * 3.0).sum().backward(), InvalidArgument);
        refused.set_value();
      });
      inside.get_future().wait();
    }
    if (event == "arrived 0.1") {
      EXPECT_EQ(refused.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
    }
  };
  product().sum().backward();
  second_thread.join();
  EXPECT_THAT(sink.take(), ElementsAre("opened", "arrived 0.1", "arrived 0.0", "closed"));
  EXPECT_FALSE(other.grad().defined());
}

TEST_F(Refusals, PassesOfTwoThreadsOneAfterAnotherAreFine) {
  for (int i = 0; i < 2; ++i) {
    std::thread([&] { product().sum().backward(); }).join();
    product().sum().backward();
  }
  const Events events = sink.take();
  EXPECT_EQ(std::count(events.begin(), events.end(), "closed"), 4);
  EXPECT_EQ(tracker.known_tasks(), 0U);
}

}  // namespace
}  // namespace tandem::hooks
