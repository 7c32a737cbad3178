// files.cpp: the part of scan.h that touches the disk.
#include "examples/code_search/scan.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace code_search {
namespace {

namespace fs = std::filesystem;

bool is_header(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".h" || extension == ".hh" || extension == ".hpp" || extension == ".hxx" ||
         extension == ".cuh";
}

/// The length of the valid UTF-8 sequence at the start of `s`; 0: there is none.
std::size_t utf8_length(std::string_view s) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(s[i]); };
  const std::size_t length = byte(0) < 0x80   ? 1
                             : byte(0) < 0xC2 ? 0
                             : byte(0) < 0xE0 ? 2
                             : byte(0) < 0xF0 ? 3
                             : byte(0) < 0xF5 ? 4
                                              : 0;
  if (length > s.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  return length;
}

struct FoundFile {
  std::string relative;
  fs::path path;
};

/// Headers below `folder`, folder by folder, so that one unreadable folder does not end the walk.
void find_headers(const fs::path& folder,
                  const std::string& prefix,
                  std::vector<FoundFile>& found,
                  ScanCounts& counts) {
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  if (error) {
    ++counts.unreadable;
    return;
  }
  for (; entry != fs::directory_iterator(); entry.increment(error)) {
    if (error) break;
    const std::string relative = prefix + entry->path().filename().string();
    std::error_code ignored;
    if (entry->is_symlink(ignored) && entry->is_directory(ignored)) continue;  // may be a loop
    if (entry->is_directory(ignored)) {
      find_headers(entry->path(), relative + "/", found, counts);
    } else if (entry->is_regular_file(ignored) && is_header(entry->path())) {
      found.push_back({relative, entry->path()});
    }
  }
}

}  // namespace

std::string normalise_bytes(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (std::size_t i = 0; i < bytes.size();) {
    const char c = bytes[i];
    if (c == '\r') {
      text += '\n';
      i += bytes.substr(i, 2) == "\r\n" ? 2 : 1;
      continue;
    }
    const std::size_t length = utf8_length(bytes.substr(i));
    const bool control = length == 1 && static_cast<unsigned char>(c) < 0x20;
    if (length == 0 || (control && c != '\n' && c != '\t')) {
      text += ' ';
      ++i;
    } else {
      text += bytes.substr(i, length);
      i += length;
    }
  }
  return text;
}

ScanResult scan_folder(const std::string& folder) {
  std::error_code error;
  const fs::path root(folder);
  if (!fs::is_directory(root, error)) {
    throw std::runtime_error("source folder '" + folder + "' is not a folder" +
                             (error ? " (" + error.message() + ")" : "") +
                             "; name one with C++ headers by --source");
  }
  fs::directory_iterator probe(root, error);
  if (error) {
    throw std::runtime_error("source folder '" + folder + "' cannot be read: " + error.message());
  }

  ScanResult result;
  std::vector<FoundFile> files;
  find_headers(root, "", files, result.counts);
  std::sort(files.begin(), files.end(),
            [](const FoundFile& a, const FoundFile& b) { return a.relative < b.relative; });
  for (const FoundFile& file : files) {
    const auto bytes = fs::file_size(file.path, error);
    if (!error && bytes > kMaxFileBytes) {
      ++result.counts.too_large;
      continue;
    }
    std::ifstream stream(file.path, std::ios::binary);
    const std::string raw((std::istreambuf_iterator<char>(stream)),
                          std::istreambuf_iterator<char>());
    if (!stream.is_open() || stream.bad()) {
      ++result.counts.unreadable;
      continue;
    }
    ++result.counts.files;
    std::vector<Declaration> declarations = scan_text(file.relative, normalise_bytes(raw));
    if (!declarations.empty()) ++result.counts.files_with_docs;
    std::move(declarations.begin(), declarations.end(), std::back_inserter(result.declarations));
  }
  return result;
}

}  // namespace code_search
