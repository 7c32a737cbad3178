#include "comm/memory_limit.h"

#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace tandem::comm {

namespace {

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // missing, or the word "max"
}

/// Sums the values of the lines of `path` that begin with one of two keys ("key value" or
/// "key: value").
std::uint64_t sum_of_keys(const std::string& path, const char* first, const char* second) {
  std::ifstream file(path);
  std::uint64_t sum = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t value = 0;
    if (!(words >> key >> value)) continue;
    if (key == first || key == second) sum += value;
  }
  return sum;
}

void lower(MemoryLimit& limit, std::uint64_t available, const std::string& source) {
  if (available < limit.available_bytes) limit = MemoryLimit{available, source};
}

struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* file_keys[2];  // cached files: counted as used, given up on demand
};

/// Walks from the control group at `mount` + `path` up to the mount itself: each level limits.
void lower_by_groups(MemoryLimit& limit,
                     const std::string& mount,
                     std::string path,
                     const GroupFiles& files) {
  while (true) {
    if (path == "/") path.clear();
    const std::string folder = mount + path + "/";
    const auto most = read_number(folder + files.limit);
    const auto used = read_number(folder + files.usage);
    if (most && used) {
      const std::uint64_t cached =
          sum_of_keys(folder + "memory.stat", files.file_keys[0], files.file_keys[1]);
      const std::uint64_t held = *used > cached ? *used - cached : 0;
      lower(limit, *most > held ? *most - held : 0, "the memory limit of control group " + folder);
    }
    const auto slash = path.rfind('/');
    if (slash == std::string::npos) return;
    path.resize(slash);
  }
}

}  // namespace

MemoryLimit available_memory() { return available_memory_under(""); }

MemoryLimit available_memory_under(const std::string& root) {
  MemoryLimit limit{std::numeric_limits<std::uint64_t>::max(), "nothing"};
  const std::string meminfo = root + "/proc/meminfo";
  const std::uint64_t kibibytes = sum_of_keys(meminfo, "MemAvailable:", "SwapFree:");
  if (kibibytes > 0) lower(limit, kibibytes * 1024, "the memory of this machine");

  static constexpr GroupFiles kVersion2{
      "memory.max", "memory.current", {"active_file", "inactive_file"}};
  static constexpr GroupFiles kVersion1{"memory.limit_in_bytes",
                                        "memory.usage_in_bytes",
                                        {"total_active_file", "total_inactive_file"}};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "7:cpu,memory:/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      lower_by_groups(limit, root + "/sys/fs/cgroup", path, kVersion2);
    } else if (controllers.find(",memory,") != std::string::npos) {
      lower_by_groups(limit, root + "/sys/fs/cgroup/memory", path, kVersion1);
    }
  }
  return limit;
}

std::string describe_bytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  std::string text = std::to_string(bytes) + " bytes";
  double value = static_cast<double>(bytes) / 1024;
  if (value < 1) return text;
  int unit = 0;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  char scaled[48];
  std::snprintf(scaled, sizeof(scaled), " (%.1f %s)", value, kUnits[unit]);
  return text + scaled;
}

}  // namespace tandem::comm
