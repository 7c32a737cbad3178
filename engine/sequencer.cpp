#include "engine/sequencer.h"

#include "kernels/check.h"

#include <algorithm>
#include <utility>

namespace tandem::engine {

namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }
bool any(const Bits& bits) { return std::find(bits.begin(), bits.end(), true) != bits.end(); }

}  // namespace

Sequencer::Sequencer(int rank, int ranks) : rank_(rank), ranks_(ranks) { shape_.ranks = ranks; }

// --- registration ---

void Sequencer::add_engine(EngineShape shape) {
  TANDEM_ASSERT(!pass_, "engines are registered outside passes");
  const int index = shape_.engines++;
  Engine engine;
  engine.first_bucket = shape_.buckets;
  engine.first_parameter = shape_.parameters;
  shape_.groups += shape.groups;
  shape_.buckets += shape.buckets;
  shape_.parameters += static_cast<int>(shape.bucket_of.size());
  engine_of_.resize(at(shape_.buckets), index);
  holding_.resize(at(shape_.buckets));
  // Unsettled buckets stand last, in reverse registration: what was registered last is reached
  // first by a backward pass, more often than not.
  const auto unsettled = std::find_if(order_.begin(), order_.end(), [&](int bucket) {
    return !engines_[at(engine_of(bucket))].settled;
  });
  std::vector<int> fresh;
  for (int b = shape_.buckets - 1; b >= engine.first_bucket; --b) {
    fresh.push_back(b);
  }
  order_.insert(unsettled, fresh.begin(), fresh.end());
  engine.shape = std::move(shape);
  engines_.push_back(std::move(engine));
}

void Sequencer::retire_engine(int engine) {
  engines_[at(engine)].retired = true;
  clear_window(engine);
}

void Sequencer::compact() {
  TANDEM_ASSERT(!pass_, "engines are compacted outside passes");
  std::vector<int> moved(at(shape_.buckets), -1);
  std::vector<Engine> kept;
  Bits holding;
  std::vector<int> engine_of;
  Shape shape;
  shape.ranks = ranks_;
  for (Engine& engine : engines_) {
    if (engine.retired) {
      continue;
    }
    for (int b = 0; b < engine.shape.buckets; ++b) {
      moved[at(engine.first_bucket + b)] = shape.buckets + b;
      holding.push_back(holding_[at(engine.first_bucket + b)]);
      engine_of.push_back(shape.engines);
    }
    engine.first_bucket = shape.buckets;
    engine.first_parameter = shape.parameters;
    shape.groups += engine.shape.groups;
    shape.buckets += engine.shape.buckets;
    shape.parameters += static_cast<int>(engine.shape.bucket_of.size());
    ++shape.engines;
    kept.push_back(std::move(engine));
  }
  std::vector<int> order;
  for (const int bucket : order_) {
    if (moved[at(bucket)] >= 0) {
      order.push_back(moved[at(bucket)]);
    }
  }
  engines_ = std::move(kept);
  holding_ = std::move(holding);
  engine_of_ = std::move(engine_of);
  order_ = std::move(order);
  shape_ = shape;
}

std::uint64_t Sequencer::order_hash() const {
  std::uint64_t hash = 1469598103934665603ULL;
  const auto mix = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  for (const Engine& engine : engines_) {
    mix(engine.retired ? 1 : 2);
    mix(engine.settled ? 1 : 2);
  }
  for (const int bucket : order_) {
    mix(static_cast<std::uint64_t>(bucket));
  }
  return hash;
}

// --- a pass ---

void Sequencer::start_pass() {
  TANDEM_ASSERT(!pass_, "the previous close is resolved before a pass opens");
  Pass& pass = pass_.emplace();
  pass.took.resize(at(shape_.engines));
  pass.missing.resize(at(shape_.buckets));
  pass.launched.resize(at(shape_.buckets));
  pass.late.resize(at(shape_.buckets));
  pass.completed.assign(at(shape_.buckets), kIncomplete);
}

void Sequencer::open(Opening opening, GateSay& say) {
  start_pass();
  Pass& pass = *pass_;
  pass.own = true;
  pass.hold = opening.hold;
  pass.allowed =
      opening.allowed.empty() ? Bits(at(shape_.engines), true) : std::move(opening.allowed);
  pass.frozen = std::move(opening.frozen);
  pass.frozen.resize(at(shape_.engines));
  pass.present.resize(at(shape_.engines));

  say.word = Word::kBackward;
  say.hold = opening.hold;
  say.armed_engines.assign(at(shape_.engines), false);
  say.unfrozen_buckets.assign(at(shape_.buckets), false);
  for (int e = 0; e < shape_.engines; ++e) {
    const Engine& engine = engines_[at(e)];
    Bits& frozen = pass.frozen[at(e)];
    frozen.resize(engine.shape.bucket_of.size());
    pass.present[at(e)].resize(engine.shape.bucket_of.size());
    if (engine.retired) {
      continue;
    }
    bool trains = false;
    for (std::size_t p = 0; p < frozen.size(); ++p) {
      if (!frozen[p]) {
        const int bucket = engine.first_bucket + engine.shape.bucket_of[p];
        ++pass.missing[at(bucket)];
        say.unfrozen_buckets[at(bucket)] = true;
        trains = true;
      }
    }
    say.armed_engines[at(e)] =
        trains && pass.allowed[at(e)] && !opening.armed.empty() && opening.armed[at(e)];
  }
}

