// tests/support/functor_oracle.cpp: the oracle that shares the update functors and nothing else, so
// that a difference of one bit is a fault of what stands around them: order of sums, factors, step
// counts, bounds.
#include "kernels/update.h"
#include "tests/support/oracle.h"

#include <torch/types.h>

#include <variant>
#include <vector>

namespace tandem::testing {
namespace {

class FunctorOracle : public Oracle {
 public:
  FunctorOracle(const Scenario& scenario, int world_size) : Oracle(scenario, world_size) {
    for (const at::Tensor& master : masters_) {
      state0_.emplace_back(static_cast<std::size_t>(master.numel()), 0.0F);
      state1_.emplace_back(static_cast<std::size_t>(master.numel()), 0.0F);
    }
    counts_.assign(masters_.size(), 0);
  }

 protected:
  void update(int index, const WindowGradients& window, double reported_clip_factor) override {
    const double schedule = scenario_.schedule(index);
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      if (!window.sums[i].defined()) {
        continue;
      }
      const std::int64_t count = ++counts_[i];
      const double factor = reported_clip_factor / window.denominators[owner_[i]];
      const at::Tensor sums = window.sums[i].contiguous();
      const float* gradient = sums.data_ptr<float>();
      float* master = masters_[i].data_ptr<float>();
      const Optimizer& settings = scenario_.engines[owner_[i]].optimizer;
      const auto step = [&](const auto& functor) {
        for (std::size_t k = 0; k < state0_[i].size(); ++k) {
          float state[2] = {state0_[i][k], state1_[i][k]};
          master[k] = functor(master[k], gradient[k], state);
          state0_[i][k] = state[0];
          state1_[i][k] = state[1];
        }
      };
      if (const auto* adamw = std::get_if<AdamW>(&settings)) {
        step(kernels::AdamUpdate<true, false>::at_step(adamw->lr * schedule, adamw->beta1,
                                                       adamw->beta2, adamw->eps,
                                                       adamw->weight_decay, count, factor));
      } else {
        const auto& sgd = std::get<Sgd>(settings);
        step(kernels::SgdUpdate<true, false>::at_step(sgd.lr * schedule, sgd.momentum, 0.0,
                                                      sgd.weight_decay, count, factor));
      }
    }
  }

 private:
  std::vector<std::vector<float>> state0_;
  std::vector<std::vector<float>> state1_;
  std::vector<std::int64_t> counts_;
};

}  // namespace

std::unique_ptr<Oracle> functor_oracle(const Scenario& scenario, int world_size) {
  return std::make_unique<FunctorOracle>(scenario, world_size);
}

}  // namespace tandem::testing
