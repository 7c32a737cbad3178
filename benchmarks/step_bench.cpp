// benchmarks/step_bench.cpp: whole training steps on the ranks that mpirun started, one thread a
// rank, each rank with its threads on a core of its own.
//
// The limit is the same program without communication and sharding: forward, plain backward, and
// one update of every whole parameter in every rank by the same kernel. Figure and limit are means
// over the ranks, both begun at a barrier.
#include "benchmarks/paired.h"
#include "benchmarks/stream_array.h"
#include "benchmarks/workloads.h"
#include "kernels/fold.h"
#include "kernels/update.h"
#include "zero/update_rule.h"
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <sched.h>
#include <thread>

namespace tandem::benchmarks {
namespace {

constexpr int kPairs = 9;
constexpr double kFloor = 1 / 1.10;  // a tenth above the limit at most

AdamW optimizer() { return {.lr = 1e-4, .weight_decay = 0.01}; }

using MakeWorkload = std::function<std::unique_ptr<Workload>(torch::ScalarType, int rank)>;

/// Forward, plain backward, and updates of whole parameters.
class PlainProgram {
 public:
  explicit PlainProgram(std::unique_ptr<Workload> workload) : workload_(std::move(workload)) {
    for (const auto& module : workload_->modules()) {
      for (const torch::Tensor& parameter : module->parameters()) {
        const std::int64_t numel = parameter.numel();
        Own& own = parameters_.emplace_back();
        own.parameter = parameter;
        for (auto& state : own.states) state = stream_array<float>(numel);
        if (parameter.scalar_type() == torch::kFloat32) continue;
        own.master = stream_array<float>(numel);
        own.grad = stream_array<float>(numel);
        const torch::Tensor exact = parameter.detach().to(torch::kFloat32).contiguous();
        std::copy_n(exact.data_ptr<float>(), numel, own.master.data());
      }
    }
  }

  /// Seconds until the end of the backward pass, and of the step.
  std::array<double, 2> step() {
    const double start = seconds_now();
    workload_->loss([](std::size_t, const torch::Tensor&) {}).backward();
    const double middle = seconds_now();
    const kernels::Update rule = zero::update_at(optimizer(), ++steps_, 1.0);
    for (Own& own : parameters_) update(own, rule);
    return {middle - start, seconds_now() - start};
  }

 private:
  struct Own {
    torch::Tensor parameter;
    kernels::DeviceArray<float> master, grad;
    std::array<kernels::DeviceArray<float>, 2> states;
  };

  static void update(Own& own, const kernels::Update& rule) {
    torch::Tensor& grad = own.parameter.mutable_grad();
    const torch::Tensor dense = grad.contiguous();
    kernels::UpdateArrays arrays;
    arrays.param = own.parameter.data_ptr();
    arrays.numel = own.parameter.numel();
    for (std::size_t k = 0; k < own.states.size(); ++k) arrays.state[k] = own.states[k].data();
    if (own.master.empty()) {
      arrays.grad = dense.data_ptr<float>();
    } else {
      const kernels::Slice slice{dense.data_ptr(), kernels::Dtype::kBFloat16};
      kernels::fold({&slice, 1}, arrays.numel, own.grad.data(), kernels::Accumulator::kFresh);
      arrays.grad = own.grad.data();
      arrays.master = own.master.data();
      arrays.param_dtype = kernels::Dtype::kBFloat16;
    }
    kernels::update(rule, arrays);
    grad = torch::Tensor();
  }

  std::unique_ptr<Workload> workload_;
  std::deque<Own> parameters_;
  std::int64_t steps_ = 0;
};

void whole_step(benchmark::State& state,
                World& world,
                const MakeWorkload& make,
                torch::ScalarType type,
                bool share) {
  torch::manual_seed(7);
  const auto workload = make(type, world.rank());
  std::deque<Engine<std::shared_ptr<torch::nn::Module>>> engines;
  std::int64_t numel = 0;
  for (const auto& module : workload->modules()) {
    EngineOptions options;
    options.name = "engine " + std::to_string(engines.size());
    options.optimizer = optimizer();
    options.share_parameters_on_node = share;
    engines.emplace_back(world, module, options);
    for (const torch::Tensor& parameter : module->parameters()) numel += parameter.numel();
  }
  torch::manual_seed(7);
  PlainProgram plain(make(type, world.rank()));

  std::vector<double> passes, plain_passes, exposed, norm, update, gather;
  Paired paired(kFloor);
  const auto pair = [&](bool counted) {
    (void)world.sum(0.0);
    const double start = seconds_now();
    workload->loss([&](std::size_t k, const torch::Tensor& output) { engines[k].track(output); })
        .backward();
    const double middle = seconds_now();
    const StepResult result = world.step();
    const double figure = world.mean(seconds_now() - start);
    if (!result.applied) throw std::runtime_error("step_bench: a step was not applied");
    (void)world.sum(0.0);
    const auto [plain_pass, plain_step] = plain.step();
    const double limit = world.mean(plain_step);
    if (!counted) return;
    paired.add(state, figure, limit);
    passes.push_back(middle - start);
    plain_passes.push_back(plain_pass);
    exposed.push_back(result.times.exposed);
    norm.push_back(result.times.norm);
    update.push_back(result.times.update);
    gather.push_back(result.times.gather);
  };
  for (int i = 0; i < (quick() ? 1 : 3); ++i) pair(false);
  for (auto _ : state) pair(true);
  paired.report(state);
  state.counters["parameters"] = static_cast<double>(numel);
  state.counters["pass_ms"] = median(passes) * 1e3;
  state.counters["plain_pass_ms"] = median(plain_passes) * 1e3;
  state.counters["exposed_ms"] = median(exposed) * 1e3;
  state.counters["norm_ms"] = median(norm) * 1e3;
  state.counters["update_ms"] = median(update) * 1e3;
  state.counters["gather_ms"] = median(gather) * 1e3;
}

void register_all(World& world) {
  const auto towers = [](std::int64_t width) -> MakeWorkload {
    return [width = quick() ? 128 : width](torch::ScalarType type, int rank) {
      return make_towers(width, type, rank);
    };
  };
  const MakeWorkload code_search = [](torch::ScalarType type, int rank) {
    return make_code_search(elements(256), type, rank);
  };
  const std::vector<std::pair<std::string, MakeWorkload>> models{
      {"two towers 20.0 M", towers(1720)},
      {"two towers 60.6 M", towers(3072)},
      {"code search 17.3 M", code_search}};
  for (const auto& [name, make] : models) {
    for (const auto type : {torch::kFloat32, torch::kBFloat16}) {
      for (const bool share : {false, true}) {
        add("step/" + name + (type == torch::kFloat32 ? ", fp32" : ", bf16") +
                (share ? ", one copy a node" : ""),
            kPairs, [=, &world, make = make](benchmark::State& state) {
              whole_step(state, world, make, type, share);
            });
      }
    }
  }
}

/// Before any thread is made, so that all of this rank's inherit it.
void pin_to_core() {
  const char* const rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  if (rank == nullptr) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(std::atoi(rank)) % cores, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace
}  // namespace tandem::benchmarks

int main(int argc, char** argv) {
  tandem::benchmarks::pin_to_core();
  at::set_num_threads(1);
  benchmark::AddCustomContext("libtorch", TORCH_VERSION);
  tandem::World world = tandem::World::from_environment();
  tandem::benchmarks::register_all(world);
  return tandem::benchmarks::run(argc, argv, world.rank() == 0);
}
