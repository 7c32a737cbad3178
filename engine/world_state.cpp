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
      average_(options.average),
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
  if (!closed_ && !broken_) {
    control_->abort("rank " + std::to_string(group_.rank) +
                    " ended its world without close(), probably by an exception");
  }
  tracker_.reset();  // no event from here on
  queue_.reset();    // what is enqueued ends by itself: peers are there, or the world is aborted
  finish_lanes();
}

// Nothing may be freed that a stream still uses.
void WorldState::finish_lanes() noexcept {
  const comm::Deadline until = deadline();
  for (const auto& lane : lanes_) {
    try {
      // First the lane's own: users' streams wait for it.
      static_cast<void>(lane->finish(lane->stream->record(), until));
      static_cast<void>(lane->finish(lane->torch->current().record(), until));
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
    watch();
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

// What nobody waits for with a deadline on a device: the work that users' streams wait for
// (gathers, and reductions whose staging is used again), and the queue's jobs that give it. A rank
// that is gone would leave that without an end, and the user waiting for it in the middle of his
// own code.
void WorldState::watch() {
  if (closed_) {
    return;
  }
  for (const auto& lane : lanes_) {
    if (!lane->asynchronous || lane->ended) {
      continue;
    }
    try {
      if (broken_) {
        throw WorldBroken(*broken_);
      }
      if (const std::exception_ptr error = queue_->error()) {
        std::rethrow_exception(error);
      }
      lane->plane->check();
      if (const std::optional<std::string> late = lane->first_late()) {
        time_out(*late, {});
      }
    } catch (const std::exception& error) {
      break_world(error.what());
      lane->plane->abort();
      lane->ended = true;
    }
  }
}

}  // namespace tandem::engine
