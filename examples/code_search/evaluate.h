// evaluate.h: how well scores find the right document. Plain arithmetic on score rows.
// Called by report.cpp and search.cpp.
#pragma once

#include <cstddef>
#include <vector>

namespace code_search {

/// One row a query, one score a document.
using Scores = std::vector<std::vector<float>>;

struct Recall {
  double at_1 = 0.0;  // share of queries, 0 to 1
  double at_10 = 0.0;
};

/// Query q's right document is document q. Ties count against the query: a document that scores the
/// same as the right one is ranked before it, so that constant scores earn nothing. NaN ranks last.
Recall recall(const Scores& scores);

/// What guessing earns among `documents`.
Recall chance(std::size_t documents);

/// Row by row (x - mean) / deviation, so that different scores can be added; a constant row gives
/// 0.
std::vector<float> z_scores(const std::vector<float>& row);

/// z_scores(a) + z_scores(b).
Scores combine(const Scores& a, const Scores& b);

/// Indices of the `count` highest scores, best first; of equal ones the lower index first.
std::vector<std::size_t> top(const std::vector<float>& row, std::size_t count);

}  // namespace code_search
