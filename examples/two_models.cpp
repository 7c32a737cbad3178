// two_models.cpp: two models, one loss, one backward pass, one joint step. Each model is an Engine;
// the optimizer's states are spread over the ranks. Runs alone, or as `mpirun -np 2 two_models`.
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <exception>

torch::nn::Sequential make_tower(int inputs) {
  return torch::nn::Sequential(torch::nn::Linear(inputs, 64), torch::nn::GELU(),
                               torch::nn::Linear(64, 16));
}

torch::Tensor keyed_randn(at::IntArrayRef shape, std::uint64_t key) {
  return torch::randn(shape, at::make_generator<at::CPUGeneratorImpl>(key));
}

/// What a camera and a writer make of 32 things: two views of hidden traits. Keyed by (seed, rank,
/// step).
std::pair<torch::Tensor, torch::Tensor> make_batch(int seed, int rank, int step) {
  const torch::Tensor traits = keyed_randn({32, 8}, (seed * 1'000'000ULL + step) * 1'000 + rank);
  return {torch::tanh(traits.matmul(keyed_randn({8, 48}, 1))),
          torch::tanh(traits.matmul(keyed_randn({8, 24}, 2)))};
}

torch::Tensor contrastive(const torch::Tensor& images, const torch::Tensor& texts) {
  namespace F = torch::nn::functional;
  const torch::Tensor logits = F::normalize(images).matmul(F::normalize(texts).t()) / 0.1;
  const torch::Tensor target = torch::arange(logits.size(0));
  return F::cross_entropy(logits, target) + F::cross_entropy(logits.t(), target);
}

/// Collective. A double carries 32 bits exactly, so the hash of rank 0 travels in two halves.
bool same_on_all_ranks(tandem::World& world, std::uint64_t hash) {
  const double low = static_cast<double>(hash & 0xffffffffU);
  const double high = static_cast<double>(hash >> 32);
  const double low_of_0 = world.broadcast(low);
  const double high_of_0 = world.broadcast(high);
  return !world.any(low != low_of_0 || high != high_of_0);
}

int train() {
  tandem::World world = tandem::World::from_environment();  // mpirun, srun, or one process alone
  tandem::Engine images(world, make_tower(48),
                        {.name = "images", .optimizer = tandem::AdamW{.lr = 3e-3}});
  tandem::Engine texts(world, make_tower(24),
                       {.name = "texts", .optimizer = tandem::AdamW{.lr = 1e-2}});
  for (int step = 0; step < 200; ++step) {
    const auto [pixels, words] = make_batch(/*seed=*/1, world.rank(), step);
    torch::Tensor loss = contrastive(images.forward(pixels), texts.forward(words));
    loss.backward();  // plain LibTorch; gradients are reduced while it runs
    const tandem::StepResult result = world.step({.clip_norm = 1.0});  // one norm, one clip
    const double mean_loss = world.mean(loss.item<double>());
    if (world.rank() == 0 && (step + 1) % 20 == 0) {
      std::printf("step %3d  loss %.4f  norm %.4f\n", step + 1, mean_loss, result.norm);
    }
  }
  const bool same = same_on_all_ranks(world, world.parameter_hash());
  if (world.rank() == 0) {
    std::printf("parameters on %d rank(s): %s\n", world.size(), same ? "the same" : "DIFFERENT");
  }
  return same ? 0 : 1;
}

int main() {
  try {
    return train();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "two_models: %s\n", error.what());
    return 1;
  }
}
