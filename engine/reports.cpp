// engine/reports.cpp: memory and wire, measured, beside their formulas; and how they print.
#include "engine/world_state.h"
#include "zero/update_rule.h"
#include <tandem/error.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace tandem::engine {

namespace {

constexpr std::int64_t kPage = 4096;  // buckets of the flat parameters begin at pages

}  // namespace

Average WorldState::average() const {
  const std::lock_guard lock(mutex_);
  return average_;
}

std::int64_t WorldState::updates() const {
  const std::lock_guard lock(mutex_);
  return updates_;
}

MemoryReport WorldState::memory_report() const {
  const std::lock_guard lock(mutex_);
  MemoryReport report;
  MemoryLine parameters{"parameters", 0, 0,
                        "padded elements * 2 (bf16, fp16) or 4 (fp32), each bucket in whole pages; "
                        "shared on a node: its first rank's"};
  MemoryLine gradients{"gradient shard", 0, 0, "own padded elements * 4"};
  MemoryLine moments{"moments", 0, 0, "own padded elements * 4 for each state"};
  MemoryLine masters{"master weights", 0, 0, "own padded 16-bit elements * 4, as remainders * 2"};
  MemoryLine staging{"staging", 0, -1, "buckets in flight and kept for reuse"};
  MemoryLine held{"held", 0, -1, "gradients that wait in staging now"};
  for (const auto& core : cores_) {
    if (core->retired()) {
      continue;
    }
    for (const zero::ParameterInfo& info : core->infos) {
      report.parameters += info.numel;
    }
    std::int64_t states = 0;
    for (std::size_t g = 0; g < core->groups; ++g) {
      states = std::max<std::int64_t>(states, zero::states_of(core->shard->groups().settings(g)));
    }
    const std::int64_t master_bytes = core->options.masters == Masters::kSeparate ? 4 : 2;
    const std::int64_t copies = owns_parameter_memory(*core) ? 1 : 0;
    for (const zero::BucketLayout& bucket : core->plan.buckets) {
      const std::int64_t own = zero::slice_of(group_, bucket.numel).numel();
      parameters.expected +=
          (bucket.numel * static_cast<std::int64_t>(kernels::bytes_of(bucket.dtype)) + kPage - 1) /
          kPage * kPage * copies;
      gradients.expected += own * 4;
      moments.expected += own * 4 * states;
      masters.expected += bucket.dtype == kernels::Dtype::kFloat32 ? 0 : own * master_bytes;
    }
    parameters.bytes += core->plan.flat_bytes * copies;
    gradients.bytes += static_cast<std::int64_t>(core->shard->gradient_bytes());
    moments.bytes += static_cast<std::int64_t>(core->shard->moment_bytes());
    masters.bytes += static_cast<std::int64_t>(core->shard->master_bytes());
    staging.bytes += static_cast<std::int64_t>(core->channel->staging_bytes());
    held.bytes += static_cast<std::int64_t>(core->gradients->held_bytes());
  }
  report.lines = {parameters, gradients, moments, masters, staging, held};
  return report;
}

WireReport WorldState::wire_report() const {
  const std::lock_guard lock(mutex_);
  WireReport report = retired_wire_;
  for (const auto& core : cores_) {
    if (core->channel) {
      report.reduce_bytes += static_cast<std::int64_t>(core->channel->reduced_bytes());
      report.gather_bytes += static_cast<std::int64_t>(core->channel->gathered_bytes());
      report.between_nodes_bytes += static_cast<std::int64_t>(core->channel->between_nodes_bytes());
    }
  }
  report.control_bytes = static_cast<std::int64_t>(control_->posted_bytes());
  report.control_rounds = static_cast<std::int64_t>(control_->posted_rounds());
  report.launches = launches_;
  return report;
}

std::uint64_t WorldState::engine_parameter_hash(EngineCore& core) {
  const std::lock_guard lock(mutex_);
  await_devices("what a hash is of");
  if (const std::string problem = restore_moved(core); !problem.empty()) {
    throw InvalidArgument(problem);
  }
  return parameter_hash(core);
}

std::uint64_t WorldState::world_parameter_hash() {
  const std::lock_guard lock(mutex_);
  await_devices("what a hash is of");
  std::vector<std::uint64_t> parts;
  for (const auto& core : cores_) {
    if (!core->retired()) {
      if (const std::string problem = restore_moved(*core); !problem.empty()) {
        throw InvalidArgument(problem);
      }
      parts.push_back(parameter_hash(*core));
    }
  }
  return combine_hashes(parts);
}

}  // namespace tandem::engine

namespace tandem {

namespace {

std::string line(const char* format, const char* what, double megabytes, const std::string& note) {
  char text[256];
  std::snprintf(text, sizeof text, format, what, megabytes, note.c_str());
  return text;
}

constexpr double kMegabyte = 1e6;

}  // namespace

const char* to_string(StepReason reason) {
  switch (reason) {
    case StepReason::kApplied:
      return "applied";
    case StepReason::kNonFinite:
      return "non-finite gradient";
    case StepReason::kEmpty:
      return "nothing to step";
  }
  return "?";
}

std::int64_t MemoryReport::total_bytes() const {
  std::int64_t total = 0;
  for (const MemoryLine& line : lines) {
    total += line.what == "held" ? 0 : line.bytes;  // part of staging
  }
  return total;
}

std::string MemoryReport::to_string() const {
  std::string text = "memory of this rank, " + std::to_string(parameters) + " parameters\n";
  for (const MemoryLine& one : lines) {
    std::string note = one.formula;
    if (one.expected >= 0) {
      char expected[64];
      std::snprintf(expected, sizeof expected, " = %.2f MB",
                    static_cast<double>(one.expected) / kMegabyte);
      note += expected;
    }
    text += line("  %-16s %10.2f MB   %s\n", one.what.c_str(),
                 static_cast<double>(one.bytes) / kMegabyte, note);
  }
  return text +
         line("  %-16s %10.2f MB%s\n", "total", static_cast<double>(total_bytes()) / kMegabyte, "");
}

std::string WireReport::to_string() const {
  return "read from other ranks so far\n" +
         line("  %-16s %10.2f MB   %s\n", "reductions",
              static_cast<double>(reduce_bytes) / kMegabyte,
              "in " + std::to_string(launches) + " launches") +
         line("  %-16s %10.2f MB%s\n", "parameters", static_cast<double>(gather_bytes) / kMegabyte,
              "") +
         line("  %-16s %10.2f MB%s\n", "  between nodes",
              static_cast<double>(between_nodes_bytes) / kMegabyte, "") +
         line("  %-16s %10.2f MB   %s\n", "agreement",
              static_cast<double>(control_bytes) / kMegabyte,
              "posted in " + std::to_string(control_rounds) + " rounds");
}

}  // namespace tandem
