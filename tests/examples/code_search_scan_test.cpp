// code_search_scan_test.cpp: which declarations the scanner of C++ headers finds, and what it
// survives.
#include "examples/code_search/scan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace code_search {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> names(const std::vector<Declaration>& declarations) {
  std::vector<std::string> result;
  for (const Declaration& declaration : declarations) result.push_back(declaration.name);
  return result;
}

/// A folder that lives as long as the test.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "code_search_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  Folder(Folder&&) = delete;
  Folder& operator=(Folder&&) = delete;

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(Scan, FindsFunctionsAndTypesUnderTheirComment) {
  const auto found = scan_text("a.h", R"(
namespace n {
/// Adds two numbers.
int add(int a, int b);
/* A point
 * in the plane. */
struct Point { int x; };
// Which way to go.
enum class Way : int { kLeft, kRight };
/// One of several.
union U { int i; float f; };
}
)");
  EXPECT_THAT(names(found), ElementsAre("add", "Point", "Way", "U"));
  EXPECT_EQ(found[0].line, 4);
  EXPECT_EQ(found[0].code, "int add(int a, int b)");
  EXPECT_EQ(found[0].comment, " Adds two numbers.");
  EXPECT_THAT(found[1].comment, ::testing::HasSubstr("A point\nin the plane."));
}

TEST(Scan, NamesTheEnclosingClasses) {
  const auto found = scan_text("a.h", R"(
namespace n {
class API_EXPORT Outer final : public Base<int> {
 public:
  struct Inner {
    /// Clears it all.
    void clear() { items_ = {}; }
  };
};
}
)");
  ASSERT_THAT(names(found), ElementsAre("clear"));
  EXPECT_EQ(found[0].scope, "Outer::Inner");
  EXPECT_EQ(found[0].code, "void clear()");
}

