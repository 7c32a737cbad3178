# Finds a LibTorch folder (include/ and lib/) and makes the imported target LibTorch::torch of it, and
# LibTorch::c10_cuda if that LibTorch was built for CUDA (its header needs CUDA::cudart; torch_cuda itself
# is linked by nobody: it is opened when a CUDA device is asked for).
#
# The folder is, in this order: the cache variable TANDEM_LIBTORCH; the one that find_package(Torch) has
# found before, if it was called; the environment variable TANDEM_LIBTORCH; one in CMAKE_PREFIX_PATH; the
# wheel in the project's .venv. LibTorch's own package file is not read: that of a CUDA wheel demands nvcc,
# while a program for the CPU only needs libtorch_cpu and libc10.
#
# Included by Tandem's own build and, installed, by tandemConfig.cmake. The targets are global: a project
# that adds Tandem by add_subdirectory links them from folders above.
# Sets LibTorch_FOUND, LibTorch_VERSION, LibTorch_ROOT_DIR, LibTorch_INCLUDE_DIR, LibTorch_CUDA_MAJOR (the
# CUDA release that it was built for, such as 13; empty without).

set(LibTorch_ROOT_DIR "")
set(LibTorch_NOT_FOUND_MESSAGE "")
set(_libtorch_origin "")
set(_libtorch_of_torch "")
if(Torch_FOUND AND TORCH_INSTALL_PREFIX)
  get_filename_component(_libtorch_of_torch ${TORCH_INSTALL_PREFIX} REALPATH)
endif()
if(TANDEM_LIBTORCH)
  set(LibTorch_ROOT_DIR ${TANDEM_LIBTORCH})
  set(_libtorch_origin "the CMake variable TANDEM_LIBTORCH")
elseif(_libtorch_of_torch)
  set(LibTorch_ROOT_DIR ${_libtorch_of_torch})
  set(_libtorch_origin "find_package(Torch)")
elseif(DEFINED ENV{TANDEM_LIBTORCH} AND NOT "$ENV{TANDEM_LIBTORCH}" STREQUAL "")
  set(LibTorch_ROOT_DIR $ENV{TANDEM_LIBTORCH})
  set(_libtorch_origin "the environment variable TANDEM_LIBTORCH")
