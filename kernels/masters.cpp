// kernels/masters.cpp: masters cut into parameters and remainders, and joined again.
#include "kernels/masters.h"

#include "kernels/check.h"

namespace tandem::kernels {

void split_masters(const float* master, std::int64_t numel, Bf16* param, std::uint16_t* remainder) {
  TANDEM_ASSERT(numel >= 0, "a range has no negative length");
  for (std::int64_t i = 0; i < numel; ++i) {
    const float stored = canonical(master[i]);
    round_master(stored, param[i]);
    remainder[i] = remainder_of(stored);
  }
}

void join_masters(const Bf16* param,
                  const std::uint16_t* remainder,
                  std::int64_t numel,
                  float* master) {
  TANDEM_ASSERT(numel >= 0, "a range has no negative length");
  for (std::int64_t i = 0; i < numel; ++i) master[i] = join_master(param[i], remainder[i]);
}

}  // namespace tandem::kernels
