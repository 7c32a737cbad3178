// kernels/denormals.h: denormals are kept, whatever mode the calling thread is in.
//
// Programs set flush-to-zero for speed (at::set_flush_denormal, -ffast-math start-up code), on some
// threads or ranks and not on others. The public kernels give the same bits regardless: they hold
// one of these around their loops.
#pragma once

#if defined(__SSE__) && !defined(__CUDACC__)
#include <xmmintrin.h>
#endif

namespace tandem::kernels {

/// Clears flush-to-zero and denormals-are-zero of the calling thread until it is destroyed, on the
/// same thread. Does nothing on processors other than x86. What it covers must be behind a call
/// that the compiler cannot see through: arithmetic beside it could be moved across it.
class KeepDenormals {
 public:
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
  KeepDenormals(KeepDenormals&&) = delete;
  KeepDenormals& operator=(KeepDenormals&&) = delete;

#if defined(__SSE__) && !defined(__CUDACC__)
  KeepDenormals() : saved_(_mm_getcsr()) {
    if ((saved_ & kModes) != 0) _mm_setcsr(saved_ & ~kModes);
  }
  ~KeepDenormals() {
    // The modes only: exceptions raised meanwhile stay noted, as after any arithmetic.
    if ((saved_ & kModes) != 0) _mm_setcsr(_mm_getcsr() | (saved_ & kModes));
  }

 private:
  static constexpr unsigned kModes = 0x8040;  // flush-to-zero, denormals-are-zero
  unsigned saved_;
#else
  KeepDenormals() {}
  ~KeepDenormals() {}
#endif
};

}  // namespace tandem::kernels
