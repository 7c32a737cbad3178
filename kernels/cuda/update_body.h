// kernels/cuda/update_body.h: what one lane of a warp does in an update (kernels/update.h, U1 to
// U3).
//
// B4 An element's arithmetic is the functor's of kernels/optimizers.h between the roundings of
//    kernels/masters.h, as in the CPU's loop; which lane does it changes nothing.
// Compiled for the GPU (update.cu) and, for tests, for the CPU.
#pragma once

#include "kernels/bf16.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/fragment.h"
#include "kernels/cuda/geometry.h"
#include "kernels/fp16.h"
#include "kernels/inline.h"
#include "kernels/masters.h"
#include "kernels/update.h"

#include <cstdint>
#include <type_traits>
#include <variant>

namespace tandem::kernels::cuda {

/// One rule as a kernel reads it: the functor's bytes behind its index in Update.
struct alignas(16) RuleSlot {
  static constexpr std::size_t kFunctorBytes = 48;
  std::int32_t kind = -1;
  std::int32_t unused[3] = {};
  alignas(16) unsigned char functor[kFunctorBytes] = {};
};

template <Stored kStored>
using ParamOf = std::conditional_t<kStored == Stored::kFp32,
                                   float,
                                   std::conditional_t<kStored == Stored::kFp16Masters, Fp16, Bf16>>;

// NOLINTBEGIN(bugprone-easily-swappable-parameters): in the order of UpdateArrays; a piece, then a
// lane

/// One element in registers. What a storage has not is not there to be read or written.
template <class Functor, Stored kStored>
TANDEM_KERNEL_INLINE void update_element(const Functor& functor,
                                         float grad,
                                         ParamOf<kStored>& param,
                                         float& master,
                                         std::uint16_t& remainder,
                                         float* state) {
  if constexpr (kStored == Stored::kFp32) {
    param = functor(param, grad, state);
  } else {
    constexpr bool kRemainders = kStored == Stored::kBf16Remainders;
    float start = 0.0F;
    if constexpr (kRemainders) {
      start = join_master(param, remainder);
    } else {
      start = start_of(master, param);
    }
    const float updated = canonical(functor(start, grad, state));
    if constexpr (kRemainders) {
      remainder = remainder_of(updated);
    } else {
      master = updated;
    }
    round_master(updated, param);
  }
}

/// Lane `lane`'s part of a piece.
template <class Functor, Stored kStored>
TANDEM_KERNEL_INLINE void update_lane(const Functor& functor,
                                      const Fragment& fragment,
                                      const Piece& piece,
                                      int lane) {
  using Param = ParamOf<kStored>;
  constexpr int kStates = Functor::kStates;
  constexpr bool kRemainders = kStored == Stored::kBf16Remainders;
  constexpr bool kMasters = kStored != Stored::kFp32 && !kRemainders;
  const float* const grad = fragment.grad + piece.begin;
  Param* const param = static_cast<Param*>(fragment.param) + piece.begin;
  float* const master = kMasters ? fragment.master + piece.begin : nullptr;
  std::uint16_t* const remainder = kRemainders ? fragment.remainder + piece.begin : nullptr;
  float* state[kStates > 0 ? kStates : 1] = {};
  TANDEM_UNROLL
  for (int k = 0; k < kStates; ++k) state[k] = fragment.state[k] + piece.begin;

  const std::int32_t groups = fragment.vector ? piece.numel / kVector : 0;
  for (std::int32_t group = lane; group < groups; group += kWarp) {
    const std::int32_t i = group * kVector;
    const Four<float> grads = load_four(grad + i);
    Four<Param> params = load_four(param + i);
    Four<float> masters{};
    Four<std::uint16_t> remainders{};
    Four<float> states[kStates > 0 ? kStates : 1] = {};
    if constexpr (kMasters) masters = load_four(master + i);
    if constexpr (kRemainders) remainders = load_four(remainder + i);
    TANDEM_UNROLL
    for (int k = 0; k < kStates; ++k) states[k] = load_four(state[k] + i);
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) {
      float own[kStates > 0 ? kStates : 1] = {};
      TANDEM_UNROLL
      for (int k = 0; k < kStates; ++k) own[k] = states[k].of[j];
      update_element<Functor, kStored>(functor, grads.of[j], params.of[j], masters.of[j],
                                       remainders.of[j], own);
      TANDEM_UNROLL
      for (int k = 0; k < kStates; ++k) states[k].of[j] = own[k];
    }
    store_four(param + i, params);
    if constexpr (kMasters) store_four(master + i, masters);
    if constexpr (kRemainders) store_four(remainder + i, remainders);
    TANDEM_UNROLL
    for (int k = 0; k < kStates; ++k) store_four(state[k] + i, states[k]);
  }

