#include "engine/gpu.h"

#include "kernels/cuda_device.h"
#include <tandem/error.h>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <dlfcn.h>

namespace tandem::engine {

namespace {

/// Whether LibTorch's CUDA library is there: it registers itself. Not at::hasCUDA(), whose first
/// answer is final.
bool torch_cuda_is_loaded() { return at::CUDAHooksRegistry()->Has("CUDAHooks"); }

void load_torch_cuda() {
  if (!torch_cuda_is_loaded() && dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw DeviceError(std::string("LibTorch's CUDA library cannot be loaded: ") + dlerror() +
                      "; it needs the CUDA packages of its wheel (cuBLAS, cuDNN, NCCL and others) "
                      "beside it or in LD_LIBRARY_PATH, and a LibTorch that was built for CUDA");
  }
  if (!at::hasCUDA()) {
    throw DeviceError(
        "LibTorch's CUDA library is loaded, but LibTorch has been asked about CUDA before it was "
        "(torch::manual_seed does) and does not ask again; call World::gpu() first of all, or link "
        "torch_cuda");
  }
}

}  // namespace

bool cuda_is_built() { return kernels::cuda_built(); }

int gpu_of_local_rank(int local) {
  if (!kernels::cuda_built()) {
    throw DeviceError(
        "World::gpu: this Tandem was built without CUDA; configure it with "
        "TANDEM_CUDA=ON");
  }
  const int count = kernels::cuda_device_count();
  if (count == 0) {
    throw DeviceError(
        "World::gpu: the CUDA driver shows no GPU; see nvidia-smi, and CUDA_VISIBLE_DEVICES");
  }
  load_torch_cuda();
  return local % count;
}

std::string gpu_identity(int index) { return kernels::cuda_device_identity(index); }

}  // namespace tandem::engine
