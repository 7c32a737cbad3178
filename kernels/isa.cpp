// kernels/isa.cpp: the instruction-set levels and the choice among them.
//
// TANDEM_ISA_LEVELS (a number, from the build) says how many tables were compiled in: 3 on x86-64
// (baseline, x86-64-v3, x86-64-v4), else 1.
#include "kernels/isa.h"

#include "kernels/cpu_kernels.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace tandem::kernels {

extern const CpuKernels kBaselineKernels;
#if TANDEM_ISA_LEVELS > 1
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

namespace {

bool runs_here(Isa isa) {
#if TANDEM_ISA_LEVELS > 1
  // Every feature that the level's -march may use: a virtual machine may hide single ones.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")
#if defined(__GNUC__) && !defined(__clang__)
                  && __builtin_cpu_supports("x86-64-v3")
#endif
      ;
  if (isa == Isa::kAvx2) return v3;
  if (isa == Isa::kAvx512) {
    return v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kBaseline;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{available_isas().back()};
  return isa;
}

}  // namespace

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (runs_here(isa)) isas.push_back(isa);
  }
  return isas;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "x86-64-v3";
    case Isa::kAvx512:
      return "x86-64-v4";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void select_isa(Isa isa) {
  if (!runs_here(isa)) {
    throw std::invalid_argument(std::string("select_isa: this machine does not run ") +
                                name_of(isa) + "; choose one of available_isas()");
  }
  current().store(isa, std::memory_order_relaxed);
}

const CpuKernels& cpu_kernels(Isa isa) {
#if TANDEM_ISA_LEVELS > 1
  if (isa == Isa::kAvx2) return kAvx2Kernels;
  if (isa == Isa::kAvx512) return kAvx512Kernels;
#endif
  static_cast<void>(isa);
  return kBaselineKernels;
}

const CpuKernels& cpu_kernels() { return cpu_kernels(current_isa()); }

}  // namespace tandem::kernels
