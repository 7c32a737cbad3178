// benchmarks/gpu_step.cpp: whole steps of two towers on this rank's GPU: one loss, one backward
// over both engines, buckets reduced under it. Prints one line of JSON on rank 0.
//
//   gpu_step [width] [layers] [batch] [steps]
//
// Hidden is the share of the reductions' time on the device for which no step had to wait. Beside
// the step stands what forward and backward take in the same run without Tandem.
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

namespace {

using Seconds = std::chrono::duration<double>;

torch::nn::Sequential tower(std::int64_t width, std::int64_t layers) {
  torch::nn::Sequential net;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::GELU());
  }
  return net;
}

/// The mean of the matching pairs' cross-entropies, both ways.
torch::Tensor contrastive(const torch::Tensor& a, const torch::Tensor& b) {
  namespace F = torch::nn::functional;
  const torch::Tensor left = F::normalize(a.to(torch::kFloat), F::NormalizeFuncOptions().dim(1));
  const torch::Tensor right = F::normalize(b.to(torch::kFloat), F::NormalizeFuncOptions().dim(1));
  const torch::Tensor scores = 20.0 * left.matmul(right.t());
  const torch::Tensor own = torch::arange(scores.size(0), scores.options().dtype(torch::kLong));
  return 0.5 * (F::cross_entropy(scores, own) + F::cross_entropy(scores.t(), own));
}

/// Waits for the device: the loss is read.
double seconds_of(const std::function<torch::Tensor()>& work, int times) {
  const auto start = std::chrono::steady_clock::now();
  double last = 0.0;
  for (int i = 0; i < times; ++i) last = work().item<double>();
  if (!(last < 1e9)) std::fprintf(stderr, "gpu_step: the loss is %g\n", last);
  return Seconds(std::chrono::steady_clock::now() - start).count() / times;
}

std::int64_t argument(int argc, char** argv, int place, std::int64_t otherwise) {
  return argc > place ? std::atoll(argv[place]) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t width = argument(argc, argv, 1, 4096);
  const std::int64_t layers = argument(argc, argv, 2, 6);
  const std::int64_t batch = argument(argc, argv, 3, 1024);
  const int steps = static_cast<int>(argument(argc, argv, 4, 20));

  tandem::World world = tandem::World::from_environment({.timeout = std::chrono::minutes(1)});
  const torch::Device gpu = world.gpu();
  torch::manual_seed(world.rank() + 1);
  const auto make = [&] {
    auto net = tower(width, layers);
    net->to(gpu, torch::kBFloat16);
    return net;
  };
  torch::nn::Sequential left = make();
  torch::nn::Sequential right = make();
  const auto options = torch::TensorOptions(torch::kBFloat16).device(gpu);
  const torch::Tensor pixels = torch::randn({batch, width}, options);
  const torch::Tensor tokens = torch::randn({batch, width}, options);

  // The limit first: autograd leaves gradients in .grad, which are dropped.
  const auto plain = [&] {
    const torch::Tensor loss = contrastive(left->forward(pixels), right->forward(tokens));
    loss.backward();
    for (const auto& net : {left, right}) {
      for (torch::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    }
    return loss;
  };
  static_cast<void>(seconds_of(plain, 3));
  const double limit = seconds_of(plain, steps);

  tandem::Engine images(world, left, {.name = "images", .optimizer = tandem::AdamW{.lr = 1e-4}});
  tandem::Engine texts(world, right, {.name = "texts", .optimizer = tandem::AdamW{.lr = 1e-4}});
  tandem::StepTimes sum;
  bool counted = false;
  const auto train = [&] {
    const torch::Tensor loss = contrastive(images.forward(pixels), texts.forward(tokens));
    loss.backward();
    const tandem::StepResult result = world.step({.clip_norm = 1.0});
    if (!result.applied) std::fprintf(stderr, "gpu_step: a step was not applied\n");
    if (counted) {
      sum.reduction += result.times.reduction;
      sum.exposed += result.times.exposed;
      sum.norm += result.times.norm;
      sum.update += result.times.update;
      sum.gather += result.times.gather;
    }
    return loss;
  };
  static_cast<void>(seconds_of(train, 3));
  counted = true;
  const double step = seconds_of(train, steps);

  const double hidden = sum.reduction > 0.0 ? 1.0 - sum.exposed / sum.reduction : 0.0;
  if (world.rank() == 0) {
    std::printf(
        "{\"ranks\": %d, \"parameters\": %lld, \"step_ms\": %.3f, \"forward_backward_ms\": %.3f, "
        "\"ratio\": %.3f, \"reduction_ms\": %.3f, \"exposed_ms\": %.3f, \"hidden\": %.3f, "
        "\"norm_ms\": %.3f, \"update_host_ms\": %.3f, \"gather_host_ms\": %.3f}\n",
        world.size(), static_cast<long long>(world.memory_report().parameters), 1e3 * step,
        1e3 * limit, limit / step, 1e3 * sum.reduction / steps, 1e3 * sum.exposed / steps, hidden,
        1e3 * sum.norm / steps, 1e3 * sum.update / steps, 1e3 * sum.gather / steps);
  }
  world.close();
  return 0;
}
