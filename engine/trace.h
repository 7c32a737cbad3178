// engine/trace.h: what one rank did when, for chrome://tracing and ui.perfetto.dev.
//
// T1 Off, an event costs one relaxed load. On, it costs a clock and a short lock.
// T2 Times are CLOCK_MONOTONIC, so that the files of the ranks of one machine share a time axis.
// T3 Memory is bounded: events beyond the capacity are counted, and the file says how many.
// T4 Nothing is communicated: each rank writes its own file.
// Thread safety: any thread; start() and stop() by one at a time.
// Called by engine (pass, step, agreement, world).
#pragma once

#include "kernels/nvtx.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tandem::engine {

class Trace {
 public:
  /// Which row of the rank's picture an event stands in.
  enum class Row : std::uint8_t { kUser, kQueue, kAgreement, kDevice };

  /// What an event is about; -1: nothing to say.
  struct About {
    std::int32_t engine = -1;     // serial
    std::int32_t bucket = -1;     // of the engine
    std::int32_t parameter = -1;  // of the engine
    std::int64_t bytes = -1;
    std::int64_t pass = -1;
    std::int64_t update = -1;
    std::int64_t post = -1;  // of the engine's channel: ties a fold to its launch
    bool late = false;
    const char* what = nullptr;  // static text
  };

  static constexpr std::size_t kCapacity = 2'000'000;  // events, about 200 MB

  Trace(int rank, int size, std::size_t capacity = kCapacity);
  /// Writes what is recorded; an error goes to stderr.
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  Trace(Trace&&) = delete;
  Trace& operator=(Trace&&) = delete;

  /// Begins to record for `path`: with several ranks "dir/name.rank<r>.ext". Ends a recording that
  /// runs, also one for the same path, whose file is then replaced; but if the file cannot be
  /// opened, that one goes on, and InvalidArgument is thrown.
  void start(const std::string& path);
  /// Writes the file and ends; nothing if nothing is recorded. Throws SystemError if writing fails.
  void stop();

  /// Names for events of this engine, earlier ones too, until the recording ends that runs or
  /// begins next: engines come and go, and a trace is rare.
  void name_engine(std::int32_t serial, std::string name, std::vector<std::string> parameters);

  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
  /// Nanoseconds of CLOCK_MONOTONIC.
  [[nodiscard]] static std::int64_t now();
  /// Something that took from `begin` until now, if recording was on at `begin` (>= 0).
  void span(const char* name, Row row, std::int64_t begin, const About& about);
  /// The same until `end`, for what is known only later.
  void span(const char* name, Row row, std::int64_t begin, std::int64_t end, const About& about);
  /// Something that happens now.
  void instant(const char* name, Row row, const About& about);

 private:
  struct Event {
    const char* name = nullptr;
    Row row = Row::kUser;
    std::int64_t begin = 0;
    std::int64_t duration = -1;  // -1: an instant
    About about;
  };
  struct EngineNames {
    std::string name;
    std::vector<std::string> parameters;
  };

  void add(const Event& event);
  void write(const std::deque<Event>& events,
             const std::map<std::int32_t, EngineNames>& engines,
             std::int64_t dropped);

  const int rank_;
  const int size_;
  const std::size_t capacity_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;          // guards the next four
  std::deque<Event> events_;  // never moved while it grows
  std::int64_t dropped_ = 0;
  std::int64_t began_ = 0;  // what began earlier is not of this recording
  std::map<std::int32_t, EngineNames> engines_;
  // Of start() and stop() alone.
  std::string path_;
  std::ofstream file_;
};

/// Records a span from its construction to its end, and shows it to a profiler (NVTX) if one is
/// attached, recording or not.
class TraceSpan {
 public:
  TraceSpan(Trace& trace, const char* name, Trace::Row row, const Trace::About& about = {})
      : trace_(trace),
        name_(name),
        row_(row),
        about_(about),
        profiled_(name),
        begin_(trace.on() ? Trace::now() : -1) {}
  ~TraceSpan() {
    if (begin_ >= 0) trace_.span(name_, row_, begin_, about_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  TraceSpan(TraceSpan&&) = delete;
  TraceSpan& operator=(TraceSpan&&) = delete;

 private:
  Trace& trace_;
  const char* name_;
  Trace::Row row_;
  Trace::About about_;
  kernels::ProfilerRange profiled_;
  std::int64_t begin_;
};

}  // namespace tandem::engine
