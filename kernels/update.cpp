// kernels/update.cpp: hands update() to the instruction set in use.
#include "kernels/update.h"

#include "kernels/check.h"
#include "kernels/cpu_kernels.h"
#include "kernels/denormals.h"

#include <cstddef>
#include <type_traits>

namespace tandem::kernels {
namespace {

void check(const UpdateArrays& arrays, int states) {
  TANDEM_ASSERT(arrays.numel >= 0, "a fragment has no negative length");
  if (arrays.numel == 0) return;
  TANDEM_ASSERT(arrays.grad != nullptr && arrays.param != nullptr,
                "a fragment has a gradient and a parameter");
  for (int k = 0; k < states; ++k) {
    TANDEM_ASSERT(arrays.state[static_cast<std::size_t>(k)] != nullptr,
                  "a fragment has the states of its update");
  }
  switch (arrays.param_dtype) {
    case Dtype::kFloat32:
      TANDEM_ASSERT(arrays.master == nullptr && arrays.remainder == nullptr,
                    "fp32 parameters have no masters");
      break;
    case Dtype::kBFloat16:
      TANDEM_ASSERT((arrays.master == nullptr) != (arrays.remainder == nullptr),
                    "bf16 parameters have masters or remainders");
      break;
    case Dtype::kFloat16:
      TANDEM_ASSERT(arrays.master != nullptr && arrays.remainder == nullptr,
                    "fp16 parameters have masters");
      break;
  }
}

}  // namespace

int states_of(const Update& update) {
  return std::visit([](const auto& functor) { return std::decay_t<decltype(functor)>::kStates; },
                    update);
}

void update(const Update& update, const UpdateArrays& arrays) {
  check(arrays, states_of(update));
  const CpuKernels& table = cpu_kernels();
  const KeepDenormals keep;
  std::visit([&](const auto& functor) { table.update[update.index()](&functor, arrays); }, update);
}

}  // namespace tandem::kernels
