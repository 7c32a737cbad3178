// tests/behaviours/behaviours.cpp: what several engines under one loss.backward() must do, as a
// table.
//
//   mpirun -np 2 behaviours [WORD...]       only rows whose name contains one of the words
//
// Every row trains with Tandem by plain loss.backward() and default options, compares the
// parameters of every rank with a one-process torch::optim oracle (scenario.h), and reads "ok" or
// what went wrong. Exit status 1 if any row is not ok. Nothing can hang: waits of a row end after
// 20 s with an error that ends the program with the row's name, and so does a row that takes longer
// than a minute.
#include "tests/behaviours/scenario.h"
#include "tests/behaviours/trainer.h"
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace behaviours {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Models two_mlps() { return {std::make_shared<Mlp>(1), std::make_shared<Mlp>(2)}; }
Models two_scales(double value) {
  return {std::make_shared<Scale>(value), std::make_shared<Scale>(value)};
}

Tensor loss_of_a(const Calls& call, const Moment& at) {
  return call[0](input(at, 0)).square().mean();
}
Tensor loss_of_b(const Calls& call, const Moment& at) {
  return (call[1](input(at, 1)) - 1).square().mean();
}
std::vector<Tensor> both(const Calls& call, const Moment& at) {
  return {loss_of_a(call, at) + loss_of_b(call, at)};
}
std::vector<Tensor> chained(const Calls& call, const Moment& at) {
  return {(call[1](call[0](input(at, 0))) - 1).square().mean()};
}
std::vector<Tensor> sum_of_scales(const Calls& call, const Moment&) {
  const Tensor ones = torch::ones({2});
  return {(call[0](ones).to(torch::kFloat) + call[1](ones).to(torch::kFloat)).sum()};
}

Verdict one_loss() { return run({.make = two_mlps, .losses = both, .steps = 5}); }

Verdict chained_4_passes() {
  return run({.make = two_mlps,
              .losses = chained,
              .steps = 2,
              .passes = 4,
              .divide = Divide::kRanksAndPasses,
              .adamw = false,
              .lr = 0.5});
}

Verdict absent_on_all_ranks() {
  const auto losses = [](const Calls& call, const Moment& at) {
    return at.step == 1 ? std::vector{loss_of_b(call, at)} : both(call, at);
  };
  return run({.make = two_mlps, .losses = losses, .steps = 3});
}

Verdict absent_on_one_rank() {
  const auto losses = [](const Calls& call, const Moment& at) {
    return at.step == 1 && at.rank == 1 ? std::vector{loss_of_b(call, at)} : both(call, at);
  };
  return run({.make = two_mlps, .losses = losses, .steps = 3});
}

Verdict unused_parameter() {
  const auto make = []() -> Models {
    return {std::make_shared<MlpWithUnused>(1), std::make_shared<Mlp>(2)};
  };
  return run({.make = make, .losses = both, .steps = 3});
}

// Gradients (3, 0) and (4, 0), joint norm 5, clipped to 1: both models move by .6 and .8. A clip of
// each engine alone would move both by 1.
Verdict joint_clip() {
  const auto losses = [](const Calls& call, const Moment&) {
    const Tensor x = torch::tensor({1.0F, 0.0F});
    return std::vector{3 * call[0](x).sum() + 4 * call[1](x).sum()};
  };
  return run({.make = [] { return two_scales(0.0); },
              .losses = losses,
              .adamw = false,
              .lr = 1.0,
              .clip_norm = 1.0});
}

struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown in backward, on purpose") {}
};
bool throw_next = false;

/// The identity; its backward throws once when `throw_next` is set.
struct ThrowOnce : torch::autograd::Function<ThrowOnce> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    if (std::exchange(throw_next, false)) throw Thrown();
    return gradients;
  }
};

