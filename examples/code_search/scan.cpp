// scan.cpp: the walk over one header's characters. The head of a declaration (its text up to `;` or
// `{`) is taken apart in declaration.cpp.
#include "examples/code_search/scan.h"

#include "examples/code_search/declaration.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace code_search {
namespace {

struct Scope {
  ScopeKind kind = ScopeKind::kOpaque;
  std::string name;
};

/// A comment that waits for the declaration below it.
struct PendingComment {
  std::string text;
  int last_line = -2;  // where it ended; -2: there is none
};

/// What a preprocessor branch must find unchanged: its alternatives open the same braces again.
struct Snapshot {
  std::vector<Scope> scopes;
  int parens = 0;
};

class Scanner {
 public:
  Scanner(std::string_view path, std::string_view text) : path_(path), text_(text) {}

  std::vector<Declaration> run() {
    while (at_ < text_.size()) step();
    return std::move(found_);
  }

 private:
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  void step() {
    const char c = peek();
    if (c == '\n') {
      ++line_;
      ++at_;
      line_has_code_ = false;
      add_blank();
    } else if (std::isspace(static_cast<unsigned char>(c))) {
      ++at_;
      add_blank();
    } else if (c == '/' && peek(1) == '/') {
      line_comment();
    } else if (c == '/' && peek(1) == '*') {
      block_comment();
    } else if (c == '#' && !line_has_code_) {
      preprocessor_line();
    } else {
      code(c);
    }
  }

  // --- comments -------------------------------------------------------------------------------
  void line_comment() {
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    std::string_view body = text_.substr(at_ + 2, end - at_ - 2);
    at_ = end;
    if (line_has_code_ || !blank_head()) return;  // it explains a part of the declaration
    while (!body.empty() && (body.front() == '/' || body.front() == '!')) body.remove_prefix(1);
    if (pending_.last_line != line_ - 1 || !pending_is_lines_) pending_ = {};
    if (!pending_.text.empty()) pending_.text += '\n';
    pending_.text += body;
    pending_.last_line = line_;
    pending_is_lines_ = true;
  }

  void block_comment() {
    const std::size_t close = text_.find("*/", at_ + 2);
    const std::size_t end = close == std::string_view::npos ? text_.size() : close;
    const std::string_view body = text_.substr(at_ + 2, end - at_ - 2);
    const bool beside_code = line_has_code_;
    line_ += static_cast<int>(std::count(body.begin(), body.end(), '\n'));
    at_ = std::min(end + 2, text_.size());
    if (beside_code || !blank_head()) return;
    pending_.text.clear();
    std::size_t start = 0;
    while (start <= body.size()) {
      const std::size_t stop = std::min(body.find('\n', start), body.size());
      std::string_view row = body.substr(start, stop - start);
      const std::size_t first = row.find_first_not_of(" \t*!");
      row = first == std::string_view::npos ? std::string_view() : row.substr(first);
      pending_.text += row;
      pending_.text += '\n';
      start = stop + 1;
    }
    pending_.last_line = line_;
    pending_is_lines_ = false;
  }

  // --- preprocessor ---------------------------------------------------------------------------
  void preprocessor_line() {
    std::size_t word = at_ + 1;
    while (word < text_.size() && (text_[word] == ' ' || text_[word] == '\t')) ++word;
    const std::string_view directive = text_.substr(word, 5);
    if (directive.substr(0, 2) == "if") {
      branches_.push_back({scopes_, parens_});
    } else if (directive.substr(0, 4) == "else" || directive.substr(0, 4) == "elif") {
      if (!branches_.empty()) {
        scopes_ = branches_.back().scopes;
        parens_ = branches_.back().parens;
      }
    } else if (directive == "endif" && !branches_.empty()) {
      branches_.pop_back();
    }
    while (at_ < text_.size()) {  // to the line's end, over continuations
      const std::size_t end = std::min(text_.find('\n', at_), text_.size());
      const bool goes_on = end > at_ && end < text_.size() && text_[end - 1] == '\\';
      at_ = end;
      if (!goes_on) break;
      ++at_;
      ++line_;
    }
    if (blank_head()) pending_ = {};
  }

