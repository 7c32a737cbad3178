// token_average.cpp: a language model on batches of unequal length, with the mean over tokens: the
// same curve on one rank and on three, and beside it what a mean of means would train.
//
// Each update has six micro-batches. Micro-batch i is dealt to rank i mod R, so that every number
// of ranks adds the same gradients in the same order: even the bits of the parameters are the same.
// Ranks are threads of this process; under mpirun nothing but World::from_environment() is another.
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace F = torch::nn::functional;

constexpr int kUpdates = 60;
constexpr int kMicroBatches = 6;
constexpr std::int64_t kVocabulary = 32;

/// Keyed by what it is for: every rank makes the same without sharing a generator.
at::Generator keyed(std::uint64_t key) { return at::make_generator<at::CPUGeneratorImpl>(key); }

torch::nn::Sequential make_model() {
  torch::nn::Sequential model(torch::nn::Embedding(kVocabulary, 16),
                              torch::nn::Linear(16, kVocabulary));
  const torch::NoGradGuard no_grad;
  std::uint64_t key = 1;
  for (torch::Tensor& parameter : model->parameters()) {
    parameter.normal_(0.0, 0.3, keyed(key++));
  }
  return model;
}

/// A sequence of 4 to 67 tokens that counts up by a step of its own, mostly by 1 in long ones and
/// by 2 to 4 in short ones: short and long micro-batches pull in different directions.
torch::Tensor make_text(int update, int micro_batch) {
  const std::uint64_t key = 1000 + static_cast<std::uint64_t>(update * kMicroBatches + micro_batch);
  at::Generator generator = keyed(key);
  const auto pick = [&](std::int64_t end) {
    return torch::randint(end, {}, generator).item<std::int64_t>();
  };
  const bool is_long = micro_batch % 3 == 0;
  const std::int64_t tokens = is_long ? 36 + pick(32) : 4 + pick(6);
  const std::int64_t step = is_long ? 1 : 2 + pick(3);
  return (torch::arange(tokens) * step + pick(kVocabulary)).remainder(kVocabulary);
}

/// The sum of the losses of all tokens but the first, which nothing precedes.
torch::Tensor sum_of_losses(const torch::Tensor& logits, const torch::Tensor& text) {
  return F::cross_entropy(logits, text.slice(0, 1),
                          F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

struct Curve {
  std::vector<double> loss;  // of each update, over its tokens
  std::uint64_t hash = 0;    // of the parameters at the end
};

/// The mean over all tokens of the update, whoever holds them; or, as wrong as it is common, the
/// mean of the micro-batches' own means.
enum class Mean : std::uint8_t { kOfTokens, kOfMeans };

Curve train(tandem::World& world, Mean mean) {
  tandem::Engine model(world, make_model(), {.optimizer = tandem::AdamW{.lr = 0.01}});
  Curve curve;
  for (int update = 0; update < kUpdates; ++update) {
    double loss_here = 0.0;
    std::int64_t tokens_here = 0;
    for (int i = world.rank(); i < kMicroBatches; i += world.size()) {
      const torch::Tensor text = make_text(update, i);
      const std::int64_t tokens = text.size(0) - 1;
      const torch::Tensor sum = sum_of_losses(model.forward(text.slice(0, 0, tokens)), text);
      if (mean == Mean::kOfTokens) {
        sum.backward();
        world.count_tokens(tokens);  // travels with the step, which divides by all ranks' tokens
      } else {
        (sum / tokens).backward();
      }
      loss_here += sum.item<double>();
      tokens_here += tokens;
    }
    world.step({.clip_norm = 1.0});
    curve.loss.push_back(world.sum(loss_here) / world.sum(static_cast<double>(tokens_here)));
  }
  curve.hash = world.parameter_hash();
  return curve;
}

/// On so many ranks, each a thread; what rank 0 saw.
Curve train_on(int ranks, Mean mean) {
  std::vector<tandem::World> worlds = tandem::World::in_process(
      ranks, {.average = mean == Mean::kOfTokens ? tandem::Average::kTokens
                                                 : tandem::Average::kMicroBatches});
  std::vector<Curve> curves(worlds.size());
  std::vector<std::exception_ptr> errors(worlds.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < worlds.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        torch::set_num_threads(1);
        tandem::World world = std::move(worlds[rank]);
        curves[rank] = train(world, mean);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
  return curves.front();
}

int compare() {
  const Curve one = train_on(1, Mean::kOfTokens);
  const Curve three = train_on(3, Mean::kOfTokens);
  const Curve means = train_on(3, Mean::kOfMeans);
  std::printf("loss of each token, by what gradients are the mean of\n\n");
  std::printf("            mean over tokens       mean of means\n");
  std::printf("update     1 rank     3 ranks          3 ranks\n");
  bool same = one.hash == three.hash;
  for (std::size_t update = 0; update < kUpdates; ++update) {
    // World::sum adds the ranks' doubles in another order than one rank does.
    same = same && std::abs(one.loss[update] - three.loss[update]) < 1e-12;
    if (update % 6 == 0 || update + 1 == kUpdates) {
      std::printf("%6zu   %8.6f    %8.6f         %8.6f\n", update + 1, one.loss[update],
                  three.loss[update], means.loss[update]);
    }
  }
  std::printf(
      "\nparameters  %016llx  %016llx  %016llx\n", static_cast<unsigned long long>(one.hash),
      static_cast<unsigned long long>(three.hash), static_cast<unsigned long long>(means.hash));
  std::printf("1 and 3 ranks: %s\n", same ? "the same" : "DIFFERENT");
  return same && one.hash != means.hash ? 0 : 1;
}

int main() {
  try {
    return compare();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "token_average: %s\n", error.what());
    return 1;
  }
}
