// tandem/optimizer.h: optimizer settings, and groups of parameters with settings of their own.
//
// Formulas and defaults are those of torch.optim (Lion: its paper). Moments are fp32, whatever the
// parameters' type; every parameter counts its own updates; bias corrections are computed in
// double. lr and weight_decay may be changed between steps (Engine::set_learning_rate,
// Engine::set_weight_decay). All settings are finite; ranges are said beside each.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tandem {

/// AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2).
struct AdamW {
  double lr = 1e-3;            // learning rate, >= 0
  double beta1 = 0.9;          // decay of the first moment, in [0, 1)
  double beta2 = 0.999;        // decay of the second moment, in [0, 1)
  double eps = 1e-8;           // added to the denominator, >= 0
  double weight_decay = 1e-2;  // decoupled, >= 0
  bool amsgrad = false;        // divides by the largest second moment so far (Reddi et al., 2018)
};

/// Adam (Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, algorithm 1).
struct Adam {
  double lr = 1e-3;           // learning rate, >= 0
  double beta1 = 0.9;         // decay of the first moment, in [0, 1)
  double beta2 = 0.999;       // decay of the second moment, in [0, 1)
  double eps = 1e-8;          // added to the denominator, >= 0
  double weight_decay = 0.0;  // added to the gradient (L2), >= 0
  bool amsgrad = false;       // divides by the largest second moment so far (Reddi et al., 2018)
};

/// SGD with momentum (Sutskever et al., On the importance of initialization and momentum, 2013, in
/// torch.optim's form: the learning rate multiplies the buffer).
struct Sgd {
  double lr = 1e-3;           // learning rate, >= 0
  double momentum = 0.0;      // >= 0; 0 keeps no momentum
  double weight_decay = 0.0;  // added to the gradient (L2), >= 0
  double dampening = 0.0;     // of the gradient's way into the momentum, from the second update on
  bool nesterov = false;      // needs momentum > 0 and no dampening
};

/// RMSprop (Hinton, Neural Networks for Machine Learning, lecture 6, 2012; centered: Graves,
/// Generating Sequences With Recurrent Neural Networks, 2013).
struct RmsProp {
  double lr = 1e-2;           // learning rate, >= 0
  double alpha = 0.99;        // decay of the squared gradient's mean, in [0, 1]
  double eps = 1e-8;          // added to the denominator, >= 0
  double weight_decay = 0.0;  // added to the gradient (L2), >= 0
  double momentum = 0.0;      // >= 0; 0 keeps no momentum
  bool centered = false;      // divides by an estimate of the standard deviation
};

/// Adagrad (Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011).
struct Adagrad {
  double lr = 1e-2;                        // learning rate, >= 0
  double lr_decay = 0.0;                   // lr / (1 + (update - 1) * lr_decay), >= 0
  double weight_decay = 0.0;               // added to the gradient (L2), >= 0
  double initial_accumulator_value = 0.0;  // of the sum of squares, >= 0
  double eps = 1e-10;                      // added to the denominator, >= 0
};

/// Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2).
struct Lion {
  double lr = 1e-4;           // learning rate, >= 0
  double beta1 = 0.9;         // of the interpolation whose sign is the step, in [0, 1)
  double beta2 = 0.99;        // decay of the momentum, in [0, 1)
  double weight_decay = 0.0;  // decoupled, >= 0
};

using Optimizer = std::variant<AdamW, Adam, Sgd, RmsProp, Adagrad, Lion>;

/// What a predicate is told of a parameter: its name in the module ("encoder.0.weight") and its
/// shape. Every rank must choose alike.
struct ParameterView {
  std::string_view name;
  std::span<const std::int64_t> shape;
};
using ParameterPredicate = std::function<bool(const ParameterView&)>;

/// Parameters whose name contains a match of `regex` (ECMAScript, as std::regex_search). Throws
/// InvalidArgument on a malformed expression, at once.
[[nodiscard]] ParameterPredicate name_matches(const std::string& regex);
/// Parameters of at most one dimension: biases, and the scales and shifts of norms.
[[nodiscard]] ParameterPredicate is_vector();

/// Parameters with settings of their own. A parameter belongs to the first group whose `where`
/// holds for it, else to the engine's default settings; a group that gets none is an error.
/// Settings left out are the engine's, also when those are changed later.
struct ParameterGroup {
  std::string name = {};  // unique among the engine's groups; empty: "group<N>", N from 1
  ParameterPredicate where = {};
  std::optional<double> lr = std::nullopt;
  std::optional<double> weight_decay = std::nullopt;
  std::optional<double> beta1 = std::nullopt;     // Adam, AdamW, Lion
  std::optional<double> beta2 = std::nullopt;     // Adam, AdamW, Lion
  std::optional<double> eps = std::nullopt;       // all but Sgd and Lion
  std::optional<double> momentum = std::nullopt;  // Sgd, RmsProp
};

/// The usual exemption in one line: `.groups = {tandem::no_decay(tandem::is_vector())}`.
[[nodiscard]] ParameterGroup no_decay(ParameterPredicate where);

}  // namespace tandem
