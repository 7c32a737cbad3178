// declaration.h: reads the head of a C++ declaration, its text up to the `;` or `{`: what it
// declares, whether a comment above it documents it, and what scope its brace opens.
// Called by scan.cpp.
#pragma once

#include <string>
#include <string_view>

namespace code_search {

enum class ScopeKind {
  kNamespace,  // namespaces and extern "C": transparent
  kClass,      // members are declarations again
  kOpaque,     // function bodies, enumerators, initialisers: nothing inside counts
};

struct Head {
  bool documentable = false;             // a function, or a class, struct, union or enum with body
  ScopeKind opens = ScopeKind::kOpaque;  // of the brace that follows, if one does
  std::string name;
  std::string code;  // blanks collapsed, constructor initialisers cut off
};

/// `head` as it stands in the file, blanks already collapsed; `opens_body`: a `{` follows, not a
/// `;`.
Head parse_head(std::string_view head, bool opens_body);

/// True for `public`, `protected`, `private` and Qt-like labels, whose colon ends no declaration.
bool is_access_label(std::string_view head);

}  // namespace code_search
