// U1 to U3 of kernels/update.h against optimizers in double, and the same bits everywhere.
#include "kernels/update.h"

#include "kernels/bf16.h"
#include "kernels/cpu_kernels.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;

/// One fragment with its memory; each array begins at an odd element and ends with a guard.
struct Fragment {
  static constexpr float kGuard = 4321.0F;
  static constexpr std::size_t kStart = 3;
  Floats grad, value, state0, state1;
  std::vector<Bf16> rounded;
  std::int64_t numel;
  bool master;

  Fragment(std::int64_t length, bool with_master, float (*draw)(std::mt19937&)) {
    numel = length;
    master = with_master;
    grad = padded(1, draw);
    value = padded(2, draw);
    state0 = padded(3, draw);
    state1 = padded(4, draw);
    for (float& second : state1) second = std::fabs(second);
    rounded.assign(grad.size(), Bf16{0x1234});
  }

  Floats padded(std::uint32_t seed, float (*draw)(std::mt19937&)) const {
    Floats values = random_values(numel, seed, draw);
    values.insert(values.begin(), kStart, kGuard);
    values.push_back(kGuard);
    return values;
  }

  UpdateArrays arrays(int states) {
    UpdateArrays arrays;
    arrays.grad = grad.data() + kStart;
    if (master) {
      arrays.param = rounded.data() + kStart;
      arrays.param_dtype = Dtype::kBFloat16;
      arrays.master = value.data() + kStart;
    } else {
      arrays.param = value.data() + kStart;
    }
    arrays.state0 = state0.data() + kStart;
    arrays.state1 = states == 2 ? state1.data() + kStart : nullptr;
    arrays.numel = numel;
    return arrays;
  }
};

void run(const CpuKernels& table, const AdamWUpdate& functor, const UpdateArrays& arrays) {
  table.update_adamw(functor, arrays);
}
void run(const CpuKernels& table, const SgdUpdate& functor, const UpdateArrays& arrays) {
  table.update_sgd(functor, arrays);
}
float call(const AdamWUpdate& functor, float param, float grad, float& first, float& second) {
  return functor(param, grad, first, second);
}
float call(const SgdUpdate& functor, float param, float grad, float& first, float& second) {
  static_cast<void>(second);
  return functor(param, grad, first);
}

/// Every ISA must do what the functor says, element by element, and touch nothing else.
template <typename Functor>
void expect_the_functors_bits(const Functor& functor) {
  for (const bool master : {false, true}) {
    for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
      for (const std::int64_t numel : kLengths) {
        const Fragment start(numel, master, draw);
        Fragment expected = start;
        for (std::size_t i = Fragment::kStart; i + 1 < expected.value.size(); ++i) {
          expected.value[i] = call(functor, expected.value[i], expected.grad[i], expected.state0[i],
                                   expected.state1[i]);
          if (master) expected.rounded[i] = round_half_away(expected.value[i]);
        }
        for (const Isa isa : available_isas()) {
          Fragment own = start;
          run(cpu_kernels(isa), functor, own.arrays(Functor::kStates));
          const auto all = static_cast<std::int64_t>(own.value.size());
          ASSERT_EQ(first_difference(own.value.data(), expected.value.data(), all), "")
              << name_of(isa) << ", numel " << numel;
          ASSERT_EQ(first_difference(own.state0.data(), expected.state0.data(), all), "");
          ASSERT_EQ(first_difference(own.state1.data(), expected.state1.data(), all), "");
          for (std::size_t i = 0; i < own.rounded.size(); ++i) {
            const float a = to_float(own.rounded[i]), b = to_float(expected.rounded[i]);
            ASSERT_TRUE(own.rounded[i].bits == expected.rounded[i].bits ||
                        (std::isnan(a) && std::isnan(b)))
                << name_of(isa) << ", element " << i;
          }
        }
      }
    }
  }
}

TEST(Update, AdamWGivesTheFunctorsBitsOnEveryIsa) {
  expect_the_functors_bits(AdamWUpdate::at_step(1e-3, 0.9, 0.999, 1e-8, 0.01, 3, 0.125));
  expect_the_functors_bits(AdamWUpdate::at_step(0.7, 0.0, 0.5, 0.0, 0.0, 1, -3.0));
}

