// code_search_text_test.cpp: words, and which comments are kept.
#include "examples/code_search/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace code_search {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Rejection judge(const std::string& raw) { return judge_comment(raw, clean_comment(raw)); }

TEST(Text, SplitsCamelAndSnakeCase) {
  EXPECT_THAT(sub_words("setGradEnabled(at::IValue x2)"),
              ElementsAre("set", "grad", "enabled", "at", "i", "value", "x", "2"));
  EXPECT_THAT(sub_words("HTTPServer max_pool2d_"),
              ElementsAre("http", "server", "max", "pool", "2", "d"));
  EXPECT_THAT(sub_words("na\xC3\xAFve"), ElementsAre("na\xC3\xAFve"));
  EXPECT_THAT(sub_words(" :: !"), IsEmpty());
}

TEST(Text, CleaningKeepsProseOnly) {
  EXPECT_EQ(clean_comment("@brief Adds  two\n \\param a numbers\n-----\nsee https://x.org/y here"),
            "Adds two a numbers see here");
  EXPECT_EQ(clean_comment("Before.\n```\nint x = f();\n```\nAfter."), "Before. After.");
}

TEST(Text, RejectsWhatTeachesNothing) {
  EXPECT_EQ(judge("Returns the number of elements."), Rejection::kNone);
  EXPECT_EQ(judge("Copyright (c) somebody, some year, all of it"), Rejection::kLicence);
  EXPECT_EQ(judge("TODO: make this work one day"), Rejection::kToDo);
  EXPECT_EQ(judge("aten::add.Tensor(Tensor self, Tensor other) -> Tensor"), Rejection::kSchema);
  EXPECT_EQ(judge("int x = compute(1, 2);\nreturn x;"), Rejection::kCode);
  EXPECT_EQ(judge("Only three words"), Rejection::kShort);
  EXPECT_EQ(judge("see 1 2 3 4 5"), Rejection::kShort);  // numbers are no words
}

TEST(Text, JaccardIsSharedOverAll) {
  const Words a = word_set({"b", "a", "c", "a"}), b = word_set({"c", "d", "b"});
  EXPECT_THAT(a, ElementsAre("a", "b", "c"));
  EXPECT_DOUBLE_EQ(jaccard(a, b), 2.0 / 4.0);  // {b, c} of {a, b, c, d}
  EXPECT_DOUBLE_EQ(jaccard(a, a), 1.0);
  EXPECT_DOUBLE_EQ(jaccard(a, {}), 0.0);
}

}  // namespace
}  // namespace code_search
