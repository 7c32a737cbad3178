// zero/optimizer_settings.cpp: what optimizer settings are allowed.
#include "zero/optimizer_shard.h"
#include <tandem/error.h>

#include <limits>
#include <sstream>
#include <string>
#include <variant>

namespace tandem::zero {
namespace {

/// NaN fails both comparisons. The kernels compute in fp32, so what overflows there is out of
/// range.
void check_not_negative(const char* optimizer, const char* field, double value) {
  if (value >= 0.0 && value <= static_cast<double>(std::numeric_limits<float>::max())) return;
  std::ostringstream text;
  text << optimizer << ": " << field << " is " << value << "; give a finite number >= 0";
  throw InvalidArgument(text.str());
}

void check_beta(const char* field, double value) {
  if (value >= 0.0 && value < 1.0) return;
  std::ostringstream text;
  text << "AdamW: " << field << " is " << value << "; give a number in [0, 1)";
  throw InvalidArgument(text.str());
}

}  // namespace

void check(const Optimizer& optimizer) {
  if (const AdamW* adamw = std::get_if<AdamW>(&optimizer)) {
    check_not_negative("AdamW", "lr", adamw->lr);
    check_beta("beta1", adamw->beta1);
    check_beta("beta2", adamw->beta2);
    check_not_negative("AdamW", "eps", adamw->eps);
    check_not_negative("AdamW", "weight_decay", adamw->weight_decay);
    return;
  }
  const Sgd& sgd = std::get<Sgd>(optimizer);
  check_not_negative("Sgd", "lr", sgd.lr);
  check_not_negative("Sgd", "momentum", sgd.momentum);
  check_not_negative("Sgd", "weight_decay", sgd.weight_decay);
}

}  // namespace tandem::zero
