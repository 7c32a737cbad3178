#include "comm/device_staging_pool.h"

#include <tandem/error.h>

#include <utility>

namespace tandem::comm {

DeviceStagingPool::DeviceStagingPool(const ChannelSpec& spec,
                                     kernels::Device& device,
                                     RetiredMemory& retired)
    : channel_("channel of engine '" + spec.name + "'"),
      largest_(spec.largest_staging),
      device_(device),
      retired_(retired),
      slots_(spec.staging_slots) {
  for (std::size_t index = slots_.size(); index > 0; --index) {
    free_.push_back(static_cast<std::int32_t>(index - 1));
  }
}

std::size_t DeviceStagingPool::choose(std::size_t bytes) {
  constexpr std::size_t kNone = ~std::size_t{0};
  std::size_t in_use = 0;
  std::size_t first_in_use = kNone;
  std::size_t unused = kNone;   // a slot without memory
  std::size_t largest = kNone;  // of those that are too small
  for (std::size_t at = free_.size(); at-- > 0;) {
    Slot& candidate = slot(free_[at]);
    drop_complete(candidate.users);
    if (candidate.memory == nullptr) {
      if (unused == kNone) unused = at;
    } else if (candidate.bytes < bytes) {
      if (largest == kNone || candidate.bytes > slot(free_[largest]).bytes) largest = at;
    } else if (candidate.users.empty()) {
      return at;
    } else {
      first_in_use = at;
      ++in_use;
    }
  }
  if (in_use >= kInUse) return first_in_use;
  if (unused != kNone) return unused;
  return first_in_use != kNone ? first_in_use : largest;
}

Staging DeviceStagingPool::acquire(std::size_t bytes) {
  if (bytes > largest_) {
    throw InvalidArgument(channel_ + ": staging of " + std::to_string(bytes) +
                          " bytes asked for; its largest is " + std::to_string(largest_));
  }
  if (free_.empty()) {
    throw InvalidArgument(channel_ + ": all " + std::to_string(slots_.size()) +
                          " staging slots are held or in flight");
  }
  const std::size_t at = choose(bytes);
  const std::int32_t index = free_[at];
  Slot& chosen = slot(index);
  if (chosen.bytes < bytes) {
    std::shared_ptr<std::byte> memory = allocate_on(device_, bytes, channel_);
    retired_.keep(std::exchange(chosen.memory, std::move(memory)), std::exchange(chosen.users, {}));
    bytes_ += bytes - std::exchange(chosen.bytes, bytes);
  }
  chosen.state = State::kHeld;
  free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(at));
  return Staging{chosen.memory.get(), bytes, index, chosen.users};
}

DeviceStagingPool::Slot& DeviceStagingPool::held(const Staging& staging, const char* action) {
  const auto index = static_cast<std::size_t>(staging.slot);
  if (staging.slot < 0 || index >= slots_.size() || slots_[index].state != State::kHeld) {
    throw InvalidArgument(channel_ + ": staging slot " + std::to_string(staging.slot) + " " +
                          action + " that was not acquired, or twice");
  }
  return slots_[index];
}

// The marks from before stay: a writer that wrote nothing has not waited for them.
void DeviceStagingPool::give_back(Staging staging) {
  Slot& returned = held(staging, "given back");
  for (kernels::Mark& mark : staging.pending) returned.users.push_back(std::move(mark));
  make_free(staging.slot);
}

void DeviceStagingPool::posted(const Staging& staging) {
  Slot& leaving = held(staging, "posted");
  leaving.users.insert(leaving.users.end(), staging.pending.begin(), staging.pending.end());
  leaving.state = State::kInFlight;
}

// The fold has waited for the writers, and they for what came before.
void DeviceStagingPool::folded(std::int32_t index, kernels::Mark last) {
  slot(index).users = {std::move(last)};
  make_free(index);
}

void DeviceStagingPool::make_free(std::int32_t index) {
  slot(index).state = State::kFree;
  slot(index).last_used = generation_;
  free_.push_back(index);
}

void DeviceStagingPool::trim(int idle_generations) {
  ++generation_;
  for (const std::int32_t index : free_) {
    Slot& idle = slot(index);
    if (idle.memory == nullptr || generation_ - idle.last_used < idle_generations) continue;
    drop_complete(idle.users);
    if (!idle.users.empty()) continue;
    idle.memory.reset();
    bytes_ -= std::exchange(idle.bytes, 0);
  }
}

void DeviceStagingPool::retire(const kernels::Marks& last) noexcept {
  for (Slot& gone : slots_) {
    gone.users.insert(gone.users.end(), last.begin(), last.end());
    retired_.keep(std::move(gone.memory), std::move(gone.users));
  }
}

}  // namespace tandem::comm
