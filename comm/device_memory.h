// comm/device_memory.h: device memory that comm holds, and when it may go.
//
// W1 Memory is given back to the device only when the marks of all work that uses it are complete.
//    The host does not wait for them: what is still in use is kept and looked at again later.
// Called by comm (device_link, device_staging_pool, device_channel).
#pragma once

#include "kernels/device.h"
#include "kernels/stream.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tandem::comm {

/// Device::allocate. Throws OutOfMemory, saying what `whose` memory is and what to do.
[[nodiscard]] std::shared_ptr<std::byte> allocate_on(kernels::Device& device,
                                                     std::size_t bytes,
                                                     const std::string& whose);

/// Takes out the marks that are complete.
void drop_complete(kernels::Marks& marks);

/// Memory that nobody asks for any more but that work may still use (W1). Thread safety: any
/// thread.
class RetiredMemory {
 public:
  RetiredMemory() = default;
  /// Waits for what is left, which no peer holds up: a communicator has ended before. What is not
  /// done in a few seconds never will be, and the memory stays with the process.
  ~RetiredMemory();
  RetiredMemory(const RetiredMemory&) = delete;
  RetiredMemory& operator=(const RetiredMemory&) = delete;
  RetiredMemory(RetiredMemory&&) = delete;
  RetiredMemory& operator=(RetiredMemory&&) = delete;

  void keep(std::shared_ptr<std::byte> memory, kernels::Marks users) noexcept;
  /// Lets go what is not used any more.
  void sweep() noexcept;

 private:
  struct Item {
    std::shared_ptr<std::byte> memory;
    kernels::Marks users;
  };
  std::mutex mutex_;
  std::vector<Item> items_;
};

/// Memory that many channels use one after another, in the order of one stream, so that it needs
/// to be there once. Thread safety: any thread.
class Scratch {
 public:
  /// All outlive the scratch.
  Scratch(kernels::Device& device, kernels::Stream& stream, RetiredMemory& retired)
      : device_(device), stream_(stream), retired_(retired) {}
  ~Scratch() { retire(std::move(memory_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Scratch(Scratch&&) = delete;
  Scratch& operator=(Scratch&&) = delete;

  /// At least `bytes` from now on. Throws OutOfMemory.
  void grow(std::size_t bytes, const std::string& whose);

  /// Held while work that uses the memory is given to the stream: grow() replaces the memory, and
  /// what was given before goes on with the old one.
  class Lease {
   public:
    explicit Lease(Scratch& scratch);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Lease(Lease&&) = delete;
    Lease& operator=(Lease&&) = delete;
    [[nodiscard]] std::byte* data() const { return memory_.get(); }

   private:
    Scratch& scratch_;
    std::shared_ptr<std::byte> memory_;
  };

 private:
  /// Keeps `memory` until the work given so far is done.
  void retire(std::shared_ptr<std::byte> memory) noexcept;

  kernels::Device& device_;
  kernels::Stream& stream_;
  RetiredMemory& retired_;
  std::mutex mutex_;
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace tandem::comm
