// The formulas of kernels/optimizers.h against their publications, written down in double, and N12
// for every optimizer and every way of keeping masters.
//
// Tolerance of every reference below, 20 steps. The parameter, below 2, is rounded twice in a step:
// 4 2^-24. A direction (what the rate is multiplied by) of size D is a quotient of averages in
// which no term has gone through more than 2 * 20 + 10 roundings, above and below: 100 D 2^-24 < D
// 2^-17. Momentum of 0.9 keeps an error for 10 steps. What the error of the parameter adds through
// weight decay is a hundredth of that, and the bounds are not met by far.
#include "kernels/optimizers.h"

#include "tests/kernels/update_rig.h"

#include <gtest/gtest.h>

#include <functional>

namespace tandem::kernels {
namespace {

constexpr double kFactor = 0.5;
constexpr std::int64_t kNumel = 1000;
constexpr double kSmall = 0x1p-17;

/// Gradients of either sign and a size in [0.5, 1.5), far from zero, and a sixteenth of that in
/// most steps, so that second moments fall as well as rise.
Floats gradients(std::int64_t step) {
  std::mt19937 random(static_cast<std::uint32_t>(100 + step));
  Floats values(kNumel);
  for (float& value : values) {
    const double size = 0.5 + static_cast<double>(random()) / 4294967296.0;
    const double signed_size = random() % 2 == 0 ? size : -size;
    value = static_cast<float>(step % 7 == 1 ? signed_size : signed_size / 16);
  }
  return values;
}

/// One element in double: its parameter w and what its optimizer remembers, by the papers' letters.
struct Element {
  double w = 0, m = 0, v = 0, v_max = 0, buffer = 0;
};

using AtStep = std::function<Update(double lr, std::int64_t step)>;
using Reference = std::function<void(Element& e, double g, double lr, std::int64_t step)>;

/// Runs 20 steps of both, with rates 0.01 / step.
void expect_follows(const AtStep& at_step,
                    const Reference& reference,
                    double direction_error,
                    Element initial = {},
                    float initial_state = 0.0F) {
  Floats start = gradients(1);
  Fragment fragment(Storage::kFp32, start);
  fragment.state[0] = Fragment::guarded(Floats(kNumel, initial_state));
  std::vector<Element> elements(kNumel, initial);
  for (std::size_t i = 0; i < elements.size(); ++i) elements[i].w = start[i];
  double tolerance = 0.0;
  for (std::int64_t step = 1; step <= 20; ++step) {
    const double lr = 0.01 / static_cast<double>(step);
    const Floats grad = gradients(step + 1);
    fragment.grad = Fragment::guarded(grad);
    const Update functor = at_step(lr, step);
    update(functor, fragment.arrays(states_of(functor)));
    tolerance += 4 * 0x1p-24 + lr * direction_error;
    for (std::size_t i = 0; i < elements.size(); ++i) {
      reference(elements[i], grad[i] * kFactor, lr, step);
      ASSERT_LT(std::fabs(elements[i].w), 2.0);
      ASSERT_NEAR(fragment.master(static_cast<std::int64_t>(i)), elements[i].w, tolerance)
          << "step " << step << ", element " << i;
    }
  }
}

// |m| / sqrt(v) is at most 3 for any gradients: (0.1 / sqrt(0.01)) / sqrt(1 - 0.9^2 / 0.99) = 2.4
// by Cauchy and Schwarz, and the bias corrections make it less.
constexpr double kAdamError = 3 * kSmall;

/// Algorithm 2 of the AdamW paper; algorithm 1 of Adam with decay added to the gradient; AMSGrad.
Reference adam(bool decoupled, bool amsgrad) {
  return [=](Element& e, double g, double lr, std::int64_t step) {
    const double decay = 0.1, n = static_cast<double>(step);
    if (decoupled) e.w -= lr * decay * e.w;
    if (!decoupled) g += decay * e.w;
    e.m = 0.9 * e.m + 0.1 * g;
    e.v = 0.99 * e.v + 0.01 * g * g;
    e.v_max = std::max(e.v_max, e.v);
    const double m_hat = e.m / (1 - std::pow(0.9, n));
    const double v_hat = (amsgrad ? e.v_max : e.v) / (1 - std::pow(0.99, n));
    e.w -= lr * m_hat / (std::sqrt(v_hat) + 1e-8);
  };
}

template <typename Functor>
Update adam_at(double lr, std::int64_t step) {
  return Functor::at_step(lr, 0.9, 0.99, 1e-8, 0.1, step, kFactor);
}

TEST(Optimizers, AdamWFollowsItsPaper) {
  expect_follows(&adam_at<AdamUpdate<true, false>>, adam(true, false), kAdamError);
}
TEST(Optimizers, AdamWWithAmsgradFollowsItsPaper) {
  expect_follows(&adam_at<AdamUpdate<true, true>>, adam(true, true), kAdamError);
}
TEST(Optimizers, AdamFollowsItsPaper) {
  expect_follows(&adam_at<AdamUpdate<false, false>>, adam(false, false), kAdamError);
}
TEST(Optimizers, AdamWithAmsgradFollowsItsPaper) {
  expect_follows(&adam_at<AdamUpdate<false, true>>, adam(false, true), kAdamError);
}

/// torch.optim.SGD's page, line by line. A direction is at most (0.75 + 0.1 * 2) * (1 + 10).
Reference sgd(double momentum, double dampening, bool nesterov) {
  return [=](Element& e, double g, double lr, std::int64_t step) {
    g += 0.1 * e.w;
    if (momentum != 0) {
      e.buffer = step > 1 ? momentum * e.buffer + (1 - dampening) * g : g;
      g = nesterov ? g + momentum * e.buffer : e.buffer;
    }
    e.w -= lr * g;
  };
}

template <typename Functor>
AtStep sgd_at(double momentum, double dampening) {
  return [=](double lr, std::int64_t step) {
    return Functor::at_step(lr, momentum, dampening, 0.1, step, kFactor);
  };
}

TEST(Optimizers, SgdFollowsTorchsFormula) {
  expect_follows(sgd_at<SgdUpdate<false, false>>(0, 0), sgd(0, 0, false), 2 * kSmall);
}
TEST(Optimizers, SgdWithMomentumFollowsTorchsFormula) {
  expect_follows(sgd_at<SgdUpdate<true, false>>(0.9, 0), sgd(0.9, 0, false), 11 * kSmall);
}
// The state's first contents, here 9, are not read: the first buffer is the gradient.
TEST(Optimizers, SgdWithDampeningLeavesTheFirstGradientAlone) {
  expect_follows(sgd_at<SgdUpdate<true, false>>(0.9, 0.5), sgd(0.9, 0.5, false), 11 * kSmall, {},
                 9.0F);
}
TEST(Optimizers, SgdWithNesterovFollowsTorchsFormula) {
  expect_follows(sgd_at<SgdUpdate<true, true>>(0.9, 0), sgd(0.9, 0, true), 11 * kSmall);
}

/// torch.optim.RMSprop's page. Step 1 has square_avg = 0.1 g^2: |direction| <= sqrt(10) then, and
/// never more. Centered: with weights that add up to q = 1 - 0.9^step, Cauchy and Schwarz leave a
/// variance of at least (1 - q) square_avg, a ninth after 20 steps. So a direction is at most three
/// times as large, and the subtraction makes relative errors up to 2 * 9 times as large, of which
/// the root passes on half: 3 * sqrt(10) * 9.
Reference rmsprop(bool centered, double momentum) {
  return [=](Element& e, double g, double lr, std::int64_t) {
    g += 0.1 * e.w;
    e.v = 0.9 * e.v + 0.1 * g * g;
    e.m = 0.9 * e.m + 0.1 * g;
    const double variance = centered ? e.v - e.m * e.m : e.v;
    e.buffer = momentum * e.buffer + g / (std::sqrt(variance) + 1e-8);
    e.w -= lr * e.buffer;
  };
}

template <typename Functor>
AtStep rmsprop_at(double momentum) {
  return [=](double lr, std::int64_t) {
    return Functor::at_step(lr, 0.9, 1e-8, momentum, 0.1, kFactor);
  };
}

TEST(Optimizers, RmspropFollowsTorchsFormula) {
  expect_follows(rmsprop_at<RmspropUpdate<false, false>>(0), rmsprop(false, 0), 3.2 * kSmall);
}
TEST(Optimizers, RmspropWithMomentumFollowsTorchsFormula) {
  expect_follows(rmsprop_at<RmspropUpdate<false, true>>(0.9), rmsprop(false, 0.9), 32 * kSmall);
}
TEST(Optimizers, CenteredRmspropFollowsTorchsFormula) {
  expect_follows(rmsprop_at<RmspropUpdate<true, false>>(0), rmsprop(true, 0), 86 * kSmall);
}
TEST(Optimizers, CenteredRmspropWithMomentumFollowsTorchsFormula) {
  expect_follows(rmsprop_at<RmspropUpdate<true, true>>(0.9), rmsprop(true, 0.9), 860 * kSmall);
}

// The variance of a constant gradient tends to zero, and rounding takes it below.
TEST(Optimizers, CenteredRmspropOfAConstantGradientIsNoNan) {
  Fragment fragment(Storage::kFp32, Floats(200, 1.0F));
  for (std::size_t i = 0; i < 200; ++i) {
    fragment.grad[Fragment::kStart + i] = 0.1F + 0.01F * static_cast<float>(i);
  }
  bool negative = false;
  for (int step = 0; step < 1000; ++step) {
    update(RmspropUpdate<true, false>::at_step(1e-12, 0.9, 1e-8, 0.0, 0.0, 1.0),
           fragment.arrays(2));
    for (std::size_t i = Fragment::kStart; i < 200 + Fragment::kStart; ++i) {
      const float mean = fragment.state[1][i];
      negative = negative || fragment.state[0][i] - mean * mean < 0.0F;
      ASSERT_TRUE(std::isfinite(fragment.value[i])) << "step " << step;
    }
  }
  EXPECT_TRUE(negative) << "nothing was tested";
}

/// torch.optim.Adagrad's page, with an initial accumulator of 0.25.
TEST(Optimizers, AdagradFollowsTorchsFormula) {
  expect_follows(
      [](double lr, std::int64_t step) {
        return AdagradUpdate::at_step(lr, 0.05, 1e-10, 0.1, step, kFactor);
      },
      [](Element& e, double g, double lr, std::int64_t step) {
        g += 0.1 * e.w;
        e.v += g * g;
        e.w -= lr / (1 + static_cast<double>(step - 1) * 0.05) * g / (std::sqrt(e.v) + 1e-10);
      },
      kSmall, {.v = 0.25}, 0.25F);
}

// Algorithm 2 of the Lion paper. Gradients are -1, 0 or 1 and the betas 1/2 and 1/4, so that the
// averages of 8 steps are exact in fp32 and their signs, 0 among them, are the same in both. The
// parameter, below 4, is rounded twice a step, the bracket (below 2) twice.
TEST(Optimizers, LionFollowsItsPaper) {
  const double lr = 0.015, decay = 0.1;
  const Floats start = gradients(1);
  Fragment fragment(Storage::kFp32, start);
  std::vector<double> w(start.begin(), start.end()), m(kNumel);
  std::mt19937 random(5);
  int zeros = 0;
  for (int step = 1; step <= 8; ++step) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      const int g = static_cast<int>(random() % 3) - 1;
      fragment.grad[Fragment::kStart + i] = static_cast<float>(2 * g);  // a factor of 1/2 follows
      const double c = 0.5 * m[i] + 0.5 * g;
      zeros += c == 0 ? 1 : 0;
      w[i] -= lr * ((c > 0 ? 1.0 : 0.0) - (c < 0 ? 1.0 : 0.0) + decay * w[i]);
      m[i] = 0.25 * m[i] + 0.75 * g;
    }
    update(LionUpdate::at_step(lr, 0.5, 0.25, decay, kFactor), fragment.arrays(1));
    for (std::size_t i = 0; i < w.size(); ++i) {
      ASSERT_EQ(fragment.state[0][Fragment::kStart + i], m[i]);
      ASSERT_NEAR(fragment.value[Fragment::kStart + i], w[i], step * (8 + 4 * lr) * 0x1p-24)
          << "step " << step << ", element " << i;
    }
  }
  EXPECT_GT(zeros, 300);  // a third of the first step's thousand, and later ones
}

