// bags.cpp: see bags.h.
#include "examples/code_search/bags.h"

#include "examples/code_search/keyed.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace code_search {
namespace {

std::int64_t bucket_of(const char* text, std::size_t bytes) {  // FNV-1a, 64 bits, mixed
  std::uint64_t hash = 0xCBF29CE484222325ULL;
  for (std::size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<unsigned char>(text[i])) * 0x100000001B3ULL;
  }
  return static_cast<std::int64_t>(mix(hash) % kBuckets);
}

/// `words` without those in the sorted list `left_out`.
Words without(const Words& words, const Words& left_out) {
  Words kept;
  for (const std::string& word : words) {
    if (!std::binary_search(left_out.begin(), left_out.end(), word)) kept.push_back(word);
  }
  return kept;
}

constexpr double kLeastIdf = 0.1;  // even a feature of every text says something

}  // namespace

std::vector<std::int64_t> features_of(const std::string& word) {
  std::string marked(1, '<');
  marked += word;
  marked += '>';
  std::vector<std::int64_t> ids;
  ids.push_back(bucket_of(word.data(), word.size()));
  for (std::size_t n = 3; n <= 5; ++n) {
    for (std::size_t i = 0; i + n <= marked.size(); ++i) {
      ids.push_back(bucket_of(marked.data() + i, n));
    }
  }
  return ids;
}

Idf::Idf(const std::vector<const Words*>& texts) : weights_(kBuckets) {
  std::vector<double> documents(kBuckets);
  std::vector<std::size_t> last_seen(kBuckets);
  for (std::size_t text = 0; text < texts.size(); ++text) {
    for (const std::string& word : *texts[text]) {
      const auto [entry, is_new] = known_.try_emplace(word);
      if (is_new) entry->second = features_of(word);
      for (std::int64_t id : entry->second) {
        const auto bucket = static_cast<std::size_t>(id);
        if (last_seen[bucket] == text + 1) continue;
        last_seen[bucket] = text + 1;
        documents[bucket] += 1.0;
      }
    }
  }
  const double all = static_cast<double>(texts.size());
  for (std::size_t i = 0; i < kBuckets; ++i) {
    weights_[i] = static_cast<float>(std::log((all + 1.0) / (documents[i] + 1.0)) + kLeastIdf);
  }
}

Idf::Idf(std::vector<float> weights) : weights_(std::move(weights)) {}

void Idf::append(const Words& words, const FeatureDrop& drop, Bags& bags) const {
  const std::size_t start = bags.ids.size();
  bags.offsets.push_back(static_cast<std::int64_t>(start));
  double squares = 0.0;
  const auto add = [&](std::int64_t id) {
    const float weight = weights_[static_cast<std::size_t>(id)];
    bags.ids.push_back(id);
    bags.weights.push_back(weight);
    squares += static_cast<double>(weight) * weight;
  };
  for (std::size_t w = 0; w < std::min(words.size(), kMostWords); ++w) {
    const auto found = known_.find(words[w]);
    const std::vector<std::int64_t> hashed =
        found == known_.end() ? features_of(words[w]) : std::vector<std::int64_t>();
    const auto& features = found == known_.end() ? hashed : found->second;
    for (std::size_t f = 0; f < features.size(); ++f) {
      // At most 2 * bytes - 1 features a word: far fewer than 2^32.
      const bool dropped =
          drop.probability > 0.0 && keyed_chance(drop.probability, mix(drop.key ^ (w << 32 | f)));
      if (!dropped) add(features[f]);
    }
  }
  if (bags.ids.size() == start) add(features_of("").front());
  const double length = std::sqrt(squares);
  for (std::size_t i = start; i < bags.weights.size(); ++i) {
    bags.weights[i] = static_cast<float>(bags.weights[i] / length);
  }
}

Dealer::Dealer(const std::vector<Pair>& pairs,
               const Idf& comment_idf,
               const Idf& code_idf,
               const DealOptions& options)
    : pairs_(pairs), comment_idf_(comment_idf), code_idf_(code_idf), options_(options) {
  partner_.resize(pairs.size());
  std::iota(partner_.begin(), partner_.end(), std::size_t{0});
  if (options.shuffle_pairs) {
    partner_ = keyed_permutation(pairs.size(), options.seed, Purpose::kShuffle, 0);
  }
}

MicroBatch Dealer::micro_batch(std::uint64_t index) const {
  const std::size_t per_epoch = pairs_.size() / kPairsPerMicroBatch;
  const std::vector<std::size_t> order =
      keyed_permutation(pairs_.size(), options_.seed, Purpose::kEpoch, index / per_epoch);
  const std::size_t start = (index % per_epoch) * kPairsPerMicroBatch;
  const auto drop = [&](std::size_t row, std::uint64_t side) {
    const auto key = keyed(options_.seed, Purpose::kDropFeature, index, row, side);
    return FeatureDrop{options_.drop_feature, key};
  };
  MicroBatch batch;
  for (std::size_t row = 0; row < kPairsPerMicroBatch; ++row) {
    const Pair& pair = pairs_[order[start + row]];
    const Pair& partner = pairs_[partner_[order[start + row]]];
    const auto bits = keyed(options_.seed, Purpose::kStripName, index, row);
    const bool strip = keyed_chance(options_.strip_name, bits);
    comment_idf_.append(strip ? without(pair.comment_words, pair.name_words) : pair.comment_words,
                        drop(row, 0), batch.comments);
    code_idf_.append(partner.code_words, drop(row, 1), batch.codes);
  }
  return batch;
}

}  // namespace code_search
