// train.h: the training run: two towers and a loss head as three engines, one loss, one backward,
// one joint step. Called by main.cpp on every rank.
#pragma once

#include "examples/code_search/bags.h"
#include "examples/code_search/model.h"
#include "examples/code_search/settings.h"
#include <tandem/report.h>
#include <tandem/world.h>

#include <cstdint>
#include <functional>

namespace code_search {

/// One update, as rank 0 saw it.
struct Progress {
  int step = 0;  // from 1
  int steps = 0;
  double loss = 0.0;  // mean over all ranks and micro-batches
  double temperature = 0.0;
  double learning_rate = 0.0;
  double seconds = 0.0;           // the whole update
  double backward_seconds = 0.0;  // of these, inside loss.backward()
  std::int64_t pairs = 0;         // of all ranks in this update
  tandem::StepResult result;
};

struct Trained {
  Tower comments;
  Tower codes;
  bool interrupted = false;  // on all ranks alike
  int steps = 0;             // done
  double seconds = 0.0;
  double temperature = 0.0;
  std::uint64_t parameter_hash = 0;
  tandem::MemoryReport memory;
  tandem::WireReport wire;
};

/// Collective. `on_step` is called on every rank after each update; it must not communicate.
Trained train(tandem::World& world,
              const Settings& settings,
              const Dealer& dealer,
              const std::function<void(const Progress&)>& on_step);

}  // namespace code_search