  // --- code -----------------------------------------------------------------------------------
  void code(char c) {
    line_has_code_ = true;
    if (c == '"' || c == '\'') return literal(c);
    if (parens_ == 0 && (c == ';' || c == '{' || c == '}')) {
      ++at_;
      if (c == ';') end_of_declaration(false);
      if (c == '{') end_of_declaration(true);
      if (c == '}') close_scope();
      return;
    }
    if (c == '(') ++parens_;
    if (c == ')' && parens_ > 0) --parens_;
    if (c == ':' && parens_ == 0 && is_access_label(head_) && peek(1) != ':') {
      ++at_;
      forget_head();
      line_has_code_ = false;
      return;
    }
    if (blank_head()) head_line_ = line_;
    head_ += c;
    ++at_;
  }

  void literal(char quote) {
    if (quote == '\'' && at_ > 0 && std::isalnum(static_cast<unsigned char>(text_[at_ - 1]))) {
      ++at_;  // a digit separator: 1'000
      return;
    }
    if (blank_head()) head_line_ = line_;
    const std::size_t start = at_;
    if (quote == '"' && start > 0 && text_[start - 1] == 'R') {
      const std::size_t open = text_.find('(', start);
      if (open != std::string_view::npos && open - start <= 17) {
        std::string mark(text_.substr(start, open - start));  // "delimiter
        mark.front() = ')';
        mark += '"';
        const std::size_t close = text_.find(mark, open);
        at_ = close == std::string_view::npos ? text_.size() : close + mark.size();
        const std::string_view body = text_.substr(start, at_ - start);
        line_ += static_cast<int>(std::count(body.begin(), body.end(), '\n'));
        head_ += "\"\"";
        return;
      }
    }
    ++at_;
    while (at_ < text_.size() && text_[at_] != quote && text_[at_] != '\n') {
      at_ += text_[at_] == '\\' && peek(1) != '\n' && at_ + 1 < text_.size() ? 2 : 1;
    }
    if (at_ < text_.size() && text_[at_] == quote) ++at_;
    head_ += text_.substr(start, at_ - start);
  }

  void end_of_declaration(bool opens_body) {
    const bool visible = scopes_.empty() || scopes_.back().kind != ScopeKind::kOpaque;
    const Head head = visible ? parse_head(head_, opens_body) : Head{};
    if (head.documentable && pending_.last_line >= head_line_ - 1 && !pending_.text.empty()) {
      Declaration declaration;
      declaration.path = path_;
      declaration.line = head_line_;
      declaration.comment = pending_.text;
      declaration.scope = enclosing_classes();
      declaration.code = head.code;
      declaration.name = head.name;
      found_.push_back(std::move(declaration));
    }
    if (opens_body) scopes_.push_back({head.opens, head.name});
    forget_head();
  }

  void close_scope() {
    if (!scopes_.empty()) scopes_.pop_back();
    forget_head();
  }

  void forget_head() {
    head_.clear();
    pending_ = {};
  }

  std::string enclosing_classes() const {
    std::string names;
    for (const Scope& scope : scopes_) {
      if (scope.kind != ScopeKind::kClass || scope.name.empty()) continue;
      if (!names.empty()) names += "::";
      names += scope.name;
    }
    return names;
  }

  bool blank_head() const { return head_.empty(); }
  void add_blank() {
    if (!head_.empty() && head_.back() != ' ') head_ += ' ';
  }

  std::string_view path_;
  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool line_has_code_ = false;
  std::string head_;  // the declaration being read
  int head_line_ = 0;
  int parens_ = 0;
  PendingComment pending_;
  bool pending_is_lines_ = false;
  std::vector<Scope> scopes_;
  std::vector<Snapshot> branches_;
  std::vector<Declaration> found_;
};

}  // namespace

std::vector<Declaration> scan_text(std::string_view path, std::string_view text) {
  return Scanner(path, text).run();
}

}  // namespace code_search
