// tests/support/oracle.cpp: the loop that all oracles share, and the two that step with
// torch::optim.
#include "tests/support/oracle.h"

#include "tests/support/torch_optimizer.h"

#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>

namespace tandem::testing {
namespace {

/// fp32 -> bf16, halves away from zero; -> fp16, halves to even.
at::Tensor rounded_to(at::ScalarType dtype, const at::Tensor& master) {
  if (dtype != at::kBFloat16) {
    return master.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  }
  const at::Tensor bits = master.contiguous().view(torch::kInt32);
  return at::bitwise_right_shift(bits + 0x8000, 16).to(torch::kInt16).view(at::kBFloat16);
}

void clear_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    parameter.mutable_grad().reset();
  }
}

double rate_of(const Optimizer& settings) {
  return std::visit([](const auto& optimizer) { return optimizer.lr; }, settings);
}

/// The settings of the first group that wants the parameter, else the engine's.
Optimizer settings_for(const EngineOptions& options,
                       const std::string& name,
                       const at::Tensor& tensor,
                       bool& own_rate) {
  Optimizer settings = options.optimizer;
  own_rate = false;
  for (const ParameterGroup& group : options.groups) {
    const std::vector<std::int64_t> shape = tensor.sizes().vec();
    if (!group.where(ParameterView{name, shape})) {
      continue;
    }
    own_rate = group.lr.has_value();
    std::visit(
        [&](auto& o) {
          o.lr = group.lr.value_or(o.lr);
          o.weight_decay = group.weight_decay.value_or(o.weight_decay);
          if constexpr (requires { o.beta1; }) {
            o.beta1 = group.beta1.value_or(o.beta1);
            o.beta2 = group.beta2.value_or(o.beta2);
          }
          if constexpr (requires { o.eps; }) {
            o.eps = group.eps.value_or(o.eps);
          }
          if constexpr (requires { o.momentum; }) {
            o.momentum = group.momentum.value_or(o.momentum);
          }
        },
        settings);
    break;
  }
  return settings;
}

/// In the type in which an engine's gradients travel.
at::Tensor on_the_wire(const at::Tensor& gradient, Wire wire) {
  switch (wire) {
    case Wire::kParameter:
      return gradient;
    case Wire::kFloat32:
      return gradient.to(at::kFloat);
    case Wire::kBFloat16:
      return gradient.to(at::kBFloat16);
    case Wire::kFloat16:
      return gradient.to(at::kHalf);
  }
  return gradient;
}

class TorchOracle : public Oracle {
 public:
  TorchOracle(const Scenario& scenario, int world_size) : Oracle(scenario, world_size) {
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      steppers_.push_back(torch_optimizer_of(masters_[i], settings(i)));
    }
  }

 protected:
  void update(int index, const WindowGradients& window, double) override {
    clear_gradients(masters_);
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      if (window.sums[i].defined()) {
        masters_[i].mutable_grad() =
            window.sums[i] * window.multipliers[owner_[i]] / window.denominators[owner_[i]];
      }
    }
    if (scenario_.clip_norm) {
      torch::nn::utils::clip_grad_norm_(masters_, *scenario_.clip_norm, scenario_.norm_type);
    }
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      steppers_[i]->param_groups()[0].options().set_lr(rate_of(settings(i)) *
                                                       rate_factor(index, i));
      steppers_[i]->step();
    }
  }

 private:
  std::vector<std::unique_ptr<torch::optim::Optimizer>> steppers_;  // [parameter]
};

class WholeOracle : public TorchOracle {
 public:
  using TorchOracle::TorchOracle;

