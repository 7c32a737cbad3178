// corpus.cpp: see corpus.h.
#include "examples/code_search/corpus.h"

#include "examples/code_search/keyed.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace code_search {
namespace {

std::string stem_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::size_t start = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(start, path.rfind('.') - start);
}

/// Leaves out pairs whose comment is nearly one of `others`. An inverted index finds the few
/// candidates: two sets with Jaccard above .6 share words, the rarest of them first.
std::size_t drop_near_duplicates(std::vector<Pair>& pairs, const std::vector<Pair>& others) {
  std::vector<Words> sets;
  std::unordered_map<std::string, std::vector<std::size_t>> index;
  for (const Pair& other : others) {
    sets.push_back(word_set(other.comment_words));
    for (const std::string& word : sets.back()) index[word].push_back(sets.size() - 1);
  }
  std::vector<std::size_t> shared(sets.size());
  const auto near_duplicate = [&](const Pair& pair) {
    const Words words = word_set(pair.comment_words);
    std::fill(shared.begin(), shared.end(), 0);
    for (const std::string& word : words) {
      const auto found = index.find(word);
      if (found == index.end()) continue;
      for (std::size_t other : found->second) ++shared[other];
    }
    for (std::size_t other = 0; other < sets.size(); ++other) {
      const std::size_t both = shared[other];
      const std::size_t any = words.size() + sets[other].size() - both;
      if (static_cast<double>(both) > kNearDuplicate * static_cast<double>(any)) return true;
    }
    return false;
  };
  const std::size_t before = pairs.size();
  pairs.erase(std::remove_if(pairs.begin(), pairs.end(), near_duplicate), pairs.end());
  return before - pairs.size();
}

}  // namespace

std::vector<Pair> make_pairs(const std::vector<Declaration>& declarations) {
  std::vector<Pair> pairs;
  std::unordered_set<std::string> seen;
  for (const Declaration& declaration : declarations) {
    Pair pair;
    pair.comment = clean_comment(declaration.comment);
    if (judge_comment(declaration.comment, pair.comment) != Rejection::kNone) continue;
    if (!seen.insert(pair.comment).second) continue;
    pair.path = declaration.path;
    pair.line = declaration.line;
    pair.code =
        declaration.scope.empty() ? declaration.code : declaration.scope + ": " + declaration.code;
    pair.comment_words = sub_words(pair.comment);
    pair.code_words = sub_words(pair.code);
    pair.name_words = word_set(sub_words(declaration.name));
    pairs.push_back(std::move(pair));
  }
  return pairs;
}

Corpus make_corpus(const ScanResult& scan, std::uint64_t seed) {
  Corpus corpus;
  corpus.counts = scan.counts;
  corpus.documented = scan.declarations.size();
  std::vector<Pair> pairs = make_pairs(scan.declarations);
  corpus.pairs = pairs.size();
  if (pairs.size() < kFewestPairs) {
    throw std::runtime_error(
        "found " + std::to_string(pairs.size()) +
        " documented declarations worth learning from in " + std::to_string(scan.counts.files) +
        " headers (" + std::to_string(scan.counts.unreadable) + " unreadable, " +
        std::to_string(scan.counts.too_large) + " too large); at least " +
        std::to_string(kFewestPairs) +
        " are needed: name a folder with more C++ headers that carry doc comments by --source");
  }

  std::map<std::string, std::vector<Pair>> by_stem;
  for (Pair& pair : pairs) by_stem[stem_of(pair.path)].push_back(std::move(pair));
  std::vector<std::vector<Pair>*> groups;
  for (auto& [stem, group] : by_stem) groups.push_back(&group);
  // Small stems before large ones would bias the choice: the order is random, a stem that does not
  // fit any more is passed over, so that the held-out set has exactly its size.
  std::size_t used = 0;
  for (std::size_t i : keyed_permutation(groups.size(), seed, Purpose::kSplit, 0)) {
    const bool held_out = corpus.held_out.size() + groups[i]->size() <= kHeldOutPairs;
    std::vector<Pair>& side = held_out ? corpus.held_out : corpus.train;
    std::move(groups[i]->begin(), groups[i]->end(), std::back_inserter(side));
    ++used;
  }
  corpus.near_duplicates = drop_near_duplicates(corpus.train, corpus.held_out);
  if (corpus.held_out.size() < kHeldOutPairs / 2 || corpus.train.size() < kFewestPairs / 2) {
    throw std::runtime_error("the headers split into " + std::to_string(corpus.train.size()) +
                             " training and " + std::to_string(corpus.held_out.size()) +
                             " held-out pairs, too few on one side: the doc comments come from " +
                             std::to_string(used) + " file names only");
  }
  return corpus;
}

}  // namespace code_search
