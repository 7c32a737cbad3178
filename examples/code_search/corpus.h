// corpus.h: from scanned declarations to training and held-out pairs.
//
// C1 Files are split by stem: options/pooling.h and functional/pooling.h fall on the same side.
// C2 No training comment is nearly a held-out one (word Jaccard above kNearDuplicate).
// C3 A pure function of (scan, seed): every rank computes the same corpus.
// Called by main.cpp.
#pragma once

#include "examples/code_search/scan.h"
#include "examples/code_search/text.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace code_search {

inline constexpr std::size_t kHeldOutPairs = 500;
inline constexpr std::size_t kFewestPairs = 1000;
inline constexpr double kNearDuplicate = 0.6;

struct Pair {
  std::string path;
  int line = 0;
  std::string comment;  // cleaned prose
  std::string code;     // the declaration, for people
  Words comment_words;
  Words code_words;  // enclosing classes, then the declaration
  Words name_words;  // of the declared name, sorted, without repetitions
};

struct Corpus {
  std::vector<Pair> train;
  std::vector<Pair> held_out;
  ScanCounts counts;
  std::size_t documented = 0;       // before any filter
  std::size_t pairs = 0;            // after the filters, before the split
  std::size_t near_duplicates = 0;  // left out of training by C2
};

/// Filters comments (text.h), drops exact duplicates of the comment, splits the words.
std::vector<Pair> make_pairs(const std::vector<Declaration>& declarations);

/// Throws std::runtime_error if there are fewer than kFewestPairs pairs, or if all come from so few
/// files that nothing is left to train on.
Corpus make_corpus(const ScanResult& scan, std::uint64_t seed);

}  // namespace code_search
