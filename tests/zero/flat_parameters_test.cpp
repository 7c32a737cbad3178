// test.zero.flat_parameters: L1, L2, L3, and parameters that users moved.
#include "zero/flat_parameters.h"

#include "tests/support/fake_channel.h"
#include <tandem/error.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace tandem::zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<ParameterInfo> infos_of(const std::vector<at::Tensor>& tensors) {
  std::vector<ParameterInfo> infos;
  for (const at::Tensor& tensor : tensors) {
    infos.push_back({"p" + std::to_string(infos.size()), tensor.sizes().vec(), tensor.numel(),
                     tensor.scalar_type() == at::kFloat ? kernels::Dtype::kFloat32
                                                        : kernels::Dtype::kBFloat16});
  }
  return infos;
}

/// Leaves of both types, one of them empty, one a scalar, one not contiguous.
std::vector<at::Tensor> assorted() {
  torch::manual_seed(1);
  std::vector<at::Tensor> tensors = {
      torch::randn({3, 5}), torch::randn({40, 50}), torch::randn({7}).to(at::kBFloat16),
      torch::empty({0, 4}), torch::tensor(2.5F),    torch::randn({6, 4}).t()};
  for (at::Tensor& tensor : tensors) tensor.requires_grad_();
  return tensors;
}

struct Fixture {
  explicit Fixture(std::vector<at::Tensor> given, std::int64_t bucket_bytes = 1 << 20)
      : tensors(std::move(given)),
        infos(infos_of(tensors)),
        plan(plan_buckets(infos, bucket_bytes)),
        channel({.name = "test", .parameter_bytes = static_cast<std::size_t>(plan.flat_bytes)}),
        flat(plan, *device, channel.parameters(), tensors) {}

  [[nodiscard]] const std::byte* place(std::size_t i) const {
    const std::int32_t bucket = plan.bucket_of[i];
    return flat.bucket(bucket) +
           plan.offset_of[i] * static_cast<std::int64_t>(kernels::bytes_of(infos[i].dtype));
  }

  std::vector<at::Tensor> tensors;
  std::vector<ParameterInfo> infos;
  BucketPlan plan;
  test_support::FakeChannel channel;
  std::unique_ptr<TorchDevice> device = make_torch_cpu();
  FlatParameters flat;
};

TEST(FlatParameters, TensorsBecomeContiguousViewsWithTheirValues) {  // L1
  for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
    std::vector<at::Tensor> before;
    for (const at::Tensor& tensor : assorted()) before.push_back(tensor.detach().clone());
    Fixture f(assorted(), bucket_bytes);
    for (std::size_t i = 0; i < before.size(); ++i) {
      const at::Tensor& tensor = f.tensors[i];
      EXPECT_TRUE(torch::equal(tensor, before[i])) << i;
      EXPECT_TRUE(tensor.is_contiguous());
      EXPECT_TRUE(tensor.requires_grad());
      EXPECT_TRUE(tensor.is_leaf());
      EXPECT_EQ(tensor.sizes(), before[i].sizes());
      if (tensor.numel() > 0) {
        EXPECT_EQ(tensor.const_data_ptr(), f.place(i));
      }
    }
    EXPECT_EQ(f.flat.first_moved(), -1);
    EXPECT_FALSE(f.flat.restore_moved("e", f.infos));
  }
}

TEST(FlatParameters, KeepsFrozenTensorsFrozen) {
  Fixture f({torch::ones({3}), torch::ones({3}).requires_grad_()});
  EXPECT_FALSE(f.tensors[0].requires_grad());
  EXPECT_TRUE(f.tensors[1].requires_grad());
}

TEST(FlatParameters, PaddingStartsAtZero) {  // L3; the channel's memory starts as NaN
  Fixture f(assorted());
  std::vector<bool> own(static_cast<std::size_t>(f.plan.flat_bytes), false);
  for (std::size_t i = 0; i < f.infos.size(); ++i) {
    const std::ptrdiff_t begin = f.place(i) - f.flat.bucket(0);
    const auto bytes =
        f.infos[i].numel * static_cast<std::int64_t>(kernels::bytes_of(f.infos[i].dtype));
    std::fill(own.begin() + begin, own.begin() + begin + bytes, true);
  }
  std::int64_t dirty = 0;
  for (const BucketLayout& bucket : f.plan.buckets) {
    const std::int64_t bytes =
        bucket.numel * static_cast<std::int64_t>(kernels::bytes_of(bucket.dtype));
    for (std::int64_t at = bucket.flat_offset; at < bucket.flat_offset + bytes; ++at) {
      dirty += !own[static_cast<std::size_t>(at)] && f.flat.bucket(0)[at] != std::byte{0};
    }
  }
  EXPECT_EQ(dirty, 0);
}

