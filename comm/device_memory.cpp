#include "comm/device_memory.h"

#include "comm/memory_limit.h"
#include <tandem/error.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace tandem::comm {

namespace {

/// A device that has failed uses nothing any more.
bool complete_or_failed(const kernels::Mark& mark) noexcept {
  try {
    return mark.complete();
  } catch (...) {
    return true;
  }
}

bool all_complete(const kernels::Marks& marks) noexcept {
  return std::all_of(marks.begin(), marks.end(), complete_or_failed);
}

}  // namespace

std::shared_ptr<std::byte> allocate_on(kernels::Device& device,
                                       std::size_t bytes,
                                       const std::string& whose) {
  const auto refuse = [&](const std::string& why) {
    throw OutOfMemory(whose + ": " + describe_bytes(bytes) + " of device memory on " +
                      device.name() + " could not be had: " + why +
                      "; use a smaller bucket_bytes, more ranks with a device each, or a smaller "
                      "model or batch");
  };
  try {
    return device.allocate(bytes);
  } catch (const kernels::OutOfDeviceMemory& error) {
    refuse(error.what());
  } catch (const std::bad_alloc&) {
    refuse("the process cannot allocate memory");
  }
  return nullptr;
}

void drop_complete(kernels::Marks& marks) {
  marks.erase(std::remove_if(marks.begin(), marks.end(),
                             [](const kernels::Mark& mark) { return mark.complete(); }),
              marks.end());
}

RetiredMemory::~RetiredMemory() {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (Item& item : items_) {
    for (const kernels::Mark& mark : item.users) {
      bool done = true;
      try {
        done = mark.wait_until(until);
      } catch (...) {  // a device that has failed uses nothing any more
      }
      if (!done) {
        // Freeing it would let work write into memory of somebody else.
        static_cast<void>(new std::shared_ptr<std::byte>(item.memory));
        break;
      }
    }
  }
}

void RetiredMemory::keep(std::shared_ptr<std::byte> memory, kernels::Marks users) noexcept {
  if (memory == nullptr) return;
  const std::lock_guard lock(mutex_);
  items_.push_back(Item{std::move(memory), std::move(users)});
}

void RetiredMemory::sweep() noexcept {
  const std::lock_guard lock(mutex_);
  items_.erase(std::remove_if(items_.begin(), items_.end(),
                              [](const Item& item) { return all_complete(item.users); }),
               items_.end());
}

void Scratch::grow(std::size_t bytes, const std::string& whose) {
  const std::lock_guard lock(mutex_);
  if (bytes <= bytes_) return;
  std::shared_ptr<std::byte> larger = allocate_on(device_, bytes, whose);
  retire(std::exchange(memory_, std::move(larger)));
  bytes_ = bytes;
}

void Scratch::retire(std::shared_ptr<std::byte> memory) noexcept {
  if (memory == nullptr) return;
  kernels::Marks users;
  try {
    users.push_back(stream_.record());
  } catch (...) {  // a device that has failed uses nothing any more
  }
  retired_.keep(std::move(memory), std::move(users));
}

Scratch::Lease::Lease(Scratch& scratch) : scratch_(scratch) {
  const std::lock_guard lock(scratch.mutex_);
  memory_ = scratch.memory_;
}

Scratch::Lease::~Lease() {
  const std::lock_guard lock(scratch_.mutex_);
  if (memory_ != scratch_.memory_) scratch_.retire(std::move(memory_));
}

}  // namespace tandem::comm
