// tandem/token_count.h: how many tokens (rows, pixels, ...) a loss stands for; what World::backward
// can be told.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <utility>

namespace tandem {

/// A number of tokens, >= 0: an integer, or a tensor of one integer on any device, whose value of
/// now is meant and which is not read before the next step (`mask.sum()` on a GPU is not waited
/// for).
class TokenCount {
 public:
  /// Throws InvalidArgument if it is < 0 or above 2^63 - 1.
  template <std::integral Number>
  TokenCount(Number count)  // NOLINT(google-explicit-constructor): that is what it is for
      : number_(checked(static_cast<std::int64_t>(count),
                        std::cmp_greater_equal(count, 0) && std::in_range<std::int64_t>(count))) {}
  /// Throws InvalidArgument unless it is one element of an integer type. A value < 0 is refused by
  /// the step, on all ranks.
  TokenCount(const at::Tensor& count);  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool is_tensor() const { return tensor_.defined(); }
  [[nodiscard]] std::int64_t number() const { return number_; }  // 0 of a tensor
  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }

 private:
  static std::int64_t checked(std::int64_t count, bool fits);
  std::int64_t number_ = 0;
  at::Tensor tensor_;
};

struct BackwardOptions {
  /// The loss is a mean over so many tokens of this rank: it is multiplied by them, and they are
  /// counted, so that the step makes it the mean over the tokens of all ranks. For
  /// Average::kTokens. A 0 that is known on the host (an integer, a tensor of the CPU) contributes
  /// exact zeros, even where such a mean is NaN.
  std::optional<TokenCount> weight = std::nullopt;
  bool retain_graph = false;
};

}  // namespace tandem
