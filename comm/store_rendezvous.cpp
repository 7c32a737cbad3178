#include "comm/store_rendezvous.h"

#include "comm/process_ranks.h"
#include "comm/store_join.h"
#include <tandem/error.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace tandem::comm {

namespace {

// The first letter of what rank 0 says of a gathering: its texts, or why there are none.
constexpr char kTexts = 't';
constexpr char kMismatch = 'm';
constexpr char kTimeout = 'o';

/// "BYTES TEXT", one after another.
void append(std::string& all, const std::string& text) {
  all += std::to_string(text.size()) + " ";
  all += text;
}

std::vector<std::string> split(const std::string& all, std::size_t at) {
  std::vector<std::string> texts;
  while (at < all.size()) {
    const std::size_t space = all.find(' ', at);
    const std::size_t bytes = std::stoul(all.substr(at, space - at));
    texts.push_back(all.substr(space + 1, bytes));
    at = space + 1 + bytes;
  }
  return texts;
}

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(std::shared_ptr<Store> store, const StoreRanks& ranks, Deadline deadline)
      : store_(std::move(store)), group_(ranks.group), chunk_bytes_(ranks.chunk_bytes) {
    const std::string node = forced_node(group_.rank, ranks.ranks_per_node);
    prefix_ = kStoreKeys + join_world(*store_, group_, deadline) + "/";
    const std::string key = (ranks.host_key.empty() ? host_key() : ranks.host_key) + " " + node;
    nodes_ = Nodes(all_gather("finding out which ranks share a host", key, deadline));
  }

  [[nodiscard]] Group group() const override { return group_; }
  [[nodiscard]] const Nodes& nodes() const override { return nodes_; }

  std::vector<std::string> all_gather(const std::string& what,
                                      const std::string& text,
                                      Deadline deadline) override {
    const std::string place = prefix_ + "gather/" + std::to_string(gatherings_);
    std::string mine;
    append(mine, what);
    append(mine, text);
    set_long(place + "/" + std::to_string(group_.rank), mine);
    const std::string all = group_.rank == 0 ? collect(place, what, text, deadline)
                                             : wait_for_all(place, what, deadline);
    if (group_.rank == 0 && gatherings_ > 0) {
      // Everybody who has come to this gathering has read the last one.
      erase_long(prefix_ + "gather/" + std::to_string(gatherings_ - 1) + "/all");
    }
    ++gatherings_;
    if (all[0] == kTexts) return split(all, 1);
    if (group_.rank != 0) store_->add(place + "/heard", 1);
    if (all[0] == kMismatch) throw Mismatch(all.substr(1));
    throw Timeout(all.substr(1));
  }

  std::vector<std::shared_ptr<Segment>> exchange(const std::string& what,
                                                 std::shared_ptr<Segment> mine,
                                                 Deadline deadline) override {
    return exchange_by_address(*this, what, mine, deadline);
  }

  std::unique_ptr<Messenger> make_messenger(const std::string& what, Deadline deadline) override {
    all_gather(what, {}, deadline);
    if (!mail_) mail_ = make_store_mail(store_, prefix_ + "mail/", group_, chunk_bytes_);
    return make_store_messenger(mail_, spaces_++);
  }

  void close(Deadline deadline) override {
    const std::string what = "closing the world";
    if (mail_ && !flush(*mail_, deadline)) {
      throw Timeout(what + ": messages of rank " + std::to_string(group_.rank) +
                    " were not handed over by the deadline");
    }
    all_gather(what, {}, deadline);
    mail_.reset();
    // Rank 0's process may hold the store, so it goes last: the others say that they need it no
    // more, by a call that is answered.
    const std::string place = prefix_ + "gone/";
    if (group_.rank != 0) {
      store_->add(place + std::to_string(group_.rank), 1);
      return;
    }
    for (int rank = 1; rank < group_.size; ++rank) {
      const std::string key = place + std::to_string(rank);
      for (const StorePauses pauses; !store_->find(key); pauses.sleep()) {
        if (deadline.passed()) {
          throw Timeout(what + ": rank " + std::to_string(rank) +
                        " did not end it by the deadline; did its process end?");
        }
      }
      store_->erase(key);
    }
    erase_long(prefix_ + "gather/" + std::to_string(gatherings_ - 1) + "/all");
  }

 private:
  // Values of any length, in pieces; the first, under the key itself, says how many more there are
  // and is set last.

