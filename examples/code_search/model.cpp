// model.cpp: see model.h.
#include "examples/code_search/model.h"

#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/normalization.h>
#include <torch/nn/init.h>

#include <cmath>

namespace code_search {
namespace {

constexpr double kEmbeddingScale = 10.0;
constexpr double kFirstTemperature = 0.05;

}  // namespace

BagTensors to_tensors(const Bags& bags) {
  const auto count = static_cast<std::int64_t>(bags.ids.size());
  BagTensors tensors;
  tensors.ids = torch::empty({count}, torch::kInt64);
  tensors.offsets = torch::empty({static_cast<std::int64_t>(bags.offsets.size())}, torch::kInt64);
  tensors.weights = torch::empty({count}, torch::kFloat32);
  std::copy(bags.ids.begin(), bags.ids.end(), tensors.ids.data_ptr<std::int64_t>());
  std::copy(bags.offsets.begin(), bags.offsets.end(), tensors.offsets.data_ptr<std::int64_t>());
  std::copy(bags.weights.begin(), bags.weights.end(), tensors.weights.data_ptr<float>());
  return tensors;
}

TowerImpl::TowerImpl() {
  namespace nn = torch::nn;
  embedding_ = register_module(
      "embedding",
      nn::EmbeddingBag(
          nn::EmbeddingBagOptions(static_cast<std::int64_t>(kBuckets), kWidth).mode(torch::kSum)));
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  widen_ = register_module("widen", nn::Linear(kWidth, kHidden));
  narrow_ = register_module("narrow", nn::Linear(kHidden, kWidth));
  nn::init::normal_(embedding_->weight, 0.0, 0.02);
  nn::init::zeros_(narrow_->weight);
  nn::init::zeros_(narrow_->bias);
}

torch::Tensor TowerImpl::forward(const BagTensors& bags) {
  const auto weights = bags.weights.to(embedding_->weight.scalar_type());
  const auto bag = kEmbeddingScale * embedding_->forward(bags.ids, bags.offsets, weights);
  const auto hidden = torch::gelu(widen_->forward(norm_->forward(bag)));
  const auto out = bag + narrow_->forward(hidden);
  return torch::nn::functional::normalize(out.to(torch::kFloat32),
                                          torch::nn::functional::NormalizeFuncOptions().dim(1));
}

LossHeadImpl::LossHeadImpl() {
  log_temperature_ =
      register_parameter("log_temperature", torch::full({}, std::log(kFirstTemperature)));
}

torch::Tensor LossHeadImpl::forward(const torch::Tensor& comments, const torch::Tensor& codes) {
  const auto logits = comments.mm(codes.t()) * torch::exp(-log_temperature_.to(torch::kFloat32));
  const auto target = torch::arange(logits.size(0), torch::kInt64);
  return 0.5 * (torch::cross_entropy_loss(logits, target) +
                torch::cross_entropy_loss(logits.t(), target));
}

double LossHeadImpl::temperature() const { return std::exp(log_temperature_.item<double>()); }

}  // namespace code_search
