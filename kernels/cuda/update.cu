// kernels/cuda/update.cu: one kernel for each kind of optimizer. A warp takes a piece; where the
// piece's fragment has no rule, or one of another kind, it has nothing to do: a bucket is one
// launch for each kind in it, and its fragments' number does not matter.
//
// Register use is bounded so that three blocks share a multiprocessor: 24 warps with 64 bytes a
// lane in flight are 48 KB, above the 25 KB that 4.8 TB/s times 0.7 us are for each of an H200's
// 132. Functors with three states, which move 80 bytes and would spill, make do with two blocks.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/update_body.h"

#include <array>
#include <utility>
#include <variant>

namespace tandem::kernels::cuda {
namespace {

template <int kKind>
constexpr int kBlocksTogether = std::variant_alternative_t<kKind, Update>::kStates == 3 ? 2 : 3;

template <int kKind>
__global__ void __launch_bounds__(kThreads, kBlocksTogether<kKind>)
    update_kernel(const __grid_constant__ UpdateLaunch update) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t p = warp_of_grid(); p < update.count; p += warps_of_grid()) {
    update_piece<kKind>(update, p, lane);
  }
}

template <int... kKinds>
constexpr auto kernels_of(std::integer_sequence<int, kKinds...> /*kinds*/) {
  return std::array<void (*)(UpdateLaunch), sizeof...(kKinds)>{update_kernel<kKinds>...};
}

}  // namespace

void launch_update(cudaStream_t stream, std::int32_t kind, const UpdateLaunch& update) {
  if (update.count <= 0) return;
  constexpr auto kKernels =
      kernels_of(std::make_integer_sequence<int, static_cast<int>(std::variant_size_v<Update>)>());
  launch("the update's kernel", kKernels.at(static_cast<std::size_t>(kind)),
         blocks_for(update.count, kWarps), stream, update);
}

}  // namespace tandem::kernels::cuda
