// tandem/outputs.h: finding the tensors in what a module's forward returns.
//
// Tensor, optional, pair, tuple, vector, array, initializer_list, map and unordered_map are walked,
// nested as they like; numbers, enums, strings and null pointers are passed over. For a struct of
// your own, write beside it
//
//   template <class Visit>
//   void visit_tensors(const MyOutput& output, Visit&& visit) { visit(output.logits);
//   visit(output.state); }
//
// where `visit` takes anything of the above again. A type that is none of these does not compile,
// with a message that says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tandem {

namespace detail {

template <class T>
struct AlwaysFalse : std::false_type {};

struct AnyVisitor {
  template <class T>
  void operator()(const T&) const {}
};

template <class T>
concept HasVisitTensors = requires(const T& value, AnyVisitor visitor) {
  visit_tensors(value, visitor);
};

template <class T>
concept Ignored = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
    std::is_same_v<T, std::string_view> || std::is_same_v<T, std::nullptr_t> ||
    std::is_same_v<T, std::nullopt_t> || std::is_same_v<T, std::monostate>;

template <class T>
concept Range = requires(const T& value) {
  value.begin();
  value.end();
};

template <class T>
concept Optional = requires(const T& value) {
  value.has_value();
  *value;
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

}  // namespace detail

/// Calls function(const at::Tensor&) for each defined tensor in `value`.
template <class T, class Function>
void for_each_tensor(const T& value, Function&& function) {
  if constexpr (std::is_base_of_v<at::Tensor, T>) {
    if (value.defined()) {
      function(static_cast<const at::Tensor&>(value));
    }
  } else if constexpr (detail::HasVisitTensors<T>) {
    visit_tensors(value, [&](const auto& part) { for_each_tensor(part, function); });
  } else if constexpr (detail::Ignored<T>) {
    // Nothing to find.
  } else if constexpr (detail::Optional<T>) {
    if (value.has_value()) {
      for_each_tensor(*value, function);
    }
  } else if constexpr (detail::TupleLike<T> && !detail::Range<T>) {
    std::apply([&](const auto&... parts) { (for_each_tensor(parts, function), ...); }, value);
  } else if constexpr (detail::Range<T>) {
    for (const auto& part : value) {
      for_each_tensor(part, function);
    }
  } else {
    static_assert(
        detail::AlwaysFalse<T>::value,
        "tandem cannot find the tensors in this type: write visit_tensors(const T&, Visit&&) in "
        "the type's namespace, see <tandem/outputs.h>");
  }
}

}  // namespace tandem
