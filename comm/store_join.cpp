#include "comm/store_join.h"

#include <tandem/error.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace tandem::comm {

namespace {

using namespace std::chrono_literals;

constexpr auto kFarewell = 2s;

const std::string kJoin = std::string(kStoreKeys) + "join/";

std::string random_word() {
  // The device, the process and the time: any one of them is enough as a rule.
  std::random_device device;
  const std::uint64_t bits = (static_cast<std::uint64_t>(device()) << 32U) ^ device();
  std::ostringstream word;
  word << std::hex << bits << '.' << getpid() << '.' << Clock::now().time_since_epoch().count();
  return word.str();
}

struct Hello {
  std::string word = "-";  // nobody
  int size = 0;
};

std::string hello_key(int rank) { return kJoin + "hello/" + std::to_string(rank); }
std::string ack_key(int rank) { return kJoin + "ack/" + std::to_string(rank); }

std::string heard_key(const std::string& list) { return kJoin + "heard/" + list; }

Hello find_hello(Store& store, int rank) {
  Hello hello;
  if (const auto text = store.find(hello_key(rank))) {
    std::istringstream words(*text);
    words >> hello.word >> hello.size;
  }
  return hello;
}

struct List {
  std::string name;
  std::vector<std::string> words;  // by rank
  std::string failure;             // empty: none

  [[nodiscard]] std::string text() const {
    std::string text = name + " " + std::to_string(words.size());
    for (const std::string& word : words) text += " " + word;
    return text + "\n" + failure;
  }
  static List parse(const std::string& text) {
    const std::size_t end = text.find('\n');
    std::istringstream in(text.substr(0, end));
    List list;
    std::size_t size = 0;
    in >> list.name >> size;
    for (std::string word; list.words.size() < size && in >> word;) list.words.push_back(word);
    if (end != std::string::npos) list.failure = text.substr(end + 1);
    return list;
  }
};

std::string did_not_come(const std::vector<int>& missing, Group group, const std::string& more) {
  return "making the world: " + name_ranks(missing) + " of " + std::to_string(group.size) +
         " did not come by the deadline" + more +
         "; were all of them started, with the same MASTER_ADDR and MASTER_PORT, and does every "
         "one make this world?";
}

/// Rank 0's side.
class Host {
 public:
  Host(Store& store, Group group, const std::string& word)
      : store_(store), group_(group), word_(word), hellos_(of_all<Hello>()), acks_(of_all<bool>()) {
    hellos_[0] = Hello{word, group.size};
    acks_[0] = true;
  }

  std::string run(Deadline deadline) {
    for (const StorePauses pauses; !deadline.passed(); pauses.sleep()) {
      if (look_for_ranks()) publish({});
      if (all_confirmed() && complete()) {
        store_.set(kJoin + "final", name_);
        return name_;
      }
    }
    std::vector<int> missing;
    std::string more;
    for (int rank = 1; rank < group_.size; ++rank) {
      if (acks_[index(rank)]) continue;
      missing.push_back(rank);
      const int size = hellos_[index(rank)].size;
      if (size != 0 && size != group_.size) {
        more += " (a process that was told WORLD_SIZE=" + std::to_string(size) +
                " says it is rank " + std::to_string(rank) + ")";
      }
    }
    const std::string failure = did_not_come(missing, group_, more);
    const auto alive = std::count(acks_.begin() + 1, acks_.end(), true);
    publish(failure);
    wait_until_heard(store_, heard_key(name_), alive);
    throw Timeout(failure);
  }

 private:
  template <class T>
  [[nodiscard]] std::vector<T> of_all() const {
    return std::vector<T>(static_cast<std::size_t>(group_.size));
  }
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  /// Of those that have not confirmed: a word left by somebody else is replaced by its successor.
  /// What is there is published even if ranks are missing: that tells the living from the dead.
  bool look_for_ranks() {
    bool changed = false;
    for (int rank = 1; rank < group_.size; ++rank) {
      if (acks_[index(rank)]) continue;
      const Hello hello = find_hello(store_, rank);
      if (hello.word == hellos_[index(rank)].word) continue;
      hellos_[index(rank)] = hello;
      changed = true;
    }
    return changed || name_.empty();
  }