TEST(FlatParameters, WritesToTheBucketShowInTheTensor) {
  Fixture f({torch::zeros({2, 2}).requires_grad_()});
  const float value = 3.0F;
  std::memcpy(f.flat.bucket(0) + 3 * sizeof(float), &value, sizeof(value));
  EXPECT_EQ(f.tensors[0][1][1].item<float>(), 3.0F);
}

TEST(FlatParameters, GradientsArriveInTheShapeOfTheView) {
  Fixture f(assorted());
  (f.tensors[5] * 2).sum().backward();
  EXPECT_TRUE(torch::equal(f.tensors[5].grad(), torch::full({4, 6}, 2.0F)));
}

TEST(FlatParameters, MemoryOutlivesEverythingButTheTensors) {  // L1
  at::Tensor tensor = torch::full({1000}, 4.0F);
  std::weak_ptr<std::byte> memory;
  {
    Fixture f({tensor});
    memory = f.channel.parameters();
    f.channel.drop_parameters();
  }
  EXPECT_FALSE(memory.expired());
  EXPECT_EQ(tensor.sum().item<float>(), 4000.0F);
  tensor.reset();
  EXPECT_TRUE(memory.expired());
}

TEST(FlatParameters, TouchMakesAStaleGraphAnError) {  // L2
  Fixture f({torch::ones({3}).requires_grad_(), torch::ones({3}).requires_grad_()});
  const at::Tensor stale = (f.tensors[0] * f.tensors[0]).sum();
  const at::Tensor fresh = (f.tensors[1] * f.tensors[1]).sum();
  f.flat.touch({true, false});
  EXPECT_THAT([&] { stale.backward(); },
              ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
  EXPECT_NO_THROW(fresh.backward());
}

TEST(FlatParameters, RestoresTensorsThatWereReplaced) {
  Fixture f(assorted());
  const at::Tensor loaded = torch::full({40, 50}, 9.0F);
  f.tensors[1].set_data(loaded);
  EXPECT_EQ(f.flat.first_moved(), 1);
  EXPECT_TRUE(f.flat.restore_moved("e", f.infos));
  EXPECT_EQ(f.flat.first_moved(), -1);
  EXPECT_EQ(f.tensors[1].const_data_ptr(), f.place(1));
  EXPECT_TRUE(torch::equal(f.tensors[1], loaded));
  EXPECT_TRUE(f.tensors[1].requires_grad());
}

TEST(FlatParameters, RestoresSwappedAndTransposedTensors) {
  Fixture f(
      {torch::full({2, 2}, 1.0F), torch::full({2, 2}, 2.0F), torch::arange(4.0F).view({2, 2})});
  const at::Tensor first = f.tensors[0].variable_data();
  f.tensors[0].set_data(f.tensors[1].variable_data());
  f.tensors[1].set_data(first);
  f.tensors[2].set_data(f.tensors[2].variable_data().t());  // the same address, other strides
  EXPECT_EQ(f.flat.first_moved(), 0);
  EXPECT_TRUE(f.flat.restore_moved("e", f.infos));
  EXPECT_EQ(f.flat.first_moved(), -1);
  EXPECT_TRUE(f.tensors[2].is_contiguous());
  EXPECT_TRUE(torch::equal(f.tensors[0], torch::full({2, 2}, 2.0F)));
  EXPECT_TRUE(torch::equal(f.tensors[1], torch::full({2, 2}, 1.0F)));
  EXPECT_TRUE(torch::equal(f.tensors[2], torch::arange(4.0F).view({2, 2}).t()));
}

TEST(FlatParameters, RefusesAnotherTypeOrShapeAndThenChangesNothing) {
  Fixture f(assorted());
  f.tensors[1].set_data(torch::full({40, 50}, 9.0F));
  f.tensors[2].set_data(torch::zeros({7, 2}, at::kBFloat16));
  EXPECT_THAT(
      [&] { f.flat.restore_moved("critic", f.infos); },
      ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("'p2'"), HasSubstr("'critic'"),
                                           HasSubstr("bf16 [7]"), HasSubstr("bf16 [7, 2]"))));
  EXPECT_EQ(f.flat.first_moved(), 1) << "nothing was restored";

  Fixture g(assorted());
  g.tensors[0].set_data(torch::zeros({3, 5}, at::kDouble));
  EXPECT_EQ(g.flat.first_moved(), 0);
  EXPECT_THAT(
      [&] { g.flat.restore_moved("critic", g.infos); },
      ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("fp32 [3, 5]"), HasSubstr("Double [3, 5]"))));
}

}  // namespace
}  // namespace tandem::zero
