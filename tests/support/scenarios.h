// tests/support/scenarios.h: the loops that several programs run: oracle tests, cases, the
// behaviour table. Every one is complete as returned; tests change what they are about (passes,
// average, stage, types).
#pragma once

#include "tests/support/scenario.h"

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace tandem::testing {

/// 4 x 8 values of a micro-batch; `stream` tells inputs of one micro-batch apart.
at::Tensor batch(const Place& place, int stream = 0);

/// Two engines "a" and "b" with learning rates of their own, AdamW with weight decay; mlp() each.
Scenario two_engines_in_one_loss();
/// The same nets, loss through b(a(x)).
Scenario chained();
/// One mlp "a".
Scenario one_engine();
/// Two towers and a learned temperature (named tensors) in one contrastive loss.
Scenario three_engines_in_one_loss();
/// Engine a is used twice in one forward, multiplied; b once.
Scenario siamese();
/// Two losses that share a's graph, with a backward each.
Scenario two_losses();
/// Penalty on the input gradient, through autograd::grad with create_graph.
Scenario gradient_penalty();
/// b's first Linear is a's.
Scenario tied_across_engines();
/// "a" has a parameter that no loss reaches.
Scenario unused_parameter();
/// In step 1 no rank uses a.
Scenario engine_absent_everywhere();
/// In step 1 rank 0 alone uses a.
Scenario engine_absent_on_some_ranks();
/// Odd ranks add their loss terms in reverse and build b's graph first.
Scenario reversed_on_odd_ranks();

// --- changes ---

/// One option of every engine.
template <class Option>
Scenario with(Scenario scenario,
              Option EngineOptions::*option,
              const std::type_identity_t<Option>& value) {
  for (EngineOptions& options : scenario.engines) {
    options.*option = value;
  }
  return scenario;
}
/// Four steps of twelve micro-batches, dealt to the ranks: the same ones on 1, 2, 3 and 4.
Scenario dealt(Scenario scenario);
Scenario with_sgd(Scenario scenario, double lr, double momentum = 0.0, double weight_decay = 0.0);
/// `passes` micro-batches of each rank a step, averaged over all of them.
Scenario with_micro_batches(Scenario scenario, int passes);
Scenario with_bucket_bytes(Scenario scenario, std::int64_t bytes);
Scenario with_stage(Scenario scenario, int stage);
/// All but every third micro-batch are held.
Scenario held(Scenario scenario);
/// Factors after every micro-batch: of both signs, not all powers of two, 1 now and then.
double factor_after(const Place& place, std::size_t net);
Scenario multiplied(Scenario scenario);
/// Those nets with parameters of another type.
Scenario in_type(Scenario scenario, at::ScalarType dtype, const std::vector<std::size_t>& nets);
Scenario in_bf16(Scenario scenario, const std::vector<std::size_t>& nets);

}  // namespace tandem::testing
