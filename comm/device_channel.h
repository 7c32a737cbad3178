// comm/device_channel.h: what all channels over device memory do alike: staging, the record of what
// was posted and not yet folded, and the order in which work is given to the plane's stream.
//
// V1 Posts only record. fold() and gather() give their work to the stream in the agreed order, so
//    the order on the device is the agreed one.
// V2 Memory is ordered by marks: before the stream reads staging it waits for the post's writers,
//    and who writes there next waits for the fold; before it reads parameters it waits for what
//    post_gather() was given.
// V3 No rank reads another one's device memory: a peer gets what this rank's stream sends. So
//    folded_by_all() and wait_gathered_by_all() ask only what has been given to this rank's stream;
//    its order does the rest.
// Thread safety: as comm/data_plane.h; the mutex guards what posting and folding both touch.
// Called by comm (nccl_channel, staged_channel).
#pragma once

#include "comm/data_plane.h"
#include "comm/device_link.h"
#include "comm/device_staging_pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tandem::comm {

class DeviceChannel : public Channel {
 public:
  /// `parameters`: of the device, [spec.parameter_bytes].
  DeviceChannel(ChannelSpec spec,
                std::shared_ptr<DeviceLink> link,
                std::shared_ptr<std::byte> parameters);
  ~DeviceChannel() override;
  DeviceChannel(const DeviceChannel&) = delete;
  DeviceChannel& operator=(const DeviceChannel&) = delete;
  DeviceChannel(DeviceChannel&&) = delete;
  DeviceChannel& operator=(DeviceChannel&&) = delete;

  [[nodiscard]] Group group() const override { return link_->group(); }
  Staging acquire(std::size_t bytes) final;
  void give_back(Staging staging) final;
  PostId post(Staging staging, kernels::Dtype wire, const PartOfRank& part) final;
  void fold(PostId post,
            std::int64_t begin,
            std::int64_t numel,
            float* acc,
            kernels::Accumulator state,
            const std::string& what,
            Deadline deadline) final;
  [[nodiscard]] bool folded_by_all() const final;
  void wait_folded_by_all(const std::string& what, Deadline deadline) final;
  void trim(int idle_generations) override;

  [[nodiscard]] std::shared_ptr<std::byte> parameters() final { return parameters_; }
  std::uint64_t post_gather(const kernels::Marks& written) final;
  void gather(std::uint64_t gather,
              const std::function<ByteRange(int rank)>& of_rank,
              const std::string& what,
              Deadline deadline) final;
  void wait_gathered_by_all(const std::string& what, Deadline deadline) final;

  [[nodiscard]] std::size_t staging_bytes() const override { return pool_.bytes(); }
  [[nodiscard]] std::uint64_t reduced_bytes() const final { return reduced_bytes_; }
  [[nodiscard]] std::uint64_t gathered_bytes() const final { return gathered_bytes_; }
  [[nodiscard]] std::uint64_t between_nodes_bytes() const final { return between_nodes_bytes_; }

 protected:
  struct Post {
    Staging staging;  // empty: zeros
    kernels::Dtype wire = kernels::Dtype::kFloat32;
    std::vector<ElementRange> parts;  // by rank
  };
  /// What to add to: acc[0, own part's numel).
  struct Sum {
    float* acc = nullptr;
    kernels::Accumulator state = kernels::Accumulator::kContinue;
  };
  using Ranges = std::vector<ByteRange>;  // by rank

  /// Gives the stream the exchange and the fold of a post. The stream waits for its writers
  /// already.
  virtual void give_fold(const Post& post, Sum sum, const std::string& what, Deadline deadline) = 0;
  /// The same for a gather, of checked ranges.
  virtual void give_gather(const Ranges& ranges, const std::string& what, Deadline deadline) = 0;

  [[nodiscard]] DeviceLink& link() const { return *link_; }
  [[nodiscard]] const ChannelSpec& spec() const { return spec_; }
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] std::byte* parameter_data() const { return parameters_.get(); }
  void count_reduced(int from, std::size_t bytes) { count(reduced_bytes_, from, bytes); }
  void count_gathered(int from, std::size_t bytes) { count(gathered_bytes_, from, bytes); }

 private:
  using Counter = std::atomic<std::uint64_t>;

  void count(Counter& counter, int from, std::size_t bytes);
  Post take_post(PostId post, std::int64_t begin, std::int64_t numel, const std::string& what);
  kernels::Marks take_gather(std::uint64_t gather, const std::string& what);
  /// Blocks until `given` has reached `target`.
  void await_given(const std::uint64_t& given,
                   std::uint64_t target,
                   const std::string& what,
                   Deadline deadline);

  const ChannelSpec spec_;
  const std::string where_;  // "engine 'critic'"
  const std::shared_ptr<DeviceLink> link_;
  const std::shared_ptr<std::byte> parameters_;

  mutable std::mutex mutex_;
  std::condition_variable given_;  // signalled when one of the two counters below grows
  DeviceStagingPool pool_;
  std::deque<Post> posts_;  // not yet taken by fold()
  std::uint64_t posted_ = 0;
  std::uint64_t folds_taken_ = 0;
  std::uint64_t folds_given_ = 0;       // to the stream
  std::deque<kernels::Marks> gathers_;  // written, not yet taken by gather()
  std::uint64_t gathers_posted_ = 0;
  std::uint64_t gathers_taken_ = 0;
  std::uint64_t gathers_given_ = 0;

  Counter reduced_bytes_{0};
  Counter gathered_bytes_{0};
  Counter between_nodes_bytes_{0};
};

}  // namespace tandem::comm
