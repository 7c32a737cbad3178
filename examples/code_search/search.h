// search.h: declarations one can ask for: their embeddings by the code tower, the comment tower
// that embeds questions, and BM25 over the same words. Saved after training, loaded by --query.
//
// File: a LibTorch archive with format (int), dtype (string), catalogue (string, JSON: [[where,
// code], ...]), embeddings (float [entries, 256]), comment_idf (float [32768]), comment_tower.
// Called by main.cpp and report.cpp.
#pragma once

#include "examples/code_search/bags.h"
#include "examples/code_search/bm25.h"
#include "examples/code_search/corpus.h"
#include "examples/code_search/evaluate.h"
#include "examples/code_search/model.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace code_search {

struct Entry {
  std::string where;  // path:line
  std::string code;
};

class SearchIndex {
 public:
  /// Embeds the declarations of `pairs`.
  SearchIndex(const std::vector<const Pair*>& pairs,
              Tower comment_tower,
              Tower code_tower,
              const Idf& comment_idf,
              const Idf& code_idf);

  /// Throws std::runtime_error, naming the file and what to do, if there is none or it is no index.
  static SearchIndex load(const std::string& file);
  /// Replaces the file at once: a reader sees the old one or the new one. Throws
  /// std::runtime_error.
  void save(const std::string& file) const;

  Scores model_scores(const std::vector<const Words*>& questions) const;
  Scores bm25_scores(const std::vector<const Words*>& questions) const;

  /// The entries that fit `question` best by model and BM25 together (z-scores added), best first.
  std::vector<std::size_t> answer(const std::string& question, std::size_t count) const;

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  SearchIndex(std::vector<Entry> entries, torch::Tensor embeddings, Tower comment_tower, Idf idf);

  std::vector<Entry> entries_;
  torch::Tensor embeddings_;  // float [entries, kWidth]
  Tower comment_tower_;
  Idf comment_idf_;
  std::unique_ptr<Bm25> bm25_;
};

}  // namespace code_search
