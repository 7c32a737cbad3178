#include "tests/kernels/fake_cuda.h"

#include "kernels/queue.h"

#include <cuda.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace tandem::kernels::fake_cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct FakeStream {
  explicit FakeStream(std::uint64_t seed) : queue("fake stream", {seed, 60}) {}
  Queue queue;
};

struct FakeEvent {
  Event point;
  std::shared_ptr<std::atomic<Clock::time_point>> when;
};

struct World {
  std::mutex mutex;  // guards what follows
  std::array<bool, kDevices> contexts{};
  cudaError_t next = cudaSuccess;
  std::map<const char*, std::size_t> memory;  // of the device and pinned: start, bytes
  Held held;
  std::uint64_t seed = 0;
  std::unique_ptr<FakeStream> standard;

  static World& get() {
    static World world;
    return world;
  }
};

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

/// What every call does that needs a device; success, or the error that a test asked for.
cudaError_t enter() {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  world.contexts[static_cast<std::size_t>(current)] = true;
  return result(std::exchange(world.next, cudaSuccess));
}

FakeStream& of(cudaStream_t stream) {
  if (stream != nullptr) return *reinterpret_cast<FakeStream*>(stream);
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  if (world.standard == nullptr) world.standard = std::make_unique<FakeStream>(999);
  return *world.standard;
}

FakeEvent& of(cudaEvent_t event) { return *reinterpret_cast<FakeEvent*>(event); }

/// Of the device or pinned.
bool is_known(const void* address) {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  auto after = world.memory.upper_bound(static_cast<const char*>(address));
  if (after == world.memory.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

cudaError_t take_memory(void** memory, std::size_t bytes) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if (bytes > (std::size_t{1} << 40)) return result(cudaErrorMemoryAllocation);
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return result(cudaErrorMemoryAllocation);
  std::memset(*memory, 0x5A, bytes);  // what was there before
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  world.memory[static_cast<const char*>(*memory)] = bytes;
  ++world.held.allocations;
  return cudaSuccess;
}

cudaError_t give_memory_back(void* memory) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  if (world.memory.erase(static_cast<const char*>(memory)) != 1) {
    return result(cudaErrorInvalidValue);
  }
  --world.held.allocations;
  std::free(memory);
  return cudaSuccess;
}

void wait_for(FakeStream& stream) {
  const Event end = stream.queue.record();
  while (!end.wait_until(Clock::now() + std::chrono::minutes(1))) {
  }
}

CUresult primary_context_state(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

}  // namespace

void give(cudaStream_t stream, std::function<void()> work) {
  of(stream).queue.enqueue(std::move(work));
}

bool has_context(int device) {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  return world.contexts[static_cast<std::size_t>(device)];
}

void forget_contexts() {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  world.contexts = {};
}

void fail_next(cudaError_t error) {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  world.next = error;
}

Held held() {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  return world.held;
}

}  // namespace tandem::kernels::fake_cuda

using namespace tandem::kernels;             // NOLINT
using namespace tandem::kernels::fake_cuda;  // NOLINT

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
  current = device;
  return enter();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
  *properties = {};
  for (int i = 0; i < 16; ++i) properties->uuid.bytes[i] = static_cast<char>(0xF0 + i + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  static_cast<void>(std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02X:00.0", device));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return enter();
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol,
                                             void** function,
                                             unsigned /*version*/,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0;
  *function = known ? reinterpret_cast<void*>(&primary_context_state) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return take_memory(memory, bytes); }
cudaError_t cudaFree(void* memory) { return give_memory_back(memory); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned /*flags*/) {
  return take_memory(memory, bytes);
}
cudaError_t cudaFreeHost(void* memory) { return give_memory_back(memory); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = 1;
  *total = 2;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int /*level*/) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  *stream = reinterpret_cast<cudaStream_t>(new FakeStream(++world.seed));
  ++world.held.streams;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete &of(stream);  // its queue runs to the end
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  --world.held.streams;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  wait_for(of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  of(stream).queue.wait(of(event).point);  // the point that it has now
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  *event = reinterpret_cast<cudaEvent_t>(new FakeEvent);
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  ++world.held.events;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &of(event);
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  --world.held.events;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  FakeEvent& own = of(event);
  own.when = std::make_shared<std::atomic<Clock::time_point>>();
  FakeStream& given = of(stream);
  given.queue.enqueue([when = own.when] { when->store(Clock::now()); });
  own.point = given.queue.record();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  return result(of(event).point.complete() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const std::chrono::duration<float, std::milli> time =
      of(end).when->load() - of(begin).when->load();
  *milliseconds = time.count();
  return enter();
}

cudaError_t cudaMemcpyAsync(
    void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  if (is_known(from)) {
    give(stream, [=] { std::memcpy(to, from, bytes); });
  } else {
    const auto* const begin = static_cast<const char*>(from);
    give(stream, [to, staged = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(to, staged.data(), staged.size());
    });
  }
  if (!is_known(to)) wait_for(of(stream));
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  give(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

}  // extern "C"
