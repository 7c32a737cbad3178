// main.cpp: trains a code search on the doc comments of C++ headers, or asks a trained one.
//
// Every rank scans the headers itself and computes the same corpus; rank 0 prints, evaluates and
// saves. What goes wrong on one rank ends all of them, with one message.
#include "examples/code_search/corpus.h"
#include "examples/code_search/report.h"
#include "examples/code_search/search.h"
#include "examples/code_search/settings.h"
#include "examples/code_search/train.h"
#include <tandem/error.h>
#include <tandem/world.h>

#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace code_search {
namespace {

constexpr int kInterrupted = 130;  // what a shell expects of a program that Ctrl-C ended

/// Beside the program, so that it is found from any folder.
std::string default_model() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "code_search.pt" : (program.parent_path() / "code_search.pt").string();
}

int threads_per_rank(const Settings& settings, int ranks) {
  if (settings.threads > 0) return settings.threads;
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return at::get_num_threads();
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks);
}

/// Runs `action` and agrees on how it went: true if it did on all ranks. A rank that failed says
/// why.
bool on_all_ranks(tandem::World& world, const std::function<void()>& action) {
  std::string failure;
  try {
    action();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  // Usually all ranks fail alike: rank 0 speaks for them.
  const bool failed = world.any(!failure.empty());
  const bool rank_0_failed = world.broadcast(failure.empty() ? 0.0 : 1.0) != 0.0;
  if (!failure.empty() && (world.rank() == 0 || !rank_0_failed)) {
    std::fprintf(stderr, "code_search: rank %d: %s\n", world.rank(), failure.c_str());
  }
  return !failed;
}

std::vector<const Words*> words_of(const std::vector<Pair>& pairs, Words Pair::*member) {
  std::vector<const Words*> words;
  for (const Pair& pair : pairs) words.push_back(&(pair.*member));
  return words;
}

/// 52 bits that differ when corpora do: exact in the double that ranks exchange.
double fingerprint(const Corpus& corpus) {
  std::string all;
  for (const auto* side : {&corpus.train, &corpus.held_out}) {
    for (const Pair& pair : *side) all += pair.path + '\n' + pair.comment + '\n' + pair.code + '\n';
  }
  return static_cast<double>(std::hash<std::string>{}(all) >> 12);
}

void evaluate_and_save(const Settings& settings,
                       const Corpus& corpus,
                       const Idf& comment_idf,
                       const Idf& code_idf,
                       const Trained& trained,
                       int world_size,
                       MetricsFile& metrics) {
  const auto index_over = [&](const std::vector<const Pair*>& pairs) {
    return SearchIndex(pairs, trained.comments, trained.codes, comment_idf, code_idf);
  };
  std::vector<const Pair*> held_out, all;
  for (const Pair& pair : corpus.held_out) held_out.push_back(&pair);
  all = held_out;
  for (const Pair& pair : corpus.train) all.push_back(&pair);

  const SearchIndex small = index_over(held_out);
  const auto questions = words_of(corpus.held_out, &Pair::comment_words);
  const Scores model = small.model_scores(questions), bm25 = small.bm25_scores(questions);
  const MetricsFile::Summary summary = {settings,     corpus,        trained,
                                        recall(bm25), recall(model), recall(combine(model, bm25)),
                                        world_size};
  print_recalls(held_out.size(), summary.bm25, summary.model, summary.combined);

  const SearchIndex large = index_over(all);
  print_examples(large, corpus, settings.seed);
  print_memory_and_wire(trained);
  metrics.finish(summary);
  if (!settings.model.empty()) {
    large.save(settings.model);
    std::printf("saved %s; ask it: code_search --query \"number of dimensions\"\n",
                settings.model.c_str());
  }
}

int run_training(tandem::World& world, const Settings& settings) {
  const bool speaks = world.rank() == 0;
  Corpus corpus;
  if (!on_all_ranks(world,
                    [&] { corpus = make_corpus(scan_folder(settings.source), settings.seed); })) {
    return EXIT_FAILURE;
  }
  const double mine = fingerprint(corpus);
  const double first = world.broadcast(mine);
  if (!on_all_ranks(world, [&] {
        if (mine != first) {
          throw std::runtime_error("'" + settings.source +
                                   "' differs from what rank 0 finds there; " +
                                   "all ranks must see the same headers");
        }
      })) {
    return EXIT_FAILURE;
  }
  if (speaks) print_corpus(corpus, settings);

  std::optional<MetricsFile> metrics;
  if (!on_all_ranks(world, [&] { metrics.emplace(speaks ? settings.metrics : std::string()); })) {
    return EXIT_FAILURE;
  }
  const Idf comment_idf(words_of(corpus.train, &Pair::comment_words));
  const Idf code_idf(words_of(corpus.train, &Pair::code_words));
  const Dealer dealer(corpus.train, comment_idf, code_idf,
                      {.seed = settings.seed, .shuffle_pairs = settings.shuffle});
  ProgressPrinter printer;
  const Trained trained = train(world, settings, dealer, [&](const Progress& progress) {
    if (!speaks) return;
    printer.update(progress);
    metrics->update(progress);
  });
  printer.finish();
  if (trained.interrupted) {
    if (speaks) std::printf("interrupted after %d updates; nothing is saved\n", trained.steps);
    return kInterrupted;
  }
  if (speaks) {
    std::printf("%d updates in %.1f s on %d rank(s), temperature %.4f\n", trained.steps,
                trained.seconds, world.size(), trained.temperature);
  }
  const bool good = on_all_ranks(world, [&] {
    if (!speaks) return;
    evaluate_and_save(settings, corpus, comment_idf, code_idf, trained, world.size(), *metrics);
  });
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

int run_queries(tandem::World& world, const Settings& settings) {
  return on_all_ranks(world,
                      [&] {
                        if (world.rank() != 0) return;
                        const SearchIndex index = SearchIndex::load(settings.model);
                        for (const std::string& query : settings.queries)
                          print_answers(index, query, 5);
                      })
             ? EXIT_SUCCESS
             : EXIT_FAILURE;
}

int run(const Settings& settings) {
  tandem::World world =
      tandem::World::from_environment({.average = tandem::Average::kMicroBatches});
  at::set_num_threads(threads_per_rank(settings, world.size()));
  const int status =
      settings.queries.empty() ? run_training(world, settings) : run_queries(world, settings);
  world.close();
  return status;
}

}  // namespace
}  // namespace code_search

