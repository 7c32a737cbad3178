// bm25.h: the classical ranking of documents by shared words: what a learned model is compared
// with. Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009),
// equation 3.15. Called by report.cpp and search.cpp.
#pragma once

#include "examples/code_search/text.h"

#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

namespace code_search {

class Bm25 {
 public:
  struct Options {
    double k1 = 1.2;  // how fast repetitions of a word stop counting
    double b = 0.75;  // how much long documents are held back, 0 to 1
  };

  Bm25(const std::vector<const Words*>& documents, const Options& options);
  explicit Bm25(const std::vector<const Words*>& documents) : Bm25(documents, Options{}) {}

  /// One score a document; 0: no word shared.
  std::vector<float> scores(const Words& query) const;

 private:
  struct Posting {
    std::size_t document = 0;
    float weight = 0.0F;  // the word's whole contribution to that document's score
  };
  std::unordered_map<std::string, std::vector<Posting>> postings_;
  std::size_t documents_ = 0;
};

}  // namespace code_search
