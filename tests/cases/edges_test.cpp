// Cases: parameters that are empty, tiny, very many, of a type that cannot be trained, or
// destroyed.
#include "tests/support/keyed.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <sys/stat.h>
#include <system_error>
#include <vector>

namespace tandem::testing {
namespace {

NamedTensors zeros(const std::vector<std::int64_t>& sizes) {
  NamedTensors tensors;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    tensors.push_back({"p" + std::to_string(i), torch::zeros({sizes[i]}).requires_grad_()});
  }
  return tensors;
}

/// One step in which every element has the gradient rank + 1; the mean over W ranks is (W + 1) / 2.
void expect_mean_step(World& world,
                      const std::vector<std::int64_t>& sizes,
                      std::int64_t bucket_bytes) {
  const NamedTensors tensors = zeros(sizes);
  Engine net(world, tensors,
             {.name = "net", .optimizer = Sgd{.lr = 1.0}, .bucket_bytes = bucket_bytes});
  at::Tensor loss = torch::zeros({});
  for (const NamedTensor& tensor : tensors) {
    loss = loss + tensor.tensor.sum() * (world.rank() + 1.0);
  }
  loss.backward();
  EXPECT_TRUE(world.step().applied);
  for (const NamedTensor& tensor : tensors) {
    EXPECT_TRUE(tensor.tensor.eq(-(world.size() + 1.0) / 2.0).all().item<bool>()) << tensor.name;
  }
}

// Parameters of 8, 0 and 24 elements on two ranks: the empty one broke the partition, also at the
// end.
TEST(Cases, E1_EmptyParameters) {
  on_ranks(patient(), [](World& world) {
    for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
      expect_mean_step(world, {8, 0, 24}, bucket_bytes);
      expect_mean_step(world, {8, 24, 0}, bucket_bytes);
      expect_mean_step(world, {0, 8}, bucket_bytes);
    }
  });
}

/// Bytes of memory shared between ranks that this process has: mapped, and of its own taken from
/// the system.
struct SharedBytes {
  std::int64_t mapped = 0;
  std::int64_t taken = 0;
};
SharedBytes shared_bytes() {
  SharedBytes bytes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:tandem") != std::string::npos) {
      std::size_t dash = 0;
      const std::int64_t begin = std::stoll(line, &dash, 16);
      bytes.mapped += std::stoll(line.substr(dash + 1), nullptr, 16) - begin;
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    struct stat status {};
    if (target.rfind("/memfd:tandem", 0) == 0 && stat(entry.path().c_str(), &status) == 0) {
      bytes.taken += status.st_blocks * 512;
    }
  }
  return bytes;
}

// Destroyed engines kept their buckets, and their hooks went on running.
TEST(Cases, M3_DestroyingAnEngineFreesItsMemoryAndTakesItsHooksOff) {
  constexpr std::int64_t kNumel = 1 << 20;
  const SharedBytes before = shared_bytes();
  const auto train = [](World& world) {
    const SharedBytes in_world = shared_bytes();
    at::Tensor parameter = torch::zeros({kNumel}).requires_grad_();
    {
      Engine net(world, NamedTensors{{"p", parameter}}, {.name = "net"});
      parameter.sum().backward();
      EXPECT_TRUE(world.step().applied);
    }
    EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(parameter), nullptr);
    parameter.sum().backward();
    EXPECT_TRUE(parameter.grad().eq(1.0).all().item<bool>());
    if (world.size() == 1) {  // with threads of other ranks in this process it is not known when
      const std::int64_t taken = shared_bytes().taken - in_world.taken;
      EXPECT_GE(taken, kNumel * 4) << "the parameter lives there";
      EXPECT_LT(taken, kNumel * 4 + (1 << 20)) << "and nothing else";
      parameter.reset();
      EXPECT_EQ(shared_bytes().taken, in_world.taken);
      EXPECT_EQ(shared_bytes().mapped, in_world.mapped);
    }
  };
  on_threads(1, patient(), train);
  on_threads(2, patient(), train);
  EXPECT_EQ(shared_bytes().taken, before.taken);
  EXPECT_EQ(shared_bytes().mapped, before.mapped);
}

TEST(Cases, E1_ZeroBucketBytesIsRefused) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THROW(Engine(world, zeros({8, 0, 24}), {.bucket_bytes = 0}), InvalidArgument);
  });
}

// 21,000 scalar parameters overflowed the argument lists of a kernel.
TEST(Cases, E3_TwentyOneThousandScalars) {
  static constexpr std::int64_t kCount = 21000;
  on_ranks(patient(), [](World& world) {
    NamedTensors tensors;
    std::vector<at::Tensor> values;
    for (std::int64_t i = 0; i < kCount; ++i) {
      values.push_back(torch::zeros({}).requires_grad_());
      tensors.push_back({"scalar" + std::to_string(i), values.back()});
    }
    Engine net(world, tensors, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    for (int step = 0; step < 2; ++step) {
      (torch::stack(values) * torch::arange(kCount, torch::kFloat32)).sum().backward();
      EXPECT_EQ(world.step().engines[0].parameters, kCount);
    }
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(
        torch::stack(values).eq(-2.0 * torch::arange(kCount, torch::kFloat32)).all().item<bool>());
  });
}

// Fewer elements than ranks.
TEST(Cases, E4_FewerElementsThanRanks) {
  on_exactly(4, patient(), [](World& world) {
    expect_mean_step(world, {1, 2}, 1);
    expect_mean_step(world, {1, 2}, 1 << 20);
    expect_mean_step(world, {1}, 1);
  });
}

// A complex parameter was trained on its real part alone, or on some ranks only.
TEST(Cases, N18_ComplexAndDoubleParametersAreRefused) {
  on_ranks(patient(), [](World& world) {
    for (const auto dtype : {at::kComplexFloat, at::kComplexDouble, at::kDouble}) {
      const NamedTensors tensors = {{"fine", torch::zeros({2}).requires_grad_()},
                                    {"strange", torch::zeros({2}, dtype).requires_grad_()}};
      try {
        Engine net(world, tensors, {.name = "net"});
        ADD_FAILURE() << dtype << " was taken";
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("strange"));
      }
    }
    EXPECT_EQ(world.sum(1.0), world.size());
  });
}

}  // namespace
}  // namespace tandem::testing
