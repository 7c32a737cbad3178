// declaration.cpp: see declaration.h. Works on text, not on a grammar: good for the headers people
// write, harmless on the rest.
#include "examples/code_search/declaration.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>

namespace code_search {
namespace {

constexpr auto kNone = std::string_view::npos;

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

std::string_view trim(std::string_view s) {
  while (!s.empty() && s.front() == ' ') s.remove_prefix(1);
  while (!s.empty() && s.back() == ' ') s.remove_suffix(1);
  return s;
}

std::string_view first_word(std::string_view s) {
  std::size_t end = 0;
  while (end < s.size() && is_word(s[end])) ++end;
  return s.substr(0, end);
}

/// Behind the bracket that closes the one at `open`; the end of `s` if none does.
std::size_t behind_bracket(std::string_view s, std::size_t open, char left, char right) {
  int depth = 0;
  for (std::size_t i = open; i < s.size(); ++i) {
    if (s[i] == left) ++depth;
    if (s[i] == right && --depth == 0) return i + 1;
  }
  return s.size();
}

/// Without leading `template <...>`, `[[...]]` and `typedef`.
std::string_view without_prefixes(std::string_view s) {
  for (;;) {
    s = trim(s);
    if (first_word(s) == "template") {
      const std::size_t open = s.find('<');
      if (open == kNone) return s.substr(s.size());
      // Parentheses inside the list, as in enable_if_t<(N > 1)>, may hold a bare '>'.
      int angles = 0;
      std::size_t i = open;
      for (; i < s.size(); ++i) {
        if (s[i] == '(') i = behind_bracket(s, i, '(', ')') - 1;
        if (i < s.size() && s[i] == '<') ++angles;
        if (i < s.size() && s[i] == '>' && --angles == 0) break;
      }
      s.remove_prefix(std::min(i + 1, s.size()));
    } else if (s.substr(0, 2) == "[[") {
      s.remove_prefix(behind_bracket(s, 0, '[', ']'));
    } else if (first_word(s) == "typedef") {
      s.remove_prefix(7);
    } else {
      return s;
    }
  }
}

bool is_macro(std::string_view word) {  // C10_API, TORCH_ARG
  return word.size() > 2 &&
         std::any_of(word.begin(), word.end(),
                     [](char c) { return std::isupper(static_cast<unsigned char>(c)); }) &&
         std::none_of(word.begin(), word.end(),
                      [](char c) { return std::islower(static_cast<unsigned char>(c)); });
}

bool is_attribute(std::string_view word) {
  return word == "__attribute__" || word == "__declspec" || word == "alignas" ||
         word == "explicit" || word == "noexcept" || word == "requires" || word == "decltype" ||
         word == "__launch_bounds__";
}

/// The word that ends at `end` (blanks skipped).
std::string_view word_before(std::string_view s, std::size_t end) {
  while (end > 0 && s[end - 1] == ' ') --end;
  std::size_t start = end;
  while (start > 0 && is_word(s[start - 1])) --start;
  return s.substr(start, end - start);
}

/// The class name in `class C10_API alignas(8) Name<T> final : Base`; empty: this is no class.
std::string class_name(std::string_view s) {
  std::string name;
  std::size_t i = first_word(s).size();
  while (i < s.size()) {
    if (s[i] == ' ') {
      ++i;
    } else if (s[i] == '(') {  // of an attribute or a macro, or else this is a function
      if (!is_attribute(word_before(s, i)) && !is_macro(word_before(s, i))) return {};
      i = behind_bracket(s, i, '(', ')');
      name.clear();
    } else if (s[i] == '[') {
      i = behind_bracket(s, i, '[', ']');
    } else if (s.substr(i, 2) == "::") {
      name += "::";
      i += 2;
    } else if (is_word(s[i])) {
      const std::string_view word = first_word(s.substr(i));
      const bool qualified = name.size() > 2 && name.compare(name.size() - 2, 2, "::") == 0;
      if (word != "final" && word != "class" && word != "struct") {
        name = qualified ? name + std::string(word) : std::string(word);
      }
      i += word.size();
    } else {
      break;  // '<', ':' or something else: the name is complete
    }
  }
  return name;
}

/// Where the parameter list opens: the first parenthesis that belongs to no attribute.
std::size_t parameter_list(std::string_view s) {
  const std::size_t op = s.find("operator");
  const bool is_operator = op != kNone && (op == 0 || !is_word(s[op - 1])) &&
                           (op + 8 >= s.size() || !is_word(s[op + 8]));
  std::size_t i = 0;
  while (i < s.size()) {
    if (is_operator && i == op) {
      const std::size_t open = s.find('(', op);
      if (open == kNone) return kNone;
      return s.substr(open, 2) == "()" && word_before(s, open) == "operator" ? s.find('(', open + 2)
                                                                             : open;
    }
    if (s[i] == '=' && !is_operator) return kNone;  // a variable
    if (s[i] != '(') {
      ++i;
      continue;
    }
    const std::string_view word = word_before(s, i);
    const std::size_t behind = behind_bracket(s, i, '(', ')');
    const std::string_view rest = trim(s.substr(std::min(behind, s.size())));
    const bool more_to_come = !rest.empty() && (is_word(rest.front()) || rest.front() == '~');
    if (is_attribute(word) || (is_macro(word) && more_to_come && first_word(rest) != "const")) {
      i = behind;
      continue;
    }
    return word.empty() ? kNone : i;
  }
  return kNone;
}

std::string function_name(std::string_view s, std::size_t open) {
  const std::size_t op = s.rfind("operator", open);
  if (op != kNone && (op == 0 || !is_word(s[op - 1])) && open - op < 40) {
    return std::string(trim(s.substr(op, open - op)));
  }
  const std::string_view word = word_before(s, open);
  if (!is_macro(word)) return std::string(word);
  // TORCH_ARG(int64_t, in_channels): the macro declares its last argument.
  const std::string_view arguments = s.substr(open, behind_bracket(s, open, '(', ')') - open - 1);
  const std::string_view last = word_before(arguments, arguments.size());
  return std::string(last.empty() ? word : last);
}

/// Cuts `: a_(a), b_(b)` off a constructor.
std::string_view without_initialisers(std::string_view s, std::size_t open) {
  const std::size_t behind = behind_bracket(s, open, '(', ')');
  for (std::size_t i = behind; i < s.size(); ++i) {
    if (s[i] == '(') i = behind_bracket(s, i, '(', ')') - 1;
    if (i < s.size() && s[i] == ':' && s.substr(i, 2) != "::" && (i == 0 || s[i - 1] != ':')) {
      return trim(s.substr(0, i));
    }
  }
  return s;
}

}  // namespace

bool is_access_label(std::string_view head) {
  const std::string_view word = first_word(trim(head));
  return word == "public" || word == "protected" || word == "private";
}

Head parse_head(std::string_view head, bool opens_body) {
  Head result;
  const std::string_view whole = trim(head);
  const std::string_view s = without_prefixes(whole);
  const std::string_view first = first_word(s);
  if (first == "namespace" || s.substr(0, 16) == "inline namespace" ||
      s.substr(0, 8) == "extern \"" || whole.empty()) {
    if (!whole.empty()) result.opens = ScopeKind::kNamespace;
    if (s.substr(0, 8) == "extern \"" && s.find('(') != kNone) {
      result.opens = ScopeKind::kOpaque;  // extern "C" void f() {
    } else {
      return result;
    }
  }
  if (first == "class" || first == "struct" || first == "union" || first == "enum") {
    const std::string name = class_name(s);
    const std::size_t assignment = s.find('=');
    if (opens_body && (!name.empty() || s.find('(') == kNone) && assignment == kNone) {
      result.opens = first == "enum" ? ScopeKind::kOpaque : ScopeKind::kClass;
      result.documentable = !name.empty();
      result.name = name;
      result.code = whole;
      return result;
    }
  }
  constexpr std::array<std::string_view, 8> kNoFunctions = {
      "using", "static_assert", "friend", "return", "if", "for", "while", "switch"};
  if (std::find(kNoFunctions.begin(), kNoFunctions.end(), first) != kNoFunctions.end() &&
      !(first == "friend" && s.find('(') != kNone)) {
    return result;
  }
  const std::size_t open = parameter_list(s);
  if (open == kNone) return result;
  result.name = function_name(s, open);
  result.documentable = !result.name.empty();
  const std::string_view cut = without_initialisers(s, open);
  result.code = std::string(whole.substr(0, whole.size() - s.size())) + std::string(cut);
  return result;
}

}  // namespace code_search
