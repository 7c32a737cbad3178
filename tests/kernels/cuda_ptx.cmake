# Compiles one .cu file again, by the flags of the build, and looks at what came out:
#   registers  no local memory: no stack frame and no spills in any kernel
#   arithmetic no fused multiply-add, nothing approximate, no denormals flushed, and every addition and
#              multiplication with its rounding, which forbids ptxas to contract them; with POW the
#              file calls pow(), which has the first two
#   loads      WIDE of them at least are of 128 bits
# Called by ctest with NVCC, PTXAS, FLAGS (a list), INCLUDE, ARCHITECTURE, FILE, POW, WORK and WIDE.
cmake_minimum_required(VERSION 3.25)
file(MAKE_DIRECTORY ${WORK})
execute_process(COMMAND ${NVCC} -std=c++20 -O2 ${FLAGS} -I${INCLUDE} -arch=compute_${ARCHITECTURE}
                        -ptx ${FILE} -o ${WORK}/kernels.ptx
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PTXAS} -v -arch=sm_${ARCHITECTURE} ${WORK}/kernels.ptx -o ${WORK}/kernels.cubin
                OUTPUT_VARIABLE said ERROR_VARIABLE said COMMAND_ERROR_IS_FATAL ANY)

string(REGEX MATCHALL "Compiling entry function" kernels "${said}")
string(REGEX MATCHALL "[0-9]+ bytes stack frame, [0-9]+ bytes spill stores, [0-9]+ bytes spill loads"
       frames "${said}")
list(LENGTH kernels kernel_count)
list(LENGTH frames frame_count)
if(kernel_count EQUAL 0 OR frame_count LESS kernel_count)
  message(FATAL_ERROR "ptxas names ${kernel_count} kernels and ${frame_count} frames:\n${said}")
endif()
foreach(frame IN LISTS frames)
  if(NOT frame STREQUAL "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    message(FATAL_ERROR "a kernel uses local memory (${frame}):\n${said}")
  endif()
endforeach()

set(inexact "[ \t](add|sub|mul)\\.f(32|64)|[ \t](div|sqrt)\\.full|(ld|st)\\.local")
if(NOT POW)
  string(APPEND inexact "|[ \t](fma|mad)\\.|\\.approx|\\.ftz")
endif()
file(STRINGS ${WORK}/kernels.ptx bad REGEX "${inexact}")
if(bad)
  # Integer multiply-adds and those of addresses are exact.
  list(FILTER bad EXCLUDE REGEX "[ \t]mad\\.(lo|hi|wide)\\.[su](16|32|64)")
  if(bad)
    list(JOIN bad "\n" bad)
    message(FATAL_ERROR "not the CPU's arithmetic, or local memory:\n${bad}")
  endif()
endif()
file(STRINGS ${WORK}/kernels.ptx wide REGEX "ld\\.global(\\.nc)?\\.v4\\.[fub]32")
list(LENGTH wide wide_count)
if(wide_count LESS WIDE)
  message(FATAL_ERROR "${wide_count} loads of 128 bits, at least ${WIDE} are expected")
endif()
message("${kernel_count} kernels, no local memory, ${wide_count} loads of 128 bits")
