# TANDEM_CUDA: whether this build can use NVIDIA GPUs. Included once, behind find_package(LibTorch).
#
# AUTO takes CUDA where all of it is found: nvcc, NCCL, and a LibTorch built for the same CUDA. One line
# says what was found, or what is missing; with ON that is an error.
# Sets TANDEM_HAVE_CUDA; where it is true: the language CUDA, the targets CUDA::cudart, NCCL::nccl and
# LibTorch::c10_cuda, and tandem_cuda_objects(). tandem_room(CUDA ...) takes a room's sources for it.
set(TANDEM_CUDA AUTO CACHE STRING "Use CUDA: AUTO (where it is found), ON or OFF")
set_property(CACHE TANDEM_CUDA PROPERTY STRINGS AUTO ON OFF)
# A release: "80-real;90-real;100", code for three generations, and PTX for those to come.
set(TANDEM_CUDA_ARCHITECTURES 90 CACHE STRING
    "GPUs to compile for, as CMAKE_CUDA_ARCHITECTURES, which wins if it is set")
set(TANDEM_CUDA_OLDEST 12.6)  # of the LibTorchs that Tandem supports; C++20 in nvcc is older

string(TOUPPER "${TANDEM_CUDA}" tandem_cuda_choice)
if(NOT tandem_cuda_choice MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
  message(FATAL_ERROR "TANDEM_CUDA is '${TANDEM_CUDA}'; it takes AUTO, ON or OFF")
endif()

# tandem_find_cuda(<variable>): finds everything; the variable says what is missing, or is empty.
function(tandem_find_cuda missing)
  if(CMAKE_CUDA_COMPILER)
    set(nvcc ${CMAKE_CUDA_COMPILER})
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(nvcc $ENV{CUDACXX})
  else()
    find_program(TANDEM_NVCC nvcc HINTS ${CUDAToolkit_ROOT} ENV CUDAToolkit_ROOT ENV CUDA_PATH
                 PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(TANDEM_NVCC)
    set(nvcc ${TANDEM_NVCC})
  endif()
  if(NOT nvcc)
    set(${missing} "nvcc is missing (set CUDAToolkit_ROOT or CMAKE_CUDA_COMPILER)" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(NOT said MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${missing} "${nvcc} does not run" PARENT_SCOPE)
    return()
  endif()
  set(release ${CMAKE_MATCH_1})
  if(release VERSION_LESS TANDEM_CUDA_OLDEST)
    set(${missing} "${nvcc} is of CUDA ${release}, ${TANDEM_CUDA_OLDEST} or newer is needed" PARENT_SCOPE)
    return()
  endif()
  if(NOT LibTorch_CUDA_MAJOR)
    set(${missing} "${LibTorch_ROOT_DIR} is a LibTorch without CUDA (no lib/libc10_cuda.so)" PARENT_SCOPE)
    return()
  endif()
  # Two CUDA runtimes in one process know nothing of each other's streams and memory.
  if(NOT release MATCHES "^${LibTorch_CUDA_MAJOR}\\.")
    set(${missing} "nvcc is of CUDA ${release}, and LibTorch was built for CUDA ${LibTorch_CUDA_MAJOR}"
        PARENT_SCOPE)
    return()
  endif()
  if(NOT CUDAToolkit_ROOT)
    get_filename_component(nvcc ${nvcc} REALPATH)
    get_filename_component(CUDAToolkit_ROOT ${nvcc}/../.. ABSOLUTE)
  endif()
  find_package(CUDAToolkit QUIET)
  if(NOT TARGET CUDA::cudart)
    set(${missing} "the CUDA runtime (libcudart) is missing beside ${nvcc}" PARENT_SCOPE)
    return()
  endif()
  set_target_properties(CUDA::cudart PROPERTIES IMPORTED_GLOBAL TRUE)
  find_package(NCCL QUIET)
  if(NOT NCCL_FOUND)
    set(${missing} "NCCL is missing (nccl.h and libnccl; set NCCL_ROOT)" PARENT_SCOPE)
    return()
  endif()
  set(TANDEM_NVCC_FOUND ${nvcc} PARENT_SCOPE)
  set(TANDEM_NCCL_VERSION ${NCCL_VERSION} PARENT_SCOPE)
  set(${missing} "" PARENT_SCOPE)
endfunction()

set(TANDEM_HAVE_CUDA FALSE)
if(TANDEM_SANITIZE)
  if(tandem_cuda_choice MATCHES "^(ON|TRUE|YES|1)$")
    message(FATAL_ERROR "TANDEM_CUDA is ON, but sanitizers do not see what a GPU does: leave TANDEM_SANITIZE empty, or set TANDEM_CUDA=OFF")
  endif()
  message(STATUS "CUDA: off, as in every build with a sanitizer")
elseif(tandem_cuda_choice MATCHES "^(OFF|FALSE|NO|0)$")
  message(STATUS "CUDA: off, as TANDEM_CUDA says")
else()
  tandem_find_cuda(tandem_cuda_missing)
  if(NOT tandem_cuda_missing)
    set(TANDEM_HAVE_CUDA TRUE)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${TANDEM_CUDA_ARCHITECTURES})
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      set(CMAKE_CUDA_COMPILER ${TANDEM_NVCC_FOUND})
    endif()
    # LibTorch brings libcudart.so: a program that linked the static one would have two.
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
    if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT CMAKE_CUDA_COMPILER_LAUNCHER AND TANDEM_CCACHE)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${TANDEM_CCACHE})
    endif()
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake 3.25 does not know it of nvcc.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    list(JOIN CMAKE_CUDA_ARCHITECTURES " " tandem_cuda_archs)
    message(STATUS "CUDA: found ${CMAKE_CUDA_COMPILER_VERSION} and NCCL ${TANDEM_NCCL_VERSION}; compiling for ${tandem_cuda_archs}")
  elseif(tandem_cuda_choice STREQUAL "AUTO")
    message(STATUS "CUDA: off, ${tandem_cuda_missing}")
  else()
    message(FATAL_ERROR "TANDEM_CUDA is ON, but ${tandem_cuda_missing}")
  endif()
endif()

# tandem_cuda_objects(<target> <file.cu>...)
# An object library of kernels. It takes none of tandem_options, whose flags are g++'s.
function(tandem_cuda_objects target)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  # The same bits as the CPU (D2 of kernels/device.h): no multiplication and addition are contracted into
  # one, as -ffp-contract=off says for g++; divisions and square roots are rounded correctly and denormals
  # kept, which are nvcc's defaults, written out because a wrong bit would be found late.
  target_compile_options(${target} PRIVATE
    --fmad=false --prec-div=true --prec-sqrt=true --ftz=false
    --Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror,-fPIC,-pthread
    $<$<NOT:$<CONFIG:Debug>>:-lineinfo>)
endfunction()