  for (std::int32_t i = groups * kVector + lane; i < piece.numel; i += kWarp) {
    float own[kStates > 0 ? kStates : 1] = {};
    TANDEM_UNROLL
    for (int k = 0; k < kStates; ++k) own[k] = state[k][i];
    Param own_param = param[i];
    float own_master = 0.0F;
    std::uint16_t own_remainder = 0;
    if constexpr (kMasters) own_master = master[i];
    if constexpr (kRemainders) own_remainder = remainder[i];
    update_element<Functor, kStored>(functor, grad[i], own_param, own_master, own_remainder, own);
    param[i] = own_param;
    if constexpr (kMasters) master[i] = own_master;
    if constexpr (kRemainders) remainder[i] = own_remainder;
    TANDEM_UNROLL
    for (int k = 0; k < kStates; ++k) state[k][i] = own[k];
  }
}

/// The same, in the way that the fragment's parameters are stored.
template <class Functor>
TANDEM_KERNEL_INLINE void update_lane(const Functor& functor,
                                      const Fragment& fragment,
                                      const Piece& piece,
                                      int lane) {
  switch (fragment.stored) {
    case Stored::kFp32:
      return update_lane<Functor, Stored::kFp32>(functor, fragment, piece, lane);
    case Stored::kBf16Masters:
      return update_lane<Functor, Stored::kBf16Masters>(functor, fragment, piece, lane);
    case Stored::kBf16Remainders:
      return update_lane<Functor, Stored::kBf16Remainders>(functor, fragment, piece, lane);
    case Stored::kFp16Masters:
      return update_lane<Functor, Stored::kFp16Masters>(functor, fragment, piece, lane);
  }
}

struct UpdateLaunch {
  const Piece* pieces = nullptr;  // [count], device
  std::int64_t count = 0;
  const Fragment* fragments = nullptr;    // device
  const std::int32_t* rule_of = nullptr;  // per fragment, into rules, or UpdateRules::kSkip; device
  const RuleSlot* rules = nullptr;        // device
};

/// Lane `lane`'s part of piece `p`, in the launch for rules of kind kKind: nothing where the
/// piece's fragment has no rule, or one of another kind.
template <int kKind>
TANDEM_KERNEL_INLINE void update_piece(const UpdateLaunch& update, std::int64_t p, int lane) {
  using Functor = std::variant_alternative_t<kKind, Update>;
  static_assert(std::is_trivially_copyable_v<Functor>, "rules are uploaded as bytes");
  static_assert(sizeof(Functor) <= RuleSlot::kFunctorBytes && alignof(Functor) <= 16,
                "RuleSlot holds every functor");
  const Piece piece = update.pieces[p];
  const std::int32_t rule = update.rule_of[piece.fragment];
  if (rule < 0) return;
  const RuleSlot& slot = update.rules[rule];
  if (slot.kind != kKind) return;
  const Functor functor = *reinterpret_cast<const Functor*>(slot.functor);
  update_lane(functor, update.fragments[piece.fragment], piece, lane);
}

// NOLINTEND(bugprone-easily-swappable-parameters)

}  // namespace tandem::kernels::cuda
