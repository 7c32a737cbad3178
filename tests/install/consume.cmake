# Uses Tandem from another project, the way HOW says:
#   prefix        cmake --install, find_package(tandem), and a look at what was installed
#   moved         the same after the prefix was moved to another folder
#   subdirectory  add_subdirectory(tandem): everything is compiled again, and nothing of ours leaks
#   configure     find_package(tandem) beside a LibTorch that the project has found, with none, with
#                 another release, and of another version of Tandem
# Called by ctest with BUILD, SOURCE, WORK (a folder of its own), LIBTORCH, MPIRUN (a list; empty without
# MPI), and CCACHE, through which a second run compiles in no time.
cmake_minimum_required(VERSION 3.25)
set(consumer ${CMAKE_CURRENT_LIST_DIR}/consumer)

function(run)
  cmake_parse_arguments(PARSE_ARGV 0 RUN "" "OUTPUT;FAILS_WITH" "COMMAND")
  execute_process(COMMAND ${RUN_COMMAND} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  # CMake breaks its messages into lines.
  string(REGEX REPLACE "[ \n]+" " " flat "${text}")
  if(NOT RUN_FAILS_WITH AND NOT status EQUAL 0)
    message(FATAL_ERROR "${RUN_COMMAND}\nended with ${status}:\n${text}")
  elseif(RUN_FAILS_WITH AND (status EQUAL 0 OR NOT flat MATCHES "${RUN_FAILS_WITH}"))
    message(FATAL_ERROR "${RUN_COMMAND}\nended with ${status}, and should say '${RUN_FAILS_WITH}':\n${text}")
  endif()
  set(${RUN_OUTPUT} "${text}" PARENT_SCOPE)
endfunction()

# Not optimised and without symbols: these programs are compiled once and run for a second.
set(configure ${CMAKE_COMMAND} -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
if(CCACHE)
  set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} ${CCACHE})
  set(ENV{CMAKE_CUDA_COMPILER_LAUNCHER} ${CCACHE})
  set(ENV{CCACHE_SLOPPINESS} pch_defines,time_macros,include_file_mtime,include_file_ctime)
endif()

function(build_and_run)
  run(COMMAND ${configure} -S ${consumer} -B ${WORK}/build ${ARGN})
  run(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build --parallel 2)
  run(COMMAND ${WORK}/build/consumer OUTPUT said)
  message("${said}")
  if(MPIRUN)
    run(COMMAND ${MPIRUN} -np 2 ${WORK}/build/consumer OUTPUT said)
    message("${said}")
    if(NOT said MATCHES "rank 1 of 2: ")
      message(FATAL_ERROR "the launcher's two ranks did not find each other")
    endif()
  endif()
endfunction()

