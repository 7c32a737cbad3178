// code_search_data_test.cpp: the split, the micro-batches, BM25 and the retrieval measures.
#include "examples/code_search/bags.h"
#include "examples/code_search/bm25.h"
#include "examples/code_search/corpus.h"
#include "examples/code_search/evaluate.h"
#include "examples/code_search/keyed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace code_search {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A word for a number, of letters only: numbers do not count as words of a comment.
std::string word(std::size_t number) {
  std::string text = "w";
  for (; number > 0; number /= 26) text += static_cast<char>('a' + number % 26);
  return text + "q";
}

/// `files` stems, each twice (x/s.h and y/s.h), with `per_file` documented functions each. Comments
/// share no words with each other.
ScanResult make_scan(std::size_t files, std::size_t per_file) {
  ScanResult scan;
  std::size_t next = 0;
  for (std::size_t file = 0; file < files; ++file) {
    for (const char* folder : {"x/", "y/"}) {
      for (std::size_t i = 0; i < per_file; ++i) {
        Declaration declaration;
        declaration.path = folder + word(file) + ".h";
        declaration.line = static_cast<int>(i) + 1;
        for (int k = 0; k < 5; ++k) declaration.comment += " " + word(next++);
        declaration.name = "f" + std::to_string(next);
        declaration.code = "void " + declaration.name + "(int)";
        scan.declarations.push_back(declaration);
      }
    }
  }
  return scan;
}

std::string stem(const std::string& path) { return path.substr(2); }

TEST(Corpus, StemsFallOnOneSide) {
  const Corpus corpus = make_corpus(make_scan(200, 4), 1);  // 200 stems * 8 pairs
  EXPECT_EQ(corpus.pairs, 1600U);
  EXPECT_EQ(corpus.held_out.size(), 496U);  // 62 whole stems of 8: 63 would be 504
  EXPECT_EQ(corpus.train.size(), 1104U);
  std::set<std::string> held_out;
  for (const Pair& pair : corpus.held_out) held_out.insert(stem(pair.path));
  for (const Pair& pair : corpus.train) EXPECT_EQ(held_out.count(stem(pair.path)), 0U) << pair.path;
}

TEST(Corpus, DependsOnTheSeedOnly) {
  const ScanResult scan = make_scan(200, 4);
  const Corpus a = make_corpus(scan, 1), b = make_corpus(scan, 1), c = make_corpus(scan, 2);
  EXPECT_EQ(a.held_out[0].path, b.held_out[0].path);
  EXPECT_EQ(a.train[100].comment, b.train[100].comment);
  EXPECT_NE(a.held_out[0].path, c.held_out[0].path);
}

TEST(Corpus, DropsTrainingCommentsThatNearlyAreHeldOut) {
  ScanResult scan = make_scan(200, 4);
  const Corpus before = make_corpus(scan, 1);
  // Give a training pair the words of a held-out one and one more: Jaccard 5/6, above .6.
  const Pair victim = before.train[0];
  for (Declaration& declaration : scan.declarations) {
    if (declaration.path == victim.path && declaration.line == victim.line) {
      declaration.comment = before.held_out[0].comment + " different";
    }
  }
  const Corpus after = make_corpus(scan, 1);
  EXPECT_EQ(after.near_duplicates, 1U);
  EXPECT_EQ(after.train.size(), before.train.size() - 1);
}

TEST(Corpus, TooFewPairsAreRefusedWithANumber) {
  try {
    make_corpus(make_scan(10, 4), 1);
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("found 80 documented declarations"));
    EXPECT_THAT(error.what(), HasSubstr("1000"));
  }
}

TEST(Pairs, DropExactDuplicatesAndNameTheClass) {
  Declaration declaration;
  declaration.path = "a.h";
  declaration.comment = "Returns the number of items.";
  declaration.scope = "Box";
  declaration.code = "int itemCount() const";
  declaration.name = "itemCount";
  Declaration same = declaration;
  same.path = "b.h";
  const std::vector<Pair> pairs = make_pairs({declaration, same});
  ASSERT_EQ(pairs.size(), 1U);
  EXPECT_THAT(pairs[0].code_words, ElementsAre("box", "int", "item", "count", "const"));
  EXPECT_THAT(pairs[0].name_words, ElementsAre("count", "item"));
}

TEST(Bags, FeaturesAreTheWordAndItsGrams) {
  // "<add>": the word, 3 three-grams, 2 four-grams, 1 five-gram.
  EXPECT_EQ(features_of("add").size(), 1U + 3U + 2U + 1U);
  EXPECT_EQ(features_of("a").size(), 1U + 1U);
  EXPECT_EQ(features_of("add"), features_of("add"));
  for (std::int64_t id : features_of("declaration")) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, static_cast<std::int64_t>(kBuckets));
  }
}

TEST(Bags, WeightsHaveLengthOneAndRareWordsWeighMore) {
  const Words first = {"common", "rare"}, second = {"common"};
  const Idf idf({&first, &second, &second});
  Bags bags;
  idf.append({"common", "rare"}, {}, bags);
  idf.append({}, {}, bags);
  ASSERT_EQ(bags.offsets.size(), 2U);
  double squares = 0.0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(bags.offsets[1]); ++i) {
    squares += static_cast<double>(bags.weights[i]) * bags.weights[i];
  }
  EXPECT_NEAR(squares, 1.0, 1e-5);  // floats of about .2: relative error 6e-8 each
  EXPECT_LT(bags.weights[0], bags.weights[features_of("common").size()]);
  EXPECT_EQ(bags.ids.size() - static_cast<std::size_t>(bags.offsets[1]), 1U);  // never empty
}

