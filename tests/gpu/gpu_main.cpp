// main() of the tests that need a GPU. Where there is none the program ends with 77, which ctest
// reports as "Skipped": not run is never passed.
#include "kernels/cuda_device.h"

#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (tandem::kernels::cuda_device_count() == 0) {
    std::puts("not run: this process sees no GPU");
    return 77;
  }
  const int status = RUN_ALL_TESTS();
  const bool skipped = testing::UnitTest::GetInstance()->skipped_test_count() > 0;
  return status == 0 && skipped ? 77 : status;
}