void Sequencer::join(const GateMerged& gate) {
  start_pass();
  pass_->frozen.resize(at(shape_.engines));
  pass_->present.resize(at(shape_.engines));
  pass_->gate = gate;
}

Arrival Sequencer::classify(int engine, int parameter) const {
  if (!pass_ || pass_->closed || !pass_->own || !pass_->allowed[at(engine)] ||
      engines_[at(engine)].retired) {
    return Arrival::kDropped;
  }
  const bool again = pass_->present[at(engine)][at(parameter)];
  const bool frozen = pass_->frozen[at(engine)][at(parameter)];
  return again || frozen ? Arrival::kLate : Arrival::kMain;
}

bool Sequencer::holds(int engine) const {
  return pass_ && pass_->own && pass_->hold && engines_[at(engine)].shape.honours_hold;
}

void Sequencer::arrived(int engine, int parameter, Arrival place) {
  if (place == Arrival::kDropped) {
    return;
  }
  Pass& pass = *pass_;
  const Engine& owner = engines_[at(engine)];
  const int bucket = owner.first_bucket + owner.shape.bucket_of[at(parameter)];
  const bool first = !pass.took[at(engine)];
  if (first) {
    pass.took[at(engine)] = true;
    for (int b = 0; b < owner.shape.buckets; ++b) {  // frozen here: nothing to wait for
      if (pass.missing[at(owner.first_bucket + b)] == 0) {
        note_completion(owner.first_bucket + b);
      }
    }
  }
  bool completed = false;
  if (place == Arrival::kLate) {
    pass.late[at(bucket)] = true;
  } else {
    pass.present[at(engine)][at(parameter)] = true;
    if (holds(engine)) {
      holding_[at(bucket)] = true;
    }
    completed = --pass.missing[at(bucket)] == 0;
    if (completed) {
      note_completion(bucket);
    }
  }
  if (first || completed) {
    walk();
  }
}

void Sequencer::gate_merged(const GateMerged& gate, bool error) {
  pass_->gate = gate;
  pass_->failed = error;
  walk();
}

CloseSay Sequencer::close(bool failed) {
  Pass& pass = *pass_;
  TANDEM_ASSERT(!pass.closed, "a close is posted once a pass");
  pass.closed = true;
  CloseSay say;
  say.took_engines = pass.took;
  say.holding_engines = held_engines();
  say.late_buckets = pass.late;
  say.failed = failed;
  for (const int bucket : unsettled_buckets()) {
    say.completions.push_back(pass.completed[at(bucket)]);
  }
  return say;
}

Resolution Sequencer::close_merged(const CloseMerged& close) {
  Pass& pass = *pass_;
  TANDEM_ASSERT(pass.gate && pass.closed,
                "a close is merged after its gate and after the own close");
  Resolution resolution;
  resolution.failed = pass.failed || close.failed();
  resolution.failed_ranks = close.failed_ranks;
  resolution.ranks_in_pass = pass.gate->count(Word::kBackward);
  resolution.took_engines = close.took_engines;

  const auto touched = [&](int engine) {
    return close.took_engines[at(engine)] || close.holding_engines[at(engine)];
  };
  if (!pass.failed) {  // after an error gate nothing is launched on any rank
    for (const bool expected : {true, false}) {
      for (const int bucket : order_) {
        const int engine = engine_of(bucket);
        if (pass.gate->armed_engines[at(engine)] == expected && touched(engine) &&
            !holds_back(engine) && !skipped(bucket) && !pass.launched[at(bucket)]) {
          launch(bucket, false);
        }
      }
    }
  }
  if (!resolution.failed) {
    for (const int bucket : order_) {
      if (close.late_buckets[at(bucket)] && !holds_back(engine_of(bucket))) {
        launch(bucket, true);
      }
    }
    for (const int bucket : order_) {
      const int engine = engine_of(bucket);
      if (pass.late[at(bucket)] && holds_back(engine)) {
        holding_[at(bucket)] = true;
        resolution.late_to_main.push_back(
            Launch{engine, bucket - engines_[at(engine)].first_bucket, true, true});
      }
    }
    settle(close);
  } else {
    holding_.assign(holding_.size(), false);
  }
  pass_.reset();
  return resolution;
}