// Step 1 throws on every rank in its first pass, step 2 on the last rank alone in its last pass,
// each time between the gradients of B and those of A. The retry is what a user writes: window()
// says how many passes still stand. Each rank must learn of each failure exactly once.
Verdict throw_and_retry(int passes) {
  const auto losses = [](const Calls& call, const Moment& at) {
    const Tensor hidden = ThrowOnce::apply(call[0](input(at, 0)));
    return std::vector{(call[1](hidden) - 1).square().mean()};
  };
  const Scenario scenario = {.make = two_mlps,
                             .losses = losses,
                             .steps = 3,
                             .passes = passes,
                             .divide = passes > 1 ? Divide::kRanksAndPasses : Divide::kRanks};
  Trainer trainer(scenario);
  std::string wrong;
  for (int step = 0; step < scenario.steps; ++step) {
    const bool fails_here = step == 1 || (step == 2 && trainer.rank() == trainer.ranks() - 1);
    const int failing_pass = step == 1 ? 0 : passes - 1;
    bool arm = fails_here;
    int failures = 0;
    for (bool stepped = false; !stepped && failures < 5;) {
      try {
        for (auto pass = static_cast<int>(trainer.world().window()); pass < passes; ++pass) {
          if (arm && pass == failing_pass) {
            arm = false;
            throw_next = true;
          }
          trainer.pass(step, pass);
        }
        trainer.step();
        stepped = true;
      } catch (const Thrown&) {
        ++failures;
      } catch (const tandem::BackwardFailed&) {
        ++failures;
      }
    }
    if (failures != (step == 0 ? 0 : 1)) {
      wrong +=
          "step " + std::to_string(step) + ": " + std::to_string(failures) + " failures seen; ";
    }
  }
  return trainer.compare(train_unsharded(scenario, trainer.ranks()), wrong);
}

Verdict two_losses() {
  const auto losses = [](const Calls& call, const Moment& at) {
    const Tensor hidden = call[0](input(at, 0));
    return std::vector{(call[1](hidden) - 1).square().mean(), hidden.square().mean()};
  };
  return run({.make = two_mlps, .losses = losses, .steps = 2, .adamw = false, .lr = 0.5});
}

Verdict gradient_penalty() {
  const auto losses = [](const Calls& call, const Moment& at) {
    const Tensor x = input(at, 0).requires_grad_();
    const Tensor y = call[1](call[0](x));
    const Tensor slope = torch::autograd::grad({y.square().sum()}, {x},
                                               /*grad_outputs=*/{},
                                               /*retain_graph=*/true,
                                               /*create_graph=*/true)[0];
    return std::vector{y.mean() + slope.square().mean()};
  };
  return run({.make = two_mlps, .losses = losses, .steps = 2, .adamw = false, .lr = 0.5});
}

Verdict same_model_twice() {
  const auto losses = [](const Calls& call, const Moment& at) {
    const Tensor product = call[0](input(at, 0)) * call[0](input(at, 1));
    return std::vector{(product - 1).square().mean() + loss_of_b(call, at)};
  };
  return run({.make = two_mlps,
              .losses = losses,
              .steps = 2,
              .passes = 2,
              .divide = Divide::kRanksAndPasses,
              .adamw = false,
              .lr = 0.5});
}

Verdict tied_across_engines() {
  const auto make = []() -> Models {
    const auto a = std::make_shared<Mlp>(1);
    return {a, std::make_shared<TiedMlp>(2, *a)};
  };
  return run({.make = make, .losses = both, .steps = 2, .adamw = false, .lr = 0.5});
}

// Step 0 has an infinite loss in A on rank 0: both engines skip it on all ranks. The oracle trains
// steps 1 and 2 alone, so moments and step counts must be untouched too.
Verdict infinity_on_one_rank() {
  const auto losses = [](const Calls& call, const Moment& at) {
    Tensor a = loss_of_a(call, at);
    if (at.step == 0 && at.rank == 0) a = a * kInfinity;
    return std::vector{a + loss_of_b(call, at)};
  };
  Trainer trainer({.make = two_mlps, .losses = losses});
  std::string wrong;
  for (int step = 0; step < 3; ++step) {
    trainer.pass(step, 0);
    const tandem::StepResult result = trainer.step();
    if (result.applied != (step > 0)) wrong += "step " + std::to_string(step) + " misjudged; ";
    if (step == 0 && result.reason != tandem::StepReason::kNonFinite) wrong += "wrong reason; ";
  }
  const auto later = [](const Calls& call, const Moment& at) {
    return both(call, {at.step + 1, at.pass, at.rank});
  };
  const auto expected =
      train_unsharded({.make = two_mlps, .losses = later, .steps = 2}, trainer.ranks());
  return trainer.compare(expected, wrong);
}

// 1 - 100 * 6e-4 = .94, in bf16 .94140625. A bf16 weight would stay at 1: next to it stands
// .99609375, and 6e-4 is less than half the way.
Verdict bf16_updates() {
  return run({.make = [] { return two_scales(1.0); },
              .losses = sum_of_scales,
              .steps = 100,
              .adamw = false,
              .lr = 6e-4,
              .dtype = torch::kBFloat16});
}

