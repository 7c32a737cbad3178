#include "engine/messages.h"

#include <algorithm>
#include <bit>

namespace tandem::engine {

namespace {

constexpr std::uint64_t kMinNeutral = std::numeric_limits<std::uint64_t>::max();

std::size_t words_for(int bits) { return (static_cast<std::size_t>(bits) + 63) / 64; }

void append(std::vector<std::uint64_t>& words, const Bits& bits, int count) {
  const std::size_t first = words.size();
  words.resize(first + words_for(count), 0);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) {
      words[first + i / 64] |= std::uint64_t{1} << (i % 64);
    }
  }
}

/// Reads what append() wrote, in the same order.
class Reader {
 public:
  explicit Reader(const std::vector<std::uint64_t>& words) : words_(words) {}

  std::uint64_t word() { return words_[next_++]; }
  Bits bits(int count) {
    Bits bits(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < bits.size(); ++i) {
      bits[i] = ((words_[next_ + i / 64] >> (i % 64)) & 1U) != 0;
    }
    next_ += words_for(count);
    return bits;
  }

 private:
  const std::vector<std::uint64_t>& words_;
  std::size_t next_ = 0;
};

/// A value that its sayers must agree on (M2).
void agree_on(comm::Message& message, bool says, std::uint64_t value) {
  message.mins.push_back(says ? value : kMinNeutral);
  message.maxs.push_back(says ? value : 0);
}

class AgreedReader {
 public:
  explicit AgreedReader(const comm::Message& message) : message_(message) {}

  /// The maximum; `equal` becomes false if any rank that spoke said another value.
  std::uint64_t read(bool anybody, bool& equal) {
    const std::uint64_t low = message_.mins[next_];
    const std::uint64_t high = message_.maxs[next_];
    ++next_;
    if (anybody && low != high) {
      equal = false;
    }
    return high;
  }

 private:
  const comm::Message& message_;
  std::size_t next_ = 0;
};

}  // namespace

std::uint64_t hash_of(const Bits& bits) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (const bool bit : bits) {
    hash = (hash ^ (bit ? 1U : 2U)) * 1099511628211ULL;
  }
  return hash;
}

const char* name_of(Word word) {
  switch (word) {
    case Word::kBackward:
      return "backward";
    case Word::kStep:
      return "step";
    case Word::kZeroGrad:
      return "zero_grad";
    case Word::kValues:
      return "mean/sum/any/broadcast";
    case Word::kRegister:
      return "making an Engine";
    case Word::kLeave:
      return "leave";
    case Word::kGradient:
      return "gradient";
  }
  return "?";
}

comm::Message encode(const GateSay& say, const Shape& shape, int rank) {
  const bool backward = say.word == Word::kBackward;
  const bool step = say.word == Word::kStep;
  const bool gradient = say.word == Word::kGradient;
  // A leaver's gradients count as well.
  const bool contributes = step || gradient || say.word == Word::kLeave;
  const bool zero = say.word == Word::kZeroGrad;
  const bool values = say.word == Word::kValues;

  comm::Message message;
  append(message.ors, say.held_engines, shape.engines);
  Bits refusing(static_cast<std::size_t>(shape.ranks));
  refusing[static_cast<std::size_t>(rank)] = say.refused;
  append(message.ors, refusing, shape.ranks);
  append(message.ors, backward ? say.armed_engines : Bits(), shape.engines);
  append(message.ors, backward ? say.unfrozen_buckets : Bits(), shape.buckets);
  append(message.ors, step ? say.step_engines : Bits(), shape.engines);
  append(message.ors, contributes ? say.seen_parameters : Bits(), shape.parameters);
  append(message.ors, contributes ? say.counted_engines : Bits(), shape.engines);
  append(message.ors, zero ? say.zero_engines : Bits(), shape.engines);
  Bits stepping(static_cast<std::size_t>(shape.ranks));
  stepping[static_cast<std::size_t>(rank)] = step;
  append(message.ors, stepping, shape.ranks);
  Bits speaker(static_cast<std::size_t>(shape.ranks));
  speaker[static_cast<std::size_t>(rank)] = values;
  append(message.ors, speaker, shape.ranks);
  for (int r = 0; r < shape.ranks; ++r) {  // a slot a rank, so that merging rounds nothing
    message.ors.push_back(values && r == rank ? std::bit_cast<std::uint64_t>(say.value) : 0);
  }

  agree_on(message, true, say.world_hash);
  agree_on(message, backward, say.only_hash);
  agree_on(message, backward, std::bit_cast<std::uint64_t>(say.loss_scale));
  for (const bool says : {backward, step, gradient}) {
    for (int e = 0; e < shape.engines; ++e) {
      const double multiplier =
          say.multipliers.empty() ? 1.0 : say.multipliers[static_cast<std::size_t>(e)];
      agree_on(message, says, std::bit_cast<std::uint64_t>(multiplier));
    }
  }
  for (int e = 0; e < shape.engines; ++e) {
    const std::int64_t calls =
        say.multiplications.empty() ? 0 : say.multiplications[static_cast<std::size_t>(e)];
    agree_on(message, backward, static_cast<std::uint64_t>(calls));
  }
  agree_on(message, step, hash_of(say.step_engines));
  agree_on(message, step, std::bit_cast<std::uint64_t>(say.clip_norm));
  agree_on(message, step, std::bit_cast<std::uint64_t>(say.norm_type));
  for (int g = 0; g < shape.groups; ++g) {
    const Tunables tunables = step ? say.tunables[static_cast<std::size_t>(g)] : Tunables{};
    agree_on(message, step, std::bit_cast<std::uint64_t>(tunables.lr));
    agree_on(message, step, std::bit_cast<std::uint64_t>(tunables.weight_decay));
  }
  agree_on(message, zero, hash_of(say.zero_engines));
  agree_on(message, values, static_cast<std::uint64_t>(say.value_op));
  agree_on(message, values, static_cast<std::uint64_t>(say.value_root));
  agree_on(message, gradient, static_cast<std::uint64_t>(say.gradient_engine));
  agree_on(message, gradient, static_cast<std::uint64_t>(say.gradient_parameter));
  agree_on(message, say.word == Word::kRegister, say.register_hash);

  for (int word = 0; word < kWords; ++word) {
    message.sums.push_back(static_cast<int>(say.word) == word ? 1 : 0);
  }
  message.sums.push_back(backward && say.hold ? 1 : 0);
  for (int e = 0; e < shape.engines; ++e) {
    message.sums.push_back(contributes ? say.tokens[static_cast<std::size_t>(e)] : 0);
  }
  return message;
}