bool Sequencer::complete(int bucket) const {
  return pass_->took[at(engine_of(bucket))] && pass_->missing[at(bucket)] == 0;
}

bool Sequencer::holds_back(int engine) const {
  const GateMerged& gate = *pass_->gate;
  return engines_[at(engine)].shape.honours_hold && gate.hold_sayers > 0 &&
         gate.hold_sayers == gate.count(Word::kBackward);
}

bool Sequencer::travels_fp32(int engine) const {
  const GateMerged& gate = *pass_->gate;
  return gate.held_engines[at(engine)] ||
         (gate.hold_sayers > 0 && engines_[at(engine)].shape.honours_hold);
}

bool Sequencer::skipped(int bucket) const {
  const GateMerged& gate = *pass_->gate;
  return !gate.unfrozen_buckets[at(bucket)] && !gate.held_engines[at(engine_of(bucket))];
}

void Sequencer::note_completion(int bucket) {
  pass_->completed[at(bucket)] = completion(rank_, pass_->next_place++);
}

void Sequencer::launch(int bucket, bool late) {
  const int engine = engine_of(bucket);
  if (!late) {
    pass_->launched[at(bucket)] = true;
    holding_[at(bucket)] = false;
  }
  due_.push_back(Launch{engine, bucket - engines_[at(engine)].first_bucket, late,
                        late || travels_fp32(engine)});
}

// Launching, rule 1: a beginning of the sequence that close_merged() completes, because a complete
// bucket's engine took part.
void Sequencer::walk() {
  Pass& pass = *pass_;
  if (!pass.gate || pass.failed) {
    return;
  }
  for (; pass.cursor < order_.size(); ++pass.cursor) {
    const int bucket = order_[pass.cursor];
    const int engine = engine_of(bucket);
    if (!pass.gate->armed_engines[at(engine)] || holds_back(engine) || skipped(bucket)) {
      continue;
    }
    if (!complete(bucket)) {
      return;
    }
    launch(bucket, false);
  }
}

std::vector<int> Sequencer::unsettled_buckets() const {
  std::vector<int> buckets;
  for (int b = 0; b < shape_.buckets; ++b) {
    const Engine& engine = engines_[at(engine_of(b))];
    if (!engine.settled) {
      buckets.push_back(b);
    }
  }
  return buckets;
}

// Rule 4: engines that the first pass reached take their places behind the settled ones, by the
// merged (rank, place) of completion; incomplete buckets after them, then engines still unsettled,
// both in reverse registration.
void Sequencer::settle(const CloseMerged& close) {
  const std::vector<int> candidates = unsettled_buckets();
  std::vector<std::pair<std::uint64_t, int>> placed;  // (completion, -bucket)
  std::vector<int> rest;
  std::vector<int> settled;
  for (const int bucket : order_) {
    if (engines_[at(engine_of(bucket))].settled) {
      settled.push_back(bucket);
    }
  }
  Bits settling(at(shape_.engines));
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const int engine = engine_of(candidates[i]);
    if (close.took_engines[at(engine)] || close.holding_engines[at(engine)]) {
      settling[at(engine)] = true;
      placed.emplace_back(close.completions[i], -candidates[i]);
    } else {
      rest.push_back(candidates[i]);
    }
  }
  if (!any(settling)) {
    return;
  }
  std::sort(placed.begin(), placed.end());
  order_ = std::move(settled);
  for (const auto& [place, negative_bucket] : placed) {
    order_.push_back(-negative_bucket);
  }
  order_.insert(order_.end(), rest.rbegin(), rest.rend());
  for (int e = 0; e < shape_.engines; ++e) {
    engines_[at(e)].settled = engines_[at(e)].settled || settling[at(e)];
  }
}

// --- outside a pass ---

void Sequencer::launch_held(const Bits& held_engines) {
  for (const int bucket : order_) {
    const int engine = engine_of(bucket);
    if (held_engines[at(engine)]) {
      holding_[at(bucket)] = false;
      due_.push_back(Launch{engine, bucket - engines_[at(engine)].first_bucket, /*late=*/false,
                            /*fp32=*/true});
    }
  }
}

void Sequencer::clear_window(int engine) {
  const Engine& owner = engines_[at(engine)];
  for (int b = 0; b < owner.shape.buckets; ++b) {
    holding_[at(owner.first_bucket + b)] = false;
  }
}

std::vector<Launch> Sequencer::take_launches() { return std::exchange(due_, {}); }

Bits Sequencer::held_engines() const {
  Bits held(at(shape_.engines));
  for (int b = 0; b < shape_.buckets; ++b) {
    if (holding_[at(b)] && !engines_[at(engine_of(b))].retired) {
      held[at(engine_of(b))] = true;
    }
  }
  return held;
}

}  // namespace tandem::engine