function(check_prefix prefix)
  file(GLOB_RECURSE files RELATIVE ${prefix} LIST_DIRECTORIES false ${prefix}/*)
  set(archives 0)
  foreach(file IN LISTS files)
    if(file MATCHES "^lib[^/]*/(.*/)?libtandem_[a-z]+\\.a$")
      math(EXPR archives "${archives} + 1")
    elseif(NOT file MATCHES "^include/tandem/[a-z_]+\\.h$" AND NOT file STREQUAL "share/doc/tandem/LICENSE" AND
           NOT file MATCHES "^lib[^/]*/(.*/)?cmake/tandem/[A-Za-z-]+\\.cmake$")
      message(FATAL_ERROR "what is ${file} doing in the installed folder?")
    endif()
  endforeach()
  if(NOT "share/doc/tandem/LICENSE" IN_LIST files OR NOT "include/tandem/tandem.h" IN_LIST files OR
     archives LESS 5)
    message(FATAL_ERROR "headers, licence or archives are missing: ${files}")
  endif()
  # A folder that can be moved, also to another machine, names none of this one's.
  file(GLOB_RECURSE scripts ${prefix}/*.cmake)
  foreach(script IN LISTS scripts)
    file(READ ${script} text)
    foreach(place ${BUILD} ${SOURCE} ${LIBTORCH} ${prefix})
      string(FIND "${text}" "${place}" at)
      if(NOT at EQUAL -1)
        message(FATAL_ERROR "${script} names ${place}")
      endif()
    endforeach()
  endforeach()
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
if(NOT HOW STREQUAL "subdirectory")
  run(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
endif()

if(HOW STREQUAL "prefix")
  check_prefix(${WORK}/prefix)
  build_and_run(-Dtandem_ROOT=${WORK}/prefix -DTANDEM_LIBTORCH=${LIBTORCH})
elseif(HOW STREQUAL "moved")
  file(MAKE_DIRECTORY ${WORK}/elsewhere)
  file(RENAME ${WORK}/prefix ${WORK}/elsewhere/tandem)
  # Here by the environment variable.
  set(ENV{TANDEM_LIBTORCH} ${LIBTORCH})
  build_and_run(-DCMAKE_PREFIX_PATH=${WORK}/elsewhere/tandem)
elseif(HOW STREQUAL "subdirectory")
  set(mpi OFF)
  if(MPIRUN)
    set(mpi ON)
  endif()
  build_and_run(-DTANDEM_SOURCE=${SOURCE} -DTANDEM_LIBTORCH=${LIBTORCH} -DTANDEM_MPI=${mpi})
  file(STRINGS ${WORK}/build/compile_commands.json commands REGEX "\"command\".*consumer/main\\.cpp")
  foreach(ours -Werror -Wall -ffp-contract -fno-math-errno -ftree-vectorize -fpch -include)
    if(commands MATCHES " ${ours}" OR NOT commands MATCHES "-std=gnu\\+\\+20")
      message(FATAL_ERROR "the consumer's own file is compiled with ${ours} or not as C++20: ${commands}")
    endif()
  endforeach()
  run(COMMAND ${CMAKE_CTEST_COMMAND} --test-dir ${WORK}/build -N OUTPUT tests)
  if(NOT tests MATCHES "Total Tests: 0")
    message(FATAL_ERROR "Tandem's tests are in the consumer's list: ${tests}")
  endif()
elseif(HOW STREQUAL "configure")
  unset(ENV{TANDEM_LIBTORCH})
  set(find ${configure} -Dtandem_ROOT=${WORK}/prefix)
  run(COMMAND ${find} -S ${CMAKE_CURRENT_LIST_DIR}/torch_found -B ${WORK}/torch_found -DSTANDIN_TORCH=${LIBTORCH})
  run(COMMAND ${find} -S ${CMAKE_CURRENT_LIST_DIR}/torch_found -B ${WORK}/two_torches -DSTANDIN_TORCH=${WORK}
      -DTANDEM_LIBTORCH=${LIBTORCH} FAILS_WITH "a program cannot hold two LibTorchs")
  run(COMMAND ${find} -S ${consumer} -B ${WORK}/no_torch FAILS_WITH "no LibTorch folder is known. Set TANDEM_LIBTORCH")
  # A LibTorch of another release, as far as is looked at.
  file(WRITE ${WORK}/other/include/ATen/ATen.h "")
  file(WRITE ${WORK}/other/include/torch/csrc/api/include/torch/torch.h "")
  file(WRITE ${WORK}/other/include/torch/headeronly/version.h
       "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 99\n#define TORCH_VERSION_PATCH 1\n")
  file(WRITE ${WORK}/other/lib/libtorch_cpu.so "")
  file(WRITE ${WORK}/other/lib/libc10.so "")
  run(COMMAND ${find} -S ${consumer} -B ${WORK}/other_torch -DTANDEM_LIBTORCH=${WORK}/other
      FAILS_WITH "was built with LibTorch [0-9.]+, and [^ ]*other is 2\\.99\\.1: build Tandem with that one")
  file(WRITE ${WORK}/next/CMakeLists.txt
       "cmake_minimum_required(VERSION 3.25)\nproject(next LANGUAGES CXX)\nfind_package(tandem 0.2 REQUIRED)\n")
  run(COMMAND ${find} -S ${WORK}/next -B ${WORK}/next_tandem -DTANDEM_LIBTORCH=${LIBTORCH}
      FAILS_WITH "requested version \"0\\.2\"")
else()
  message(FATAL_ERROR "HOW is '${HOW}'")
endif()