GateMerged decode_gate(const comm::Message& message, const Shape& shape) {
  GateMerged gate;
  std::size_t sum = 0;
  for (int& sayers : gate.sayers) {
    sayers = static_cast<int>(message.sums[sum++]);
  }
  gate.hold_sayers = static_cast<int>(message.sums[sum++]);
  for (int e = 0; e < shape.engines; ++e) {
    gate.tokens.push_back(message.sums[sum++]);
  }

  Reader ors(message.ors);
  gate.held_engines = ors.bits(shape.engines);
  gate.refusing_ranks = ors.bits(shape.ranks);
  gate.armed_engines = ors.bits(shape.engines);
  gate.unfrozen_buckets = ors.bits(shape.buckets);
  gate.step_engines = ors.bits(shape.engines);
  gate.seen_parameters = ors.bits(shape.parameters);
  gate.counted_engines = ors.bits(shape.engines);
  gate.zero_engines = ors.bits(shape.engines);
  gate.stepping_ranks = ors.bits(shape.ranks);
  const Bits speakers = ors.bits(shape.ranks);
  for (int r = 0; r < shape.ranks; ++r) {
    const double value = std::bit_cast<double>(ors.word());
    gate.values.push_back(speakers[static_cast<std::size_t>(r)] ? std::optional(value)
                                                                : std::nullopt);
  }

  const bool step = gate.said(Word::kStep);
  const bool values = gate.said(Word::kValues);
  AgreedReader agreed(message);
  agreed.read(true, gate.hashes_equal);
  const bool backward = gate.said(Word::kBackward);
  const bool gradient = gate.said(Word::kGradient);
  agreed.read(backward, gate.only_equal);
  gate.loss_scale = std::bit_cast<double>(agreed.read(backward, gate.scale_equal));
  const auto read_multipliers = [&](bool said, GateMerged::Multipliers& merged, const Bits* of) {
    for (int e = 0; e < shape.engines; ++e) {
      bool equal = true;
      const auto multiplier = std::bit_cast<double>(agreed.read(said, equal));
      merged.of_engine.push_back(said ? multiplier : 1.0);
      const bool counts = of == nullptr || (*of)[static_cast<std::size_t>(e)];
      merged.equal = merged.equal && (equal || !counts);
    }
  };
  read_multipliers(backward, gate.backward_multipliers, nullptr);
  read_multipliers(step, gate.step_multipliers, &gate.step_engines);
  read_multipliers(gradient, gate.gradient_multipliers, nullptr);
  for (int e = 0; e < shape.engines; ++e) {
    const auto calls =
        static_cast<std::int64_t>(agreed.read(backward, gate.backward_multipliers.equal));
    gate.multiplications.push_back(backward ? calls : 0);
  }
  agreed.read(step, gate.step_equal);
  gate.clip_norm = std::bit_cast<double>(agreed.read(step, gate.step_equal));
  gate.norm_type = std::bit_cast<double>(agreed.read(step, gate.step_equal));
  for (int g = 0; g < shape.groups; ++g) {
    Tunables tunables;
    tunables.lr = std::bit_cast<double>(agreed.read(step, gate.step_equal));
    tunables.weight_decay = std::bit_cast<double>(agreed.read(step, gate.step_equal));
    gate.tunables.push_back(tunables);
  }
  agreed.read(gate.said(Word::kZeroGrad), gate.zero_equal);
  gate.value_op = static_cast<ValueOp>(agreed.read(values, gate.value_equal));
  gate.value_root = static_cast<int>(agreed.read(values, gate.value_equal));
  gate.gradient_engine = static_cast<int>(agreed.read(gradient, gate.gradient_equal));
  gate.gradient_parameter = static_cast<int>(agreed.read(gradient, gate.gradient_equal));
  agreed.read(gate.said(Word::kRegister), gate.register_equal);
  return gate;
}

