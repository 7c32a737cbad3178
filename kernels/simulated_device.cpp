#include "kernels/simulated_device.h"

#include "kernels/check.h"
#include "kernels/cpu_device.h"

#include <atomic>
#include <chrono>
#include <utility>

namespace tandem::kernels {
namespace {

using Clock = std::chrono::steady_clock;

class SimulatedMark final : public Mark::State {
 public:
  void set(Event event) { event_ = std::move(event); }
  void stamp() { when_.store(Clock::now(), std::memory_order_relaxed); }

  [[nodiscard]] const Event& event() const { return event_; }
  [[nodiscard]] bool complete() const override {
    if (!event_.complete()) return false;
    try {
      static_cast<void>(event_.wait_until(Clock::now()));  // what failed before it
    } catch (const DeviceError&) {
      throw;
    } catch (const std::exception& error) {
      throw DeviceError(error.what());
    }
    return true;
  }
  [[nodiscard]] double seconds_since(const State& earlier) const override {
    const auto& other = dynamic_cast<const SimulatedMark&>(earlier);
    return std::chrono::duration<double>(when_.load() - other.when_.load()).count();
  }

 private:
  Event event_;  // set before anybody else knows the mark
  std::atomic<Clock::time_point> when_{Clock::time_point{}};
};

class SimulatedStream final : public Stream {
 public:
  using Stream::wait;
  explicit SimulatedStream(QueueDelays delays) : queue_("stream", delays) {}

  void give(std::function<void()> work) { queue_.enqueue(std::move(work)); }
  [[nodiscard]] Mark record() override {
    auto state = std::make_shared<SimulatedMark>();
    queue_.enqueue([state] { state->stamp(); });
    state->set(queue_.record());
    return Mark(state);
  }
  void wait(const Mark& mark) override {
    if (mark.state() == nullptr) return;
    queue_.wait(dynamic_cast<const SimulatedMark&>(*mark.state()).event());
  }
  [[nodiscard]] std::uintptr_t id() const override {
    return reinterpret_cast<std::uintptr_t>(this);
  }

 private:
  Queue queue_;
};

SimulatedStream& simulated(Stream& stream) { return dynamic_cast<SimulatedStream&>(stream); }

/// The CPU's table, worked on when the stream comes to it.
class SimulatedTable final : public FragmentTable {
 public:
  explicit SimulatedTable(std::unique_ptr<FragmentTable> table) : table_(std::move(table)) {}

  void sum_squares(Stream& stream, const std::vector<bool>& chosen) override {
    simulated(stream).give([table = table_, chosen] {
      ImmediateStream now;
      table->sum_squares(now, chosen);
    });
  }
  void sum_powers(Stream& stream, const std::vector<bool>& chosen, const Power& power) override {
    simulated(stream).give([table = table_, chosen, power] {
      ImmediateStream now;
      table->sum_powers(now, chosen, power);
    });
  }
  void add_sum_to(Superaccumulator& sum) const override { table_->add_sum_to(sum); }
  void find_largest(Stream& stream, const std::vector<bool>& chosen) override {
    simulated(stream).give([table = table_, chosen] {
      ImmediateStream now;
      table->find_largest(now, chosen);
    });
  }
  [[nodiscard]] std::uint32_t largest() const override { return table_->largest(); }
  void set_rules(Stream& stream, UpdateRules rules) override {
    simulated(stream).give([table = table_, rules = std::move(rules)] {
      ImmediateStream now;
      table->set_rules(now, rules);
    });
  }
  void update(Stream& stream, std::int32_t bucket) override {
    simulated(stream).give([table = table_, bucket] {
      ImmediateStream now;
      table->update(now, bucket);
    });
  }

 private:
  const std::shared_ptr<FragmentTable> table_;
};

class SimulatedDevice final : public Device {
 public:
  explicit SimulatedDevice(QueueDelays delays) : delays_(delays), cpu_(make_cpu_device()) {}

  [[nodiscard]] std::string name() const override { return "simulated"; }
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return cpu_->allocate(bytes);
  }
  [[nodiscard]] std::shared_ptr<std::byte> allocate_host(std::size_t bytes) override {
    return cpu_->allocate_host(bytes);
  }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(Priority /*priority*/) override {
    QueueDelays delays = delays_;
    delays.seed += 7919U * ++streams_;  // each stream has pauses of its own
    return std::make_unique<SimulatedStream>(delays);
  }

  void copy(Stream& stream, void* to, const void* from, std::size_t bytes) override {
    simulated(stream).give([this, to, from, bytes] { cpu_->copy(now_, to, from, bytes); });
  }
  void zero(Stream& stream, void* to, std::size_t bytes) override {
    simulated(stream).give([this, to, bytes] { cpu_->zero(now_, to, bytes); });
  }
  void fill(Stream& stream, float* to, float value, std::int64_t numel) override {
    simulated(stream).give([this, to, value, numel] { cpu_->fill(now_, to, value, numel); });
  }
  void multiply(Stream& stream, float* x, float factor, std::int64_t numel) override {
    simulated(stream).give([this, x, factor, numel] { cpu_->multiply(now_, x, factor, numel); });
  }
  void widen(
      Stream& stream, float* to, const void* from, Dtype dtype, std::int64_t numel) override {
    simulated(stream).give(
        [this, to, from, dtype, numel] { cpu_->widen(now_, to, from, dtype, numel); });
  }
  void fold(Stream& stream,
            std::span<const Slice> slices,
            std::int64_t numel,
            float* acc,
            Accumulator state) override {
    simulated(stream).give([this, own = std::vector<Slice>(slices.begin(), slices.end()), numel,
                            acc, state] { cpu_->fold(now_, own, numel, acc, state); });
  }

  [[nodiscard]] std::unique_ptr<FragmentTable> make_table(
      std::vector<UpdateArrays> fragments, std::vector<std::size_t> bucket_ends) override {
    return std::make_unique<SimulatedTable>(
        cpu_->make_table(std::move(fragments), std::move(bucket_ends)));
  }

 private:
  const QueueDelays delays_;
  const std::unique_ptr<Device> cpu_;
  ImmediateStream now_;  // without state
  std::atomic<std::uint64_t> streams_{0};
};

}  // namespace

std::unique_ptr<Device> make_simulated_device(QueueDelays delays) {
  return std::make_unique<SimulatedDevice>(delays);
}

void give_simulated_work(Stream& stream, std::function<void()> work) {
  simulated(stream).give(std::move(work));
}

}  // namespace tandem::kernels
