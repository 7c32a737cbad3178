// Two engines, one loss, one step. The loss is scale * w with w = scale = 1: both gradients are 1
// on every rank, and so are their means; SGD with lr 0.25 leaves 0.75.
#include <tandem/tandem.h>

#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

int main() {
  tandem::World world = tandem::World::from_environment();
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
  linear->weight.detach().fill_(1.0);
  at::Tensor scale = at::ones({1}).requires_grad_(true);
  tandem::Engine net(world, linear, {.name = "net", .optimizer = tandem::Sgd{.lr = 0.25}});
  tandem::Engine head(world, tandem::NamedTensors{{"scale", scale}},
                      {.name = "head", .optimizer = tandem::Sgd{.lr = 0.25}});
  (net.forward(at::ones({1, 1})) * scale).sum().backward();
  const bool applied = world.step().applied;
  const float weight = linear->weight.item<float>();
  std::printf("rank %d of %d: %g %g\n", world.rank(), world.size(), weight, scale.item<float>());
  return applied && weight == 0.75F && scale.item<float>() == 0.75F ? 0 : 1;
}
