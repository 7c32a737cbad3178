// tests/integration/trace_test.cpp: what a trace says is what happened, and it parses.
#include "engine/trace.h"

#include "tests/support/models.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

namespace tandem::testing {
namespace {

using Json = nlohmann::json;

/// A folder of this process and test, removed at the end.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("tandem-trace-" + std::to_string(getpid()) + "-" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  Folder(Folder&&) = delete;
  Folder& operator=(Folder&&) = delete;
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

Json read(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return Json::parse(file);
}

std::string of_rank(const std::string& stem, const World& world) {
  return world.size() == 1 ? stem + ".json"
                           : stem + ".rank" + std::to_string(world.rank()) + ".json";
}

std::vector<Json> named(const Json& trace, const std::string& name) {
  std::vector<Json> found;
  for (const Json& event : trace["traceEvents"]) {
    if (event["name"] == name) {
      found.push_back(event);
    }
  }
  return found;
}

double end_of(const Json& event) { return event["ts"].get<double>() + event["dur"].get<double>(); }

TEST(Trace, SaysWhatHappened) {
  const Folder folder;
  on_ranks(patient(), [&](World& world) {
    Engine a(world, mlp(1), {.name = "a", .bucket_bytes = 1});
    Engine b(world, mlp(2), {.name = "b"});
    const std::string stem = folder.file("t" + std::to_string(world.size()));
    const std::int64_t launches = world.wire_report().launches;
    world.trace(stem + ".json");
    for (int step = 0; step < 3; ++step) {
      (a.forward(torch::ones({4, 8})).sum() + b.forward(torch::ones({4, 8})).sum()).backward();
      EXPECT_TRUE(world.step().applied);
    }
    world.zero_grad();
    world.stop_trace();
    const std::int64_t launched = world.wire_report().launches - launches;

    const Json trace = read(of_rank(stem, world));
    EXPECT_EQ(trace["otherData"]["rank"], world.rank());
    EXPECT_EQ(trace["otherData"]["ranks"], world.size());
    EXPECT_EQ(trace["otherData"]["dropped_events"], 0);
    EXPECT_EQ(named(trace, "forward").size(), 6U);
    EXPECT_EQ(named(trace, "backward").size(), 3U);
    EXPECT_EQ(named(trace, "step").size(), 3U);
    EXPECT_EQ(named(trace, "norm").size(), 3U);
    EXPECT_EQ(named(trace, "zero_grad").size(), 1U);
    // Two Linear layers each: four parameters, of a in a bucket each, of b in one.
    EXPECT_EQ(named(trace, "arrival").size(), 3U * 8U);
    EXPECT_EQ(named(trace, "launch").size(), 3U * 5U);
    EXPECT_EQ(static_cast<std::int64_t>(named(trace, "launch").size()), launched);
    EXPECT_EQ(named(trace, "update").size(), 3U * 5U);
    EXPECT_EQ(named(trace, "gather").size(), 3U * 5U);
    std::set<std::string> arrived;
    for (const Json& event : named(trace, "arrival")) {
      arrived.insert(event["args"]["engine"].get<std::string>() + " " +
                     event["args"]["parameter"].get<std::string>());
    }
    EXPECT_EQ(arrived, (std::set<std::string>{"a first.weight", "a first.bias", "a second.weight",
                                              "a second.bias", "b first.weight", "b first.bias",
                                              "b second.weight", "b second.bias"}));
    std::map<std::string, Json> folds;  // by engine and post
    const auto key = [](const Json& event) {
      return event["args"]["engine"].get<std::string>() + event["args"]["post"].dump();
    };
    for (const Json& fold : named(trace, "fold")) {
      EXPECT_TRUE(folds.emplace(key(fold), fold).second) << fold;
    }
    for (const Json& launch : named(trace, "launch")) {
      ASSERT_EQ(folds.count(key(launch)), 1U) << launch;
      EXPECT_GE(end_of(folds[key(launch)]), launch["ts"].get<double>());
      EXPECT_EQ(folds[key(launch)]["args"]["bucket"], launch["args"]["bucket"]);
    }
    EXPECT_EQ(folds.size(), named(trace, "launch").size());
  });
}

// On each row, two spans are apart or one lies inside the other.
TEST(Trace, SpansNest) {
  const Folder folder;
  on_ranks(patient(), [&](World& world) {
    Engine net(world, mlp(1), {.name = "net", .bucket_bytes = 1});
    const std::string stem = folder.file("t" + std::to_string(world.size()));
    world.trace(stem + ".json");
    for (int step = 0; step < 5; ++step) {
      net.forward(torch::ones({4, 8})).sum().backward();
      world.step();
      static_cast<void>(world.mean(1.0));
    }
    world.close();  // writes as well
    const Json trace = read(of_rank(stem, world));
    std::map<int, std::vector<Json>> rows;
    for (const Json& event : trace["traceEvents"]) {
      if (event["ph"] == "X") {
        rows[event["tid"].get<int>()].push_back(event);
      }
    }
    // The user's thread, the queue, and on a device what its stream does.
    EXPECT_EQ(rows.size(), on_simulated_gpus() ? 3U : 2U);
    for (auto& [row, events] : rows) {
      std::sort(events.begin(), events.end(), [](const Json& x, const Json& y) {
        return std::pair(x["ts"].get<double>(), -x["dur"].get<double>()) <
               std::pair(y["ts"].get<double>(), -y["dur"].get<double>());
      });
      std::vector<double> open;  // ends
      for (const Json& event : events) {
        while (!open.empty() && open.back() <= event["ts"].get<double>()) {
          open.pop_back();
        }
        // Printed to a thousandth of a microsecond.
        EXPECT_TRUE(open.empty() || end_of(event) <= open.back() + 0.01) << event;
        open.push_back(end_of(event));
      }
    }
  });
}

TEST(Trace, IsOffUntilStartedAndStartsAnew) {
  const Folder folder;
  on_ranks(patient(), [&](World& world) {
    Engine net(world, mlp(1), {.name = "net"});
    const std::string stem = folder.file("u" + std::to_string(world.size()));
    const auto pass = [&] { net.forward(torch::ones({4, 8})).sum().backward(); };
    pass();
    world.trace(stem + "1.json");
    pass();
    pass();
    world.trace(stem + "2.json");  // ends the first
    pass();
    world.stop_trace();
    pass();
    world.stop_trace();  // nothing to do
    EXPECT_EQ(named(read(of_rank(stem + "1", world)), "backward").size(), 2U);
    EXPECT_EQ(named(read(of_rank(stem + "2", world)), "backward").size(), 1U);
    EXPECT_THROW(world.trace(folder.file("no/such/folder/t.json")), InvalidArgument);
  });
}

TEST(Trace, ShowsAPassThatFailed) {
  const Folder folder;
  on_ranks(patient(), [&](World& world) {
    Engine net(world, mlp(1), {.name = "net"});
    const std::string stem = folder.file("f" + std::to_string(world.size()));
    world.trace(stem + ".json");
    const at::Tensor output = net.forward(torch::ones({4, 8}).requires_grad_());
    net->first->weight.register_hook([](const at::Tensor& /*gradient*/) -> at::Tensor {
      throw std::runtime_error("thrown in backward");
    });
    EXPECT_THROW(world.backward(output.sum()), std::exception);
    world.stop_trace();
    const Json trace = read(of_rank(stem, world));
    EXPECT_EQ(named(trace, "backward, failed").size(), 1U);
    EXPECT_EQ(named(trace, "backward").size(), 0U);
  });
}

TEST(Trace, CountsWhatItDrops) {
  const Folder folder;
  const std::string path = folder.file("t.json");
  {
    engine::Trace trace(0, 1, /*capacity=*/3);
    trace.start(path);
    for (int i = 0; i < 10; ++i) {
      trace.instant("event", engine::Trace::Row::kQueue, {.bytes = i});
    }
  }  // its end writes
  const Json written = read(path);
  EXPECT_EQ(named(written, "event").size(), 3U);
  EXPECT_EQ(written["otherData"]["dropped_events"], 7);
}

TEST(Trace, GoesOnIfTheNextCannotStart) {
  const Folder folder;
  engine::Trace trace(0, 1);
  trace.start(folder.file("t.json"));
  EXPECT_THROW(trace.start(folder.file("no/such/t.json")), InvalidArgument);
  trace.instant("event", engine::Trace::Row::kUser, {});
  trace.stop();
  EXPECT_EQ(named(read(folder.file("t.json")), "event").size(), 1U);
}

TEST(Trace, StartsAnewInTheSameFile) {
  const Folder folder;
  const std::string path = folder.file("t.json");
  engine::Trace trace(0, 1);
  trace.start(path);
  for (int i = 0; i < 1000; ++i) {
    trace.instant("old", engine::Trace::Row::kUser, {});
  }
  trace.start(path);
  trace.instant("event", engine::Trace::Row::kUser, {});
  trace.stop();
  const Json written = read(path);
  EXPECT_EQ(named(written, "event").size(), 1U);
  EXPECT_EQ(named(written, "old").size(), 0U);
}

TEST(Trace, LeavesOutWhatBeganBeforeIt) {
  const Folder folder;
  engine::Trace trace(0, 1);
  trace.start(folder.file("1.json"));
  const std::int64_t begin = engine::Trace::now();
  trace.start(folder.file("2.json"));
  trace.span("old", engine::Trace::Row::kUser, begin, {});
  trace.stop();
  EXPECT_EQ(named(read(folder.file("2.json")), "old").size(), 0U);
}

// Engines come and go, so that names are not kept for ever; those of living engines are given anew.
TEST(Trace, ForgetsNamesWithTheirRecording) {
  const Folder folder;
  engine::Trace trace(0, 1);
  trace.name_engine(4, "gone", {"w"});
  trace.start(folder.file("1.json"));
  trace.start(folder.file("2.json"));
  trace.instant("arrival", engine::Trace::Row::kUser, {.engine = 4, .parameter = 0});
  trace.stop();
  EXPECT_FALSE(named(read(folder.file("2.json")), "arrival")[0]["args"].contains("engine"));

  std::vector<World> worlds = World::in_process(1, patient());
  Engine before(worlds[0], mlp(1), {.name = "before"});
  worlds[0].trace(folder.file("3.json"));
  worlds[0].trace(folder.file("4.json"));
  Engine during(worlds[0], mlp(1), {.name = "during"});
  (before.forward(torch::ones({4, 8})).sum() + during.forward(torch::ones({4, 8})).sum())
      .backward();
  worlds[0].stop_trace();
  std::set<std::string> names;
  for (const Json& event : named(read(folder.file("4.json")), "forward")) {
    names.insert(event["args"]["engine"].get<std::string>());
  }
  EXPECT_EQ(names, (std::set<std::string>{"before", "during"}));
}

TEST(Trace, KeepsNamesWithQuotes) {
  const Folder folder;
  engine::Trace trace(0, 1);
  trace.name_engine(4, "an \"engine\"\n", {"w\xff"});  // and one that is not UTF-8
  trace.start(folder.file("t.json"));
  trace.instant("arrival", engine::Trace::Row::kUser, {.engine = 4, .parameter = 0});
  trace.stop();
  EXPECT_EQ(named(read(folder.file("t.json")), "arrival")[0]["args"]["engine"], "an \"engine\"\n");
}

}  // namespace
}  // namespace tandem::testing
