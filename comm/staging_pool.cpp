#include "comm/staging_pool.h"

#include <tandem/error.h>

#include <algorithm>
#include <utility>

namespace tandem::comm {

StagingPool::StagingPool(std::string channel,
                         std::shared_ptr<Segment> segment,
                         std::size_t begin,
                         std::size_t slot_bytes,
                         std::size_t slots)
    : channel_(std::move(channel)),
      segment_(std::move(segment)),
      begin_(begin),
      slot_bytes_(slot_bytes),
      slots_(slots) {
  for (std::size_t slot = slots; slot > 0; --slot) {
    free_.push_back(static_cast<std::int32_t>(slot - 1));
  }
}

Staging StagingPool::acquire(std::size_t bytes) {
  if (bytes > slot_bytes_) {
    throw InvalidArgument("channel of engine '" + channel_ + "': staging of " +
                          std::to_string(bytes) + " bytes asked for; its largest is " +
                          std::to_string(slot_bytes_));
  }
  if (free_.empty()) {
    throw InvalidArgument("channel of engine '" + channel_ + "': all " +
                          std::to_string(slots_.size()) + " staging slots are held or in flight");
  }
  const auto slot_of = [this](std::int32_t index) -> Slot& {
    return slots_[static_cast<std::size_t>(index)];
  };
  auto choice = std::find_if(free_.rbegin(), free_.rend(),
                             [&](std::int32_t index) { return slot_of(index).committed >= bytes; });
  if (choice == free_.rend()) {
    choice = std::max_element(free_.rbegin(), free_.rend(), [&](std::int32_t a, std::int32_t b) {
      return slot_of(a).committed < slot_of(b).committed;
    });
  }
  const std::int32_t index = *choice;
  Slot& slot = slot_of(index);
  const std::size_t offset = begin_ + static_cast<std::size_t>(index) * slot_bytes_;
  if (slot.committed < bytes) {
    segment_->commit(offset, bytes);
    const std::size_t pages = (bytes + Segment::kPage - 1) / Segment::kPage;
    committed_bytes_ += pages * Segment::kPage - slot.committed;
    slot.committed = pages * Segment::kPage;
  }
  slot.state = State::kHeld;
  free_.erase(std::next(choice).base());
  return Staging{segment_->data() + offset, bytes, index};
}

StagingPool::Slot& StagingPool::held(const Staging& staging, const char* action) {
  const auto index = static_cast<std::size_t>(staging.slot);
  if (staging.slot < 0 || index >= slots_.size() || slots_[index].state != State::kHeld) {
    throw InvalidArgument("channel of engine '" + channel_ + "': staging slot " +
                          std::to_string(staging.slot) + " " + action +
                          " that was not acquired, or twice");
  }
  return slots_[index];
}

void StagingPool::give_back(const Staging& staging) {
  held(staging, "given back");
  make_free(staging.slot);
}

void StagingPool::posted(const Staging& staging, PostId post) {
  held(staging, "posted").state = State::kInFlight;
  in_flight_.push_back(InFlight{post, staging.slot});
}

void StagingPool::free_folded(PostId folded_by_all) {
  while (!in_flight_.empty() && in_flight_.front().post < folded_by_all) {
    make_free(in_flight_.front().slot);
    in_flight_.pop_front();
  }
}

void StagingPool::make_free(std::int32_t slot) {
  Slot& freed = slots_[static_cast<std::size_t>(slot)];
  freed.state = State::kFree;
  freed.last_used = generation_;
  free_.push_back(slot);
}

void StagingPool::trim(int idle_generations) {
  ++generation_;
  for (const std::int32_t index : free_) {
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    if (slot.committed == 0 || generation_ - slot.last_used < idle_generations) continue;
    segment_->release(begin_ + static_cast<std::size_t>(index) * slot_bytes_, slot.committed);
    committed_bytes_ -= slot.committed;
    slot.committed = 0;
  }
}

std::size_t StagingPool::offset(const Staging& staging) const {
  return static_cast<std::size_t>(staging.data - segment_->data());
}

}  // namespace tandem::comm
