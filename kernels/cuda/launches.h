// kernels/cuda/launches.h: the kernels, called from plain C++.
//
// All are asynchronous on `stream`, whose device is current; numel 0 launches nothing. All are
// deterministic, also from one GPU to another: an element's arithmetic depends on no grid, and the
// norm's sums across warps are integers. Errors of the launch itself are thrown as DeviceError;
// what a kernel does wrong shows at a later call.
// Called by kernels/cuda's device and table.
#pragma once

#include "kernels/cuda/fold_body.h"
#include "kernels/cuda/norm_body.h"
#include "kernels/cuda/update_body.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::kernels::cuda {

/// Throws DeviceError if the kernels were not compiled for the current device.
void check_kernels();

/// Writes 4 bytes an element.
void launch_fill(cudaStream_t stream, const FillLaunch& fill);
/// Moves 8 bytes an element.
void launch_multiply(cudaStream_t stream, const MultiplyLaunch& multiply);
/// Reads 2 bytes an element of a 16-bit type (4 of fp32), writes 4.
void launch_widen(cudaStream_t stream, const WidenLaunch& widen);
/// Reads the slices once and the accumulator unless fresh, and writes it: what kernels/fold.h says.
void launch_fold(cudaStream_t stream, const FoldLaunch& fold);

/// Updates the pieces whose fragments have a rule of that kind (an index of Update), each by one
/// warp. Moves what kernels/update.h says, and some 20 bytes a piece.
void launch_update(cudaStream_t stream, std::int32_t kind, const UpdateLaunch& update);

/// The words of a superaccumulator to which the 1,024-blocks of the chosen fragments' gradients
/// were added. Two launches. Reads 4 bytes an element of the chosen.
void launch_sum_squares(cudaStream_t stream, const NormLaunch& norm);
/// The same of (|x| / divisor)^p, kernels/powers.h.
void launch_sum_powers(cudaStream_t stream, const NormLaunch& norm);
/// The largest magnitude of the chosen fragments' gradients. Two launches. Reads 4 bytes an element
/// of the chosen.
void launch_find_largest(cudaStream_t stream, const NormLaunch& norm);

}  // namespace tandem::kernels::cuda