// O3: 1 - 0.999 in fp32 would be off by 5e-5 of its value; so would 1 - beta^step.
TEST(Optimizers, ScalarsAreComputedInDouble) {
  const auto update = AdamUpdate<true, false>::at_step(0.1, 0.9, 0.999, 1e-8, 0.01, 2, 1.0);
  EXPECT_EQ(update.one_minus_beta2, static_cast<float>(1.0 - 0.999));
  EXPECT_EQ(update.decay, static_cast<float>(1.0 - 0.1 * 0.01));
  // 1 - 0.9^2 = 0.19 and 1 - 0.999^2 = 0.001999
  EXPECT_FLOAT_EQ(update.step_size, static_cast<float>(0.1 / 0.19));
  EXPECT_FLOAT_EQ(update.bias_correction2_sqrt, static_cast<float>(std::sqrt(0.001999)));
}

/// Every optimizer set up so that gradients of 1 move a parameter by `movement` each step, to
/// within a thousandth (RMSprop: by eps = 1000 against roots of at most 1; Adagrad: by a sum of
/// 10^6).
std::vector<std::pair<std::string, AtStep>> constant_movements(double movement) {
  const double slow = movement * 1000;
  const auto adam_of = [=](auto functor) {
    return [=](double, std::int64_t step) -> Update {
      return decltype(functor)::at_step(movement, 0.9, 0.999, 0.0, 0.0, step, 1.0);
    };
  };
  const auto rmsprop_of = [=](auto functor) {
    return [=](double, std::int64_t) -> Update {
      return decltype(functor)::at_step(slow, 0.9, 1000.0, 0.0, 0.0, 1.0);
    };
  };
  return {
      {"AdamW", adam_of(AdamUpdate<true, false>{})},
      {"AdamW, amsgrad", adam_of(AdamUpdate<true, true>{})},
      {"Adam", adam_of(AdamUpdate<false, false>{})},
      {"Adam, amsgrad", adam_of(AdamUpdate<false, true>{})},
      {"SGD",
       [=](double, std::int64_t step) {
         return SgdUpdate<false, false>::at_step(movement, 0, 0, 0, step, 1.0);
       }},
      {"SGD, momentum and as much dampening: a buffer of 1",
       [=](double, std::int64_t step) {
         return SgdUpdate<true, false>::at_step(movement, 0.9, 0.9, 0, step, 1.0);
       }},
      {"SGD, nesterov: 1 + 0.9 * 1",
       [=](double, std::int64_t step) {
         return SgdUpdate<true, true>::at_step(movement / 1.9, 0.9, 0.9, 0, step, 1.0);
       }},
      {"RMSprop", rmsprop_of(RmspropUpdate<false, false>{})},
      {"RMSprop, momentum", rmsprop_of(RmspropUpdate<false, true>{})},
      {"RMSprop, centered", rmsprop_of(RmspropUpdate<true, false>{})},
      {"RMSprop, centered, momentum", rmsprop_of(RmspropUpdate<true, true>{})},
      {"Adagrad",
       [=](double, std::int64_t step) { return AdagradUpdate::at_step(slow, 0, 0, 0, step, 1.0); }},
      {"Lion",
       [=](double, std::int64_t) { return LionUpdate::at_step(movement, 0.9, 0.99, 0, 1.0); }},
  };
}

