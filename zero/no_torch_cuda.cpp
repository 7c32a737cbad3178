// zero/no_torch_cuda.cpp: what a build without CUDA says instead.
#include "zero/torch_cuda.h"

#include <string>

namespace tandem::zero {

std::unique_ptr<TorchDevice> make_torch_cuda(int index) {
  throw kernels::DeviceError("cuda:" + std::to_string(index) +
                             " cannot be used: this Tandem was built without CUDA; configure it "
                             "with TANDEM_CUDA=ON");
}

}  // namespace tandem::zero
