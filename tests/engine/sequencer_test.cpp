// The agreement protocol, exhaustively: scenarios of two or three ranks through every interleaving
// of arrivals, merged gates and merged closes; and many random ones.
#include "tests/engine/sequencer_world.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem::engine::test {
namespace {

EngineShape engine(std::string name, std::vector<int> bucket_of, bool honours_hold = false) {
  int buckets = 0;
  for (const int bucket : bucket_of) {
    buckets = std::max(buckets, bucket + 1);
  }
  return {std::move(name), std::move(bucket_of), buckets, honours_hold};
}

Script run(Bits armed, std::vector<std::pair<int, int>> arrivals) {
  Script script;
  script.armed = std::move(armed);
  script.arrivals = std::move(arrivals);
  return script;
}

Script at_step() {
  Script script;
  script.runs = false;
  return script;
}

void expect_agreement(const Scenario& scenario) {
  SequencerWorld world(scenario);
  std::size_t states = 0;
  ASSERT_NO_THROW(states = world.explore());
  EXPECT_GT(states, 10U);
}

TEST(Sequencer, SameLaunchesWhenRanksArriveInDifferentOrders) {  // I1, I2, I3
  expect_agreement(
      {"orders",
       {engine("a", {0, 1}), engine("b", {0})},
       {{run({true, true}, {{1, 0}, {0, 1}, {0, 0}}), run({true, true}, {{0, 0}, {0, 1}, {1, 0}})},
        {run({true, true}, {{0, 1}, {1, 0}, {0, 0}}),
         run({true, true}, {{1, 0}, {0, 0}, {0, 1}})}}});
}

TEST(Sequencer, AnEngineMissingOnOneRankIsZerosThere) {  // I2
  expect_agreement(
      {"absent on one",
       {engine("a", {0, 0}), engine("b", {0, 1})},
       {{run({true, true}, {{0, 0}, {0, 1}, {1, 0}, {1, 1}}), run({true, true}, {{0, 1}, {0, 0}})},
        {run({true, false}, {{0, 0}, {0, 1}}), run({true, true}, {{1, 1}, {1, 0}})}}});
}

TEST(Sequencer, AnEngineThatNobodyReachesLaunchesNothing) {
  expect_agreement({"absent on all",
                    {engine("a", {0}), engine("b", {0, 1})},
                    {{run({true, true}, {{0, 0}}), run({true, true}, {{0, 0}})}}});
}

TEST(Sequencer, ARankAtItsStepJoinsEveryPassWithNothing) {  // I2
  expect_agreement({"uneven",
                    {engine("a", {0, 1})},
                    {{run({true}, {{0, 0}, {0, 1}}), run({true}, {{0, 1}, {0, 0}})},
                     {run({true}, {{0, 1}, {0, 0}}), at_step()},
                     {run({true}, {{0, 1}}), at_step()}}});
}

TEST(Sequencer, LateArrivalsTravelOnceOnEveryRank) {  // I3
  expect_agreement({"late",
                    {engine("a", {0, 1})},
                    {{run({true}, {{0, 0}, {0, 0}, {0, 1}, {0, 0}}), run({true}, {{0, 1}, {0, 0}})},
                     {run({true}, {{0, 0}, {0, 1}}), run({true}, {{0, 0}, {0, 1}, {0, 1}})}}});
}

TEST(Sequencer, FrozenParametersBlockNobodyAndTheirArrivalsAreLate) {
  Script frozen = run({true, true}, {{0, 0}, {0, 1}, {1, 0}});
  frozen.frozen = {{false, true}, {}};
  Script all_frozen = run({true, true}, {{1, 0}});
  all_frozen.frozen = {{true, true}, {}};
  expect_agreement({"frozen",
                    {engine("a", {0, 1}), engine("b", {0})},
                    {{frozen, run({true, true}, {{0, 1}, {0, 0}, {1, 0}})},
                     {all_frozen, run({true, true}, {{1, 0}, {0, 0}, {0, 1}})},
                     {all_frozen, all_frozen}}});
}

TEST(Sequencer, WhatIsHeldTravelsWithTheNextPassOrTheStep) {  // I3
  Script held = run({true, true}, {{0, 0}, {0, 1}, {1, 0}});
  held.hold = true;
  const Script open = run({true, true}, {{1, 0}, {0, 1}, {0, 0}});
  const std::vector<EngineShape> engines{engine("a", {0, 1}, true), engine("b", {0})};
  expect_agreement({"hold on all, then not", engines, {{held, held}, {open, open}}});
  expect_agreement({"hold on one", engines, {{held, open}, {open, held}}});
  expect_agreement({"hold to the step", engines, {{held, held}, {held, at_step()}}});
  Script late = held;
  late.arrivals.push_back({0, 0});
  expect_agreement({"hold with late arrivals", engines, {{late, held}, {held, late}}});
}

TEST(Sequencer, OutsideOnlyNothingArrives) {
  Script only = run({true, true}, {{0, 0}, {1, 0}, {1, 1}});
  only.allowed = {true, false};
  expect_agreement(
      {"only", {engine("a", {0}), engine("b", {0, 1})}, {{only, only}, {only, at_step()}}});
}

TEST(Sequencer, AFailedPassLaunchesTheSameAndDiscardsEverything) {  // I6
  Script fails = run({true, true}, {{1, 0}});
  fails.fails = true;
  const Script fine = run({true, true}, {{1, 0}, {0, 1}, {0, 0}});
  const std::vector<EngineShape> engines{engine("a", {0, 1}), engine("b", {0})};
  expect_agreement({"failure", engines, {{fine, fails}, {fine, fine}}});
  expect_agreement({"failure late", engines, {{fine, fine}, {fails, at_step()}, {fine, fine}}});
}

TEST(Sequencer, EnginesThatNobodyTrackedGoBehind) {
  expect_agreement(
      {"untracked",
       {engine("a", {0}), engine("b", {0, 1})},
       {{run({true, false}, {{1, 1}, {0, 0}, {1, 0}}), run({false, false}, {{1, 0}, {0, 0}})}}});
}

TEST(Sequencer, ThreeRanks) {
  expect_agreement(
      {"three",
       {engine("a", {0, 1})},
       {{run({true}, {{0, 0}, {0, 1}}), run({true}, {{0, 1}, {0, 0}}), run({true}, {{0, 0}})},
        {run({true}, {{0, 1}}), at_step(), run({true}, {{0, 0}, {0, 1}})}}});
}

TEST(Sequencer, LaunchesDoNotWaitForTheCloseWhenAllIsComplete) {  // I5
  Sequencer sequencer(0, 1);
  sequencer.add_engine(engine("a", {0, 1}));
  GateSay say;
  say.tunables.resize(1);
  say.tokens.resize(1);
  sequencer.open({{true}, {}, {}, false}, say);
  say.held_engines = sequencer.held_engines();
  sequencer.gate_merged(decode_gate(encode(say, sequencer.shape(), 0), sequencer.shape()), false);
  sequencer.arrived(0, 1, sequencer.classify(0, 1));
  EXPECT_EQ(sequencer.take_launches().size(), 1U);  // bucket 1 stands first: reverse registration
  sequencer.arrived(0, 0, sequencer.classify(0, 0));
  EXPECT_EQ(sequencer.take_launches().size(), 1U);
}

TEST(Sequencer, OrderFollowsTheFirstPassThatReachedAnEngine) {
  Sequencer sequencer(0, 1);
  sequencer.add_engine(engine("a", {0, 1}));
  sequencer.add_engine(engine("b", {0}));
  EXPECT_EQ(sequencer.order(), (std::vector<int>{2, 1, 0}));
  const auto pass = [&](const std::vector<std::pair<int, int>>& arrivals, bool fails) {
    GateSay say;
    say.tunables.resize(2);
    say.tokens.resize(2);
    sequencer.open({{true, true}, {}, {}, false}, say);
    const GateMerged gate = decode_gate(encode(say, sequencer.shape(), 0), sequencer.shape());
    sequencer.gate_merged(gate, false);
    for (const auto& [e, p] : arrivals) {
      sequencer.arrived(e, p, sequencer.classify(e, p));
    }
    const CloseSay close = sequencer.close(fails);
    sequencer.close_merged(decode_close(encode(close, sequencer.shape(), 0), sequencer.shape()));
  };
  pass({{0, 0}, {0, 1}}, true);  // a failed pass settles nothing (I6)
  EXPECT_EQ(sequencer.order(), (std::vector<int>{2, 1, 0}));
  pass({{0, 0}, {0, 1}}, false);  // engine a: bucket 0 completed first; b stays unsettled, last
  EXPECT_EQ(sequencer.order(), (std::vector<int>{0, 1, 2}));
  pass({{1, 0}, {0, 1}, {0, 0}}, false);  // settled for good; b goes behind
  EXPECT_EQ(sequencer.order(), (std::vector<int>{0, 1, 2}));
}

TEST(Sequencer, CompactingDropsRetiredEnginesEverywhereAlike) {
  Sequencer sequencer(0, 1);
  sequencer.add_engine(engine("a", {0, 1}));
  sequencer.add_engine(engine("b", {0}));
  sequencer.add_engine(engine("c", {0, 1}));
  sequencer.retire_engine(1);
  sequencer.compact();
  EXPECT_EQ(sequencer.shape(), (Shape{1, 2, 2, 4, 4}));
  EXPECT_EQ(sequencer.order(), (std::vector<int>{3, 2, 1, 0}));
}

// Random scripts, each through every interleaving.
TEST(Sequencer, RandomScriptsAgreeInEveryInterleaving) {
  std::mt19937 random(7);
  const auto one_in = [&](int n) {
    return std::uniform_int_distribution<int>(0, n - 1)(random) == 0;
  };
  for (int trial = 0; trial < 120; ++trial) {
    Scenario scenario;
    scenario.name = "random " + std::to_string(trial);
    scenario.engines = {
        engine("a", one_in(2) ? std::vector<int>{0, 1} : std::vector<int>{0, 0}, one_in(2)),
        engine("b", {0}, one_in(2))};
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<Script>& scripts = scenario.passes.emplace_back();
      const bool hold = one_in(3);
      const bool only = one_in(5);
      for (int rank = 0; rank < 2; ++rank) {
        if (one_in(6) && rank == 1) {
          scripts.push_back(at_step());
          continue;
        }
        Script script = run({!one_in(4), !one_in(4)}, {});
        std::vector<std::pair<int, int>> all{{0, 0}, {0, 1}, {1, 0}};
        std::shuffle(all.begin(), all.end(), random);
        for (const auto& arrival : all) {
          if (!one_in(4)) {
            script.arrivals.push_back(arrival);
          }
          if (one_in(6)) {
            script.arrivals.push_back(arrival);
          }
        }
        script.hold = hold && !one_in(4);
        if (only) {
          script.allowed = {true, false};
        }
        script.frozen = {{one_in(5), one_in(5)}, {one_in(5)}};
        script.fails = one_in(8);
        scripts.push_back(script);
      }
    }
    SequencerWorld world(scenario);
    ASSERT_NO_THROW(world.explore()) << scenario.name;
  }
}

}  // namespace
}  // namespace tandem::engine::test
