// zero/bucket_plan.h: how an engine's parameters are laid into buckets.
//
// A pure function of names, sizes, types and bucket bytes; never of the world size.
// B1 Every parameter lies in exactly one bucket, whole; a bucket has one dtype.
// B2 Parameters of 1,024 elements or more start at multiples of 1,024; smaller ones start at
// multiples
//    of 64 bytes and stay inside one 1,024-block. Parameters never overlap.
// B3 A bucket's numel is a multiple of 1,024, at least one. Its bytes exceed bucket_bytes only if
// it
//    holds a single parameter.
// B4 Buckets take parameters of one dtype in registration order, so that a bucket completes in one
//    stretch of a backward pass. Buckets are numbered by their first parameter.
// Called by zero and engine (layout hash, order).
#pragma once

#include "kernels/dtype.h"
#include "zero/partition.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tandem::zero {

struct ParameterInfo {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t numel = 0;
  kernels::Dtype dtype = kernels::Dtype::kFloat32;
};

/// Where a parameter lies in its bucket.
struct Placement {
  std::int32_t parameter = 0;  // index in registration order
  std::int64_t offset = 0;     // in elements, from the bucket's start
  std::int64_t numel = 0;
};

struct BucketLayout {
  kernels::Dtype dtype = kernels::Dtype::kFloat32;
  kernels::Dtype wire = kernels::Dtype::kFloat32;  // in which its gradients travel
  std::int64_t numel = 0;                          // padded
  std::vector<Placement> placements;               // ascending offsets
  std::int64_t flat_offset = 0;  // bytes from the start of the engine's flat parameter memory;
                                 // a multiple of 4,096
};

struct BucketPlan {
  std::vector<BucketLayout> buckets;
  std::vector<std::int32_t> bucket_of;  // per parameter
  std::vector<std::int64_t> offset_of;  // per parameter, in elements inside its bucket
  std::int64_t flat_bytes = 0;          // all buckets
};

/// `bucket_bytes` > 0 (checked where options are given), of parameters whatever travels. `wire`:
/// nothing means each bucket's own type. An empty list gives an empty plan.
[[nodiscard]] BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters,
                                      std::int64_t bucket_bytes,
                                      std::optional<kernels::Dtype> wire = std::nullopt);

/// A line for each parameter ("name fp32 [2, 3]"), for hashes and for naming the first difference.
[[nodiscard]] std::vector<std::string> describe(const std::vector<ParameterInfo>& parameters);

}  // namespace tandem::zero
