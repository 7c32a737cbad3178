// tests/support/keyed.h: numbers that are a function of a key alone, so that every rank, thread and
// oracle makes the same ones without a generator whose state they would share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>

namespace tandem::testing {

/// fp32 values in [-scale, scale), a function of (key, index).
at::Tensor keyed(at::IntArrayRef shape, std::uint64_t key, double scale = 1.0);

/// One key of several numbers; different lists give different keys.
std::uint64_t key_of(std::initializer_list<std::int64_t> parts);

}  // namespace tandem::testing