// Below 1 bf16 values are 2^-8 apart and fp16 values 2^-11: steps of 6e-4 and of 1e-4 are less than
// half of that and vanish without a master. Of 100 steps with one, each is within a thousandth and
// rounds by at most 2^-25: 0.94 and 0.99.
TEST(Cases, N12_TinyUpdatesAreNotLostByMastersOfAnyOptimizer) {
  for (const Storage storage :
       {Storage::kBf16Masters, Storage::kBf16Remainders, Storage::kFp16Masters}) {
    const double movement = storage == Storage::kFp16Masters ? 1e-4 : 6e-4;
    const std::uint16_t one = rounded_bits(storage, 1.0F);
    ASSERT_EQ(rounded_bits(storage, static_cast<float>(1.0 - movement)), one);
    for (const auto& [name, at_step] : constant_movements(movement)) {
      Fragment fragment(storage, Floats(33, 1.0F));
      fragment.grad = Fragment::guarded(Floats(33, 1.0F));
      if (name == "Adagrad") fragment.state[0] = Fragment::guarded(Floats(33, 1e6F));
      for (std::int64_t step = 1; step <= 100; ++step) {
        const Update functor = at_step(0, step);
        update(functor, fragment.arrays(states_of(functor)));
        if (step == 1) {  // not yet
          EXPECT_EQ(fragment.half[Fragment::kStart], one) << name;
        }
      }
      for (std::int64_t i = 0; i < 33; ++i) {
        EXPECT_NEAR(fragment.master(i), 1.0 - 100 * movement, 0.1 * movement + 100 * 0x1p-25)
            << name << ", " << name_of(storage);
        EXPECT_EQ(fragment.half[Fragment::kStart + static_cast<std::size_t>(i)],
                  rounded_bits(storage, fragment.master(i)));
      }
    }
  }
}

// The same for decay alone, and steps of half a unit: 1 + 512 * 2^-9 = 2.
TEST(Cases, N12_TinyDecayAndHalfUnitsAreNotLostByMasters) {
  for (const Storage storage : {Storage::kBf16Masters, Storage::kBf16Remainders}) {
    Fragment decayed(storage, Floats(33, 1.0F));
    for (int step = 1; step <= 1000; ++step) {
      update(SgdUpdate<false, false>::at_step(1.0, 0, 0, 1e-4, step, 1.0), decayed.arrays(0));
    }
    EXPECT_NEAR(decayed.master(0), std::pow(1.0 - 1e-4, 1000), 1000 * 0x1p-24);
    Fragment moved(storage, Floats(33, 1.0F));
    moved.grad = Fragment::guarded(Floats(33, -1.0F));
    for (int step = 1; step <= 512; ++step) {
      update(SgdUpdate<false, false>::at_step(0x1p-9, 0, 0, 0, step, 1.0), moved.arrays(0));
    }
    EXPECT_EQ(moved.master(32), 2.0F);
  }
}

}  // namespace
}  // namespace tandem::kernels
