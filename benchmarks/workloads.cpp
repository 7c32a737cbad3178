// benchmarks/workloads.cpp: see workloads.h.
#include "benchmarks/workloads.h"

#include "examples/code_search/model.h"

#include <torch/torch.h>

namespace tandem::benchmarks {
namespace {

namespace nn = torch::nn;

class BlockImpl : public nn::Module {
 public:
  explicit BlockImpl(std::int64_t width)
      : norm_(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        linear_(register_module("linear", nn::Linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + torch::gelu(linear_->forward(norm_->forward(x)));
  }

 private:
  nn::LayerNorm norm_;
  nn::Linear linear_;
};
TORCH_MODULE(Block);

class TowerImpl : public nn::Module {
 public:
  explicit TowerImpl(std::int64_t width)
      : in_(register_module("in", nn::Linear(512, width))),
        out_(register_module("out", nn::Linear(width, 128))) {
    for (int i = 0; i < 3; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i), Block(width)));
    }
  }
  torch::Tensor forward(const torch::Tensor& inputs) {
    torch::Tensor x = torch::gelu(in_->forward(inputs));
    for (Block& block : blocks_) x = block->forward(x);
    return out_->forward(x);
  }

 private:
  nn::Linear in_, out_;
  std::vector<Block> blocks_;
};
TORCH_MODULE(Tower);

class Towers : public Workload {
 public:
  Towers(std::int64_t width, torch::ScalarType type, int rank) : first_(width), second_(width) {
    first_->to(type);
    second_->to(type);
    torch::manual_seed(100 + rank);
    for (torch::Tensor* batch : {&first_batch_, &second_batch_}) {
      *batch = torch::randn({32, 512}).to(type);
    }
  }
  [[nodiscard]] std::vector<std::shared_ptr<nn::Module>> modules() const override {
    return {first_.ptr(), second_.ptr()};
  }
  [[nodiscard]] torch::Tensor loss(const Track& track) override {
    const torch::Tensor first = first_->forward(first_batch_);
    track(0, first);
    const torch::Tensor second = second_->forward(second_batch_);
    track(1, second);
    const auto direction = [](const torch::Tensor& output) {
      return nn::functional::normalize(output.to(torch::kFloat32),
                                       nn::functional::NormalizeFuncOptions().dim(-1));
    };
    const torch::Tensor scores = direction(first).mm(direction(second).t()) / 0.07;
    const torch::Tensor target = torch::arange(scores.size(0));
    return 0.5 * (torch::cross_entropy_loss(scores, target) +
                  torch::cross_entropy_loss(scores.t(), target));
  }

 private:
  Tower first_, second_;
  torch::Tensor first_batch_, second_batch_;
};

code_search::BagTensors bags_of(std::int64_t texts) {
  constexpr std::int64_t kFeatures = 200;
  const auto buckets = static_cast<std::int64_t>(code_search::kBuckets);
  return {torch::randint(buckets, {texts * kFeatures}, torch::kInt64),
          torch::arange(texts, torch::kInt64) * kFeatures,
          torch::full({texts * kFeatures}, 1.0 / kFeatures)};
}

class CodeSearch : public Workload {
 public:
  CodeSearch(std::int64_t pairs, torch::ScalarType type, int rank) {
    comments_->to(type);
    codes_->to(type);
    torch::manual_seed(100 + rank);
    comment_bags_ = bags_of(pairs);
    code_bags_ = bags_of(pairs);
  }
  [[nodiscard]] std::vector<std::shared_ptr<nn::Module>> modules() const override {
    return {comments_.ptr(), codes_.ptr(), head_.ptr()};
  }
  [[nodiscard]] torch::Tensor loss(const Track& track) override {
    const torch::Tensor comments = comments_->forward(comment_bags_);
    track(0, comments);
    const torch::Tensor codes = codes_->forward(code_bags_);
    track(1, codes);
    torch::Tensor loss = head_->forward(comments, codes);
    track(2, loss);
    return loss;
  }

 private:
  code_search::Tower comments_, codes_;
  code_search::LossHead head_;
  code_search::BagTensors comment_bags_, code_bags_;
};

}  // namespace

std::unique_ptr<Workload> make_towers(std::int64_t width, torch::ScalarType type, int rank) {
  return std::make_unique<Towers>(width, type, rank);
}

std::unique_ptr<Workload> make_code_search(std::int64_t pairs, torch::ScalarType type, int rank) {
  return std::make_unique<CodeSearch>(pairs, type, rank);
}

}  // namespace tandem::benchmarks
