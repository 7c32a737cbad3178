// tandem/optimizer.h: optimizer settings; formulas and defaults are those of torch.optim.
#pragma once

#include <variant>

namespace tandem {

/// AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2).
/// Moments are fp32; each parameter counts its own steps; bias corrections are computed in double.
struct AdamW {
  double lr = 1e-3;            // learning rate, >= 0; may be set between steps
  double beta1 = 0.9;          // decay of the first moment, in [0, 1)
  double beta2 = 0.999;        // decay of the second moment, in [0, 1)
  double eps = 1e-8;           // added to the denominator, >= 0
  double weight_decay = 1e-2;  // decoupled, >= 0; may be set between steps
};

/// SGD with momentum; weight decay is added to the gradient (L2).
struct Sgd {
  double lr = 1e-3;           // learning rate, >= 0; may be set between steps
  double momentum = 0.0;      // >= 0; 0 keeps no momentum
  double weight_decay = 0.0;  // >= 0; may be set between steps
};

using Optimizer = std::variant<AdamW, Sgd>;

}  // namespace tandem