TEST(Bags, AtMost96WordsCount) {
  const Words one = {"a"};
  const Idf idf({&one});
  Bags bags;
  idf.append(Words(1000, "a"), {}, bags);
  EXPECT_EQ(bags.ids.size(), kMostWords * features_of("a").size());
}

class Dealing : public ::testing::Test {
 protected:
  MicroBatch deal(std::uint64_t index, DealOptions options = {.seed = 7}) const {
    return Dealer(corpus_.train, comment_idf_, code_idf_, options).micro_batch(index);
  }
  static std::vector<const Words*> words(const std::vector<Pair>& pairs, Words Pair::*member) {
    std::vector<const Words*> result;
    for (const Pair& pair : pairs) result.push_back(&(pair.*member));
    return result;
  }
  Corpus corpus_ =
      make_corpus(make_scan(200, 4), 1);  // 1,104 for training: 4 micro-batches an epoch
  Idf comment_idf_{words(corpus_.train, &Pair::comment_words)};
  Idf code_idf_{words(corpus_.train, &Pair::code_words)};
};

TEST_F(Dealing, IsAFunctionOfSeedAndIndex) {
  EXPECT_EQ(deal(3).comments.ids, deal(3).comments.ids);
  EXPECT_NE(deal(3).comments.ids, deal(4).comments.ids);
  EXPECT_NE(deal(3).comments.ids, deal(3, {.seed = 8}).comments.ids);
  EXPECT_EQ(deal(3).codes.offsets.size(), kPairsPerMicroBatch);
}

TEST_F(Dealing, AnEpochShowsAPairAtMostOnce) {
  // Without drops a text's features name its pair: all comments differ.
  const DealOptions whole = {.seed = 7, .drop_feature = 0.0, .strip_name = 0.0};
  std::set<std::vector<std::int64_t>> seen;
  for (std::uint64_t index = 0; index < 4; ++index) {
    const Bags bags = deal(index, whole).comments;
    for (std::size_t row = 0; row < bags.offsets.size(); ++row) {
      const auto end = row + 1 < bags.offsets.size() ? bags.offsets[row + 1]
                                                     : static_cast<std::int64_t>(bags.ids.size());
      seen.emplace(bags.ids.begin() + bags.offsets[row], bags.ids.begin() + end);
    }
  }
  EXPECT_EQ(seen.size(), 4 * kPairsPerMicroBatch);
}

TEST_F(Dealing, DropsAboutHalfOfTheFeatures) {
  const double all =
      static_cast<double>(deal(0, {.seed = 7, .drop_feature = 0.0}).codes.ids.size());
  const double kept = static_cast<double>(deal(0).codes.ids.size());
  // A binomial share of thousands of features: deviation below .5/sqrt(2,000) = .011; 6 of these.
  EXPECT_GT(all, 2000.0);
  EXPECT_NEAR(kept / all, 0.5, 0.07);
}

TEST_F(Dealing, TheControlShowsOtherDeclarations) {
  const DealOptions plain = {.seed = 7, .drop_feature = 0.0}, shuffled = {7, 0.0, 0.5, true};
  EXPECT_EQ(deal(0, plain).comments.ids, deal(0, shuffled).comments.ids);
  EXPECT_NE(deal(0, plain).codes.ids, deal(0, shuffled).codes.ids);
}

TEST(Bm25Ranking, ScoresByTheFormula) {
  // Two documents of lengths 2 and 4, mean 3. "a" is in one of two: idf = ln(1 + 1.5/1.5) = ln 2.
  // Document 0: count 1, damping 1.2 (1 - .75 + .75 * 2/3) = .9: score ln 2 * 2.2 / 1.9.
  const Words first = {"a", "b"}, second = {"b", "c", "c", "d"};
  const Bm25 bm25({&first, &second});
  const std::vector<float> scores = bm25.scores({"a", "a"});
  EXPECT_NEAR(scores[0], std::log(2.0) * 2.2 / 1.9, 1e-6);
  EXPECT_EQ(scores[1], 0.0F);
  EXPECT_THAT(bm25.scores({"unknown"}), ElementsAre(0.0F, 0.0F));
}

TEST(Evaluation, RecallCountsWhatStandsBefore) {
  // Query 0 finds its document first, query 1 second.
  const Recall result = recall({{3.0F, 1.0F}, {2.0F, 1.0F}});
  EXPECT_DOUBLE_EQ(result.at_1, 0.5);
  EXPECT_DOUBLE_EQ(result.at_10, 1.0);
}

TEST(Evaluation, ConstantAndNanScoresEarnNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_DOUBLE_EQ(recall(Scores(20, std::vector<float>(20, 1.0F))).at_10, 0.0);
  EXPECT_DOUBLE_EQ(recall(Scores(20, std::vector<float>(20, nan))).at_10, 0.0);
  EXPECT_DOUBLE_EQ(chance(500).at_1, 0.002);
  EXPECT_DOUBLE_EQ(chance(500).at_10, 0.02);
}

TEST(Evaluation, CombinesOnOneScale) {
  // Mean 2, deviation 1: -1 and 1.
  EXPECT_THAT(z_scores({1.0F, 3.0F}), ElementsAre(-1.0F, 1.0F));
  EXPECT_THAT(z_scores({5.0F, 5.0F}), ElementsAre(0.0F, 0.0F));
  EXPECT_THAT(combine({{1.0F, 3.0F}}, {{300.0F, 100.0F}})[0], ElementsAre(0.0F, 0.0F));
}

TEST(Evaluation, TopPrefersTheEarlierOfEquals) {
  EXPECT_THAT(top({1.0F, 3.0F, 3.0F, 2.0F}, 3), ElementsAre(1U, 2U, 3U));
  EXPECT_THAT(top({1.0F}, 5), ElementsAre(0U));
}

}  // namespace
}  // namespace code_search
