// text.h: words of comments and declarations, and which comments are worth learning from.
// Pure functions on strings. Called by corpus.cpp, bags.cpp and bm25.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace code_search {

using Words = std::vector<std::string>;

/// Lower-case sub-words: "setGradEnabled(at::IValue x2)" gives set grad enabled at i value x 2.
/// Letters beyond ASCII count as letters; everything else separates.
Words sub_words(std::string_view text);

/// A doc comment as prose: documentation commands (@param, \brief), fenced examples, rules of
/// dashes and web addresses gone, lines joined.
std::string clean_comment(std::string_view raw);

/// Why a comment is left out; kNone: it is kept.
enum class Rejection { kNone, kLicence, kToDo, kSchema, kCode, kShort };

/// Judges the raw comment (`raw`, for what cleaning removes) and its cleaned text.
Rejection judge_comment(std::string_view raw, std::string_view cleaned);

/// |a and b| / |a or b| of two sorted lists without repetitions; 1 if both are empty.
double jaccard(const Words& a, const Words& b);

/// Sorted, without repetitions: what jaccard() takes.
Words word_set(Words words);

}  // namespace code_search
