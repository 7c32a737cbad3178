// comm/memory_limit.h: how much memory this process can still have, so that asking for more is an
// error with advice. Without the question Linux would grant the pages and later kill the process.
// Called by comm/segment.
#pragma once

#include <cstdint>
#include <string>

namespace tandem::comm {

struct MemoryLimit {
  std::uint64_t available_bytes = 0;
  std::string source;  // what sets the limit, for errors
};

/// The least of what the machine has (RAM that can be had without swapping, and free swap) and what
/// the control groups (v1 or v2: containers, batch jobs) of this process leave. Costs some file
/// reads, about 0.1 ms. Nothing readable means no limit.
[[nodiscard]] MemoryLimit available_memory();

/// The same with files under `root` in place of /; for tests.
[[nodiscard]] MemoryLimit available_memory_under(const std::string& root);

/// "41943040 bytes (40.0 MiB)".
[[nodiscard]] std::string describe_bytes(std::uint64_t bytes);

}  // namespace tandem::comm