TEST(Update, SgdGivesTheFunctorsBitsOnEveryIsa) {
  expect_the_functors_bits(SgdUpdate::at_step(0.1, 0.9, 0.01, 0.25));
  expect_the_functors_bits(SgdUpdate::at_step(0.1, 0.0, 0.0, 1.0));
}

// U3: 1 - 0.999 in fp32 would be off by 5e-5 of its value; so would 1 - beta^step.
TEST(Update, ScalarsAreComputedInDouble) {
  const AdamWUpdate update = AdamWUpdate::at_step(0.1, 0.9, 0.999, 1e-8, 0.01, 2, 1.0);
  EXPECT_EQ(update.one_minus_beta2, static_cast<float>(1.0 - 0.999));
  EXPECT_EQ(update.decay, static_cast<float>(1.0 - 0.1 * 0.01));
  // 1 - 0.9^2 = 0.19 and 1 - 0.999^2 = 0.001999
  EXPECT_FLOAT_EQ(update.step_size, static_cast<float>(0.1 / 0.19));
  EXPECT_FLOAT_EQ(update.bias_correction2_sqrt, static_cast<float>(std::sqrt(0.001999)));
}

/// Gradients of either sign and a size in [0.5, 1.5): far from zero, so that the bounds below hold.
float solid_gradient(std::mt19937& random) {
  const auto size = static_cast<float>(0.5 + static_cast<double>(random()) / 4294967296.0);
  return random() % 2 == 0 ? size : -size;
}

// Tolerance: one step rounds the parameter twice, 2 * 2^-24 |w|, and the ratio m / sqrt(v), at most
// 3 for these gradients (|m| <= 1.5, sqrt(v) >= 0.5), in less than 40 roundings of 2^-24 each:
// lr * 3 * 40 * 2^-24 < lr * 2^-17. Steps add up.
TEST(Update, AdamWFollowsTheReferenceInDouble) {
  const double beta1 = 0.9, beta2 = 0.99, eps = 1e-8, decay = 0.1, factor = 0.5;
  const std::int64_t numel = 1000;
  Floats param = random_values(numel, 1, &solid_gradient);
  Floats exp_avg(1000), exp_avg_sq(1000);
  std::vector<double> w(param.begin(), param.end()), m(1000), v(1000);
  double tolerance = 0.0;
  for (std::int64_t step = 1; step <= 20; ++step) {
    const double lr = 0.01 / static_cast<double>(step);  // settable between steps
    const Floats grad =
        random_values(numel, 100 + static_cast<std::uint32_t>(step), &solid_gradient);
    UpdateArrays arrays;
    arrays.grad = grad.data();
    arrays.param = param.data();
    arrays.state0 = exp_avg.data();
    arrays.state1 = exp_avg_sq.data();
    arrays.numel = numel;
    update(AdamWUpdate::at_step(lr, beta1, beta2, eps, decay, step, factor), arrays);
    tolerance += 4 * 0x1p-24 + lr * 0x1p-17;  // |w| < 2 throughout
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = static_cast<double>(grad[i]) * factor;
      w[i] *= 1.0 - lr * decay;
      m[i] = beta1 * m[i] + (1 - beta1) * g;
      v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(beta1, step));
      const double v_hat = v[i] / (1 - std::pow(beta2, step));
      w[i] -= lr * m_hat / (std::sqrt(v_hat) + eps);
      ASSERT_NEAR(param[i], w[i], tolerance) << "step " << step << ", element " << i;
    }
  }
}

// The first step of AdamW moves every element by lr against its gradient's sign, however small.
TEST(Update, FirstAdamWStepIsTheSignTimesTheRate) {
  Floats param(64, 1.0F), m(64), v(64), grad(64);
  for (std::size_t i = 0; i < 64; ++i) grad[i] = (i % 2 == 0 ? 1.0F : -1.0F) * 1e-3F;
  UpdateArrays arrays;
  arrays.grad = grad.data();
  arrays.param = param.data();
  arrays.state0 = m.data();
  arrays.state1 = v.data();
  arrays.numel = 64;
  update(AdamWUpdate::at_step(0.125, 0.9, 0.999, 0.0, 0.0, 1, 1.0), arrays);
  // 1 -+ 0.125, within the roundings of the moments and of the ratio (a few 2^-24)
  for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(param[i], i % 2 == 0 ? 0.875 : 1.125, 1e-6);
}

