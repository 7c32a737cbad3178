// benchmarks/ranks_bench.cpp: what ranks of one node do together, without LibTorch: reductions
// against the same folds of private memory, gathers against memcpy of the same bytes, and one
// agreement round. Started by mpirun on any number of ranks.
//
// Every benchmark has a fixed number of iterations, so that the ranks make the same posts. Figure
// and limit are the slowest rank's, both begun at a barrier; the memory was touched before.
#include "benchmarks/paired.h"
#include "comm/launcher.h"
#include "comm/planes.h"
#include "kernels/queue.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tandem::benchmarks {
namespace {

using comm::Deadline;
using kernels::Accumulator;
using kernels::Dtype;

constexpr int kPairs = 15;
constexpr double kReductionFloor = 0.95;
constexpr double kGatherFloor = 0.90;

Deadline soon() { return Deadline::after(std::chrono::minutes(1)); }

/// The parts of `numel` elements, one a rank.
comm::PartOfRank dealt(std::int64_t numel, int size) {
  return [=](int rank) {
    return comm::ElementRange{numel * rank / size, numel * (rank + 1) / size};
  };
}

class Ranks {
 public:
  Ranks()
      : rendezvous_(comm::rendezvous_from_environment(soon())),
        control_(comm::make_control_plane(*rendezvous_, soon())),
        plane_(comm::make_data_plane(*rendezvous_, *control_)) {}

  [[nodiscard]] int rank() const { return rendezvous_->group().rank; }
  [[nodiscard]] int size() const { return rendezvous_->group().size; }
  std::unique_ptr<comm::Channel> open(const comm::ChannelSpec& spec) {
    return plane_->open(spec, soon());
  }
  void close() { rendezvous_->close(soon()); }

  comm::Message agree(const comm::Message& mine) {
    const Deadline deadline = soon();
    const comm::RoundId round = control_->post(mine);
    for (;;) {
      const std::uint32_t seen = control_->change();
      if (auto merged = control_->test(round)) return *merged;
      if (deadline.passed()) throw std::runtime_error("ranks_bench: a rank is missing");
      control_->wait_for_change(seen, deadline.at);
    }
  }
  /// The largest over the ranks, in seconds.
  double slowest(double seconds) {
    const auto mine = static_cast<std::uint64_t>(seconds * 1e9);
    return static_cast<double>(agree({{}, {}, {mine}, {}}).maxs.at(0)) * 1e-9;
  }