// 256 - 301 = -45, which bf16 has exactly. A bf16 sum of ones stops at 256 and would give 0; a sum
// rounded to bf16 at the end would be 300 and give -44, which is why it is not 300 ones.
Verdict bf16_sum() {
  return run({.make = [] { return two_scales(256.0); },
              .losses = sum_of_scales,
              .passes = 301,
              .adamw = false,
              .lr = 1.0,
              .dtype = torch::kBFloat16});
}

Verdict another_order() {
  const auto losses = [](const Calls& call, const Moment& at) {
    if (at.rank != 1) return both(call, at);
    const Tensor b = loss_of_b(call, at);
    return std::vector{b + loss_of_a(call, at)};
  };
  return run({.make = two_mlps, .losses = losses, .steps = 3, .adamw = false, .lr = 0.5});
}

struct Row {
  const char* name;
  std::function<Verdict()> run;
};

const std::vector<Row>& rows() {
  static const std::vector<Row> all = {
      {"two engines, one loss", one_loss},
      {"chained B(A(x)), G=4 by configuration", chained_4_passes},
      {"engine absent on all ranks, then step both", absent_on_all_ranks},
      {"engine absent on one rank", absent_on_one_rank},
      {"unused parameter must not decay", unused_parameter},
      {"joint clip over engines", joint_clip},
      {"throw in backward, retry, G=2", [] { return throw_and_retry(2); }},
      {"throw in backward, retry, G=1", [] { return throw_and_retry(1); }},
      {"two losses, retain_graph", two_losses},
      {"gradient penalty", gradient_penalty},
      {"same model twice in a forward, G=2", same_model_twice},
      {"weight tied across engines", tied_across_engines},
      {"inf in one engine on one rank: both skip", infinity_on_one_rank},
      {"100 bf16 updates of 6e-4", bf16_updates},
      {"301 bf16 gradients of 1.0", bf16_sum},
      {"engines used in another order on rank 1", another_order},
  };
  return all;
}

const char* current_row = "start";

/// SIGALRM: a row that neither ends nor times out. Only what a signal handler may do.
void end_of_patience(int) {
  const char* const parts[] = {"behaviours: row '", current_row, "': no end after 60 s\n"};
  for (const char* part : parts) {
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  _exit(1);
}

bool selected(const char* name, int argc, char** argv) {
  bool found = argc < 2;
  for (int i = 1; i < argc; ++i) found = found || std::strstr(name, argv[i]) != nullptr;
  return found;
}

int print_table(int argc, char** argv) {
  std::signal(SIGALRM, end_of_patience);
  torch::set_num_threads(1);
  alarm(60);
  int rank = 0;
  int ranks = 1;
  {
    const auto world = tandem::World::from_environment({.timeout = std::chrono::seconds(20)});
    rank = world.rank();
    ranks = world.size();
  }
  const auto print = [rank](const std::string& text) {
    if (rank != 0) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  };
  print("| scenario | Tandem | largest difference | of the movement |\n|---|---|---|---|\n");
  int run = 0;
  int failed = 0;
  for (const Row& row : rows()) {
    if (!selected(row.name, argc, argv)) continue;
    current_row = row.name;
    alarm(60);
    const Verdict verdict = row.run();
    char figures[64];
    std::snprintf(figures, sizeof figures, "%.1e | %.1e", verdict.difference, verdict.relative);
    print(std::string("| ") + row.name + " | " + (verdict.ok ? "ok" : verdict.what_is_wrong) +
          " | " + figures + " |\n");
    ++run;
    failed += verdict.ok ? 0 : 1;
  }
  alarm(0);
  print("\n" + std::to_string(run - failed) + " of " + std::to_string(run) + " rows ok on " +
        std::to_string(ranks) + " rank(s).\n" +
        "Against a one-process torch::optim oracle: the largest difference of any element, and its "
        "ratio\n"
        "to the largest movement of that parameter. G is the number of passes between two steps; "
        "Tandem's\n"
        "default sums them and divides by ranks, so rows with G average by micro-batches, the "
        "world's\n"
        "option for it. All other rows run with default options.\n");
  return run == 0 || failed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace behaviours

int main(int argc, char** argv) {
  try {
    return behaviours::print_table(argc, argv);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "behaviours: row '%s': %s\n", behaviours::current_row, error.what());
    std::fflush(stderr);
    // No orderly end: other ranks may be anywhere, and the launcher ends them.
    std::_Exit(1);
  }
}
