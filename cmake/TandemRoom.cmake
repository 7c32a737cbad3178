# tandem_room(): one room of the design as a static library. tandem_program(): one executable.
set(TANDEM_ROOMS kernels comm zero hooks engine)

# The arrows. What a room may link; an include may only follow the same arrows (tests/checks/arrows.py).
set(TANDEM_ARROWS_kernels "")
set(TANDEM_ARROWS_comm tandem::kernels)
set(TANDEM_ARROWS_zero tandem::comm tandem::kernels)
set(TANDEM_ARROWS_hooks "")
set(TANDEM_ARROWS_engine tandem::zero tandem::hooks tandem::comm tandem::kernels)
set(TANDEM_ROOMS_WITH_TORCH zero hooks engine)

# tandem_room(NAME <room> SOURCES <file>... [LINKS <target>...] [TORCH] [WITHOUT_TORCH <file>...])
#   LINKS           targets, linked publicly; of this tree's rooms only those that the arrows allow
#   TORCH           links LibTorch and compiles with the shared precompiled header
#   WITHOUT_TORCH   further sources of a TORCH room that include no LibTorch: they skip that header
#   CUDA            further sources of builds with CUDA: C++ files, which see CUDA's headers, and kernels (.cu)
#   NO_CUDA         what stands in for them in builds without
#   CUDA_LINKS      targets that the files of CUDA need besides CUDA::cudart: NCCL::nccl, LibTorch::c10_cuda
function(tandem_room)
  cmake_parse_arguments(PARSE_ARGV 0 ROOM "TORCH" "NAME"
                        "SOURCES;LINKS;WITHOUT_TORCH;CUDA;NO_CUDA;CUDA_LINKS")
  if(ROOM_UNPARSED_ARGUMENTS OR NOT ROOM_NAME IN_LIST TANDEM_ROOMS)
    message(FATAL_ERROR "tandem_room: '${ROOM_NAME}' is no room, or unknown arguments '${ROOM_UNPARSED_ARGUMENTS}'")
  endif()
  foreach(link IN LISTS ROOM_LINKS)
    if(link MATCHES "^tandem" AND NOT link IN_LIST TANDEM_ARROWS_${ROOM_NAME})
      message(FATAL_ERROR "tandem_room: ${ROOM_NAME} must not link ${link}; it may link: ${TANDEM_ARROWS_${ROOM_NAME}}")
    endif()
  endforeach()
  if(ROOM_TORCH AND NOT ROOM_NAME IN_LIST TANDEM_ROOMS_WITH_TORCH)
    message(FATAL_ERROR "tandem_room: ${ROOM_NAME} must not link LibTorch")
  endif()

  set(target tandem_${ROOM_NAME})
  if(TANDEM_HAVE_CUDA)
    set(kernels ${ROOM_CUDA})
    list(FILTER kernels INCLUDE REGEX "\\.cu$")
    set(cuda ${ROOM_CUDA})
    list(FILTER cuda EXCLUDE REGEX "\\.cu$")
  else()
    set(kernels "")
    set(cuda ${ROOM_NO_CUDA})
  endif()
  add_library(${target} STATIC ${ROOM_SOURCES} ${ROOM_WITHOUT_TORCH} ${cuda})
  add_library(tandem::${ROOM_NAME} ALIAS ${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target}
    PUBLIC ${ROOM_LINKS} Threads::Threads
    PRIVATE $<BUILD_INTERFACE:tandem_options>)
  if(TANDEM_HAVE_CUDA AND ROOM_CUDA)
    target_link_libraries(${target} PRIVATE CUDA::cudart ${ROOM_CUDA_LINKS})
  endif()
  if(kernels)
    tandem_cuda_objects(${target}_cuda ${kernels})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
  endif()
  if(ROOM_TORCH)
    tandem_use_torch(${target} PRIVATE ${ROOM_WITHOUT_TORCH})
  endif()
endfunction()

# tandem_program(NAME <name> SOURCES <file>... [LINKS <target>...] [TORCH])
function(tandem_program)
  cmake_parse_arguments(PARSE_ARGV 0 PROGRAM "TORCH" "NAME" "SOURCES;LINKS")
  if(PROGRAM_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "tandem_program: unknown arguments '${PROGRAM_UNPARSED_ARGUMENTS}'")
  endif()
  add_executable(${PROGRAM_NAME} ${PROGRAM_SOURCES})
  target_link_libraries(${PROGRAM_NAME} PRIVATE tandem_options ${PROGRAM_LINKS} Threads::Threads)
  if(PROGRAM_TORCH)
    tandem_use_torch(${PROGRAM_NAME} PRIVATE)
  endif()
endfunction()
