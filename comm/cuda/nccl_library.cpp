// comm/cuda/nccl_library.cpp: NCCL's communicators, made non-blocking, so that no call of the host
// waits for a peer without a deadline.
//
// What NCCL asks for, and where it is kept:
// 1. After ncclCommInitRankConfig and ncclGroupEnd a non-blocking communicator is asked
//    (ncclCommGetAsyncError) until it is no longer in progress; before that nothing else is called
//    but ncclCommAbort, and marks recorded on the stream stand for nothing.
// 2. A group belongs to the thread that opened it and is closed there, whatever fails inside.
// 3. ncclCommAbort frees the communicator, so it waits until no group is open and no call under
//    way: the mutex. None of them waits for a peer.
#include "comm/nccl_library.h"

#include "kernels/cuda_device.h"
#include <tandem/error.h>

#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tandem::comm {

namespace {

constexpr std::chrono::microseconds kBetweenLooks{50};

bool taken(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

/// `comm` may be null.
std::string describe(const std::string& call, ncclResult_t result, ncclComm_t comm) {
  const char* const details = ncclGetLastError(comm);
  std::string text = call + ": " + ncclGetErrorString(result);
  if (details != nullptr && *details != '\0') text += std::string(": ") + details;
  return text;
}

ncclDataType_t type_of(kernels::Dtype dtype) {
  switch (dtype) {
    case kernels::Dtype::kBFloat16:
      return ncclBfloat16;
    case kernels::Dtype::kFloat16:
      return ncclFloat16;
    case kernels::Dtype::kFloat32:
      break;
  }
  return ncclFloat32;
}

class LibraryCommunicator final : public NcclCommunicator {
 public:
  LibraryCommunicator(ncclComm_t comm, int device, Group group)
      : comm_(comm),
        where_("NCCL on cuda:" + std::to_string(device) + ", rank " + std::to_string(group.rank)) {}
  ~LibraryCommunicator() override { abort(); }
  LibraryCommunicator(const LibraryCommunicator&) = delete;
  LibraryCommunicator& operator=(const LibraryCommunicator&) = delete;
  LibraryCommunicator(LibraryCommunicator&&) = delete;
  LibraryCommunicator& operator=(LibraryCommunicator&&) = delete;

  void group_start() override {
    std::unique_lock lock(mutex_);
    check_usable();
    const ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) fail("ncclGroupStart", result);
    group_ = std::move(lock);
  }

  void group_end(Deadline deadline) override {
    const ncclResult_t result = ncclGroupEnd();
    std::unique_lock lock = std::move(group_);
    if (!taken(result)) fail("ncclGroupEnd", result);
    lock.unlock();
    wait_until_taken("ncclGroupEnd", deadline);
  }

  void send(const std::byte* data,
            std::size_t numel,
            kernels::Dtype dtype,
            int to,
            kernels::Stream& stream) override {
    add("ncclSend", stream, [&](cudaStream_t order) {
      return ncclSend(data, numel, type_of(dtype), to, comm_, order);
    });
  }
  void receive(std::byte* data,
               std::size_t numel,
               kernels::Dtype dtype,
               int from,
               kernels::Stream& stream) override {
    add("ncclRecv", stream, [&](cudaStream_t order) {
      return ncclRecv(data, numel, type_of(dtype), from, comm_, order);
    });
  }
  void all_gather(const std::byte* mine,
                  std::byte* all,
                  std::size_t bytes,
                  kernels::Stream& stream) override {
    add("ncclAllGather", stream, [&](cudaStream_t order) {
      return ncclAllGather(mine, all, bytes, ncclUint8, comm_, order);
    });
  }
  void broadcast(std::byte* data, std::size_t bytes, int root, kernels::Stream& stream) override {
    add("ncclBroadcast", stream, [&](cudaStream_t order) {
      return ncclBroadcast(data, data, bytes, ncclUint8, root, comm_, order);
    });
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    check_usable();
    const ncclResult_t state = state_of();
    if (!taken(state)) fail("ncclCommGetAsyncError", state);
  }

  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    static_cast<void>(ncclCommAbort(std::exchange(comm_, nullptr)));
  }

  /// Rule 1. Throws Timeout, DeviceError.
  void wait_until_taken(const char* call, Deadline deadline) {
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        check_usable();
        const ncclResult_t state = state_of();
        if (state == ncclSuccess) return;
        if (state != ncclInProgress) fail(call, state);
      }
      if (deadline.passed()) {
        throw Timeout(where_ + ": " + call +
                      " is still in progress at its deadline: a peer is missing or the network is "
                      "stuck (NCCL_DEBUG=INFO says more); restart from the last checkpoint");
      }
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }

 private:
  /// A call of the open group. A failed one closes it (rule 2; ncclGroupEnd says the same again).
  template <class Call>
  void add(const char* name, kernels::Stream& stream, const Call& call) {
    try {
      const ncclResult_t result =
          call(reinterpret_cast<cudaStream_t>(kernels::native_cuda_stream(stream)));
      if (!taken(result)) fail(name, result);
    } catch (...) {
      static_cast<void>(ncclGroupEnd());
      group_ = {};
      throw;
    }
  }

  [[nodiscard]] ncclResult_t state_of() {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    return asked == ncclSuccess ? state : asked;
  }

  void check_usable() const {
    if (comm_ == nullptr) throw kernels::DeviceError(where_ + ": the communicator was aborted");
  }

  [[noreturn]] void fail(const char* call, ncclResult_t result) const {
    throw kernels::DeviceError(where_ + ": " + describe(call, result, comm_));
  }

  std::mutex mutex_;
  ncclComm_t comm_;  // null after an abort
  const std::string where_;
  std::unique_lock<std::mutex> group_;  // of mutex_, while a group is open
};

class NcclLibrary final : public Nccl {
 public:
  explicit NcclLibrary(int device) : device_(device) {}

  [[nodiscard]] std::string unique_id() override {
    ncclUniqueId id{};
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) {
      throw kernels::DeviceError(describe("ncclGetUniqueId", result, nullptr));
    }
    return {static_cast<const char*>(id.internal), NCCL_UNIQUE_ID_BYTES};
  }

  [[nodiscard]] std::unique_ptr<NcclCommunicator> join(const std::string& unique_id,
                                                       Group group,
                                                       Deadline deadline) override {
    ncclUniqueId id{};
    if (unique_id.size() != NCCL_UNIQUE_ID_BYTES) {
      throw kernels::DeviceError("NCCL: an identifier of " + std::to_string(unique_id.size()) +
                                 " bytes, not " + std::to_string(NCCL_UNIQUE_ID_BYTES) +
                                 ": do all ranks run the same build?");
    }
    std::memcpy(id.internal, unique_id.data(), NCCL_UNIQUE_ID_BYTES);
    const std::shared_ptr<void> current = kernels::make_cuda_current(device_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    const ncclResult_t result = ncclCommInitRankConfig(&comm, group.size, id, group.rank, &config);
    if (!taken(result) || comm == nullptr) {
      const std::string text = describe("ncclCommInitRankConfig", result, comm);
      if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
      throw kernels::DeviceError("NCCL on cuda:" + std::to_string(device_) + ": " + text);
    }
    auto joined = std::make_unique<LibraryCommunicator>(comm, device_, group);
    joined->wait_until_taken("ncclCommInitRankConfig", deadline);
    return joined;
  }

 private:
  const int device_;
};

}  // namespace

std::unique_ptr<Nccl> make_nccl_library(int device_index) {
  return std::make_unique<NcclLibrary>(device_index);
}

}  // namespace tandem::comm
