// zero/optimizer_settings.cpp: what optimizer settings are allowed, and their hash.
#include "zero/optimizer_shard.h"
#include <tandem/error.h>

#include <array>
#include <bit>
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

/// FNV-1a over the bytes of `values`, lowest byte first.
template <std::size_t kCount>
std::uint64_t fnv1a(std::uint64_t kind, const std::array<double, kCount>& values) {
  std::uint64_t hash = 14695981039346656037ULL;
  const auto add = [&hash](std::uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ ((word >> shift) & 0xFFU)) * 1099511628211ULL;
    }
  };
  add(kind);
  // + 0.0 makes -0 a +0: both step alike.
  for (const double value : values) add(std::bit_cast<std::uint64_t>(value + 0.0));
  return hash;
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

std::uint64_t hash_of(const Optimizer& optimizer) {
  if (const AdamW* adamw = std::get_if<AdamW>(&optimizer)) {
    return fnv1a(optimizer.index(), std::array{adamw->lr, adamw->beta1, adamw->beta2, adamw->eps,
                                               adamw->weight_decay});
  }
  const Sgd& sgd = std::get<Sgd>(optimizer);
  return fnv1a(optimizer.index(), std::array{sgd.lr, sgd.momentum, sgd.weight_decay});
}

}  // namespace tandem::zero
