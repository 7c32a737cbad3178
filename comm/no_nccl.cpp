// comm/no_nccl.cpp: stands for cuda/nccl_library.cpp in builds without CUDA.
#include "comm/nccl_library.h"

#include <string>

namespace tandem::comm {

std::unique_ptr<Nccl> make_nccl_library(int device_index) {
  throw kernels::DeviceError("NCCL for CUDA device " + std::to_string(device_index) +
                             ": Tandem was built without CUDA; configure it with TANDEM_CUDA=ON");
}

}  // namespace tandem::comm
