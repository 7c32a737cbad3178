// kernels/check.h: assertions for inner invariants; public input is checked where it is given.
#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends the program in debug builds when an invariant of the file's header comment does not hold:
/// TANDEM_ASSERT(offset % 1024 == 0, "P2 slices begin at multiples of 1,024").
#ifdef NDEBUG
#define TANDEM_ASSERT(condition, text) static_cast<void>(0)
#else
#define TANDEM_ASSERT(condition, text)                                                     \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: invariant broken: %s (%s)\n", __FILE__, __LINE__, text, \
                   #condition);                                                            \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)
#endif