  void set_long(const std::string& key, const std::string& value) {
    const std::size_t pieces = value.size() / kLongestPiece;
    for (std::size_t piece = 1; piece <= pieces; ++piece) {
      store_->set(key + "/" + std::to_string(piece),
                  value.substr(piece * kLongestPiece, kLongestPiece));
    }
    store_->set(key, std::to_string(pieces) + " " + value.substr(0, kLongestPiece));
  }

  std::optional<std::string> find_long(const std::string& key) {
    auto first = store_->find(key);
    if (!first) return std::nullopt;
    const std::size_t space = first->find(' ');
    const std::size_t pieces = std::stoul(first->substr(0, space));
    std::string value = first->substr(space + 1);
    for (std::size_t piece = 1; piece <= pieces; ++piece) {
      const auto next = store_->find(key + "/" + std::to_string(piece));
      if (!next) {
        throw SystemError("the store has lost a part of '" + key +
                          "'; does something else erase keys of this store?");
      }
      value += *next;
    }
    return value;
  }

  void erase_long(const std::string& key) {
    const auto first = store_->find(key);
    if (!first) return;
    const std::size_t pieces = std::stoul(first->substr(0, first->find(' ')));
    store_->erase(key);
    for (std::size_t piece = 1; piece <= pieces; ++piece) {
      store_->erase(key + "/" + std::to_string(piece));
    }
  }

  static std::string not_all(const std::string& what, const std::vector<int>& missing) {
    return what + ": " + name_ranks(missing) +
           " did not come by the deadline; did their processes end or take another path?";
  }

  /// Rank 0: everybody's text in one value, which is published and returned.
  std::string collect(const std::string& place,
                      const std::string& what,
                      const std::string& text,
                      Deadline deadline) {
    std::string all(1, kTexts);
    append(all, text);
    std::vector<int> missing;
    std::string other;  // what a rank has come for, if it is not `what`
    for (int rank = 1; rank < group_.size; ++rank) {
      const std::string key = place + "/" + std::to_string(rank);
      auto theirs = find_long(key);
      for (const StorePauses pauses; !theirs && !deadline.passed(); theirs = find_long(key)) {
        pauses.sleep();
      }
      if (!theirs) {
        missing.push_back(rank);
        continue;
      }
      const std::vector<std::string> words = split(*theirs, 0);
      if (words.at(0) != what) other = words.at(0);
      append(all, words.at(1));
    }
    if (!missing.empty()) {
      all = kTimeout + not_all(what, missing);
    } else if (!other.empty()) {
      all = kMismatch + ("ranks meet for different things: '" + what + "' and '" + other +
                         "'; every rank must make the same worlds and engines in the same order");
    }
    set_long(place + "/all", all);
    if (all[0] != kTexts) {
      wait_until_heard(*store_, place + "/heard",
                       group_.size - 1 - static_cast<std::int64_t>(missing.size()));
    }
    for (int rank = 0; rank < group_.size; ++rank) erase_long(place + "/" + std::to_string(rank));
    return all;
  }

  std::string wait_for_all(const std::string& place, const std::string& what, Deadline deadline) {
    for (const StorePauses pauses; !deadline.passed(); pauses.sleep()) {
      if (auto all = find_long(place + "/all")) return *all;
    }
    std::vector<int> missing;
    for (int rank = 0; rank < group_.size; ++rank) {
      if (!store_->find(place + "/" + std::to_string(rank))) missing.push_back(rank);
    }
    // Rank 0 may have been about to say it, to all.
    if (auto all = find_long(place + "/all")) return *all;
    if (missing.empty()) missing.push_back(0);  // has come and gone
    return kTimeout + not_all(what, missing);
  }

  static constexpr std::size_t kLongestPiece = std::size_t{1} << 20;

  const std::shared_ptr<Store> store_;
  const Group group_;
  const std::size_t chunk_bytes_;
  std::string prefix_;
  Nodes nodes_ = Nodes::consecutive(1, 0);
  std::uint64_t gatherings_ = 0;
  std::shared_ptr<StoreMail> mail_;  // from the first messenger on
  int spaces_ = 0;
};

}  // namespace

std::unique_ptr<Rendezvous> make_store_rendezvous(std::shared_ptr<Store> store,
                                                  const StoreRanks& ranks,
                                                  Deadline deadline) {
  return std::make_unique<StoreRendezvous>(std::move(store), ranks, deadline);
}

}  // namespace tandem::comm
