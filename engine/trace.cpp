#include "engine/trace.h"

#include <tandem/error.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <utility>

namespace tandem::engine {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kRowNames[] = {"user thread", "queue", "agreement", "device"};

std::string path_of_rank(const std::string& path, int rank, int size) {
  if (size == 1) return path;
  std::filesystem::path file(path);
  const std::string extension = file.extension();
  file.replace_extension();
  return file.string() + ".rank" + std::to_string(rank) + extension;
}

double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }

/// One line of the file: an event, or what says how rows are called.
class Lines {
 public:
  explicit Lines(std::ofstream& file) : file_(file) {}
  void add(const Json& line) {
    // A name that is not UTF-8 must not cost the file.
    file_ << separator_ << line.dump(-1, ' ', false, Json::error_handler_t::replace);
    separator_ = ",\n";
  }

 private:
  std::ofstream& file_;
  const char* separator_ = "\n";
};

}  // namespace

Trace::Trace(int rank, int size, std::size_t capacity)
    : rank_(rank), size_(size), capacity_(capacity) {}

Trace::~Trace() {
  try {
    stop();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tandem: %s\n", error.what());
  }
}

void Trace::start(const std::string& path) {
  const std::string file = path_of_rank(path, rank_, size_);
  // Opened without emptying it first: a recording that runs may be for this very file.
  if (!std::ofstream(file, std::ios::binary | std::ios::app)) {  // what runs goes on
    throw InvalidArgument("World::trace: '" + file +
                          "' cannot be opened for writing; is its folder there?");
  }
  stop();
  std::ofstream opened(file, std::ios::binary | std::ios::trunc);
  const std::lock_guard lock(mutex_);
  file_ = std::move(opened);  // should it have gone meanwhile, stop() says so
  path_ = file;
  began_ = now();
  on_.store(true, std::memory_order_relaxed);
}

void Trace::stop() {
  std::deque<Event> events;
  std::int64_t dropped = 0;
  std::map<std::int32_t, EngineNames> engines;
  {
    const std::lock_guard lock(mutex_);
    if (!on_.exchange(false, std::memory_order_relaxed)) return;
    events.swap(events_);
    dropped = std::exchange(dropped_, 0);
    engines.swap(engines_);
  }
  write(events, engines, dropped);
  file_.close();
  const bool failed = file_.fail();
  if (failed)
    throw SystemError("the trace '" + path_ + "' could not be written; is the disk full?");
}

void Trace::name_engine(std::int32_t serial,
                        std::string name,
                        std::vector<std::string> parameters) {
  const std::lock_guard lock(mutex_);
  engines_[serial] = {std::move(name), std::move(parameters)};
}

std::int64_t Trace::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Trace::span(const char* name, Row row, std::int64_t begin, const About& about) {
  span(name, row, begin, now(), about);
}

void Trace::span(
    const char* name, Row row, std::int64_t begin, std::int64_t end, const About& about) {
  if (begin < 0) return;
  add(Event{name, row, begin, end - begin, about});
}

void Trace::instant(const char* name, Row row, const About& about) {
  if (!on()) return;
  add(Event{name, row, now(), -1, about});
}

void Trace::add(const Event& event) {
  const std::lock_guard lock(mutex_);
  if (!on() || event.begin < began_) return;  // stopped meanwhile, or of an earlier recording
  if (events_.size() >= capacity_) {
    ++dropped_;
    return;
  }
  events_.push_back(event);
}

// The format: https://chromium.googlesource.com/catapult, "Trace Event Format".
void Trace::write(const std::deque<Event>& events,
                  const std::map<std::int32_t, EngineNames>& engines,
                  std::int64_t dropped) {
  file_ << "{\"displayTimeUnit\":\"ms\",\"otherData\":"
        << Json{{"rank", rank_}, {"ranks", size_}, {"dropped_events", dropped}}.dump()
        << ",\"traceEvents\":[";
  Lines lines(file_);
  lines.add({{"ph", "M"},
             {"pid", rank_},
             {"name", "process_name"},
             {"args", {{"name", "rank " + std::to_string(rank_)}}}});
  const bool device = std::any_of(events.begin(), events.end(),
                                  [](const Event& event) { return event.row == Row::kDevice; });
  for (int row = 0; row < (device ? 4 : 3); ++row) {
    lines.add({{"ph", "M"},
               {"pid", rank_},
               {"tid", row},
               {"name", "thread_name"},
               {"args", {{"name", kRowNames[row]}}}});
  }
  for (const Event& event : events) {
    const About& about = event.about;
    Json args = Json::object();
    const auto engine = engines.find(about.engine);
    if (engine != engines.end()) args["engine"] = engine->second.name;
    if (about.bucket >= 0) args["bucket"] = about.bucket;
    if (about.parameter >= 0 && engine != engines.end()) {
      args["parameter"] = engine->second.parameters[static_cast<std::size_t>(about.parameter)];
    }
    if (about.bytes >= 0) args["bytes"] = about.bytes;
    if (about.pass >= 0) args["pass"] = about.pass;
    if (about.update >= 0) args["update"] = about.update;
    if (about.post >= 0) args["post"] = about.post;
    if (about.late) args["late"] = true;
    if (about.what != nullptr) args["what"] = about.what;
    Json line{{"name", event.name},
              {"cat", "tandem"},
              {"pid", rank_},
              {"tid", static_cast<int>(event.row)},
              {"ts", microseconds(event.begin)}};
    if (event.duration >= 0) {
      line["ph"] = "X";
      line["dur"] = microseconds(event.duration);
    } else {
      line["ph"] = "i";
      line["s"] = "t";
    }
    line["args"] = std::move(args);
    lines.add(line);
    if (about.post >= 0) {  // an arrow from the launch to the fold
      const bool fold = event.duration >= 0;
      Json arrow{{"name", "reduction"},
                 {"cat", "tandem"},
                 {"ph", fold ? "f" : "s"},
                 {"id", std::to_string(about.engine) + "." + std::to_string(about.post)},
                 {"pid", rank_},
                 {"tid", static_cast<int>(event.row)},
                 {"ts", microseconds(event.begin)}};
      if (fold) arrow["bp"] = "e";
      lines.add(arrow);
    }
  }
  file_ << "\n]}\n";
}

}  // namespace tandem::engine
