// report.h: everything rank 0 prints, and the metrics file. Called by main.cpp.
#pragma once

#include "examples/code_search/corpus.h"
#include "examples/code_search/evaluate.h"
#include "examples/code_search/search.h"
#include "examples/code_search/settings.h"
#include "examples/code_search/train.h"

#include <chrono>
#include <fstream>
#include <string>

namespace code_search {

/// Progress on standard output: one refreshed line on a terminal, else a line every few updates.
class ProgressPrinter {
 public:
  ProgressPrinter();
  void update(const Progress& progress);
  /// Ends the refreshed line.
  void finish();

 private:
  bool refreshes_ = false;
  bool open_line_ = false;
  double seconds_ = 0.0;  // since the last line, as are the others
  std::int64_t pairs_ = 0;
  double reduction_ = 0.0;
  double exposed_ = 0.0;
  std::chrono::steady_clock::time_point last_{};
};

/// One JSON object a line and update, then one that sums the run up.
class MetricsFile {
 public:
  /// Throws std::runtime_error if `file` cannot be written. Empty: writes nothing.
  explicit MetricsFile(const std::string& file);
  void update(const Progress& progress);
  struct Summary {
    const Settings& settings;
    const Corpus& corpus;
    const Trained& trained;
    Recall bm25, model, combined;
    int world_size = 1;
  };
  void finish(const Summary& summary);

 private:
  void line(const std::string& text);
  std::string name_;
  std::ofstream file_;
};

void print_corpus(const Corpus& corpus, const Settings& settings);
void print_recalls(std::size_t held_out,
                   const Recall& bm25,
                   const Recall& model,
                   const Recall& combined);
/// `count` entries for `question`, best first; the one at `right` is marked.
void print_answers(const SearchIndex& index,
                   const std::string& question,
                   std::size_t count,
                   const std::string& right = {});
/// Five held-out comments as questions to `index`, with their top three.
void print_examples(const SearchIndex& index, const Corpus& corpus, std::uint64_t seed);
void print_memory_and_wire(const Trained& trained);

}  // namespace code_search