// Tolerance: the buffer is at most 10 * 1.6 (momentum 0.9) and a step rounds it three times and the
// parameter twice: lr * 16 * 4 * 2^-24 + 4 * 2^-24; an error of the buffer persists for 10 steps.
TEST(Update, SgdWithMomentumFollowsTheReferenceInDouble) {
  const double lr = 0.01, momentum = 0.9, decay = 0.05, factor = 0.5;
  const std::int64_t numel = 1000;
  Floats param = random_values(numel, 1, &solid_gradient);
  Floats buffer(1000);
  std::vector<double> w(param.begin(), param.end()), b(1000);
  double tolerance = 0.0;
  for (int step = 1; step <= 20; ++step) {
    const Floats grad =
        random_values(numel, 100 + static_cast<std::uint32_t>(step), &solid_gradient);
    UpdateArrays arrays;
    arrays.grad = grad.data();
    arrays.param = param.data();
    arrays.state0 = buffer.data();
    arrays.numel = numel;
    update(SgdUpdate::at_step(lr, momentum, decay, factor), arrays);
    tolerance += (10 * lr * 64 + 4) * 0x1p-24;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = grad[i] * factor + decay * w[i];
      b[i] = step == 1 ? g : momentum * b[i] + g;
      w[i] -= lr * b[i];
      ASSERT_NEAR(param[i], w[i], tolerance) << "step " << step << ", element " << i;
    }
  }
}

/// Weights of one value, each with a master, and `steps` steps of plain SGD with gradients of 1.
float after_steps_of_sgd(float start, double lr, double decay, float gradient, int steps) {
  std::vector<Bf16> param(33, round_half_away(start));
  Floats master(33, start), buffer(33), grad(33, gradient);
  UpdateArrays arrays;
  arrays.grad = grad.data();
  arrays.param = param.data();
  arrays.param_dtype = Dtype::kBFloat16;
  arrays.master = master.data();
  arrays.state0 = buffer.data();
  arrays.numel = 33;
  for (int step = 0; step < steps; ++step) {
    update(SgdUpdate::at_step(lr, 0.0, decay, 1.0), arrays);
  }
  for (std::size_t i = 0; i < 33; ++i) {
    EXPECT_EQ(param[i].bits, round_half_away(master[i]).bits);
    EXPECT_EQ(master[i], master[0]);
  }
  return master[0];
}

// Below 1 bf16 values are 2^-8 apart: steps of 6e-4 and of 1e-4 vanish without a master. With one
// each of the steps rounds by at most 2^-25 (values below 1) or 2^-24 (below 2).
TEST(Cases, N12_TinyUpdatesAreNotLostByMasters) {
  EXPECT_NEAR(after_steps_of_sgd(1.0F, 6e-4, 0.0, 1.0F, 100), 0.94, 100 * 0x1p-25);
  EXPECT_NEAR(after_steps_of_sgd(1.0F, 1.0, 1e-4, 0.0F, 1000), std::pow(1.0 - 1e-4, 1000),
              1000 * 0x1p-24);
  EXPECT_EQ(after_steps_of_sgd(1.0F, 0x1p-9, 0.0, -1.0F, 512), 2.0F);
}

TEST(Update, AnEmptyFragmentIsNothing) {
  update(AdamWUpdate{}, UpdateArrays{});
  update(SgdUpdate{}, UpdateArrays{});
  SUCCEED();
}

TEST(Isa, ChoosesTheBestAndRefusesWhatIsNotThere) {
  const std::vector<Isa> isas = available_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), Isa::kBaseline);
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
  EXPECT_EQ(current_isa(), isas.back());
  select_isa(Isa::kBaseline);
  EXPECT_EQ(current_isa(), Isa::kBaseline);
  EXPECT_EQ(&cpu_kernels(), &cpu_kernels(Isa::kBaseline));
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (std::find(isas.begin(), isas.end(), isa) == isas.end()) {
      EXPECT_THROW(select_isa(isa), std::invalid_argument);
    }
  }
  select_isa(isas.back());
}

}  // namespace
}  // namespace tandem::kernels
