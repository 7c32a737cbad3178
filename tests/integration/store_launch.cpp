// A program that is started over a store, by torchrun_like.sh: what a launch without MPI promises.
//   worlds   makes worlds one after another and one beside another, trains in each, closes them
//   absent   RANK of 3 was not started: the others say so, all the same, at their deadline
//   dead     rank 0, whose process keeps the store, ends without a word while ranks of other nodes
//            wait for it: they get an error in good time
//   refused  TEXT: making a world is a SystemError that holds TEXT
//   taken    rank 0 cannot keep the store where another program listens
//   server   PORT: keeps a store as torchrun's agent does, until the input ends
#include <tandem/tandem.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/nn.h>

#include <arpa/inet.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

namespace {

int fail(const std::string& why) {
  std::fprintf(stderr, "store_launch: %s\n", why.c_str());
  return 1;
}

/// A few steps of a model; every rank's gradient is its rank + 1.
bool trains(tandem::World& world) {
  tandem::Engine model(world, torch::nn::Linear(8, 8),
                       {.name = "model", .optimizer = tandem::Sgd{.lr = 0.5}});
  const at::Tensor before = model->weight.detach().clone();
  double mean = 0.0;
  for (int rank = 0; rank < world.size(); ++rank) mean += (rank + 1.0) / world.size();
  for (int step = 0; step < 3; ++step) {
    (model->weight.sum() * (world.rank() + 1.0)).backward();
    world.step();
  }
  // Each of three updates subtracts 0.5 x the mean gradient.
  return at::allclose(before - model->weight.detach(), at::full({8, 8}, 1.5 * mean), 1e-5, 1e-5);
}

int worlds(const tandem::WorldOptions& options) {
  for (int count = 0; count < 3; ++count) {
    tandem::World world = tandem::World::from_environment(options);
    if (!trains(world)) return fail("wrong parameters in world " + std::to_string(count));
    world.close();
  }
  tandem::World first = tandem::World::from_environment(options);
  tandem::World second = tandem::World::from_environment(options);
  if (!trains(second) || !trains(first)) return fail("two worlds disturb each other");
  return 0;
}

int absent(const std::string& rank) {
  try {
    tandem::World::from_environment({.timeout = std::chrono::seconds(3)});
  } catch (const tandem::Timeout& error) {
    const std::string expected =
        rank == "0" ? "3 ranks: rank 0 did not come" : "rank " + rank + " of 3 did not come";
    const bool named = std::strstr(error.what(), expected.c_str()) != nullptr;
    return named ? 0 : fail(error.what());
  }
  return fail("a world of 3 was made of 2");
}

int dead(tandem::WorldOptions options) {
  options.ranks_per_node = 1;
  tandem::World world = tandem::World::from_environment(options);
  std::chrono::steady_clock::time_point begin;
  try {
    if (!trains(world)) return fail("wrong parameters");
    if (world.rank() == 0) _exit(0);
    begin = std::chrono::steady_clock::now();
    static_cast<void>(world.mean(1.0));
  } catch (const tandem::Error& error) {  // SystemError, or WorldBroken by it
    if (std::strstr(error.what(), "the process of rank 0 keeps it") == nullptr) {
      return fail(error.what());
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    return begin == decltype(begin){} || took < std::chrono::seconds(20) ? 0 : fail("took long");
  }
  return fail("went on without rank 0");
}

int refused(const char* text) {
  try {
    tandem::World::from_environment();
  } catch (const tandem::SystemError& error) {
    return std::strstr(error.what(), text) != nullptr ? 0 : fail(error.what());
  }
  return fail("a world was made");
}

int taken() {
  const int listener = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t bytes = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, any, bytes) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, any, &bytes) != 0) {
    return fail("cannot listen");
  }
  setenv("MASTER_PORT", std::to_string(ntohs(address.sin6_port)).c_str(), 1);
  return refused("rank 0 cannot make the store");
}

int server(const char* port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::stoi(port));
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", options);
  std::puts("ready");
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  tandem::WorldOptions options{.timeout = std::chrono::seconds(60)};
  try {
    if (mode == "worlds") {
      if (argc > 2) options.ranks_per_node = std::stoi(argv[2]);
      return worlds(options);
    }
    if (mode == "absent" && argc > 2) return absent(argv[2]);
    if (mode == "dead") return dead(options);
    if (mode == "refused" && argc > 2) return refused(argv[2]);
    if (mode == "taken") return taken();
    if (mode == "server" && argc > 2) return server(argv[2]);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  return fail("what is '" + mode + "'?");
}
