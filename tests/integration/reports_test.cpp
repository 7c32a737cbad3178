// tests/integration/reports_test.cpp: memory at rest and bytes on the wire, against their formulas,
// which are derived here from shapes alone.
#include "tests/support/keyed.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

namespace tandem::testing {
namespace {

// Two parameters in one bucket: one fills 6 blocks of 1,024 elements, the other, of 5 elements, is
// padded to a seventh.
constexpr std::int64_t kBlocks = 7;
constexpr std::int64_t kElements = 6 * 1024 + 5;

NamedTensors parameters(at::ScalarType dtype) {
  return {{"large", keyed({6, 1024}, 1).to(dtype).requires_grad_()},
          {"small", keyed({5}, 2).to(dtype).requires_grad_()}};
}

void backward(const NamedTensors& tensors) {
  (tensors[0].tensor.to(at::kFloat).sum() + tensors[1].tensor.to(at::kFloat).sum()).backward();
}

/// Elements that this rank owns: blocks are dealt as evenly as they go, the first ranks taking one
/// more.
std::int64_t own_elements(const World& world) {
  return 1024 * (kBlocks / world.size() + (world.rank() < kBlocks % world.size() ? 1 : 0));
}

std::map<std::string, MemoryLine> lines_of(const MemoryReport& report) {
  std::map<std::string, MemoryLine> lines;
  for (const MemoryLine& line : report.lines) {
    lines[line.what] = line;
  }
  return lines;
}

class Reports : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Reports, MemoryAtRestIsWhatTheFormulaSays) {
  const at::ScalarType dtype = GetParam();
  const std::int64_t width = dtype == at::kFloat ? 4 : 2;
  on_ranks(patient(), [&](World& world) {
    const NamedTensors tensors = parameters(dtype);
    Engine net(world, tensors, {.name = "net", .optimizer = AdamW{}});
    for (int step = 0; step < 2; ++step) {
      backward(tensors);
      world.step();
    }
    const MemoryReport report = world.memory_report();
    EXPECT_EQ(report.parameters, kElements);
    const std::int64_t own = own_elements(world);
    const auto lines = lines_of(report);
    ASSERT_TRUE(lines.count("parameters") && lines.count("gradient shard") &&
                lines.count("moments") && lines.count("held"))
        << report.to_string();
    EXPECT_EQ(lines.at("parameters").bytes, (width * 1024 * kBlocks + 4095) / 4096 * 4096)
        << "whole pages";
    EXPECT_EQ(lines.at("gradient shard").bytes, 4 * own);
    EXPECT_EQ(lines.at("moments").bytes, 2 * 4 * own);
    EXPECT_EQ(lines.at("held").bytes, 0);
    const auto masters = lines.find("master weights");
    EXPECT_EQ(masters == lines.end() ? 0 : masters->second.bytes,
              dtype == at::kFloat ? 0 : 4 * own);
    for (const auto& [what, line] : lines) {
      if (line.expected >= 0) {
        EXPECT_EQ(line.bytes, line.expected) << what << ": " << line.formula;
      }
    }
    EXPECT_NE(report.to_string().find("moments"), std::string::npos);
  });
}

TEST_P(Reports, WireCarriesOneSliceOfEachPeerAPassAndTheOthersSlicesAStep) {
  const at::ScalarType dtype = GetParam();
  const std::int64_t width = dtype == at::kFloat ? 4 : 2;
  on_ranks(patient(), [&](World& world) {
    const NamedTensors tensors = parameters(dtype);
    Engine net(world, tensors, {.name = "net", .buffers = BufferPolicy::kLeave});
    backward(tensors);
    world.step();
    const WireReport before = world.wire_report();
    constexpr int kPasses = 3;
    for (int pass = 0; pass < kPasses; ++pass) {
      backward(tensors);
    }
    world.step();
    const WireReport after = world.wire_report();
    const std::int64_t own = own_elements(world);
    EXPECT_EQ(after.launches - before.launches, kPasses * net.buckets());
    EXPECT_EQ(after.reduce_bytes - before.reduce_bytes, kPasses * (world.size() - 1) * own * width);
    EXPECT_EQ(after.gather_bytes - before.gather_bytes, (1024 * kBlocks - own) * width);
    if (world.size() > 1) {
      // A gate and a close for each pass, a gate for the step.
      EXPECT_GE(after.control_rounds - before.control_rounds, 2 * kPasses + 1);
      EXPECT_GT(after.control_bytes, before.control_bytes);
    }
    // Over all ranks: every pass P (N - 1), every step P (N - 1); each rank's share is that over N.
    const double padded = 1024.0 * kBlocks * static_cast<double>(width);
    EXPECT_EQ(world.sum(static_cast<double>(after.reduce_bytes - before.reduce_bytes)),
              kPasses * padded * (world.size() - 1));
    EXPECT_EQ(world.sum(static_cast<double>(after.gather_bytes - before.gather_bytes)),
              padded * (world.size() - 1));
  });
}

// Multipliers, token counts and the loss scale travel with rounds that are there anyway.
TEST_P(Reports, GradientArithmeticTakesNoRoundNoByteAndNoMemoryOfItsOwn) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(options, [&](World& world) {
    const NamedTensors tensors = parameters(GetParam());
    Engine net(world, tensors, {.name = "net", .buffers = BufferPolicy::kLeave});
    const auto window = [&](bool arithmetic) {
      const WireReport before = world.wire_report();
      for (int pass = 0; pass < 2; ++pass) {
        const at::Tensor loss =
            tensors[0].tensor.to(at::kFloat).sum() + tensors[1].tensor.to(at::kFloat).sum();
        (arithmetic ? world.scale(loss) : loss).backward();
        world.count_tokens(arithmetic ? TokenCount(torch::tensor(3)) : TokenCount(3));
        if (arithmetic) {
          world.multiply_gradients(0.5);
        }
      }
      EXPECT_TRUE(world.step({.clip_norm = 1.0}).applied);
      WireReport after = world.wire_report();
      after.launches -= before.launches;
      after.reduce_bytes -= before.reduce_bytes;
      after.gather_bytes -= before.gather_bytes;
      after.control_bytes -= before.control_bytes;
      after.control_rounds -= before.control_rounds;
      return after;
    };
    window(false);
    const std::int64_t memory = world.memory_report().total_bytes();
    const WireReport plain = window(false);
    const WireReport arithmetic = window(true);
    EXPECT_EQ(arithmetic.launches, plain.launches);
    EXPECT_EQ(arithmetic.reduce_bytes, plain.reduce_bytes);
    EXPECT_EQ(arithmetic.gather_bytes, plain.gather_bytes);
    EXPECT_EQ(arithmetic.control_bytes, plain.control_bytes);
    EXPECT_EQ(arithmetic.control_rounds, plain.control_rounds);
    EXPECT_EQ(world.memory_report().total_bytes(), memory);
  });
}

INSTANTIATE_TEST_SUITE_P(Types,
                         Reports,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& type) {
                           return type.param == at::kFloat ? "fp32" : "bf16";
                         });

}  // namespace
}  // namespace tandem::testing
