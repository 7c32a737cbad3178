#include "tests/engine/sequencer_world.h"

#include <stdexcept>

namespace tandem::engine::test {

namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

void merge_into(std::optional<comm::Message>& merged, const comm::Message& message) {
  if (merged) {
    merged->merge(message);
  } else {
    merged = message;
  }
}

}  // namespace

SequencerWorld::SequencerWorld(const Scenario& scenario)
    : scenario_(scenario), size_(static_cast<int>(scenario.passes.at(0).size())) {}

void SequencerWorld::fail(const std::string& what) const {
  throw std::logic_error(scenario_.name + ": " + what);
}

std::size_t SequencerWorld::explore() {
  State state;
  for (int r = 0; r < size_; ++r) {
    Rank& rank = state.ranks.emplace_back();
    rank.sequencer.emplace(r, size_);
    for (const EngineShape& shape : scenario_.engines) {
      rank.sequencer->add_engine(shape);
    }
  }
  state.gates.resize(scenario_.passes.size());
  state.gate_posts.resize(scenario_.passes.size());
  state.closes.resize(scenario_.passes.size());
  state.close_posts.resize(scenario_.passes.size());
  seen_.clear();
  visit(state);
  return seen_.size();
}

void SequencerWorld::visit(const State& state) {
  if (!seen_.insert(key(state)).second) {
    return;
  }
  check(state);
  bool stuck = true;
  bool done = true;
  for (int r = 0; r < size_; ++r) {
    done = done && state.ranks[at(r)].pass == scenario_.passes.size();
    for (int action = 0; action < 3; ++action) {
      if (possible(state, r, action)) {
        stuck = false;
        State next = state;
        perform(next, r, action);
        visit(next);
      }
    }
  }
  if (stuck && !done) {
    fail("I2: nobody can go on");
  }
  if (done) {
    check_end(state);
  }
}

bool SequencerWorld::possible(const State& state, int r, int action) const {
  const Rank& rank = state.ranks[at(r)];
  if (rank.pass == scenario_.passes.size()) {
    return false;
  }
  const Script& script = scenario_.passes[rank.pass][at(r)];
  switch (action) {
    case 0:
      if (rank.close_posted) {
        return false;
      }
      return !rank.gate_posted || script.runs;  // a rank at its step waits for the gate
    case 1:
      return rank.gate_posted && !rank.gate_taken && state.gate_posts[rank.pass] == size_;
    default:
      return rank.gate_taken && rank.close_posted && state.close_posts[rank.pass] == size_;
  }
}

void SequencerWorld::perform(State& state, int r, int action) const {
  Rank& rank = state.ranks[at(r)];
  Sequencer& sequencer = *rank.sequencer;
  const std::size_t pass = rank.pass;
  const Script& script = scenario_.passes[pass][at(r)];
  const Shape& shape = sequencer.shape();
  const auto post_close = [&](bool failed) {
    merge_into(state.closes[pass], encode(sequencer.close(failed), shape, r));
    ++state.close_posts[pass];
    rank.close_posted = true;
  };

  if (action == 0 && !rank.gate_posted) {
    GateSay say;
    say.tunables.resize(at(shape.groups));
    say.tokens.resize(at(shape.engines));
    if (script.runs) {
      sequencer.open({script.armed, script.frozen, script.allowed, script.hold}, say);
    } else {
      say.word = Word::kStep;
    }
    say.world_hash = sequencer.order_hash();
    say.held_engines = sequencer.held_engines();
    merge_into(state.gates[pass], encode(say, shape, r));
    ++state.gate_posts[pass];
    rank.gate_posted = true;
  } else if (action == 0 && rank.next_arrival < script.arrivals.size()) {
    const auto [engine, parameter] = script.arrivals[rank.next_arrival++];
    const Arrival place = sequencer.classify(engine, parameter);
    const int bucket = scenario_.engines[at(engine)].bucket_of[at(parameter)];
    const Token token{static_cast<int>(pass), r, engine, parameter,
                      static_cast<int>(rank.next_arrival)};
    if (place != Arrival::kDropped) {
      rank.arrived.insert(token);
      (place == Arrival::kMain ? rank.main : rank.late)[{engine, bucket}].insert(token);
    }
    sequencer.arrived(engine, parameter, place);
  } else if (action == 0) {
    post_close(script.fails);
  } else if (action == 1) {
    const GateMerged gate = decode_gate(*state.gates[pass], shape);
    if (gate_error(gate, size_)) {
      fail("I1: orders or holds differ at a gate: " + *gate_error(gate, size_));
    }
    rank.gate_taken = true;
    if (script.runs) {
      sequencer.gate_merged(gate, false);
    } else {
      sequencer.join(gate);
      post_close(false);
    }
  } else {
    const Resolution resolution = sequencer.close_merged(decode_close(*state.closes[pass], shape));
    drain(rank);
    if (resolution.failed) {
      for (auto* buffers : {&rank.main, &rank.late}) {
        for (auto& [bucket, tokens] : *buffers) {
          rank.discarded.insert(tokens.begin(), tokens.end());
        }
        buffers->clear();
      }
      for (const std::set<Token>& tokens :
           rank.contributed) {  // their windows are discarded as well
        rank.discarded.insert(tokens.begin(), tokens.end());
      }
    }
    for (const Launch& late : resolution.late_to_main) {
      auto& tokens = rank.late[{late.engine, late.bucket}];
      rank.main[{late.engine, late.bucket}].insert(tokens.begin(), tokens.end());
      tokens.clear();
    }
    ++rank.pass;
    rank.next_arrival = 0;
    rank.gate_posted = rank.gate_taken = rank.close_posted = false;
  }
  drain(rank);
}