 protected:
  WindowGradients gradients(int index) override {
    // The split run only says what the sum is divided by; its sums are replaced. What multiplies
    // gradients multiplies losses here.
    WindowGradients window = Oracle::gradients(index);
    window.multipliers.assign(nets_.size(), 1.0);
    const int most = scenario_.most_passes(index, world_size_);
    const double scale = scenario_.loss_scale.value_or(1.0);
    at::Tensor total;
    for (int rank = 0; rank < world_size_; ++rank) {
      for (int pass = 0; pass < scenario_.passes(index, rank, world_size_); ++pass) {
        const Place place{index, pass, rank, world_size_};
        scenario_.prepare(nets_, place);
        double weight = scale;
        for (int later = pass; later < most; ++later) {
          weight *= scenario_.multiply({index, later, rank, world_size_}, 0);
        }
        for (const at::Tensor& loss : scenario_.losses(nets_, place)) {
          const at::Tensor weighted = loss.to(at::kFloat) * weight;
          total = total.defined() ? total + weighted : weighted;
        }
      }
    }
    clear_gradients(parameters_);
    if (total.defined()) {
      total.backward();
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor gradient = parameters_[i].grad();
      window.sums[i] =
          gradient.defined() ? gradient.detach().cpu().to(at::kFloat) / scale : at::Tensor();
    }
    clear_gradients(parameters_);
    return window;
  }
};

}  // namespace

Oracle::Oracle(const Scenario& scenario, int world_size)
    : scenario_(scenario), world_size_(world_size), nets_(on_test_device(scenario.nets())) {
  parameters_ = unique_parameters(nets_);
  std::unordered_map<const void*, std::pair<std::int32_t, std::string>> owner;
  for (std::size_t net = nets_.size(); net-- > 0;) {
    for (const NamedTensor& parameter : nets_[net].parameters()) {
      owner[parameter.tensor.unsafeGetTensorImpl()] = {static_cast<std::int32_t>(net),
                                                       parameter.name};
    }
  }
  for (const at::Tensor& parameter : parameters_) {
    const auto& [net, name] = owner.at(parameter.unsafeGetTensorImpl());
    owner_.push_back(net);
    bool own_rate = false;
    settings_.push_back(
        settings_for(scenario_.engines[static_cast<std::size_t>(net)], name, parameter, own_rate));
    own_rate_.push_back(own_rate);
    masters_.push_back(parameter.detach().cpu().to(at::kFloat).clone().requires_grad_());
  }
  denominators_.assign(nets_.size(), 0.0);
}

const Optimizer& Oracle::settings(std::size_t parameter) const { return settings_[parameter]; }

double Oracle::rate_factor(int index, std::size_t parameter) const {
  return own_rate_[parameter] ? 1.0 : scenario_.schedule(index);
}

WindowGradients Oracle::gradients(int index) {
  // gradient[micro-batch of a rank and loss = pass][rank][parameter]
  std::vector<std::vector<std::vector<at::Tensor>>> gradient;
  std::vector<int> micro_batch_of;  // [micro-batch of a rank and loss]
  const double scale = scenario_.loss_scale.value_or(1.0);
  std::int64_t tokens = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    std::size_t number = 0;
    for (int pass = 0; pass < scenario_.passes(index, rank, world_size_); ++pass) {
      const Place place{index, pass, rank, world_size_};
      scenario_.prepare(nets_, place);
      tokens += scenario_.tokens(place);
      const std::vector<at::Tensor> losses = scenario_.losses(nets_, place);
      for (std::size_t i = 0; i < losses.size(); ++i, ++number) {
        clear_gradients(parameters_);
        (losses[i] * scale).backward({}, /*retain_graph=*/i + 1 < losses.size());
        if (gradient.size() <= number) {
          gradient.resize(number + 1);
          micro_batch_of.push_back(pass);
        }
        gradient[number].resize(static_cast<std::size_t>(world_size_));
        for (const at::Tensor& parameter : parameters_) {
          gradient[number][static_cast<std::size_t>(rank)].push_back(parameter.grad());
        }
      }
    }
  }
  clear_gradients(parameters_);

  WindowGradients window;
  window.sums.resize(parameters_.size());
  std::vector<double> passes_of(nets_.size(), 0.0);
  std::vector<double> pairs_of(nets_.size(), 0.0);
  window.multipliers.assign(nets_.size(), 1.0);
  for (std::size_t number = 0; number < gradient.size(); ++number) {
    const auto& pass = gradient[number];
    for (std::size_t i = 0; i < parameters_.size(); ++i) {  // said before this pass
      if (window.sums[i].defined()) {
        window.sums[i] *= window.multipliers[owner_[i]];
      }
    }
    std::vector<bool> took_part(nets_.size(), false);
    double ranks = 0.0;
    for (const auto& of_rank : pass) {
      if (of_rank.empty()) {
        continue;  // this rank ran no such pass
      }
      ranks += 1.0;
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        if (!of_rank[i].defined()) {
          continue;
        }
        took_part[owner_[i]] = true;
        if (!window.sums[i].defined()) {
          window.sums[i] = torch::zeros(parameters_[i].sizes(), at::kFloat);
        }
        const Wire wire = scenario_.engines[static_cast<std::size_t>(owner_[i])].wire;
        window.sums[i] += on_the_wire(of_rank[i].detach().cpu(), wire).to(at::kFloat) / scale;
      }
    }
    for (std::size_t net = 0; net < nets_.size(); ++net) {
      passes_of[net] += took_part[net] ? 1.0 : 0.0;
      pairs_of[net] += took_part[net] ? ranks : 0.0;
      const bool last =
          number + 1 == gradient.size() || micro_batch_of[number + 1] != micro_batch_of[number];
      window.multipliers[net] =
          last ? scenario_.multiply({index, micro_batch_of[number], 0, world_size_}, net) : 1.0;
    }
  }
  for (std::size_t net = 0; net < nets_.size(); ++net) {
    double denominator = 0.0;
    if (passes_of[net] > 0.0) {
      switch (scenario_.average) {
        case Average::kRanks:
          denominator = pairs_of[net] / passes_of[net];
          break;
        case Average::kMicroBatches:
          denominator = pairs_of[net];
          break;
        case Average::kTokens:
          denominator = static_cast<double>(tokens);
          break;
        case Average::kNone:
          denominator = 1.0;
          break;
      }
    }
    window.denominators.push_back(denominator);
  }
  return window;
}

