// kernels/isa.h: the instruction-set levels the CPU kernels are compiled for.
//
// The same source is compiled once per level with contraction off, so that all levels give the
// same bits; the best one that the machine has is chosen at the first call.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::kernels {

enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

/// Levels that were compiled in and that this machine can run, the best one last.
[[nodiscard]] std::vector<Isa> available_isas();
[[nodiscard]] const char* name_of(Isa isa);

/// The level in use: the best available one until select_isa() names another. Changes speed only.
[[nodiscard]] Isa current_isa();
/// For tests and measurements: all later kernel calls of this process use `isa`, which must be
/// available (else std::invalid_argument). Any thread.
void select_isa(Isa isa);

}  // namespace tandem::kernels
