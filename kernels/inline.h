// kernels/inline.h: marks of small functions that the CPU kernels and the CUDA kernels share.
//
// The CPU kernels are compiled once per instruction set. An inline function that they call must
// never leave its object as a weak symbol: the linker would keep one copy of it for the whole
// program, perhaps the one with AVX-512 instructions. always_inline leaves no copy, in any preset.
#pragma once

#if defined(__CUDACC__)
#define TANDEM_HOST_DEVICE __host__ __device__
#else
#define TANDEM_HOST_DEVICE
#endif

#define TANDEM_KERNEL_INLINE TANDEM_HOST_DEVICE __attribute__((always_inline)) inline