std::vector<at::Tensor> Oracle::averaged(const WindowGradients& window) const {
  std::vector<at::Tensor> gradients(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (window.sums[i].defined()) {
      const std::int32_t net = owner_[i];
      gradients[i] =
          window.sums[i].to(at::kDouble) * window.multipliers[net] / window.denominators[net];
    }
  }
  return gradients;
}

void Oracle::step(int index, double reported_clip_factor) {
  const WindowGradients window = gradients(index);
  denominators_ = window.denominators;
  std::vector<at::Tensor> gradient = {torch::zeros({1}, at::kDouble)};  // a norm of something
  for (const at::Tensor& one : averaged(window)) {
    if (one.defined()) {
      gradient.push_back(one.reshape({-1}));
    }
  }
  norm_ = torch::norm(torch::cat(gradient), scenario_.norm_type).item<double>();
  if (!std::isfinite(norm_)) {
    norm_ = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  update(index, window, reported_clip_factor);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (window.sums[i].defined()) {
      parameters_[i].copy_(rounded_to(parameters_[i].scalar_type(), masters_[i].detach()));
    }
  }
}

void Oracle::adopt(const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].copy_(values[i]);
  }
}

std::unique_ptr<Oracle> split_oracle(const Scenario& scenario, int world_size) {
  return std::make_unique<TorchOracle>(scenario, world_size);
}

std::unique_ptr<Oracle> whole_oracle(const Scenario& scenario, int world_size) {
  return std::make_unique<WholeOracle>(scenario, world_size);
}

std::vector<at::Tensor> difference(const std::vector<at::Tensor>& a,
                                   const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    result.push_back(a[i].detach().to(at::kDouble) - b[i].detach().to(at::kDouble));
  }
  return result;
}

double distance(const std::vector<at::Tensor>& a,
                const std::vector<at::Tensor>& b,
                const std::vector<at::Tensor>& c) {
  double above = 0.0;
  for (const at::Tensor& tensor : difference(a, b)) {
    above += tensor.square().sum().item<double>();
  }
  double below = 0.0;
  for (const at::Tensor& tensor : c) {
    below += tensor.detach().to(at::kDouble).square().sum().item<double>();
  }
  return above == 0.0 ? 0.0 : std::sqrt(above / below);
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

std::int64_t differing_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto integers = a[i].element_size() == 2 ? at::kShort : at::kInt;
    const at::Tensor left = a[i].detach().contiguous().view(-1).view(integers);
    const at::Tensor right = b[i].detach().contiguous().view(-1).view(integers);
    count += left.ne(right).sum().item<std::int64_t>();
  }
  return count;
}

}  // namespace tandem::testing
