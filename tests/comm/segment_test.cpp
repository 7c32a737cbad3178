#include "comm/segment.h"

#include "comm/memory_limit.h"
#include <tandem/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tandem::comm {
namespace {

using testing::HasSubstr;

constexpr std::size_t kPage = Segment::kPage;

template <typename E>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Segment, CommitsWholePagesAndEachOnce) {
  const auto segment = Segment::create("test", 10 * kPage);
  EXPECT_EQ(segment->committed_bytes(), 0U);
  segment->commit(kPage + 1, kPage);  // touches pages 1 and 2
  EXPECT_EQ(segment->committed_bytes(), 2 * kPage);
  segment->commit(0, 3 * kPage);  // adds page 0 alone
  EXPECT_EQ(segment->committed_bytes(), 3 * kPage);
  segment->commit(5 * kPage, 0);
  EXPECT_EQ(segment->committed_bytes(), 3 * kPage);
}

TEST(Segment, ReleasesWholePagesOnlyAndTheyReadAsZeroAgain) {
  const auto segment = Segment::create("test", 4 * kPage);
  segment->commit(0, 4 * kPage);
  std::memset(segment->data(), 0x5a, 4 * kPage);
  segment->release(1, 3 * kPage - 2);  // pages 1 and (not whole) 0 and 2
  EXPECT_EQ(segment->committed_bytes(), 3 * kPage);
  EXPECT_EQ(segment->data()[kPage - 1], std::byte{0x5a});
  EXPECT_EQ(segment->data()[2 * kPage], std::byte{0x5a});
  segment->commit(kPage, kPage);
  EXPECT_EQ(segment->data()[kPage], std::byte{0});
  EXPECT_EQ(segment->data()[2 * kPage - 1], std::byte{0});
}

TEST(Segment, AddressSpaceCostsNoMemory) {
  const auto segment = Segment::create("test", std::size_t{64} << 30);
  segment->commit(std::size_t{63} << 30, kPage);
  EXPECT_EQ(segment->committed_bytes(), kPage);
}

TEST(Segment, APeersMappingShowsTheSameBytesAndOutlivesTheOwner) {
  auto owner = Segment::create("test", kPage);
  owner->commit(0, kPage);
  const auto peer = Segment::open("test", Segment::Address::parse(owner->address().text()));
  ASSERT_NE(peer->data(), owner->data());
  owner->data()[7] = std::byte{1};
  EXPECT_EQ(peer->data()[7], std::byte{1});
  owner.reset();
  EXPECT_EQ(peer->data()[7], std::byte{1});
  EXPECT_THROW(peer->commit(0, kPage), InvalidArgument);
}

TEST(Segment, APeerProcessWritesWhatTheOwnerReads) {
  const auto owner = Segment::create("test", kPage);
  owner->commit(0, kPage);
  const Segment::Address address = owner->address();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    try {
      Segment::open("test", address)->data()[100] = std::byte{42};
    } catch (...) {
      _exit(1);
    }
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(owner->data()[100], std::byte{42});
}

TEST(Segment, RefusesAnAddressThatIsAnotherFile) {
  const auto owner = Segment::create("test", kPage);
  Segment::Address address = owner->address();
  ++address.inode;
  EXPECT_THAT(message_of<SystemError>([&] { Segment::open("test", address); }),
              HasSubstr("another file"));
  address = owner->address();
  address.fd = 1 << 20;
  EXPECT_THAT(message_of<SystemError>([&] { Segment::open("test", address); }),
              HasSubstr("No such file"));
  EXPECT_THROW(Segment::Address::parse("12 3"), SystemError);
}

TEST(Segment, AFullMemoryIsAnErrorWithAdviceAndTakesNothing) {
  const std::uint64_t available = available_memory().available_bytes;
  ASSERT_LT(available, std::uint64_t{1} << 40);
  const std::size_t too_much = available + (std::size_t{8} << 30);
  const auto segment = Segment::create("engine 'critic'", too_much);
  segment->commit(0, kPage);
  const std::string message =
      message_of<OutOfMemory>([&] { segment->commit(0, segment->bytes()); });
  EXPECT_THAT(message, HasSubstr("engine 'critic'"));
  EXPECT_THAT(message, HasSubstr(std::to_string(segment->bytes()) + " bytes"));
  EXPECT_THAT(message, HasSubstr("bucket_bytes"));
  EXPECT_EQ(segment->committed_bytes(), kPage);
}

TEST(Segment, ALimitOnFileSizesIsAnErrorAndNoSignal) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string message =
        message_of<OutOfMemory>([] { Segment::create("test", std::size_t{2} << 20); });
    _exit(message.find("ulimit -f") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

class MemoryLimitFiles : public testing::Test {
 protected:
  MemoryLimitFiles() { std::filesystem::remove_all(root_); }
  ~MemoryLimitFiles() override { std::filesystem::remove_all(root_); }
  MemoryLimitFiles(const MemoryLimitFiles&) = delete;
  MemoryLimitFiles& operator=(const MemoryLimitFiles&) = delete;
  MemoryLimitFiles(MemoryLimitFiles&&) = delete;
  MemoryLimitFiles& operator=(MemoryLimitFiles&&) = delete;

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  [[nodiscard]] std::uint64_t available() const {
    return available_memory_under(root_).available_bytes;
  }

  const std::string root_ = testing::TempDir() + "tandem_memory_limit_" + std::to_string(getpid());
};

TEST_F(MemoryLimitFiles, TheMachineLimitsByWhatIsAvailableAndFreeSwap) {
  write("/proc/meminfo", "MemTotal: 1000 kB\nMemAvailable:  300 kB\nSwapFree: 20 kB\n");
  EXPECT_EQ(available(), 320U * 1024);
}

TEST_F(MemoryLimitFiles, AParentGroupLimitsItsChildrenAndCachedFilesDoNotCount) {
  write("/proc/meminfo", "MemAvailable: 1000000 kB\n");
  write("/proc/self/cgroup", "0::/job/step\n");
  write("/sys/fs/cgroup/job/memory.max", "900000\n");
  write("/sys/fs/cgroup/job/memory.current", "500000\n");
  write("/sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 100000\nactive_file 50000\n");
  write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  write("/sys/fs/cgroup/job/step/memory.current", "400000\n");
  EXPECT_EQ(available(), 900000U - (500000U - 150000U));
  EXPECT_THAT(available_memory_under(root_).source, HasSubstr("/job/"));
}

TEST_F(MemoryLimitFiles, AContainersRootGroupLimits) {
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/memory.max", "700\n");
  write("/sys/fs/cgroup/memory.current", "900\n");  // above its limit: nothing is left
  EXPECT_EQ(available(), 0U);
}

TEST_F(MemoryLimitFiles, TheFirstVersionOfGroupsLimitsToo) {
  write("/proc/self/cgroup", "5:cpu:/a\n4:devices,memory:/docker/x\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "800\n");  // as a container sees it
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "300\n");
  EXPECT_EQ(available(), 500U);
}

}  // namespace
}  // namespace tandem::comm
