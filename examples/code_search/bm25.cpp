// bm25.cpp: see bm25.h.
#include "examples/code_search/bm25.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace code_search {

Bm25::Bm25(const std::vector<const Words*>& documents, const Options& options)
    : documents_(documents.size()) {
  std::size_t all_words = 0;
  for (const Words* words : documents) all_words += words->size();
  const double mean_length =
      std::max(1.0, static_cast<double>(all_words) / std::max<double>(1.0, documents.size()));

  for (std::size_t document = 0; document < documents.size(); ++document) {
    std::map<std::string, int> counts;
    for (const std::string& word : *documents[document]) ++counts[word];
    const double length = static_cast<double>(documents[document]->size()) / mean_length;
    for (const auto& [word, count] : counts) {
      const double damped = count * (options.k1 + 1.0) /
                            (count + options.k1 * (1.0 - options.b + options.b * length));
      postings_[word].push_back({document, static_cast<float>(damped)});
    }
  }
  for (auto& [word, list] : postings_) {
    const double with = static_cast<double>(list.size());
    const double idf =
        std::log(1.0 + (static_cast<double>(documents.size()) - with + 0.5) / (with + 0.5));
    for (Posting& posting : list) posting.weight = static_cast<float>(posting.weight * idf);
  }
}

std::vector<float> Bm25::scores(const Words& query) const {
  std::vector<float> result(documents_);
  for (const std::string& word : word_set(query)) {
    const auto found = postings_.find(word);
    if (found == postings_.end()) continue;
    for (const Posting& posting : found->second) result[posting.document] += posting.weight;
  }
  return result;
}

}  // namespace code_search
