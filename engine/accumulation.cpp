// engine/accumulation.cpp: which micro-batch ends a window; see tandem/accumulation.h.
#include <tandem/accumulation.h>
#include <tandem/error.h>

#include <string>

namespace tandem {

GradientAccumulation::GradientAccumulation(World& world, const AccumulationOptions& options)
    : world_(world), options_(options) {
  if (options_.steps < 1) {
    throw InvalidArgument("GradientAccumulation: steps is " + std::to_string(options_.steps) +
                          "; a window holds at least one micro-batch");
  }
  const Average average = world_.average();
  if (average != Average::kTokens && average != Average::kNone) {
    world_.set_average(Average::kMicroBatches);
  }
}

void GradientAccumulation::begin(const MicroBatch& micro_batch) {
  settle();
  if (boundary_) {
    held_ = 0;
  }
  ++held_;
  boundary_ = held_ == options_.steps || micro_batch.last_of_epoch;
  settled_ = !boundary_;
  updates_ = world_.updates();
  if (!options_.hold || boundary_) {
    release();
  } else if (!hold_) {
    hold_.emplace(world_.hold());
  }
}

void GradientAccumulation::restart() {
  settle();
  held_ = 0;
  boundary_ = false;
  settled_ = true;
  release();
}

std::int64_t GradientAccumulation::scheduler_steps() {
  settle();
  return scheduler_steps_;
}

// An update since the boundary's micro-batch began is that window's.
void GradientAccumulation::settle() {
  if (settled_ || world_.updates() == updates_) {
    return;
  }
  settled_ = true;
  scheduler_steps_ += ranks() * (options_.adjust_scheduler ? held_ : 1);
}

}  // namespace tandem
