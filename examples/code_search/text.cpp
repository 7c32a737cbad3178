// text.cpp: see text.h.
#include "examples/code_search/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>

namespace code_search {
namespace {

constexpr std::size_t kFewestWords = 4;

bool upper(char c) { return c >= 'A' && c <= 'Z'; }
bool lower(char c) { return (c >= 'a' && c <= 'z') || static_cast<unsigned char>(c) >= 0x80; }
bool digit(char c) { return c >= '0' && c <= '9'; }
bool blank(char c) { return c == ' ' || c == '\t' || c == '\n'; }

std::string lower_case(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (upper(c)) c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

bool contains_any(std::string_view text, const std::vector<std::string_view>& needles) {
  return std::any_of(needles.begin(), needles.end(), [&](std::string_view needle) {
    return text.find(needle) != std::string_view::npos;
  });
}

std::string_view trim(std::string_view s) {
  while (!s.empty() && blank(s.front())) s.remove_prefix(1);
  while (!s.empty() && blank(s.back())) s.remove_suffix(1);
  return s;
}

/// Lines of `text`, trimmed.
std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  std::size_t start = 0;
  while (start <= text.size()) {
    const std::size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(trim(text.substr(start, end - start)));
    start = end + 1;
  }
  return lines;
}

/// A line of code rather than of prose: ends like a statement, or is mostly punctuation.
bool looks_like_code(std::string_view line) {
  if (line.empty()) return false;
  const char last = line.back();
  if (last == ';' || last == '{' || last == '}') return true;
  if (line.front() == '#' || line.substr(0, 2) == ">>") return true;
  std::size_t signs = 0;
  for (char c : line) {
    if (!upper(c) && !lower(c) && !digit(c) && !blank(c) && c != '.' && c != ',' && c != '`')
      ++signs;
  }
  return signs * 4 > line.size();
}

bool is_web_address(std::string_view word) {
  return contains_any(word, {"http://", "https://", "www."});
}

/// A word of a documentation command that says nothing of its own: @param, \brief, \endcode.
bool is_command(std::string_view word) {
  return word.size() > 1 && (word.front() == '@' || word.front() == '\\') && lower(word[1]);
}

}  // namespace

Words sub_words(std::string_view text) {
  Words words;
  std::string word;
  const auto finish = [&] {
    if (!word.empty()) words.push_back(word);
    word.clear();
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const char before = i > 0 ? text[i - 1] : ' ';
    const char after = i + 1 < text.size() ? text[i + 1] : ' ';
    if (!upper(c) && !lower(c) && !digit(c)) {
      finish();
      continue;
    }
    const bool hump =
        upper(c) && (lower(before) || digit(before) || (upper(before) && lower(after)));
    if (hump || (digit(c) && !digit(before)) || (lower(c) && digit(before))) finish();
    word += upper(c) ? static_cast<char>(c - 'A' + 'a') : c;
  }
  finish();
  return words;
}

std::string clean_comment(std::string_view raw) {
  std::string cleaned;
  bool in_example = false;
  for (std::string_view line : lines_of(raw)) {
    if (line.substr(0, 3) == "```" || line.substr(0, 5) == "\\code" ||
        line.substr(0, 5) == "@code" || line.substr(0, 8) == "\\endcode" ||
        line.substr(0, 8) == "@endcode") {
      in_example = !in_example;
      continue;
    }
    if (in_example) continue;
    std::size_t at = 0;
    while (at < line.size()) {
      while (at < line.size() && blank(line[at])) ++at;
      std::size_t end = at;
      while (end < line.size() && !blank(line[end])) ++end;
      const std::string_view word = line.substr(at, end - at);
      at = end;
      const bool has_letter = std::any_of(word.begin(), word.end(),
                                          [](char c) { return upper(c) || lower(c) || digit(c); });
      const bool rule = !has_letter && word.size() > 2;  // ----, ====, ***
      if (word.empty() || rule || is_web_address(word) || is_command(word)) continue;
      if (!cleaned.empty()) cleaned += ' ';
      cleaned += word;
    }
  }
  return cleaned;
}

Rejection judge_comment(std::string_view raw, std::string_view cleaned) {
  const std::string text = lower_case(raw);
  if (contains_any(text, {"copyright", "licensed under", "all rights reserved", "spdx-license",
                          "redistribution and use", "without warranty"})) {
    return Rejection::kLicence;
  }
  if (contains_any(raw, {"TODO", "FIXME", "XXX", "NOLINT", "clang-format"}))
    return Rejection::kToDo;
  if (contains_any(text, {"aten::"}) && contains_any(text, {"->"})) return Rejection::kSchema;

  std::size_t code = 0, prose = 0;
  bool in_example = false;
  for (std::string_view line : lines_of(raw)) {
    if (line.substr(0, 3) == "```") in_example = !in_example;
    if (line.empty() || in_example || line.substr(0, 3) == "```") continue;
    ++(looks_like_code(line) ? code : prose);
  }
  if (code > 0 && code >= prose) return Rejection::kCode;

  std::size_t words = 0;
  for (const std::string& word : sub_words(cleaned)) words += !digit(word.front());
  return words < kFewestWords ? Rejection::kShort : Rejection::kNone;
}

double jaccard(const Words& a, const Words& b) {
  if (a.empty() && b.empty()) return 1.0;
  std::size_t both = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const int order = a[i].compare(b[j]);
    both += order == 0;
    i += order <= 0;
    j += order >= 0;
  }
  return static_cast<double>(both) / static_cast<double>(a.size() + b.size() - both);
}

Words word_set(Words words) {
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  return words;
}

}  // namespace code_search
