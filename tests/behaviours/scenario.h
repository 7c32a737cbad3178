// tests/behaviours/scenario.h: what a row of the behaviour table trains, and the one-process oracle
// that says what must come out. A scenario is written once and run twice: by Tandem on the ranks,
// by the oracle on one process that plays all ranks. The oracle is torch::optim and knows nothing
// of Tandem.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace behaviours {

using torch::Tensor;

/// Models of the table are called with one tensor and return one.
struct Model : torch::nn::Module {
  virtual Tensor forward(const Tensor& x) = 0;
};
using Models = std::vector<std::shared_ptr<Model>>;
using Calls = std::vector<std::function<Tensor(const Tensor&)>>;

/// 8 -> 16 -> 8 with GELU, initialised as torch::nn::Linear is, from `seed`.
struct Mlp : Model {
  explicit Mlp(std::uint64_t seed);
  Tensor forward(const Tensor& x) override;
  Tensor weight1, bias1, weight2, bias2;

 protected:
  Mlp(std::uint64_t seed, Tensor tied_weight1);
};

/// An Mlp with a parameter of ones that forward never uses.
struct MlpWithUnused : Mlp {
  explicit MlpWithUnused(std::uint64_t seed);
};

/// An Mlp whose first weight is the one of `other`: the same tensor, registered in both.
struct TiedMlp : Mlp {
  TiedMlp(std::uint64_t seed, const Mlp& other) : Mlp(seed, other.weight1) {}
};

/// weight * x, two elements of `value`.
struct Scale : Model {
  explicit Scale(double value);
  Tensor forward(const Tensor& x) override;
  Tensor weight;
};

/// Where a backward pass stands: everything random is keyed by it.
struct Moment {
  int step = 0;
  int pass = 0;
  int rank = 0;
};

/// Input `which` of this moment, 4 x 8.
Tensor input(const Moment& at, int which);

enum class Divide { kRanks, kRanksAndPasses };

struct Scenario {
  /// Makes the models, with the same initial values at every call.
  std::function<Models()> make;
  /// The losses of one pass: backward() is called on each, with retain_graph on all but the last.
  std::function<std::vector<Tensor>(const Calls&, const Moment&)> losses;
  int steps = 1;
  int passes = 1;  // between two steps
  Divide divide = Divide::kRanks;
  bool adamw = true;  // else SGD without momentum
  double lr = 1e-2;
  double weight_decay = 0.1;  // of AdamW
  std::optional<double> clip_norm = std::nullopt;
  torch::Dtype dtype = torch::kFloat;  // Tandem's; the oracle trains in fp32 and rounds at the end
};

/// The parameters of all models in the oracle, in fp32 (rounded to `dtype` at the end), model by
/// model; `ranks` ranks' losses are summed in one process.
std::vector<Tensor> train_unsharded(const Scenario& scenario, int ranks);

/// The same list of `models` as they are now.
std::vector<Tensor> snapshot(const Models& models);

}  // namespace behaviours