TEST(Scan, IgnoresCommentsInsideBodies) {
  EXPECT_THAT(names(scan_text("a.h", R"(
int f() {
  // Calls the other one.
  g(1);
  if (x) {
    /// Looks like a declaration.
    int h(int);
  }
}
/// Is outside again.
int k();
enum E {
  // This one is an enumerator, call(it).
  kOne
};
)")),
              ElementsAre("k"));
}

TEST(Scan, CommentMustStandDirectlyAbove) {
  EXPECT_THAT(scan_text("a.h", "// Far away.\n\nint f();\n"), IsEmpty());
  EXPECT_THAT(scan_text("a.h", "int x; // belongs to x\nint f();\n"), IsEmpty());
  EXPECT_THAT(scan_text("a.h", "// Explains a macro.\n#define X 1\nint f();\n"), IsEmpty());
  EXPECT_THAT(scan_text("a.h", "// Explains a variable.\nint x = f(3);\nint g();\n"), IsEmpty());
}

TEST(Scan, CommentBesideAParameterDoesNotReplaceTheOneAbove) {
  const auto found = scan_text("a.h",
                               "/// The real one.\nvoid f(int a,  // first\n"
                               "       // second\n       int b);\n");
  ASSERT_THAT(names(found), ElementsAre("f"));
  EXPECT_EQ(found[0].comment, " The real one.");
}

TEST(Scan, CutsConstructorInitialisersAndTemplatesStay) {
  const auto found = scan_text("a.h", R"(
struct P {
  /// Makes a point.
  template <class T, class = std::enable_if_t<(sizeof(T) > 1)>>
  explicit P(T x) : x_(x), y_{0} {}
  /// Compares two points.
  bool operator==(const P& other) const;
  /// Calls it.
  int operator()(int x) const;
  /// Says a setting.
  SOME_ARG(int64_t, in_channels) = 1;
};
)");
  ASSERT_THAT(names(found), ElementsAre("P", "operator==", "operator()", "in_channels"));
  EXPECT_EQ(found[0].code,
            "template <class T, class = std::enable_if_t<(sizeof(T) > 1)>> explicit P(T x)");
}

TEST(Scan, BranchesOfThePreprocessorOpenABraceOnce) {
  EXPECT_THAT(names(scan_text("a.h", R"(
#ifdef A
struct X : B {
#else
struct X {
#endif
  /// Member of either.
  void f();
};
/// Not inside any more.
void g();
)")),
              ElementsAre("f", "g"));
}

TEST(Scan, LiteralsHideBracesAndComments) {
  EXPECT_THAT(names(scan_text("a.h",
                              "inline const char* s() { return \"{ // \\\"\"; }\n"
                              "inline char c() { return '{'; }\n"
                              "inline auto r() { return R\"x(} \" {)x\"; }\n"
                              "constexpr int k = 1'000;\n"
                              "/// Still found here.\nint f();\n")),
              ElementsAre("f"));
}

TEST(Scan, SurvivesUnbalancedAndEmptyText) {
  for (const char* text :
       {"", "}", "}}}{", "/*", "//", "\"", "'", "R\"(", "(((", "#if", "template <",
        "/// x\ntemplate <class T", "/// x\nclass", "/// x\noperator", "\\"}) {
    EXPECT_NO_THROW(scan_text("a.h", text)) << text;
  }
}

TEST(Scan, BytesBecomeTextWithPlainLineEnds) {
  EXPECT_EQ(normalise_bytes("a\r\nb\rc\n"), "a\nb\nc\n");
  EXPECT_EQ(normalise_bytes("\xC3\xA4"), "\xC3\xA4");  // a valid two-byte letter
  EXPECT_EQ(normalise_bytes("x\xFFy\xC3"), "x y ");    // stray byte; sequence cut short
  EXPECT_EQ(normalise_bytes("\xC0\xAF"), "  ");        // overlong: invalid
  EXPECT_EQ(normalise_bytes(std::string("a\0b", 3)), "a b");
}

TEST(Scan, WindowsLineEndsMakeNoDifference) {
  const auto found = scan_text("a.h", normalise_bytes("/// Adds\r\n/// numbers.\r\nint f();\r\n"));
  ASSERT_THAT(names(found), ElementsAre("f"));
  EXPECT_EQ(found[0].comment, " Adds\n numbers.");
  EXPECT_EQ(found[0].line, 3);
}

TEST(ScanFolder, ReadsHeadersInPathOrder) {
  const Folder folder;
  folder.write("z.h", "/// Last of the files.\nint z();\n");
  folder.write("a/b.hpp", "/// First of the files.\nint b();\n");
  folder.write("a/ignored.txt", "/// No header.\nint no();\n");
  const ScanResult result = scan_folder(folder.path().string());
  EXPECT_THAT(names(result.declarations), ElementsAre("b", "z"));
  EXPECT_EQ(result.declarations[0].path, "a/b.hpp");
  EXPECT_EQ(result.counts.files, 2U);
  EXPECT_EQ(result.counts.files_with_docs, 2U);
}

TEST(ScanFolder, LinksInACircleEnd) {
  const Folder folder;
  folder.write("a/x.h", "/// Found only once.\nint x();\n");
  fs::create_directory_symlink(folder.path(), folder.path() / "a" / "back");
  fs::create_symlink("self.h", folder.path() / "self.h");
  EXPECT_THAT(names(scan_folder(folder.path().string()).declarations), ElementsAre("x"));
}

TEST(ScanFolder, LeavesOutHugeFilesAndSaysSo) {
  const Folder folder;
  folder.write("huge.h", "/// Too large.\nint f();\n" + std::string(kMaxFileBytes, ' '));
  const ScanResult result = scan_folder(folder.path().string());
  EXPECT_THAT(result.declarations, IsEmpty());
  EXPECT_EQ(result.counts.too_large, 1U);
}

TEST(ScanFolder, MissingFolderIsNamed) {
  try {
    scan_folder("/no/such/folder");
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("/no/such/folder"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("--source"));
  }
}

}  // namespace
}  // namespace code_search