void SequencerWorld::drain(Rank& rank) const {
  for (const Launch& launch : rank.sequencer->take_launches()) {
    auto& tokens = (launch.late ? rank.late : rank.main)[{launch.engine, launch.bucket}];
    rank.launches.push_back(launch);
    rank.contributed.push_back(tokens);
    tokens.clear();
  }
}

// I1: at every moment one rank's launches are a beginning of the other's.
void SequencerWorld::check(const State& state) const {
  for (const Rank& rank : state.ranks) {
    const auto& first = state.ranks[0].launches;
    for (std::size_t i = 0; i < std::min(first.size(), rank.launches.size()); ++i) {
      if (!(first[i] == rank.launches[i])) {
        fail("I1: launch " + std::to_string(i) + " differs between ranks");
      }
    }
  }
}

void SequencerWorld::check_end(State state) const {
  Bits held(scenario_.engines.size());
  for (const Rank& rank : state.ranks) {
    const Bits mine = rank.sequencer->held_engines();
    for (std::size_t e = 0; e < held.size(); ++e) {
      held[e] = held[e] || mine[e];
    }
  }
  for (Rank& rank : state.ranks) {
    rank.sequencer->launch_held(held);
    drain(rank);
    if (rank.launches != state.ranks[0].launches) {
      fail("I2: ranks launched different buckets in the end");
    }
    if (rank.sequencer->order() != state.ranks[0].sequencer->order()) {
      fail("I1: orders differ in the end");
    }
    // I3: exactly once, or discarded.
    std::multiset<Token> contributed;
    for (const std::set<Token>& tokens : rank.contributed) {
      contributed.insert(tokens.begin(), tokens.end());
    }
    for (const Token& token : rank.arrived) {
      const std::size_t times = contributed.count(token);
      if (times > 1 || (times == 0 && rank.discarded.count(token) == 0)) {
        fail("I3: a gradient was contributed " + std::to_string(times) + " times");
      }
    }
  }
}

std::string SequencerWorld::key(const State& state) const {
  std::string key;
  const auto add = [&](std::size_t value) { key += std::to_string(value) + ','; };
  for (const Rank& rank : state.ranks) {
    add(rank.pass);
    add(rank.next_arrival);
    add((rank.gate_posted ? 1U : 0U) + (rank.gate_taken ? 2U : 0U) + (rank.close_posted ? 4U : 0U));
    add(rank.launches.size());
    for (const std::set<Token>& tokens : rank.contributed) {
      add(tokens.size());
    }
    key += ';';
  }
  return key;
}

}  // namespace tandem::engine::test