else()
  file(GLOB _libtorch_wheels ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  foreach(_dir IN LISTS CMAKE_PREFIX_PATH _libtorch_wheels)
    if(EXISTS ${_dir}/include/torch/csrc/api/include/torch/torch.h)
      set(LibTorch_ROOT_DIR ${_dir})
      set(_libtorch_origin "CMAKE_PREFIX_PATH or the local environment .venv")
      break()
    endif()
  endforeach()
endif()

if(NOT LibTorch_ROOT_DIR)
  set(LibTorch_NOT_FOUND_MESSAGE
      "no LibTorch folder is known. Set TANDEM_LIBTORCH, as a CMake or an environment variable, to a folder that holds include/ and lib/. (In Tandem's own tree scripts/demo and scripts/test install one into .venv.)")
else()
  get_filename_component(LibTorch_ROOT_DIR ${LibTorch_ROOT_DIR} ABSOLUTE)
  get_filename_component(_libtorch_real ${LibTorch_ROOT_DIR} REALPATH)
  if(_libtorch_of_torch AND NOT _libtorch_real STREQUAL _libtorch_of_torch)
    set(LibTorch_NOT_FOUND_MESSAGE
        "TANDEM_LIBTORCH is ${LibTorch_ROOT_DIR}, but find_package(Torch) has found ${TORCH_INSTALL_PREFIX}: a program cannot hold two LibTorchs. Unset TANDEM_LIBTORCH.")
  endif()
  set(LibTorch_INCLUDE_DIR ${LibTorch_ROOT_DIR}/include)
  set(_libtorch_lib ${LibTorch_ROOT_DIR}/lib)
  foreach(_file include/ATen/ATen.h include/torch/csrc/api/include/torch/torch.h lib/libtorch_cpu.so lib/libc10.so)
    if(NOT EXISTS ${LibTorch_ROOT_DIR}/${_file})
      set(LibTorch_NOT_FOUND_MESSAGE
          "${LibTorch_ROOT_DIR} (from ${_libtorch_origin}) lacks ${_file}. Set TANDEM_LIBTORCH to a LibTorch folder: the one that holds include/ and lib/.")
      break()
    endif()
  endforeach()
endif()

if(NOT LibTorch_NOT_FOUND_MESSAGE)
  # version.h moved between releases: look where both put the numbers.
  foreach(_file torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS ${LibTorch_INCLUDE_DIR}/${_file})
      file(STRINGS ${LibTorch_INCLUDE_DIR}/${_file} _libtorch_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
      string(REGEX REPLACE "[^0-9;]" "" _libtorch_numbers "${_libtorch_lines}")
      list(JOIN _libtorch_numbers "." LibTorch_VERSION)
      if(LibTorch_VERSION)
        break()
      endif()
    endif()
  endforeach()

  # A wheel built for CUDA names the CUDA runtime even in its CPU library. The linker must see those
  # libraries, and the loader will look for them where libtorch_cpu's own rpath points.
  set(_libtorch_needed "")
  if(CMAKE_READELF)
    execute_process(COMMAND ${CMAKE_READELF} -d ${_libtorch_lib}/libtorch_cpu.so
                    OUTPUT_VARIABLE _libtorch_dynamic ERROR_QUIET)
    string(REGEX MATCHALL "lib(cudart|cupti)\\.so\\.[0-9]+" _libtorch_needed "${_libtorch_dynamic}")
    list(REMOVE_DUPLICATES _libtorch_needed)
  endif()
  set(_libtorch_rpath_dirs ${_libtorch_lib})
  string(REPLACE ":" ";" _libtorch_loader_path "$ENV{LD_LIBRARY_PATH}")
  foreach(_name IN LISTS _libtorch_needed)
    unset(_libtorch_cuda_file)
    find_file(_libtorch_cuda_file ${_name}
              PATHS ${LibTorch_ROOT_DIR}/../nvidia/cu13/lib ${_libtorch_lib} ${_libtorch_loader_path}
              NO_DEFAULT_PATH NO_CACHE)
    if(NOT _libtorch_cuda_file)
      set(LibTorch_NOT_FOUND_MESSAGE
          "${_libtorch_lib}/libtorch_cpu.so needs ${_name}, which is neither beside it nor in ../nvidia/cu13/lib. Install the packages nvidia-cuda-runtime and nvidia-cuda-cupti of the same CUDA release into the same Python environment, or set LD_LIBRARY_PATH to where they are.")
      break()
    endif()
    get_filename_component(_libtorch_cuda_dir ${_libtorch_cuda_file} REALPATH)
    get_filename_component(_libtorch_cuda_dir ${_libtorch_cuda_dir} DIRECTORY)
    list(APPEND _libtorch_rpath_dirs ${_libtorch_cuda_dir})
  endforeach()
  list(REMOVE_DUPLICATES _libtorch_rpath_dirs)

  set(LibTorch_CUDA_MAJOR "")
  if(CMAKE_READELF AND EXISTS ${_libtorch_lib}/libc10_cuda.so)
    execute_process(COMMAND ${CMAKE_READELF} -d ${_libtorch_lib}/libc10_cuda.so
                    OUTPUT_VARIABLE _libtorch_dynamic ERROR_QUIET)
    if(_libtorch_dynamic MATCHES "libcudart\\.so\\.([0-9]+)")
      set(LibTorch_CUDA_MAJOR ${CMAKE_MATCH_1})
    endif()
  endif()
endif()

include(FindPackageHandleStandardArgs)
if(LibTorch_NOT_FOUND_MESSAGE)
  set(LibTorch_USABLE FALSE)
else()
  set(LibTorch_USABLE TRUE)
endif()
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_USABLE LibTorch_ROOT_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${LibTorch_NOT_FOUND_MESSAGE}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::torch)
  add_library(LibTorch::c10 SHARED IMPORTED GLOBAL)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION ${_libtorch_lib}/libc10.so)
  add_library(LibTorch::torch SHARED IMPORTED GLOBAL)
  # Imported targets' include folders are system folders: their warnings are not ours.
  set_target_properties(LibTorch::torch PROPERTIES
    IMPORTED_LOCATION ${_libtorch_lib}/libtorch_cpu.so
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_INCLUDE_DIR};${LibTorch_INCLUDE_DIR}/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES LibTorch::c10)
  foreach(_dir IN LISTS _libtorch_rpath_dirs)
    target_link_options(LibTorch::torch INTERFACE "LINKER:-rpath,${_dir}" "LINKER:-rpath-link,${_dir}")
  endforeach()
  if(LibTorch_CUDA_MAJOR)
    add_library(LibTorch::c10_cuda SHARED IMPORTED GLOBAL)
    set_target_properties(LibTorch::c10_cuda PROPERTIES
      IMPORTED_LOCATION ${_libtorch_lib}/libc10_cuda.so
      INTERFACE_LINK_LIBRARIES LibTorch::torch)
  endif()
endif()