 private:
  std::unique_ptr<comm::Rendezvous> rendezvous_;
  std::unique_ptr<comm::ControlPlane> control_;
  std::unique_ptr<comm::DataPlane> plane_;
};

void barrier(comm::Channel& channel) {
  const comm::PostId post = channel.post({}, Dtype::kFloat32, dealt(0, 1));
  channel.fold(post, 0, 0, nullptr, Accumulator::kContinue, "barrier", soon());
  channel.wait_folded_by_all("barrier", soon());
}

/// A thread that computes in registers while it lives, as a backward pass would.
class BusyThread {
 public:
  explicit BusyThread(bool busy) {
    if (!busy) return;
    thread_ = std::thread([this] {
      double x = 1.0;
      while (!stop_.load(std::memory_order_relaxed)) {
        for (int i = 0; i < 1000; ++i) x = x * 0.999999 + 1e-6;
        keep(x);
      }
    });
  }
  ~BusyThread() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  BusyThread(const BusyThread&) = delete;
  BusyThread& operator=(const BusyThread&) = delete;
  BusyThread(BusyThread&&) = delete;
  BusyThread& operator=(BusyThread&&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void run_on(kernels::Queue& queue, const std::function<void()>& job) {
  queue.enqueue(job);
  if (!queue.record().wait_until(soon().at)) throw std::runtime_error("ranks_bench: a job hangs");
}

void reduction(benchmark::State& state, Ranks& ranks, std::int64_t megabytes, bool busy) {
  const auto size = static_cast<std::size_t>(ranks.size());
  const std::int64_t numel = elements(megabytes * 1'000'000 / 2);
  const auto bytes = static_cast<std::size_t>(numel) * 2;
  const auto channel = ranks.open({.name = "reduction",
                                   .parameter_bytes = 64,
                                   .largest_staging = bytes,
                                   .staging_slots = 2,
                                   .posts_in_flight = 8});
  kernels::Queue queue("reduction");
  const auto part = dealt(numel, ranks.size());
  const auto [begin, end] = part(ranks.rank());
  const auto mine = static_cast<std::size_t>(end - begin);
  std::vector<float> sum(mine, 0.0F);
  std::vector<std::vector<std::uint16_t>> own(size, std::vector<std::uint16_t>(mine, 0x3F80));
  std::vector<kernels::Slice> slices;
  slices.reserve(size);
  for (const auto& slice : own) slices.push_back({slice.data(), Dtype::kBFloat16});

  const BusyThread compute(busy);
  Paired paired(busy ? 0.0 : kReductionFloor);
  bool first = true;
  const auto reduce = [&](bool touch) {
    const comm::Staging staging = channel->acquire(bytes);
    if (touch) std::memset(staging.data, 0x3F, bytes);
    barrier(*channel);
    return timed([&] {
      const comm::PostId post = channel->post(staging, Dtype::kBFloat16, part);
      run_on(queue, [&] {
        channel->fold(post, begin, end - begin, sum.data(), Accumulator::kFresh, "bucket", soon());
      });
      channel->wait_folded_by_all("bucket", soon());
    });
  };
  for (auto _ : state) {
    if (std::exchange(first, false)) reduce(true);
    const double figure = ranks.slowest(reduce(false));
    barrier(*channel);
    const double limit = ranks.slowest(
        timed([&] { kernels::fold(slices, end - begin, sum.data(), Accumulator::kFresh); }));
    paired.add(state, figure, limit);
  }
  paired.report(state);
  // Read and written by this rank.
  state.counters["GB_per_s"] = static_cast<double>(mine * (2 * size + 4)) / paired.figure() * 1e-9;
  channel->wait_folded_by_all("the end", soon());
  ranks.agree({});
}

void gather(benchmark::State& state, Ranks& ranks, std::int64_t megabytes) {
  const auto size = static_cast<std::size_t>(ranks.size());
  const std::size_t part = static_cast<std::size_t>(elements(megabytes * 1'000'000)) / size;
  const auto channel = ranks.open({.name = "gather",
                                   .parameter_bytes = part * size,
                                   .largest_staging = 64,
                                   .staging_slots = 1,
                                   .posts_in_flight = 8});
  const auto parameters = channel->parameters();
  std::memset(parameters.get(), 1, part * size);
  const std::vector<std::byte> from(part * size, std::byte{1});
  std::vector<std::byte> to(part * size, std::byte{2});
  const auto of_rank = [part](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    return comm::ByteRange{part * r, part * (r + 1)};
  };
  const auto gather_once = [&] {
    barrier(*channel);
    return timed([&] {
      channel->gather(channel->post_gather({}), of_rank, "parameters", soon());
      channel->wait_gathered_by_all("parameters", soon());
    });
  };
  Paired paired(kGatherFloor);
  bool first = true;
  for (auto _ : state) {
    if (std::exchange(first, false)) gather_once();
    const double figure = ranks.slowest(gather_once());
    barrier(*channel);
    const double limit = ranks.slowest(timed([&] {
      for (int rank = 0; rank < ranks.size(); ++rank) {
        if (rank == ranks.rank()) continue;
        const std::size_t begin = of_rank(rank).begin;
        std::memcpy(to.data() + begin, from.data() + begin, part);
      }
      keep(to);
    }));
    paired.add(state, figure, limit);
  }
  paired.report(state);
  state.counters["GB_per_s"] = static_cast<double>(2 * part * (size - 1)) / paired.figure() * 1e-9;
  ranks.agree({});
}

/// One round of a message of the usual size; the figure is one round.
void agreement(benchmark::State& state, Ranks& ranks) {
  const int rounds = pairs(1000);
  const comm::Message message{{1, 2, 3, 4}, {5, 6}, {7, 8}, {9, 10, 11, 12}};
  ranks.agree(message);
  Paired paired;
  for (auto _ : state) {
    const double seconds = timed([&] {
      for (int i = 0; i < rounds; ++i) keep(ranks.agree(message));
    });
    paired.add(state, seconds / rounds, 0.0);
  }
  paired.report(state);
  state.counters["us"] = paired.figure() * 1e6;
}

void register_all(Ranks& ranks) {
  const std::string on = "/" + std::to_string(ranks.size()) + " ranks";
  for (const bool busy : {false, true}) {
    for (const std::int64_t megabytes : {1, 25, 100}) {
      add("reduction/" + std::to_string(megabytes) + " MB bf16" + on + (busy ? ", busy" : ", idle"),
          kPairs,
          [=, &ranks](benchmark::State& state) { reduction(state, ranks, megabytes, busy); });
    }
  }
  for (const std::int64_t megabytes : {25, 100}) {
    add("gather/" + std::to_string(megabytes) + " MB" + on, kPairs,
        [=, &ranks](benchmark::State& state) { gather(state, ranks, megabytes); });
  }
  add("agreement/one round" + on, kPairs,
      [&ranks](benchmark::State& state) { agreement(state, ranks); });
}

}  // namespace
}  // namespace tandem::benchmarks

int main(int argc, char** argv) {
  tandem::benchmarks::Ranks ranks;
  tandem::benchmarks::register_all(ranks);
  const int status = tandem::benchmarks::run(argc, argv, ranks.rank() == 0);
  ranks.close();
  return status;
}
