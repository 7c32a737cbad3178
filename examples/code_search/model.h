// model.h: the two towers and the loss head of the dual encoder.
// Called by train.cpp and search.cpp.
#pragma once

#include "examples/code_search/bags.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace code_search {

inline constexpr std::int64_t kWidth = 256;
inline constexpr std::int64_t kHidden = 512;

/// Bags as tensors: int64 [features], int64 [texts], float [features].
struct BagTensors {
  torch::Tensor ids, offsets, weights;
};
BagTensors to_tensors(const Bags& bags);

/// A weighted bag of hashed features to a direction: 10 x EmbeddingBag, plus a residual LayerNorm
/// -> 256 -> 512 -> GELU -> 256 whose last layer starts at zero, L2-normalised. Output float
/// [texts, 256] in any parameter type, so that the loss is computed in fp32.
class TowerImpl : public torch::nn::Module {
 public:
  TowerImpl();
  torch::Tensor forward(const BagTensors& bags);

 private:
  torch::nn::EmbeddingBag embedding_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear widen_{nullptr}, narrow_{nullptr};
};
TORCH_MODULE(Tower);

/// The learned temperature, from .05: similarities / exp(log_temperature).
class LossHeadImpl : public torch::nn::Module {
 public:
  LossHeadImpl();
  /// Symmetric InfoNCE (van den Oord, Li, Vinyals, 2018; both directions as in CLIP, 2021) over the
  /// rows of one micro-batch: the mean cross entropy of finding row r among all rows, both ways.
  torch::Tensor forward(const torch::Tensor& comments, const torch::Tensor& codes);
  double temperature() const;

 private:
  torch::Tensor log_temperature_;
};
TORCH_MODULE(LossHead);

}  // namespace code_search
