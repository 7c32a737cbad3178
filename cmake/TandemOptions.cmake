# tandem_options: the compile and link flags that every target of this tree shares.
#
# They also are the flags of the precompiled header: g++ accepts one only where code generation flags,
# -fPIC and -pthread are the same as where it was made, so nothing below may differ between targets.
add_library(tandem_options INTERFACE)
target_compile_options(tandem_options INTERFACE
  -Wall -Wextra -Werror -fPIC -pthread
  # The same bits on every instruction set: no fused multiply-add that the source does not name.
  -ffp-contract=off
  # Without it g++ does not vectorise a loop that holds a square root.
  -fno-math-errno
  # -O2 of g++ 12 stops at loops of known trip count.
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<NOT:$<CONFIG:Debug>>>:-ftree-vectorize>
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<NOT:$<CONFIG:Debug>>>:-fvect-cost-model=dynamic>
  # Lets ccache see through a precompiled header.
  $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
target_link_options(tandem_options INTERFACE -pthread)
target_include_directories(tandem_options INTERFACE
  ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
if(TANDEM_MPI)
  target_compile_definitions(tandem_options INTERFACE TANDEM_HAVE_MPI=1)
endif()

if(TANDEM_SANITIZE STREQUAL "thread")
  set(TANDEM_SANITIZE_FLAGS -fsanitize=thread)
elseif(TANDEM_SANITIZE STREQUAL "address")
  # LibTorch hides the type information that the vptr check would read.
  set(TANDEM_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize=vptr
      -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
elseif(TANDEM_SANITIZE)
  message(FATAL_ERROR "TANDEM_SANITIZE is '${TANDEM_SANITIZE}'; it takes thread, address or nothing")
endif()
if(TANDEM_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ loses sight of what LibTorch's inlined code initialises once it is instrumented. The builds
  # without a sanitizer keep the warning.
  list(APPEND TANDEM_SANITIZE_FLAGS -Wno-maybe-uninitialized)
endif()
target_compile_options(tandem_options INTERFACE ${TANDEM_SANITIZE_FLAGS})
target_link_options(tandem_options INTERFACE ${TANDEM_SANITIZE_FLAGS})

# One precompiled LibTorch header for the whole build: a file that includes torch/torch.h parses for
# 13 s without it, and the header itself takes 34 s and 740 MB once.
if(TANDEM_PCH)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/torch_pch.cpp CONTENT "")
  add_library(tandem_torch_pch OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/torch_pch.cpp)
  target_link_libraries(tandem_torch_pch PRIVATE tandem_options LibTorch::torch)
  target_precompile_headers(tandem_torch_pch PRIVATE <torch/torch.h>)
endif()

# tandem_use_torch(<target> <PUBLIC|PRIVATE> [<source without LibTorch>...])
# Links LibTorch and takes the shared precompiled header; the named sources are compiled without it.
function(tandem_use_torch target visibility)
  target_link_libraries(${target} ${visibility} LibTorch::torch)
  if(TANDEM_PCH)
    target_precompile_headers(${target} REUSE_FROM tandem_torch_pch)
    if(ARGN)
      set_source_files_properties(${ARGN} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endif()
endfunction()
