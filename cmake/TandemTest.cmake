# tandem_test(): one GoogleTest executable and its ctest entries.
#
# Debian's GoogleTest is linked. A test that runs on ranks gets its main from tests/support/mpi_main.cpp,
# which shows every rank's failures with its rank; the others get GoogleTest's.
find_package(GTest REQUIRED)

# Tests start ranks with the launcher that belongs to the MPI that was found. Open MPI refuses root and
# more ranks than cores unless told otherwise, and by default pins each rank to one core, together with
# the thread that reduces for it; other launchers know none of these flags.
set(TANDEM_MPIRUN "")
if(TANDEM_MPI)
  set(TANDEM_MPIRUN ${MPIEXEC_EXECUTABLE})
  execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE tandem_mpirun_version ERROR_QUIET)
  if(tandem_mpirun_version MATCHES "Open(RTE|-MPI| MPI)")
    list(APPEND TANDEM_MPIRUN --oversubscribe --bind-to none)
  endif()
endif()

set(TANDEM_TEST_ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
    GTEST_COLOR=no)
# Nothing is suppressed for ThreadSanitizer: LibTorch is not instrumented, but runs of it on one CPU thread
# a rank are clean as they are, and to ignore its calls into libc would hide the locks it takes around ours.
if(TANDEM_SANITIZE STREQUAL "thread")
  list(APPEND TANDEM_TEST_ENVIRONMENT
       TSAN_OPTIONS=second_deadlock_stack=1)
elseif(TANDEM_SANITIZE STREQUAL "address")
  list(APPEND TANDEM_TEST_ENVIRONMENT
       "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/lsan.supp:print_suppressions=0"
       "UBSAN_OPTIONS=print_stacktrace=1")
endif()

# What scripts/test --sanitize builds and runs (target and label `sanitized`): the tests of the rooms, in
# one process without a launcher, their ranks as threads.
add_custom_target(sanitized)

# tandem_add_test(<entry> <executable target> <ranks or 0> <timeout s> <argument>...)
# One ctest entry; ranks 0 runs the program directly. Tests of TANDEM_MPI=OFF never ask for a launcher.
function(tandem_add_test entry target ranks timeout)
  set(environment ${TANDEM_TEST_ENVIRONMENT})
  set(processors 1)
  if(ranks EQUAL 0 OR NOT TANDEM_MPI)
    add_test(NAME ${entry} COMMAND ${target} ${ARGN})
  else()
    add_test(NAME ${entry} COMMAND ${TANDEM_MPIRUN} -np ${ranks} $<TARGET_FILE:${target}> ${ARGN})
    if(ranks GREATER 1)
      set(processors 2)
    endif()
    if(TANDEM_SANITIZE STREQUAL "address")
      # MPI leaks, and unloads its modules before the report: no suppression could name them. Leaks are
      # looked for in the tests that run without it.
      list(APPEND environment ASAN_OPTIONS=detect_leaks=0)
    endif()
    # The launcher ends a hanging job itself, and says so, a little before ctest would kill it.
    math(EXPR launcher_timeout "${timeout} - 5")
    list(APPEND environment MPIEXEC_TIMEOUT=${launcher_timeout})
  endif()
  set_tests_properties(${entry} PROPERTIES
    TIMEOUT ${timeout} PROCESSORS ${processors} ENVIRONMENT "${environment}")
endfunction()

# tandem_add_store_test(<entry> <timeout s> <argument of torchrun_like.sh>...)
# One ctest entry whose ranks are started as torchrun starts them, over a store and without MPI.
function(tandem_add_store_test entry timeout)
  add_test(NAME ${entry} COMMAND ${PROJECT_SOURCE_DIR}/tests/support/torchrun_like.sh ${ARGN})
  set_tests_properties(${entry} PROPERTIES
    TIMEOUT ${timeout} PROCESSORS 2 ENVIRONMENT "${TANDEM_TEST_ENVIRONMENT}")
endfunction()

# tandem_test(NAME test.<room>.<topic> SOURCES <file>... [LINKS <target>...] [RANKS <n>...] [TORCH]
#             [TIMEOUT <s>] [NOT_SANITIZED])
#   RANKS    one ctest entry per number, <name>.np<n>, run by the MPI launcher; without MPI only 1 is run
#   TORCH    links LibTorch and compiles with the shared precompiled header
#   TIMEOUT  seconds until a hanging test is ended, 120 by default; sanitizers get three times as much
#   NOT_SANITIZED  left out by scripts/test --sanitize, for its costs
function(tandem_test)
  cmake_parse_arguments(PARSE_ARGV 0 TEST "TORCH;NOT_SANITIZED" "NAME;TIMEOUT" "SOURCES;LINKS;RANKS")
  if(TEST_UNPARSED_ARGUMENTS OR NOT TEST_NAME MATCHES "^test\\.")
    message(FATAL_ERROR "tandem_test: bad name '${TEST_NAME}' or unknown arguments '${TEST_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 120)
  endif()
  if(TANDEM_SANITIZE)
    math(EXPR TEST_TIMEOUT "3 * ${TEST_TIMEOUT}")
  endif()
  add_executable(${TEST_NAME} ${TEST_SOURCES})
  target_link_libraries(${TEST_NAME} PRIVATE tandem_options ${TEST_LINKS} GTest::gmock GTest::gtest Threads::Threads)
  if(TEST_TORCH)
    tandem_use_torch(${TEST_NAME} PRIVATE)
  endif()
  if(NOT TEST_RANKS)
    target_link_libraries(${TEST_NAME} PRIVATE GTest::gtest_main)
    tandem_add_test(${TEST_NAME} ${TEST_NAME} 0 ${TEST_TIMEOUT})
    set(entries ${TEST_NAME})
  else()
    target_link_libraries(${TEST_NAME} PRIVATE tandem_mpi_main)
    set(entries "")
    foreach(ranks IN LISTS TEST_RANKS)
      if(TANDEM_MPI OR ranks EQUAL 1)
        tandem_add_test(${TEST_NAME}.np${ranks} ${TEST_NAME} ${ranks} ${TEST_TIMEOUT})
        list(APPEND entries ${TEST_NAME}.np${ranks})
      endif()
    endforeach()
  endif()
  if(NOT TEST_NOT_SANITIZED AND NOT TANDEM_MPI)
    add_dependencies(sanitized ${TEST_NAME})
    set_tests_properties(${entries} PROPERTIES LABELS sanitized)
  endif()
endfunction()
