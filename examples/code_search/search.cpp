// search.cpp: see search.h.
#include "examples/code_search/search.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>
#include <torch/utils.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace code_search {
namespace {

constexpr std::int64_t kFormat = 1;
constexpr std::size_t kTextsAtOnce = 512;  // bounds the memory of one forward

torch::Tensor embed(Tower& tower, const Idf& idf, const std::vector<const Words*>& texts) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> parts = {torch::empty({0, kWidth})};
  for (std::size_t start = 0; start < texts.size(); start += kTextsAtOnce) {
    Bags bags;
    for (std::size_t i = start; i < std::min(start + kTextsAtOnce, texts.size()); ++i) {
      idf.append(*texts[i], FeatureDrop{}, bags);
    }
    parts.push_back(tower->forward(to_tensors(bags)));
  }
  return torch::cat(parts);
}

std::vector<Entry> entries_of(const std::vector<const Pair*>& pairs) {
  std::vector<Entry> entries;
  for (const Pair* pair : pairs) {
    entries.push_back({pair->path + ":" + std::to_string(pair->line), pair->code});
  }
  return entries;
}

torch::Tensor embed_codes(const std::vector<const Pair*>& pairs, Tower& tower, const Idf& idf) {
  std::vector<const Words*> texts;
  for (const Pair* pair : pairs) texts.push_back(&pair->code_words);
  return embed(tower, idf, texts);
}

}  // namespace

SearchIndex::SearchIndex(std::vector<Entry> entries,
                         torch::Tensor embeddings,
                         Tower comment_tower,
                         Idf idf)
    : entries_(std::move(entries)),
      embeddings_(std::move(embeddings)),
      comment_tower_(std::move(comment_tower)),
      comment_idf_(std::move(idf)) {
  std::vector<Words> words;
  std::vector<const Words*> documents;
  for (const Entry& entry : entries_) words.push_back(sub_words(entry.code));
  for (const Words& document : words) documents.push_back(&document);
  bm25_ = std::make_unique<Bm25>(documents);
}

SearchIndex::SearchIndex(const std::vector<const Pair*>& pairs,
                         Tower comment_tower,
                         Tower code_tower,
                         const Idf& comment_idf,
                         const Idf& code_idf)
    : SearchIndex(
          entries_of(pairs), embed_codes(pairs, code_tower, code_idf), comment_tower, comment_idf) {
}

Scores SearchIndex::model_scores(const std::vector<const Words*>& questions) const {
  Tower tower = comment_tower_;
  const torch::Tensor scores =
      embed(tower, comment_idf_, questions).mm(embeddings_.t()).contiguous();
  Scores rows;
  for (std::int64_t i = 0; i < scores.size(0); ++i) {
    const float* row = scores.data_ptr<float>() + i * scores.size(1);
    rows.emplace_back(row, row + scores.size(1));
  }
  return rows;
}

Scores SearchIndex::bm25_scores(const std::vector<const Words*>& questions) const {
  Scores rows;
  for (const Words* question : questions) rows.push_back(bm25_->scores(*question));
  return rows;
}

std::vector<std::size_t> SearchIndex::answer(const std::string& question, std::size_t count) const {
  const Words words = sub_words(clean_comment(question));
  const Scores both = combine(model_scores({&words}), bm25_scores({&words}));
  return top(both.front(), count);
}

void SearchIndex::save(const std::string& file) const {
  auto catalogue = nlohmann::json::array();
  for (const Entry& entry : entries_) catalogue.push_back({entry.where, entry.code});
  const std::string unfinished = file + ".part";
  try {
    torch::serialize::OutputArchive archive, tower;
    comment_tower_->save(tower);
    const bool bf16 = comment_tower_->parameters().front().scalar_type() == torch::kBFloat16;
    archive.write("format", torch::IValue(kFormat));
    archive.write("dtype", torch::IValue(bf16 ? "bf16" : "fp32"));
    archive.write("catalogue", torch::IValue(catalogue.dump()));
    archive.write("embeddings", embeddings_);
    archive.write("comment_idf", torch::tensor(comment_idf_.weights()));
    archive.write("comment_tower", tower);
    archive.save_to(unfinished);
    std::filesystem::rename(unfinished, file);
  } catch (const std::exception& error) {
    std::remove(unfinished.c_str());
    throw std::runtime_error("the model cannot be saved as '" + file +
                             "'; name a file in a writable folder by --model (" + error.what() +
                             ")");
  }
}

SearchIndex SearchIndex::load(const std::string& file) {
  if (!std::filesystem::exists(file)) {
    throw std::runtime_error("there is no model '" + file +
                             "': train first (run without --query), or name another by --model");
  }
  try {
    torch::serialize::InputArchive archive, part;
    archive.load_from(file);
    torch::IValue format, dtype, catalogue;
    archive.read("format", format);
    if (format.toInt() != kFormat) throw std::runtime_error("it has another format");
    archive.read("dtype", dtype);
    archive.read("catalogue", catalogue);
    torch::Tensor embeddings, idf;
    archive.read("embeddings", embeddings);
    archive.read("comment_idf", idf);
    Tower tower;
    if (dtype.toStringRef() == "bf16") tower->to(torch::kBFloat16);
    archive.read("comment_tower", part);
    tower->load(part);

    std::vector<Entry> entries;
    for (const auto& item : nlohmann::json::parse(catalogue.toStringRef())) {
      entries.push_back({item.at(0).get<std::string>(), item.at(1).get<std::string>()});
    }
    const auto count = static_cast<std::int64_t>(entries.size());
    if (embeddings.sizes() != torch::IntArrayRef({count, kWidth}) ||
        idf.numel() != static_cast<std::int64_t>(kBuckets)) {
      throw std::runtime_error("its parts do not fit together");
    }
    const float* weights = idf.contiguous().data_ptr<float>();
    return {std::move(entries), embeddings, tower,
            Idf(std::vector<float>(weights, weights + kBuckets))};
  } catch (const std::exception& error) {
    throw std::runtime_error("'" + file + "' is no model of this program: train again, or name " +
                             "another by --model (" + error.what() + ")");
  }
}

}  // namespace code_search
