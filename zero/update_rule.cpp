#include "zero/update_rule.h"

#include <tandem/error.h>

#include <limits>
#include <sstream>
#include <variant>
#include <vector>

namespace tandem::zero {
namespace {

enum class Range : std::uint8_t { kNotNegative, kBelowOne, kUpToOne, kFlag };

/// A setting where it lies in its optimizer: a number in a range, or a flag.
struct Field {
  const char* name;
  Range range;
  double* number;
  bool* flag = nullptr;
};

struct Listing {
  const char* name;
  std::vector<Field> fields;
};

template <class Settings>
Listing adam_listing(const char* name, Settings& o) {
  return {name,
          {{"lr", Range::kNotNegative, &o.lr},
           {"beta1", Range::kBelowOne, &o.beta1},
           {"beta2", Range::kBelowOne, &o.beta2},
           {"eps", Range::kNotNegative, &o.eps},
           {"weight_decay", Range::kNotNegative, &o.weight_decay},
           {"amsgrad", Range::kFlag, nullptr, &o.amsgrad}}};
}

Listing listing_of(AdamW& o) { return adam_listing("AdamW", o); }
Listing listing_of(Adam& o) { return adam_listing("Adam", o); }

Listing listing_of(Sgd& o) {
  return {"Sgd",
          {{"lr", Range::kNotNegative, &o.lr},
           {"momentum", Range::kNotNegative, &o.momentum},
           {"weight_decay", Range::kNotNegative, &o.weight_decay},
           {"dampening", Range::kNotNegative, &o.dampening},
           {"nesterov", Range::kFlag, nullptr, &o.nesterov}}};
}

Listing listing_of(RmsProp& o) {
  return {"RmsProp",
          {{"lr", Range::kNotNegative, &o.lr},
           {"alpha", Range::kUpToOne, &o.alpha},
           {"eps", Range::kNotNegative, &o.eps},
           {"weight_decay", Range::kNotNegative, &o.weight_decay},
           {"momentum", Range::kNotNegative, &o.momentum},
           {"centered", Range::kFlag, nullptr, &o.centered}}};
}

Listing listing_of(Adagrad& o) {
  return {"Adagrad",
          {{"lr", Range::kNotNegative, &o.lr},
           {"lr_decay", Range::kNotNegative, &o.lr_decay},
           {"weight_decay", Range::kNotNegative, &o.weight_decay},
           {"initial_accumulator_value", Range::kNotNegative, &o.initial_accumulator_value},
           {"eps", Range::kNotNegative, &o.eps}}};
}

Listing listing_of(Lion& o) {
  return {"Lion",
          {{"lr", Range::kNotNegative, &o.lr},
           {"beta1", Range::kBelowOne, &o.beta1},
           {"beta2", Range::kBelowOne, &o.beta2},
           {"weight_decay", Range::kNotNegative, &o.weight_decay}}};
}

Listing listing_of(Optimizer& optimizer) {
  return std::visit([](auto& settings) { return listing_of(settings); }, optimizer);
}

/// NaN fails every comparison. The kernels compute in fp32, so what overflows there is out of
/// range.
bool in_range(const Field& field) {
  switch (field.range) {
    case Range::kNotNegative:
      return *field.number >= 0.0 &&
             *field.number <= static_cast<double>(std::numeric_limits<float>::max());
    case Range::kBelowOne:
      return *field.number >= 0.0 && *field.number < 1.0;
    case Range::kUpToOne:
      return *field.number >= 0.0 && *field.number <= 1.0;
    case Range::kFlag:
      return true;
  }
  return false;
}

const char* advice(Range range) {
  switch (range) {
    case Range::kBelowOne:
      return "give a number in [0, 1)";
    case Range::kUpToOne:
      return "give a number in [0, 1]";
    default:
      return "give a finite number >= 0";
  }
}

template <bool kDecoupled, class Settings>
kernels::Update adam_at(const Settings& o, std::int64_t step, double grad_factor) {
  if (o.amsgrad) {
    return kernels::AdamUpdate<kDecoupled, true>::at_step(o.lr, o.beta1, o.beta2, o.eps,
                                                          o.weight_decay, step, grad_factor);
  }
  return kernels::AdamUpdate<kDecoupled, false>::at_step(o.lr, o.beta1, o.beta2, o.eps,
                                                         o.weight_decay, step, grad_factor);
}

kernels::Update rule(const AdamW& o, std::int64_t step, double grad_factor) {
  return adam_at<true>(o, step, grad_factor);
}

kernels::Update rule(const Adam& o, std::int64_t step, double grad_factor) {
  return adam_at<false>(o, step, grad_factor);
}

kernels::Update rule(const Sgd& o, std::int64_t step, double grad_factor) {
  const auto make = [&]<bool kMomentum, bool kNesterov>() -> kernels::Update {
    return kernels::SgdUpdate<kMomentum, kNesterov>::at_step(o.lr, o.momentum, o.dampening,
                                                             o.weight_decay, step, grad_factor);
  };
  if (o.momentum == 0.0) return make.template operator()<false, false>();
  return o.nesterov ? make.template operator()<true, true>()
                    : make.template operator()<true, false>();
}

kernels::Update rule(const RmsProp& o, std::int64_t /*step*/, double grad_factor) {
  const auto make = [&]<bool kCentered, bool kMomentum>() -> kernels::Update {
    return kernels::RmspropUpdate<kCentered, kMomentum>::at_step(o.lr, o.alpha, o.eps, o.momentum,
                                                                 o.weight_decay, grad_factor);
  };
  if (o.momentum == 0.0) {
    return o.centered ? make.template operator()<true, false>()
                      : make.template operator()<false, false>();
  }
  return o.centered ? make.template operator()<true, true>()
                    : make.template operator()<false, true>();
}

kernels::Update rule(const Adagrad& o, std::int64_t step, double grad_factor) {
  return kernels::AdagradUpdate::at_step(o.lr, o.lr_decay, o.eps, o.weight_decay, step,
                                         grad_factor);
}

kernels::Update rule(const Lion& o, std::int64_t /*step*/, double grad_factor) {
  return kernels::LionUpdate::at_step(o.lr, o.beta1, o.beta2, o.weight_decay, grad_factor);
}

}  // namespace

void check(const Optimizer& optimizer) {
  Optimizer copy = optimizer;
  const Listing listing = listing_of(copy);
  for (const Field& field : listing.fields) {
    if (in_range(field)) continue;
    std::ostringstream text;
    text << listing.name << ": " << field.name << " is " << *field.number << "; "
         << advice(field.range);
    throw InvalidArgument(text.str());
  }
  if (const Sgd* sgd = std::get_if<Sgd>(&optimizer)) {
    if (sgd->nesterov && (sgd->momentum == 0.0 || sgd->dampening != 0.0)) {
      throw InvalidArgument("Sgd: nesterov needs momentum > 0 and no dampening");
    }
  }
}

std::string describe(const Optimizer& optimizer) {
  Optimizer copy = optimizer;
  const Listing listing = listing_of(copy);
  std::ostringstream text;
  text.precision(17);
  text << listing.name;
  const char* separator = " ";
  for (const Field& field : listing.fields) {
    text << separator << field.name << " ";
    field.flag != nullptr ? text << *field.flag : text << *field.number;
    separator = ", ";
  }
  return text.str();
}

double* find_setting(Optimizer& optimizer, std::string_view name) {
  for (const Field& field : listing_of(optimizer).fields) {
    if (field.name == name) return field.number;
  }
  return nullptr;
}

int states_of(const Optimizer& optimizer) {
  return kernels::states_of(update_at(optimizer, 1, 1.0));
}

float initial_state(const Optimizer& optimizer) {
  const Adagrad* adagrad = std::get_if<Adagrad>(&optimizer);
  return adagrad == nullptr ? 0.0F : static_cast<float>(adagrad->initial_accumulator_value);
}

kernels::Update update_at(const Optimizer& optimizer, std::int64_t step, double grad_factor) {
  return std::visit([&](const auto& settings) { return rule(settings, step, grad_factor); },
                    optimizer);
}

}  // namespace tandem::zero
