// evaluate.cpp: see evaluate.h.
#include "examples/code_search/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace code_search {

Recall recall(const Scores& scores) {
  Recall result;
  for (std::size_t query = 0; query < scores.size(); ++query) {
    const std::vector<float>& row = scores[query];
    std::size_t before = 0;
    for (std::size_t other = 0; other < row.size(); ++other) {
      // Negated, so that a right document whose score is NaN has all others before it.
      before += other != query && !(row[other] < row[query]) && !std::isnan(row[other]);
    }
    if (std::isnan(row[query])) before = row.size();
    result.at_1 += before < 1;
    result.at_10 += before < 10;
  }
  const double queries = std::max<double>(1.0, static_cast<double>(scores.size()));
  return {result.at_1 / queries, result.at_10 / queries};
}

Recall chance(std::size_t documents) {
  const double n = std::max<double>(1.0, static_cast<double>(documents));
  return {1.0 / n, std::min(1.0, 10.0 / n)};
}

std::vector<float> z_scores(const std::vector<float>& row) {
  if (row.empty()) return {};
  const double n = static_cast<double>(row.size());
  const double mean = std::accumulate(row.begin(), row.end(), 0.0) / n;
  double squares = 0.0;
  for (float x : row) squares += (x - mean) * (x - mean);
  const double deviation = std::sqrt(squares / n);
  std::vector<float> result(row.size(), 0.0F);
  if (!(deviation > 0.0)) return result;
  for (std::size_t i = 0; i < row.size(); ++i) {
    result[i] = static_cast<float>((row[i] - mean) / deviation);
  }
  return result;
}

Scores combine(const Scores& a, const Scores& b) {
  Scores result;
  for (std::size_t query = 0; query < std::min(a.size(), b.size()); ++query) {
    std::vector<float> row = z_scores(a[query]);
    const std::vector<float> other = z_scores(b[query]);
    for (std::size_t i = 0; i < std::min(row.size(), other.size()); ++i) row[i] += other[i];
    result.push_back(std::move(row));
  }
  return result;
}

std::vector<std::size_t> top(const std::vector<float>& row, std::size_t count) {
  std::vector<std::size_t> order(row.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  count = std::min(count, order.size());
  const auto middle = order.begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(order.begin(), middle, order.end(), [&](std::size_t x, std::size_t y) {
    return row[x] != row[y] ? row[x] > row[y] : x < y;
  });
  order.resize(count);
  return order;
}

}  // namespace code_search
