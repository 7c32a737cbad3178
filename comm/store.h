// comm/store.h: a table of texts that all ranks of a launch reach, kept by a server somewhere.
//
// T1 Every call is answered within a bounded time, or throws SystemError saying which server did
//    not answer and what to do; from then on every call throws the same.
// T2 What one rank does is seen by every rank in the order in which it was done.
// Thread safety: any thread.
// Called by comm (store_rendezvous, store_messenger). Implemented by engine/tcp_store, since comm
// knows no LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tandem::comm {

class Store {
 public:
  Store() = default;
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  Store(Store&&) = delete;
  Store& operator=(Store&&) = delete;

  /// Values are any bytes, at most kLongestStoreValue.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Nothing if the key is not there; does not wait for it.
  [[nodiscard]] virtual std::optional<std::string> find(const std::string& key) = 0;
  /// Adds to the number under `key`, 0 if it is not there, at once for all ranks; its new value.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  virtual void erase(const std::string& key) = 0;
};

/// TCPStore's server closes the connection of who sends more than 8 MiB at once.
inline constexpr std::size_t kLongestStoreValue = std::size_t{4} << 20;

}  // namespace tandem::comm
