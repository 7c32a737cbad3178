// kernels/cuda/powers.cu: sums of powers (sum.cuh). Alone in a file because pow() is a polynomial
// of fused multiply-adds, which the kernels that share the CPU's bits must not have.
#include "kernels/cuda/sum.cuh"

namespace tandem::kernels::cuda {

void launch_sum_powers(cudaStream_t stream, const NormLaunch& norm) {
  launch_sum<true>(stream, norm);
}

}  // namespace tandem::kernels::cuda
