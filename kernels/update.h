// kernels/update.h: one update of one contiguous fragment of a parameter.
//
// U1 Element i depends on element i only; nothing outside [0, numel) is touched.
// U2 The same bits on every instruction set and whatever the thread does with denormals.
// U3 fp32 parameters are updated in place. 16-bit ones have masters (kernels/masters.h), from which
//    the update starts unless the parameter was edited, and receive them rounded.
// Called by zero/optimizer_shard.
#pragma once

#include "kernels/dtype.h"
#include "kernels/optimizers.h"

#include <array>
#include <cstdint>
#include <variant>

namespace tandem::kernels {

/// One optimizer's scalars of one update.
using Update = std::variant<AdamUpdate<true, false>,
                            AdamUpdate<true, true>,
                            AdamUpdate<false, false>,
                            AdamUpdate<false, true>,
                            SgdUpdate<false, false>,
                            SgdUpdate<true, false>,
                            SgdUpdate<true, true>,
                            RmspropUpdate<false, false>,
                            RmspropUpdate<false, true>,
                            RmspropUpdate<true, false>,
                            RmspropUpdate<true, true>,
                            AdagradUpdate,
                            LionUpdate>;

inline constexpr int kMaxStates = 3;

/// How many of UpdateArrays::state this update has, 0 to kMaxStates.
[[nodiscard]] int states_of(const Update& update);

/// Every array is [numel] and overlaps no other.
struct UpdateArrays {
  const float* grad = nullptr;  // in: the accumulated sum, before grad_factor
  void* param = nullptr;        // in/out, of param_dtype
  Dtype param_dtype = Dtype::kFloat32;
  // fp32: neither. fp16: master. bf16: exactly one of the two.
  float* master = nullptr;                 // in/out
  std::uint16_t* remainder = nullptr;      // in/out
  std::array<float*, kMaxStates> state{};  // in/out, in the order of kStates' comment
  std::int64_t numel = 0;
};

/// Runs one update over a fragment. Moves 12 bytes an fp32 element, 16 a 16-bit one with separate
/// masters, 12 one with a remainder, and 8 more for each state. Blocking, on the calling thread;
/// different fragments may run on different threads.
void update(const Update& update, const UpdateArrays& arrays);

}  // namespace tandem::kernels
