// tests/support/functor_oracle.cpp: the oracle that shares the update functors and nothing else, so
// that a difference of one bit is a fault of what stands around them: order of sums, factors, step
// counts, bounds.
#include "tests/support/oracle.h"
#include "zero/update_rule.h"

#include <torch/types.h>

#include <variant>
#include <vector>

namespace tandem::testing {
namespace {

class FunctorOracle : public Oracle {
 public:
  FunctorOracle(const Scenario& scenario, int world_size) : Oracle(scenario, world_size) {
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      const auto numel = static_cast<std::size_t>(masters_[i].numel());
      states_.emplace_back(static_cast<std::size_t>(zero::states_of(settings(i))),
                           std::vector<float>(numel, zero::initial_state(settings(i))));
    }
    counts_.assign(masters_.size(), 0);
  }

 protected:
  void update(int index, const WindowGradients& window, double reported_clip_factor) override {
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      if (!window.sums[i].defined()) {
        continue;
      }
      const std::int64_t count = ++counts_[i];
      const double factor =
          reported_clip_factor * window.multipliers[owner_[i]] / window.denominators[owner_[i]];
      Optimizer scheduled = settings(i);
      std::visit([&](auto& o) { o.lr *= rate_factor(index, i); }, scheduled);
      const at::Tensor sums = window.sums[i].contiguous();
      std::visit(
          [&](const auto& functor) {
            run(functor, masters_[i].numel(), sums.data_ptr<float>(), masters_[i].data_ptr<float>(),
                states_[i]);
          },
          zero::update_at(scheduled, count, factor));
    }
  }

 private:
  using States = std::vector<std::vector<float>>;  // [state][element]

  template <class Functor>
  static void run(const Functor& functor,
                  std::int64_t numel,
                  const float* gradient,
                  float* master,
                  States& state) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(numel); ++k) {
      float now[kernels::kMaxStates] = {};
      for (std::size_t s = 0; s < state.size(); ++s) {
        now[s] = state[s][k];
      }
      master[k] = functor(master[k], gradient[k], now);
      for (std::size_t s = 0; s < state.size(); ++s) {
        state[s][k] = now[s];
      }
    }
  }

  std::vector<States> states_;
  std::vector<std::int64_t> counts_;
};

}  // namespace

std::unique_ptr<Oracle> functor_oracle(const Scenario& scenario, int world_size) {
  return std::make_unique<FunctorOracle>(scenario, world_size);
}

}  // namespace tandem::testing
