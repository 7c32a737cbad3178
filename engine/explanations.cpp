// engine/explanations.cpp: what ranks tell each other in words when a gate cannot proceed.
#include "engine/world_state.h"
#include <tandem/error.h>

#include <algorithm>
#include <sstream>

namespace tandem::engine {

namespace {

const char* name_of(Average average) {
  switch (average) {
    case Average::kRanks:
      return "ranks";
    case Average::kMicroBatches:
      return "micro-batches";
    case Average::kTokens:
      return "tokens";
    case Average::kNone:
      return "nothing";
  }
  return "?";
}

std::string join_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line;
    text += '\n';
  }
  return text;
}

/// Begins what a rank explains that could not go on by itself.
constexpr const char* kRefusal = "refused: ";

/// The first line in which two ranks' texts differ, as a message; falls back to the heads.
std::string first_difference(const std::vector<std::string>& texts) {
  const auto line_of = [](const std::string& text, std::size_t n) -> std::optional<std::string> {
    std::istringstream stream(text);
    std::string line;
    for (std::size_t i = 0; i <= n; ++i) {
      if (!std::getline(stream, line)) {
        return std::nullopt;
      }
    }
    return line;
  };
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) {
      continue;
    }
    std::size_t n = 0;
    for (;; ++n) {
      const auto a = line_of(texts[0], n);
      const auto b = line_of(texts[r], n);
      if (a != b || !a) {
        return "rank 0: " + a.value_or("(nothing further)") + "; rank " + std::to_string(r) + ": " +
               b.value_or("(nothing further)");
      }
    }
  }
  return "all ranks: " + line_of(texts[0], 0).value_or("");
}

}  // namespace

std::vector<std::string> WorldState::describe(const GateSay& say) const {
  std::vector<std::string> lines;
  std::string head = std::string("calls ") + name_of(say.word);
  const Bits& named = say.word == Word::kStep ? say.step_engines : say.zero_engines;
  if (say.word == Word::kStep || say.word == Word::kZeroGrad) {
    head += " of";
    for (const auto& core : cores_) {
      if (named[static_cast<std::size_t>(core->index)]) {
        head += " '" + core->name + "'";
      }
    }
  }
  std::ostringstream detail;
  detail.precision(17);
  if (say.word == Word::kStep) {
    detail << " with clip_norm " << say.clip_norm << " and norm_type " << say.norm_type;
  } else if (say.word == Word::kValues) {
    constexpr const char* kOps[] = {"mean", "sum", "any", "broadcast"};
    detail << ": " << kOps[static_cast<int>(say.value_op)];
    if (say.value_op == ValueOp::kBroadcast) {
      detail << " from rank " << say.value_root;
    }
  } else if (say.word == Word::kGradient) {
    const EngineCore& core = *cores_[static_cast<std::size_t>(say.gradient_engine)];
    detail << " of engine '" << core.name << "', parameter '"
           << core.infos[static_cast<std::size_t>(say.gradient_parameter)].name << "'";
  }
  if (say.word == Word::kBackward && say.loss_scale != 0.0) {
    detail << " of a loss scaled by " << say.loss_scale;
  }
  if (say.word == Word::kBackward && !only_.empty()) {
    detail << " under only() of";
    for (const auto& core : cores_) {
      if (std::count(only_.back().begin(), only_.back().end(), core->serial) > 0) {
        detail << " '" << core->name << "'";
      }
    }
  }
  lines.push_back(head + detail.str());
  for (const auto& core : cores_) {
    if (core->retired()) {
      continue;
    }
    std::ostringstream line;
    line.precision(17);
    line << "engine '" << core->name << "'";
    const double multiplier =
        say.multipliers.empty() ? 1.0 : say.multipliers[static_cast<std::size_t>(core->index)];
    if (multiplier != 1.0) {
      line << ", gradients multiplied by " << multiplier;
    }
    if (say.word == Word::kStep) {
      const std::vector<Tunables> tunables = core->tunables();
      for (std::size_t g = 0; g < tunables.size(); ++g) {
        if (g > 0) {
          line << "; group '" << core->shard->groups().name(g) << "'";
        }
        line << ": learning rate " << tunables[g].lr << ", weight decay "
             << tunables[g].weight_decay;
      }
    }
    lines.push_back(line.str());
  }
  return lines;
}

// After an error every rank says in words what it was about to do; all throw the same.
void WorldState::explain(Lock& lock, const std::string& error, bool windows_discarded) {
  const std::vector<std::string> texts =
      gather_texts(lock, join_lines(said_) + "average by " + name_of(average_),
                   "the other ranks' explanation of an error");
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].rfind(kRefusal, 0) != 0) {
      continue;
    }
    // What the rank found may have cost it gradients, so the window is worth nothing anywhere.
    clear_windows(Bits(cores_.size(), true));
    drop_gradients(Bits(cores_.size(), true));
    window_passes_ = 0;
    const std::size_t begin = std::string(kRefusal).size();
    throw InvalidArgument(
        "rank " + std::to_string(r) + ": " + texts[r].substr(begin, texts[r].find('\n') - begin) +
        ". The windows of all engines were discarded on all ranks, parameters and optimizer states "
        "are unchanged: put it right and repeat the window from its first pass");
  }
  throw Mismatch(
      error + ". " + first_difference(texts) +
      ". Every rank must make the same calls in the same order. Parameters are unchanged; " +
      (windows_discarded
           ? "the windows of all engines were discarded: repeat the window from its first pass"
           : "gradients are kept: correct the call and repeat it"));
}

std::vector<std::string> WorldState::refusal(const std::string& problem) {
  return {kRefusal + problem};
}

}  // namespace tandem::engine
