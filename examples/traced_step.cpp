// traced_step.cpp: two engines train a few steps; the last is recorded, for a picture of how the
// parts of a step overlap:
//   mpirun -np 2 traced_step trace.json && scripts/trace-picture trace.json -o step.svg
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>

torch::nn::Sequential make_tower(int inputs) {
  torch::nn::Sequential tower(torch::nn::Linear(inputs, 1024), torch::nn::GELU());
  for (int layer = 0; layer < 3; ++layer) {
    tower->push_back(torch::nn::Linear(1024, 1024));
    tower->push_back(torch::nn::GELU());
  }
  tower->push_back(torch::nn::Linear(1024, 64));
  return tower;
}

void train(const std::string& trace) {
  tandem::World world = tandem::World::from_environment();
  torch::manual_seed(1 + world.rank());
  // Buckets of one layer each, so that there is something to see.
  tandem::Engine images(world, make_tower(512), {.name = "images", .bucket_bytes = 4 << 20});
  tandem::Engine texts(world, make_tower(256), {.name = "texts", .bucket_bytes = 4 << 20});
  constexpr int kSteps = 6;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor pixels = torch::randn({256, 512});
    const torch::Tensor words = torch::randn({256, 256});
    static_cast<void>(world.sum(0.0));  // the ranks begin the step together
    if (step + 1 == kSteps) world.trace(trace);
    const torch::Tensor loss = torch::mse_loss(images.forward(pixels), texts.forward(words));
    loss.backward();
    world.step({.clip_norm = 1.0});
  }
  world.stop_trace();
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: traced_step FILE.json\n");
    return 2;
  }
  try {
    train(argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "traced_step: %s\n", error.what());
    return 1;
  }
}
