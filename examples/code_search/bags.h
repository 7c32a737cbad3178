// bags.h: words to numbers: hashed sub-words with their character n-grams, weighted by how rare
// they are, and the micro-batches of the run.
//
// F1 Micro-batch i of a run is a pure function of (corpus, seed, i): which pairs, which features
// are
//    dropped, which names are stripped. No rank, no world size enters.
// F2 The rows of one micro-batch are different pairs; an epoch shows every pair at most once.
// Called by train.cpp (training) and search.cpp (everything else).
#pragma once

#include "examples/code_search/corpus.h"
#include "examples/code_search/text.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace code_search {

inline constexpr std::size_t kBuckets = std::size_t{1} << 15;
inline constexpr std::size_t kMostWords = 96;
inline constexpr std::size_t kPairsPerMicroBatch = 256;

/// Many texts as one list of weighted features, the way an embedding bag takes them. The squared
/// weights of each text add up to 1.
struct Bags {
  std::vector<std::int64_t> ids;      // in [0, kBuckets)
  std::vector<std::int64_t> offsets;  // where each text starts
  std::vector<float> weights;
};

/// The hashed features of a word: itself and the 3-, 4- and 5-grams of "<word>".
std::vector<std::int64_t> features_of(const std::string& word);

/// Which features of a text are left out, and by which key. Feature f of word w is decided by
/// (key, w, f), so that a word loses some of its n-grams and rarely all.
struct FeatureDrop {
  double probability = 0.0;
  std::uint64_t key = 0;
};

/// Rarity of every bucket, learned from the training texts of one side.
class Idf {
 public:
  explicit Idf(const std::vector<const Words*>& texts);
  /// As weights() gave them: of a saved model.
  explicit Idf(std::vector<float> weights);

  /// Adds `words` (the first kMostWords of them) as the next text. A text that is left without any
  /// feature gets one of its own, so that no bag is empty.
  void append(const Words& words, const FeatureDrop& drop, Bags& bags) const;

  const std::vector<float>& weights() const { return weights_; }

 private:
  std::vector<float> weights_;  // [kBuckets]
  // Features of the words met while learning: hashing them anew would take longer than the lookup.
  std::unordered_map<std::string, std::vector<std::int64_t>> known_;
};

/// One micro-batch: row r of `comments` belongs to row r of `codes`.
struct MicroBatch {
  Bags comments;
  Bags codes;
};

struct DealOptions {
  std::uint64_t seed = 0;
  double drop_feature = 0.5;   // probability, both sides
  double strip_name = 0.5;     // probability that a comment loses the words of the declared name
  bool shuffle_pairs = false;  // the control: comments meet other pairs' declarations
};

/// Deals the training pairs. Thread safety: const calls may run at the same time.
class Dealer {
 public:
  Dealer(const std::vector<Pair>& pairs,
         const Idf& comment_idf,
         const Idf& code_idf,
         const DealOptions& options);

  MicroBatch micro_batch(std::uint64_t index) const;

 private:
  const std::vector<Pair>& pairs_;
  const Idf& comment_idf_;
  const Idf& code_idf_;
  DealOptions options_;
  std::vector<std::size_t> partner_;  // whose declaration a pair's comment is shown with
};

}  // namespace code_search
