// Ranks that are threads, each with a simulated device of its own and a plane over it, for the
// tests of channels over device memory.
#pragma once

#include "comm/device_data_plane.h"
#include "comm/mark_wait.h"
#include "comm/planes.h"
#include "kernels/simulated_device.h"
#include "tests/comm/thread_ranks.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/watched_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tandem::comm {

using kernels::Accumulator;
using kernels::Dtype;
using test_support::WatchedDevice;

/// How ranks reach each other.
enum class Way : std::uint8_t { kNccl, kStaged };

inline std::string name_of(Way way) { return way == Way::kNccl ? "Nccl" : "Staged"; }

struct DeviceRank {
  Rendezvous& rendezvous;
  ControlPlane& control;
  DataPlane& host;  // the ranks' plane on the CPU
  WatchedDevice& device;
  kernels::Stream& stream;  // the plane's
  kernels::Stream& user;    // on which gradients and parameters are written
  DataPlane& plane;
  int rank;
  int size;

  /// The host's wait for everything that a stream was given.
  void finish(kernels::Stream& of) const {
    const std::string where = "test";
    await_mark(
        of.record(), [this] { plane.check(); }, {where, where, {rank, size}}, patient());
  }
  /// Aborts, and waits until nothing uses the test's memory any more.
  void abort() const {
    plane.abort();
    EXPECT_TRUE(user.record().wait_until(patient().at));
    EXPECT_TRUE(stream.record().wait_until(patient().at));
  }
};

struct RigOptions {
  RankShape shape = {};
  std::int64_t max_us = 300;  // delays of every piece of work
  std::uint64_t seed = 1;
};

/// Runs `body` on `size` ranks. With Way::kNccl over `nccl`; a world of one has none.
inline void on_device_ranks(Way way,
                            int size,
                            test_support::FakeNccl& nccl,
                            const std::function<void(DeviceRank&)>& body,
                            const RigOptions& options = {}) {
  on_thread_ranks(
      size,
      [&](Rendezvous& rendezvous) {
        const int rank = rendezvous.group().rank;
        const auto control = make_control_plane(rendezvous, patient());
        const auto host = make_data_plane(rendezvous, *control);
        WatchedDevice device(
            {options.seed * 1000 + static_cast<std::uint64_t>(rank), options.max_us});
        const auto stream = device.make_stream(kernels::Priority::kHigh);
        const auto user = device.make_stream(kernels::Priority::kNormal);
        const DeviceLinks links{rendezvous, *control, device, *stream};
        const auto plane =
            way == Way::kStaged
                ? make_staged_data_plane(links, *host)
                : make_nccl_data_plane(links, size == 1 ? nullptr : nccl.library(rank), patient());
        DeviceRank view{rendezvous, *control, *host, device, *stream, *user, *plane, rank, size};
        body(view);
        // Before a plane may go, its peers have what it sent: see comm/nccl.h.
        rendezvous.all_gather("the end of the test", "", patient());
      },
      options.shape);
}

inline void on_device_ranks(Way way,
                            int size,
                            const std::function<void(DeviceRank&)>& body,
                            const RigOptions& options = {}) {
  test_support::FakeNccl nccl(size);
  on_device_ranks(way, size, nccl, body, options);
}

/// Elements whose sums depend on their order, of any type: random signs and mantissas, exponents
/// around that of 1.
inline std::vector<std::byte> contribution(int rank,
                                           std::uint64_t post,
                                           std::int64_t numel,
                                           Dtype wire) {
  std::mt19937_64 random(post * 101 + static_cast<std::uint64_t>(rank) + 1);
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel) * kernels::bytes_of(wire));
  for (std::int64_t i = 0; i < numel; ++i) {
    const std::uint64_t bits = random();
    const auto at = static_cast<std::size_t>(i) * kernels::bytes_of(wire);
    const auto around = static_cast<std::int32_t>((bits >> 40) % 13) - 6;
    if (wire == Dtype::kFloat32) {
      const auto value = static_cast<std::uint32_t>((bits & 0x807FFFFFU) |
                                                    static_cast<std::uint32_t>(127 + around) << 23);
      std::memcpy(&bytes[at], &value, 4);
    } else {
      const bool bf16 = wire == Dtype::kBFloat16;
      const auto exponent =
          static_cast<std::uint32_t>(bf16 ? (127 + around) << 7 : (15 + around) << 10);
      const auto value = static_cast<std::uint16_t>((bits & (bf16 ? 0x807FU : 0x83FFU)) | exponent);
      std::memcpy(&bytes[at], &value, 2);
    }
  }
  return bytes;
}

