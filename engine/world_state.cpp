#include "engine/world_state.h"

#include "comm/planes.h"
#include "engine/gpu.h"
#include <tandem/error.h>

#include <algorithm>
#include <chrono>

namespace tandem::engine {

WorldState::WorldState(std::unique_ptr<comm::Rendezvous> rendezvous,
                       const WorldOptions& options,
                       std::unique_ptr<Lanes> lanes)
    : options_(options),
      rendezvous_(std::move(rendezvous)),
      group_(rendezvous_->group()),
      trace_(std::make_shared<Trace>(group_.rank, group_.size)),
      control_(comm::make_control_plane(*rendezvous_, deadline())),
      devices_(std::move(lanes)),
      queue_(std::make_unique<kernels::Queue>(
          "reductions",
          kernels::QueueDelays{
              options.queue_delay_seed * 1000003U + static_cast<std::uint64_t>(group_.rank),
              options.queue_delay_us})),
      sequencer_(group_.rank, group_.size),
      tracker_(std::make_unique<hooks::PassTracker>(*this)),
      progress_([this] { progress(); }) {}

WorldState::~WorldState() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  progress_wanted_.notify_all();
  control_->wake();
  progress_.join();
  tracker_.reset();  // no event from here on
  if (!closed_ && !broken_) {
    control_->abort("rank " + std::to_string(group_.rank) +
                    " ended its world without close(), probably by an exception");
  }
  queue_.reset();  // what is enqueued ends by itself: peers are there, or the world is aborted
  finish_lanes();
}

// Nothing may be freed that a stream still uses. Work that does not end by itself is ended.
void WorldState::finish_lanes() noexcept {
  for (const auto& lane : lanes_) {
    try {
      const kernels::Marks marks{lane->torch->current().record(), lane->stream->record()};
      for (const kernels::Mark& mark : marks) {
        if (!mark.wait_until(deadline().at)) {
          lane->plane->abort();
        }
        static_cast<void>(mark.wait_until(deadline().at));
      }
    } catch (...) {  // NOLINT(bugprone-empty-catch): a device that failed does no more work
    }
  }
}

c10::Device WorldState::gpu() const {
  const comm::Nodes& nodes = rendezvous_->nodes();
  const std::vector<int>& local = nodes.ranks_of(nodes.node_of(group_.rank));
  const auto place = std::find(local.begin(), local.end(), group_.rank) - local.begin();
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(gpu_of_local_rank(static_cast<int>(place)))};
}

void WorldState::start_trace(const std::string& path) {
  const std::lock_guard lock(mutex_);
  trace_->start(path);
  for (const auto& core : cores_) {
    if (!core->retired()) {
      name_in_trace(*core);
    }
  }
}

void WorldState::name_in_trace(const EngineCore& core) {
  std::vector<std::string> parameters;
  for (const zero::ParameterInfo& info : core.infos) {
    parameters.push_back(info.name);
  }
  trace_->name_engine(core.serial, core.name, std::move(parameters));
}

// Takes merged rounds of the open pass while the user's thread computes. It sleeps while there is
// nothing to take, and keeps out while the user's thread waits for a round itself.
void WorldState::progress() {
  using namespace std::chrono_literals;
  Lock lock(mutex_);
  while (!stopping_) {
    const bool outstanding =
        sequencer_.in_pass() && (!sequencer_.gate_known() || sequencer_.closed() || abandoned_);
    watch_lanes();
    if (broken_ || touching_ > 0 || !outstanding) {
      // A pass that dies is noted without the lock, so its note can be missed for one turn.
      progress_wanted_.wait_for(lock, sequencer_.in_pass() ? 20ms : 1000ms);
      continue;
    }
    const std::uint32_t seen = control_->change();
    try {
      if (advance()) {
        continue;
      }
    } catch (const std::exception& error) {
      break_world(error.what());
      continue;
    }
    lock.unlock();
    control_->wait_for_change(seen, comm::Clock::now() + 20ms);
    lock.lock();
  }
}

// What users' streams wait for, and the host does not: a rank that is gone leaves its peers'
// gathers without an end, on which the user would wait in the middle of his own code.
void WorldState::watch_lanes() {
  for (const auto& lane : lanes_) {
    if (!lane->watch) {
      continue;
    }
    try {
      if (lane->watch->mark.complete()) {
        lane->watch.reset();
        continue;
      }
      lane->plane->check();
      if (lane->watch->deadline.passed()) {
        time_out(lane->watch->what, {});
      }
    } catch (const std::exception& error) {
      lane->watch.reset();
      break_world(error.what());
      lane->plane->abort();
    }
  }
}

}  // namespace tandem::engine
