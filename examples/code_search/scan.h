// scan.h: finds documented declarations in a folder of C++ headers.
//
// S1 Deterministic: the result depends on the files' relative paths and bytes only (paths sorted).
// S2 One pass per file with a stack of scopes; comments inside function bodies, enumerations and
//    initialisers belong to nothing.
// S3 Any bytes are accepted: invalid UTF-8 and control characters count as blanks, \r\n and \r as
// \n. This is no parser: a header that fools it yields a few odd pairs, never a failure. Called by
// corpus.cpp.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace code_search {

/// A function, class, struct, union or enum with a comment directly above it.
struct Declaration {
  std::string path;     // relative to the scanned folder, '/' between parts
  int line = 0;         // of the declaration's first word, from 1
  std::string comment;  // markers removed, lines kept
  std::string scope;    // enclosing classes, "Outer::Inner"; empty at namespace level
  std::string code;     // the declaration without its body, blanks collapsed
  std::string name;     // what it declares
};

/// What a scan met, for the report.
struct ScanCounts {
  std::size_t files = 0;            // headers read
  std::size_t files_with_docs = 0;  // of these, with at least one documented declaration
  std::size_t too_large = 0;        // headers left out, larger than kMaxFileBytes
  std::size_t unreadable = 0;       // headers or folders that could not be opened
};

inline constexpr std::size_t kMaxFileBytes = std::size_t{4} << 20;

struct ScanResult {
  std::vector<Declaration> declarations;
  ScanCounts counts;
};

/// All documented declarations of one file's text.
std::vector<Declaration> scan_text(std::string_view path, std::string_view text);

/// Scans every header (.h .hh .hpp .hxx .cuh) under `folder`. Links to folders are not followed, so
/// that a loop of links ends. Throws std::runtime_error if the folder is missing or unreadable.
ScanResult scan_folder(const std::string& folder);

/// Replaces what is not valid UTF-8, and control characters other than \n and \t, by blanks, and
/// unifies line ends.
std::string normalise_bytes(std::string_view bytes);

}  // namespace code_search
