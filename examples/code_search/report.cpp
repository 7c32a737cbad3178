// report.cpp: see report.h.
#include "examples/code_search/report.h"

#include "examples/code_search/keyed.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unistd.h>

namespace code_search {
namespace {

constexpr int kStepsPerLine = 10;  // when lines are not refreshed
constexpr double kRefreshSeconds = 0.2;

/// mpirun gives every rank a terminal of its own; TERM=dumb is how a script says that nobody looks.
bool output_is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDOUT_FILENO) != 0 && term != nullptr && std::string_view(term) != "dumb";
}

/// Resident memory of this process in MiB, shared memory included; 0: unknown.
double resident_mib() {
  std::ifstream status("/proc/self/statm");
  double pages = 0.0, resident = 0.0;
  status >> pages >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1024.0 * 1024.0);
}

std::string shortened(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return std::string(text);
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
  return std::string(text.substr(0, bytes)) + " ...";
}

void print_row(const char* name, const Recall& recall) {
  std::printf("  %-14s %9.1f %% %9.1f %%\n", name, 100.0 * recall.at_1, 100.0 * recall.at_10);
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

ProgressPrinter::ProgressPrinter() : refreshes_(output_is_terminal()) {}

void ProgressPrinter::update(const Progress& progress) {
  seconds_ += progress.seconds;
  pairs_ += progress.pairs;
  reduction_ += progress.result.times.reduction;
  exposed_ += progress.result.times.exposed;
  const auto now = std::chrono::steady_clock::now();
  const bool ends = progress.step == 1 || progress.step == progress.steps;
  const bool due = refreshes_
                       ? std::chrono::duration<double>(now - last_).count() >= kRefreshSeconds
                       : progress.step % kStepsPerLine == 0;
  if (!ends && !due) return;
  last_ = now;

  std::string hidden = "-";
  if (reduction_ > 0.0) {
    const double share = std::clamp(1.0 - exposed_ / reduction_, 0.0, 1.0);
    hidden = std::to_string(static_cast<int>(100.0 * share + 0.5)) + " %";
  }
  std::printf(
      "%sstep %d/%d  loss %.3f  norm %.3f  %.0f pairs/s  reduction hidden %s  memory %.0f MiB%s",
      refreshes_ ? "\r\033[K" : "", progress.step, progress.steps, progress.loss,
      progress.result.norm, static_cast<double>(pairs_) / std::max(seconds_, 1e-9), hidden.c_str(),
      resident_mib(), refreshes_ ? "" : "\n");
  if (!progress.result.applied) {
    std::printf("%s  skipped: %s%s", refreshes_ ? "" : "  ",
                tandem::to_string(progress.result.reason), refreshes_ ? "" : "\n");
  }
  std::fflush(stdout);
  open_line_ = refreshes_;
  seconds_ = reduction_ = exposed_ = 0.0;
  pairs_ = 0;
}

void ProgressPrinter::finish() {
  if (open_line_) std::printf("\n");
  open_line_ = false;
}

MetricsFile::MetricsFile(const std::string& file) : name_(file) {
  if (file.empty()) return;
  file_.open(file, std::ios::trunc);
  if (!file_) {
    throw std::runtime_error("the metrics file '" + file +
                             "' cannot be written; name a file in a writable folder by --metrics");
  }
}

void MetricsFile::line(const std::string& text) {
  if (name_.empty()) return;
  file_ << text << '\n' << std::flush;
  if (!file_)
    throw std::runtime_error("writing the metrics file '" + name_ + "' failed (disk full?)");
}

void MetricsFile::update(const Progress& progress) {
  const tandem::StepTimes& times = progress.result.times;
  line(nlohmann::json{
      {"step", progress.step},
      {"loss", progress.loss},
      {"norm", progress.result.norm},
      {"lr", progress.learning_rate},
      {"temperature", progress.temperature},
      {"applied", progress.result.applied},
      {"pairs", progress.pairs},
      {"seconds", progress.seconds},
      {"times",
       {{"backward", progress.backward_seconds},
        {"reduction", times.reduction},
        {"exposed", times.exposed},
        {"norm", times.norm},
        {"update", times.update},
        {"gather", times.gather}}},
  }
           .dump());
}

void MetricsFile::finish(const Summary& summary) {
  const Settings& settings = summary.settings;
  const Trained& trained = summary.trained;
  nlohmann::json memory = nlohmann::json::object();
  for (const tandem::MemoryLine& item : trained.memory.lines) {
    memory[item.what] = {{"bytes", item.bytes}, {"expected", item.expected}};
  }
  line(nlohmann::json{
      {"summary", true},
      {"recall_at_1", summary.model.at_1},
      {"recall_at_10", summary.model.at_10},
      {"bm25_recall_at_1", summary.bm25.at_1},
      {"bm25_recall_at_10", summary.bm25.at_10},
      {"combined_recall_at_1", summary.combined.at_1},
      {"combined_recall_at_10", summary.combined.at_10},
      {"parameter_hash", hex(trained.parameter_hash)},
      {"parameters", trained.memory.parameters},
      {"temperature", trained.temperature},
      {"pairs", summary.corpus.pairs},
      {"train_pairs", summary.corpus.train.size()},
      {"held_out_pairs", summary.corpus.held_out.size()},
      {"steps", trained.steps},
      {"seconds", trained.seconds},
      {"world_size", summary.world_size},
      {"micro_batches", settings.micro_batches},
      {"seed", settings.seed},
      {"dtype", settings.bf16 ? "bf16" : "fp32"},
      {"stage", settings.stage},
      {"shuffle", settings.shuffle},
      {"memory", memory},
      {"wire",
       {{"reduce_bytes", trained.wire.reduce_bytes},
        {"gather_bytes", trained.wire.gather_bytes},
        {"control_bytes", trained.wire.control_bytes},
        {"control_rounds", trained.wire.control_rounds},
        {"launches", trained.wire.launches}}},
  }
           .dump());
}

void print_corpus(const Corpus& corpus, const Settings& settings) {
  std::printf(
      "%s: %zu headers, %zu documented declarations, %zu pairs of comment and declaration\n",
      settings.source.c_str(), corpus.counts.files, corpus.documented, corpus.pairs);
  if (corpus.counts.unreadable + corpus.counts.too_large > 0) {
    std::printf("left out: %zu unreadable and %zu larger than %zu MiB\n", corpus.counts.unreadable,
                corpus.counts.too_large, kMaxFileBytes >> 20);
  }
  std::printf("%zu pairs train, %zu are held out, %zu near-duplicates of these are left out\n",
              corpus.train.size(), corpus.held_out.size(), corpus.near_duplicates);
  std::fflush(stdout);
}

void print_recalls(std::size_t held_out,
                   const Recall& bm25,
                   const Recall& model,
                   const Recall& combined) {
  std::printf("\n%zu held-out comments, each to find its declaration among %zu:\n", held_out,
              held_out);
  std::printf("  %-14s %11s %11s\n", "", "recall@1", "recall@10");
  print_row("chance", chance(held_out));
  print_row("BM25", bm25);
  print_row("model", model);
  print_row("model + BM25", combined);
  std::fflush(stdout);
}

void print_answers(const SearchIndex& index,
                   const std::string& question,
                   std::size_t count,
                   const std::string& right) {
  std::printf("\n\"%s\"\n", shortened(question, 200).c_str());
  int rank = 0;
  for (std::size_t i : index.answer(question, count)) {
    const Entry& entry = index.entries()[i];
    std::printf("  %d. %s%s\n     %s\n", ++rank, entry.where.c_str(),
                !right.empty() && entry.where == right ? "   <- its own declaration" : "",
                shortened(entry.code, 160).c_str());
  }
  std::fflush(stdout);
}

void print_examples(const SearchIndex& index, const Corpus& corpus, std::uint64_t seed) {
  constexpr std::size_t kExamples = 5, kFewestWords = 6, kMostExampleWords = 16;
  std::printf("\nFive held-out comments asked of all %zu declarations (model + BM25):\n",
              index.entries().size());
  std::size_t shown = 0;
  for (std::size_t i : keyed_permutation(corpus.held_out.size(), seed, Purpose::kExamples, 0)) {
    const Pair& pair = corpus.held_out[i];
    const std::size_t words = pair.comment_words.size();
    if (words < kFewestWords || words > kMostExampleWords) continue;
    print_answers(index, pair.comment, 3, pair.path + ":" + std::to_string(pair.line));
    if (++shown == kExamples) break;
  }
}

void print_memory_and_wire(const Trained& trained) {
  std::printf("\nMemory of rank 0, %lld parameters:\n%s",
              static_cast<long long>(trained.memory.parameters),
              trained.memory.to_string().c_str());
  std::printf("\nWire of rank 0, %d updates:\n%s\n", trained.steps,
              trained.wire.to_string().c_str());
  std::fflush(stdout);
}

}  // namespace code_search