int main(int argc, char** argv) {
  code_search::Settings settings;
  settings.source = CODE_SEARCH_DEFAULT_SOURCE;
  std::string dtype = "fp32";
  std::string model = code_search::default_model();

  CLI::App app(
      "Trains a code search on the C++ headers of a folder: two towers and a learned temperature,\n"
      "three Tandem engines in one loss. Run it alone or as `mpirun -np N code_search`. With "
      "--query\n"
      "it answers from the model that the last training saved.");
  app.option_defaults()->always_capture_default();
  app.add_option("--source", settings.source, "Folder of C++ headers to learn from");
  app.add_option("--steps", settings.steps, "Updates")->check(CLI::Range(1, 1000000));
  app.add_option("--seed", settings.seed, "Of the split, the first parameters and every draw");
  app.add_option("--dtype", dtype, "Of the towers' parameters and gradients")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--stage", settings.stage, "1: sharded optimizer states; 2: sharded gradients too")
      ->check(CLI::IsMember({1, 2}));
  app.add_option("--micro-batches", settings.micro_batches,
                 "Micro-batches of 256 pairs per rank and update")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--shuffle", settings.shuffle,
               "Control: train on comments with other declarations; saves no model unless --model");
  app.add_option("--threads", settings.threads,
                 "LibTorch threads per rank; 0: OMP_NUM_THREADS, or the cores shared by the ranks")
      ->check(CLI::Range(0, 1024));
  app.add_option("--metrics", settings.metrics,
                 "File for JSON lines: one per update, then a summary")
      ->always_capture_default(false);
  CLI::Option* model_option = app.add_option(
      "--model", model, "File the search index is saved to and read from; \"\" saves nothing");
  app.add_option("--query", settings.queries, "A question; trains nothing; may be repeated")
      ->always_capture_default(false)
      ->allow_extra_args(false);
  CLI11_PARSE(app, argc, argv);

  settings.bf16 = dtype == "bf16";
  const bool keeps = !settings.shuffle || model_option->count() > 0;
  if (keeps || !settings.queries.empty()) settings.model = model;
  try {
    return code_search::run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "code_search: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
