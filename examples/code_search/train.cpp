// train.cpp: see train.h. The loop is the part to read; everything else is its preparation.
#include "examples/code_search/train.h"

#include <tandem/engine.h>
#include <tandem/world.h>

#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <numbers>

namespace code_search {
namespace {

constexpr double kLearningRate = 1e-3;
constexpr double kHeadLearningRate = 1e-3;
constexpr int kWarmUpSteps = 50;
constexpr double kLastShare = 0.05;  // of the learning rate, at the end of the cosine

volatile std::sig_atomic_t interrupted = 0;

/// Turns the first Ctrl-C, or the SIGTERM that mpirun makes of it, into a flag that the ranks agree
/// on between two updates. A second one ends the process the usual way.
class InterruptGuard {
 public:
  InterruptGuard() {
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigaction(SIGINT, &action, &old_int_);
    sigaction(SIGTERM, &action, &old_term_);
  }
  ~InterruptGuard() {
    sigaction(SIGINT, &old_int_, nullptr);
    sigaction(SIGTERM, &old_term_, nullptr);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  InterruptGuard(InterruptGuard&&) = delete;
  InterruptGuard& operator=(InterruptGuard&&) = delete;

 private:
  struct sigaction old_int_ = {};
  struct sigaction old_term_ = {};
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The share of the learning rate in update `step` (from 0): up in a line, down in a cosine.
double schedule(int step, int steps) {
  const int warm_up = std::min(kWarmUpSteps, std::max(1, steps / 2));
  if (step < warm_up) return (step + 1.0) / warm_up;
  const double done = static_cast<double>(step - warm_up) / std::max(1, steps - warm_up);
  return kLastShare + (1.0 - kLastShare) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
}

Tower make_tower(bool bf16) {
  Tower tower;
  if (bf16) tower->to(torch::kBFloat16);
  return tower;
}

}  // namespace

Trained train(tandem::World& world,
              const Settings& settings,
              const Dealer& dealer,
              const std::function<void(const Progress&)>& on_step) {
  torch::manual_seed(settings.seed);  // rank 0's first parameters go to all ranks
  tandem::AdamW adamw = {.lr = kLearningRate, .beta2 = 0.99, .weight_decay = 0.01};
  tandem::Engine comments(world, make_tower(settings.bf16),
                          {.name = "comments", .optimizer = adamw, .stage = settings.stage});
  tandem::Engine codes(world, make_tower(settings.bf16),
                       {.name = "codes", .optimizer = adamw, .stage = settings.stage});
  adamw.lr = kHeadLearningRate;
  adamw.weight_decay = 0.0;  // there is no reason to pull a temperature towards 1
  tandem::Engine head(world, LossHead(),
                      {.name = "head", .optimizer = adamw, .stage = settings.stage});

  const InterruptGuard guard;
  const auto start = std::chrono::steady_clock::now();
  const auto ranks = static_cast<std::uint64_t>(world.size());
  Trained trained;
  for (int step = 0; step < settings.steps; ++step) {
    trained.interrupted = world.any(interrupted != 0);
    if (trained.interrupted) break;
    const auto step_start = std::chrono::steady_clock::now();
    const double share = schedule(step, settings.steps);
    comments.set_learning_rate(share * kLearningRate);
    codes.set_learning_rate(share * kLearningRate);
    head.set_learning_rate(share * kHeadLearningRate);

    Progress progress;
    for (int pass = 0; pass < settings.micro_batches; ++pass) {
      // Micro-batch i of the run goes to rank i mod R: however many ranks there are, the same ones
      // make up an update.
      const std::uint64_t passes = static_cast<std::uint64_t>(step) * settings.micro_batches + pass;
      const MicroBatch batch = dealer.micro_batch(passes * ranks + world.rank());

      const auto loss = head.forward(comments.forward(to_tensors(batch.comments)),
                                     codes.forward(to_tensors(batch.codes)));
      const auto backward_start = std::chrono::steady_clock::now();
      loss.backward();
      progress.backward_seconds += seconds_since(backward_start);
      progress.loss += loss.item<double>() / settings.micro_batches;
    }
    progress.result = world.step();
    progress.loss = world.mean(progress.loss);

    progress.step = step + 1;
    progress.steps = settings.steps;
    progress.temperature = head->temperature();
    progress.learning_rate = share * kLearningRate;
    progress.seconds = seconds_since(step_start);
    progress.pairs =
        static_cast<std::int64_t>(kPairsPerMicroBatch) * settings.micro_batches * world.size();
    on_step(progress);
    ++trained.steps;
  }
  trained.seconds = seconds_since(start);
  trained.comments = Tower(comments.ptr());
  trained.codes = Tower(codes.ptr());
  trained.temperature = head->temperature();
  trained.parameter_hash = world.parameter_hash();
  trained.memory = world.memory_report();
  trained.wire = world.wire_report();
  return trained;
}

}  // namespace code_search