std::optional<std::string> gate_error(const GateMerged& gate, int ranks) {
  if (gate.count(Word::kLeave) == ranks) {
    return std::nullopt;  // nothing is stepped any more, so engines may be gone already on some
                          // ranks
  }
  if (std::find(gate.refusing_ranks.begin(), gate.refusing_ranks.end(), true) !=
      gate.refusing_ranks.end()) {
    return "a rank found its engines in a state that it cannot train";
  }
  if (!gate.hashes_equal) {
    return "ranks hold different engines, layouts or orders (an engine made or destroyed on some "
           "ranks only?)";
  }
  if (gate.said(Word::kRegister) && gate.count(Word::kRegister) != ranks) {
    return "some ranks make an Engine while others do something else";
  }
  if (!gate.register_equal) {
    return "ranks make different engines";
  }
  if (gate.said(Word::kBackward)) {
    if (!gate.only_equal) {
      return "ranks run a backward pass under different World::only() scopes";
    }
    if (!gate.backward_multipliers.equal) {
      return "ranks multiply the gradients before a backward pass by different factors "
             "(multiply_gradients)";
    }
    if (!gate.scale_equal) {
      return "ranks scale the loss of a backward pass differently (World::scale on some ranks "
             "only?)";
    }
    return std::nullopt;  // the others join it
  }
  if (gate.said(Word::kZeroGrad) + gate.said(Word::kValues) + gate.said(Word::kGradient) > 1) {
    return "ranks make different ones of the calls zero_grad, mean/sum/any/broadcast and gradient";
  }
  if (!gate.zero_equal) {
    return "ranks call zero_grad for different engines";
  }
  if (!gate.value_equal) {
    return "ranks call different ones of mean/sum/any/broadcast, or other roots";
  }
  if (gate.said(Word::kValues) && gate.value_op == ValueOp::kBroadcast &&
      !gate.values[static_cast<std::size_t>(gate.value_root)].has_value()) {
    return "the root of a broadcast is at another call";
  }
  if (!gate.gradient_equal) {
    return "ranks ask for the gradients of different parameters";
  }
  if (!gate.gradient_multipliers.equal) {
    return "ranks multiply the gradient that they ask for by different factors "
           "(multiply_gradients)";
  }
  if (gate.said(Word::kZeroGrad) || gate.said(Word::kValues) || gate.said(Word::kGradient)) {
    return std::nullopt;  // those at step or leave join it
  }
  if (!gate.step_equal) {
    return "ranks step different engines, or with different clip_norm, norm_type, learning rates "
           "or weight decays";
  }
  if (!gate.step_multipliers.equal) {
    return "ranks multiply the gradients of a step by different factors (multiply_gradients)";
  }
  return std::nullopt;
}

bool CloseMerged::failed() const {
  return std::find(failed_ranks.begin(), failed_ranks.end(), true) != failed_ranks.end();
}

comm::Message encode(const CloseSay& say, const Shape& shape, int rank) {
  comm::Message message;
  append(message.ors, say.took_engines, shape.engines);
  append(message.ors, say.holding_engines, shape.engines);
  append(message.ors, say.late_buckets, shape.buckets);
  Bits failed(static_cast<std::size_t>(shape.ranks));
  failed[static_cast<std::size_t>(rank)] = say.failed;
  append(message.ors, failed, shape.ranks);
  message.mins = say.completions;
  return message;
}

CloseMerged decode_close(const comm::Message& message, const Shape& shape) {
  Reader ors(message.ors);
  CloseMerged close;
  close.took_engines = ors.bits(shape.engines);
  close.holding_engines = ors.bits(shape.engines);
  close.late_buckets = ors.bits(shape.buckets);
  close.failed_ranks = ors.bits(shape.ranks);
  close.completions = message.mins;
  return close;
}

}  // namespace tandem::engine