  [[nodiscard]] bool complete() const {
    return std::all_of(hellos_.begin(), hellos_.end(),
                       [&](const Hello& hello) { return hello.size == group_.size; });
  }

  void publish(const std::string& failure) {
    name_ = word_ + "." + std::to_string(++version_);
    List list{name_, {}, failure};
    for (const Hello& hello : hellos_) list.words.push_back(hello.word);
    store_.set(kJoin + "list", list.text());
    acks_ = of_all<bool>();
    acks_[0] = true;
  }

  bool all_confirmed() {
    bool all = true;
    for (int rank = 1; rank < group_.size; ++rank) {
      if (!acks_[index(rank)]) acks_[index(rank)] = store_.find(ack_key(rank)) == name_;
      all = all && acks_[index(rank)];
    }
    return all;
  }

  Store& store_;
  const Group group_;
  const std::string word_;
  std::vector<Hello> hellos_;  // by rank
  std::vector<bool> acks_;     // by rank: has confirmed the list `name_`
  std::string name_;           // of the list that was published last
  int version_ = 0;
};

std::string join_as_guest(Store& store, Group group, const std::string& word, Deadline deadline) {
  const auto rank = static_cast<std::size_t>(group.rank);
  std::string confirmed;
  const auto look = [&] {  // the world's name when it is final
    const auto text = store.find(kJoin + "list");
    if (!text) return false;
    const List list = List::parse(*text);
    if (list.words.size() <= rank || list.words[rank] != word) return false;
    if (!list.failure.empty()) {
      store.add(heard_key(list.name), 1);
      throw Timeout(list.failure);
    }
    // Told another size: rank 0 says so at its deadline.
    if (list.words.size() != static_cast<std::size_t>(group.size)) return false;
    if (confirmed != list.name) {
      confirmed = list.name;
      store.set(ack_key(group.rank), confirmed);
    }
    return store.find(kJoin + "final") == confirmed;
  };
  for (const StorePauses pauses; !deadline.passed(); pauses.sleep()) {
    if (look()) return confirmed;
    if (find_hello(store, group.rank).word != word) {
      throw SystemError("making the world: another process has come as rank " +
                        std::to_string(group.rank) + " of " + std::to_string(group.size) +
                        "; were two started with RANK=" + std::to_string(group.rank) +
                        ", or two jobs with the same MASTER_ADDR and MASTER_PORT?");
    }
  }
  if (look()) return confirmed;
  // As rank 0 sees it: whoever has not confirmed its last list. If that is not for this process,
  // it is rank 0 itself that has not come.
  std::vector<int> missing;
  for (int other = 1; other < group.size && !confirmed.empty(); ++other) {
    if (store.find(ack_key(other)) != confirmed) missing.push_back(other);
  }
  if (missing.empty()) missing.push_back(0);
  throw Timeout(did_not_come(missing, group, ""));
}

}  // namespace

void StorePauses::sleep() const {
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since_);
  std::this_thread::sleep_for(
      std::clamp<std::chrono::microseconds>(waited / 8, 50us, std::chrono::microseconds(20ms)));
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    names += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return names;
}

void wait_until_heard(Store& store, const std::string& key, std::int64_t ranks) {
  const auto deadline = Deadline::after(kFarewell);
  for (const StorePauses pauses; !deadline.passed(); pauses.sleep()) {
    if (store.add(key, 0) >= ranks) break;
  }
  store.erase(key);
}

std::string join_world(Store& store, Group group, Deadline deadline) {
  const std::string word = random_word();
  store.set(hello_key(group.rank), word + " " + std::to_string(group.size));
  return group.rank == 0 ? Host(store, group, word).run(deadline)
                         : join_as_guest(store, group, word, deadline);
}

}  // namespace tandem::comm