inline PartOfRank everything(std::int64_t numel) {
  return [numel](int /*rank*/) { return ElementRange{0, numel}; };
}
/// In slices that begin at multiples of 1,024 elements; the last rank has the least, or nothing.
inline PartOfRank dealt(std::int64_t numel, int size) {
  const std::int64_t blocks = (numel + 1023) / 1024;
  const std::int64_t each = (blocks + size - 1) / size * 1024;
  return [=](int rank) {
    return ElementRange{std::min(numel, each * rank), std::min(numel, each * (rank + 1))};
  };
}

/// One bucket, for all to reduce.
struct Bucket {
  std::int64_t numel = 0;
  Dtype wire = Dtype::kFloat32;
  PartOfRank part;
  std::vector<bool> zeros = {};  // ranks that have nothing of it

  [[nodiscard]] bool has(int rank) const {
    return zeros.empty() || !zeros[static_cast<std::size_t>(rank)];
  }
};

/// What `rank` has after the reduction of `post`, by the rule: acc + s0 + s1 + ..., in fp32.
inline std::vector<float> expected_sum(
    const Bucket& bucket, std::uint64_t post, int rank, int size, float before) {
  const ElementRange part = bucket.part(rank);
  std::vector<float> sum(static_cast<std::size_t>(part.end - part.begin), before);
  for (int peer = 0; peer < size; ++peer) {
    if (!bucket.has(peer)) continue;
    const auto bytes = contribution(peer, post, bucket.numel, bucket.wire);
    const kernels::Slice slice{
        bytes.data() + static_cast<std::size_t>(part.begin) * kernels::bytes_of(bucket.wire),
        bucket.wire};
    kernels::fold(std::span(&slice, 1), part.end - part.begin, sum.data(), Accumulator::kContinue);
  }
  return sum;
}

/// Writes contributions on the user's stream and folds them into memory of its own.
class Reducer {
 public:
  Reducer(DeviceRank& on, Channel& channel) : on_(on), channel_(channel) {}

  /// As gradients arrive: the user's stream waits for the staging, and posts at once.
  PostId post(const Bucket& bucket, std::uint64_t number) {
    if (!bucket.has(on_.rank)) return channel_.post({}, bucket.wire, bucket.part);
    values_.push_back(contribution(on_.rank, number, bucket.numel, bucket.wire));
    const std::vector<std::byte>& values = values_.back();
    Staging staging = channel_.acquire(values.size());
    on_.user.wait(staging.pending);
    on_.device.copy(on_.user, staging.data, values.data(), values.size());
    staging.pending = {on_.user.record()};
    return channel_.post(std::move(staging), bucket.wire, bucket.part);
  }

  /// Into memory that says `before` in every element.
  void fold(const Bucket& bucket, PostId post, float before) {
    const ElementRange part = bucket.part(on_.rank);
    sums_.emplace_back(static_cast<std::size_t>(part.end - part.begin), before);
    channel_.fold(post, part.begin, part.end - part.begin, sums_.back().data(),
                  Accumulator::kContinue, "bucket", patient());
  }

  /// Sums by fold, complete when the plane's stream is.
  [[nodiscard]] const std::list<std::vector<float>>& sums() const { return sums_; }

 private:
  DeviceRank& on_;
  Channel& channel_;
  std::list<std::vector<std::byte>> values_;
  std::list<std::vector<float>> sums_;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace tandem::comm
