#include "comm/launcher.h"

#include <tandem/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace tandem::comm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Environment table(std::map<std::string, std::string> values) {
  const auto shared = std::make_shared<std::map<std::string, std::string>>(std::move(values));
  return [shared](const char* name) -> const char* {
    const auto found = shared->find(name);
    return found == shared->end() ? nullptr : found->second.c_str();
  };
}

std::string claim_text(const Environment& environment) {
  const auto claim = launcher_claim(environment);
  return claim ? claim->variable + "=" + std::to_string(claim->size) : "none";
}

std::string refusal(const std::optional<LauncherClaim>& claim, int actual_size) {
  try {
    refuse_silent_worlds(claim, actual_size);
  } catch (const SystemError& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Launcher, ClaimsWhatTheLauncherSays) {
  EXPECT_EQ(claim_text(table({})), "none");
  EXPECT_EQ(claim_text(table({{"OMPI_COMM_WORLD_SIZE", "4"}})), "OMPI_COMM_WORLD_SIZE=4");
  EXPECT_EQ(claim_text(table({{"PMI_SIZE", "3"}})), "PMI_SIZE=3");
  EXPECT_EQ(claim_text(table({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "5"}})), "SLURM_NTASKS=8");
  EXPECT_EQ(claim_text(table({{"WORLD_SIZE", "2"}})), "WORLD_SIZE=2");
}

TEST(Launcher, TheShellOfAnAllocationIsNoTask) {
  EXPECT_EQ(claim_text(table({{"SLURM_NTASKS", "8"}})), "none");
}

TEST(Launcher, PyTorchsCompleteSetOfVariablesIsNotOurs) {
  EXPECT_EQ(claim_text(table({{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}})), "none");
}

TEST(Launcher, MpirunInsideABatchJobKnowsBetterThanTheJob) {
  EXPECT_EQ(claim_text(table({{"SLURM_NTASKS", "8"},
                              {"SLURM_PROCID", "0"},
                              {"WORLD_SIZE", "16"},
                              {"OMPI_COMM_WORLD_SIZE", "2"}})),
            "OMPI_COMM_WORLD_SIZE=2");
}

TEST(Launcher, RefusesNumbersThatAreNone) {
  for (const char* text : {"four", "0", "-2", "4x", " 4", "99999999999999"}) {
    EXPECT_THROW(launcher_claim(table({{"PMI_SIZE", text}})), SystemError) << text;
  }
  EXPECT_EQ(claim_text(table({{"PMI_SIZE", ""}})), "none");
}

TEST(Launcher, AsksMpiUnderEveryLauncherAndOnlyThere) {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"}) {
    EXPECT_TRUE(under_mpi_launcher(table({{name, "0"}}))) << name;
  }
  EXPECT_FALSE(under_mpi_launcher(table({})));
  EXPECT_FALSE(under_mpi_launcher(table({{"SLURM_NTASKS", "4"}, {"WORLD_SIZE", "4"}})));
}

TEST(Launcher, RefusesSilentWorldsNamingTheVariableAndWhatToDo) {
  EXPECT_THAT(refusal(LauncherClaim{"SLURM_NTASKS", 4}, 1),
              AllOf(HasSubstr("SLURM_NTASKS=4"), HasSubstr("srun"), HasSubstr("unset")));
  EXPECT_THAT(refusal(LauncherClaim{"WORLD_SIZE", 2}, 1),
              AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("mpirun")));
  EXPECT_THAT(refusal(LauncherClaim{"OMPI_COMM_WORLD_SIZE", 4}, 2), HasSubstr("has 2"));
}

TEST(Launcher, AcceptsAsManyRanksAsClaimedOrMore) {
  EXPECT_EQ(refusal(std::nullopt, 1), "not refused");
  EXPECT_EQ(refusal(LauncherClaim{"PMI_SIZE", 4}, 4), "not refused");
  EXPECT_EQ(refusal(LauncherClaim{"SLURM_NTASKS", 1}, 4), "not refused");
}

const std::map<std::string, std::string> kTorchrun{{"MASTER_ADDR", "node7"},
                                                   {"MASTER_PORT", "29500"},
                                                   {"RANK", "3"},
                                                   {"WORLD_SIZE", "4"},
                                                   {"LOCAL_RANK", "1"}};

std::map<std::string, std::string> with(std::map<std::string, std::string> values,
                                        const std::map<std::string, std::string>& more) {
  for (const auto& [name, value] : more) values[name] = value;
  return values;
}

std::string store_refusal(const std::map<std::string, std::string>& values) {
  try {
    static_cast<void>(store_launch(table(values)));
  } catch (const SystemError& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Launcher, ReadsTheVariablesThatTorchrunSets) {
  const auto launch = store_launch(table(kTorchrun));
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->host, "node7");
  EXPECT_EQ(launch->port, 29500);
  EXPECT_EQ(launch->rank, 3);
  EXPECT_EQ(launch->size, 4);
  EXPECT_FALSE(launch->agent_hosts);
  const auto hosted = [](const char* text) {
    return store_launch(table(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", text}})))
        ->agent_hosts;
  };
  EXPECT_TRUE(hosted("True"));
  EXPECT_FALSE(hosted("False"));
  EXPECT_FALSE(store_launch(table({{"RANK", "3"}, {"WORLD_SIZE", "4"}})));
}

TEST(Launcher, SrunsVariablesStandInForRankAndSize) {
  const std::map<std::string, std::string> task{{"MASTER_ADDR", "node7"},
                                                {"MASTER_PORT", "29500"},
                                                {"SLURM_PROCID", "5"},
                                                {"SLURM_NTASKS", "6"}};
  EXPECT_EQ(store_launch(table(task))->rank, 5);
  EXPECT_EQ(store_launch(table(task))->size, 6);
  // torchrun on each of the nodes of a job knows better.
  EXPECT_EQ(store_launch(table(with(task, kTorchrun)))->rank, 3);
  EXPECT_EQ(store_launch(table(with(task, kTorchrun)))->size, 4);
  // The shell of an allocation is no task.
  EXPECT_THAT(store_refusal({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"SLURM_NTASKS", "6"}}),
              HasSubstr("not RANK, WORLD_SIZE;"));
}

TEST(Launcher, AnIncompleteOrWrongSetOfStoreVariablesIsRefusedNamingTheVariable) {
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}) {
    EXPECT_THAT(store_refusal(with(kTorchrun, {{name, ""}})),
                HasSubstr("and not " + std::string(name) + ";"));
  }
  for (const auto& [name, text] :
       std::map<std::string, std::vector<std::string>>{{"MASTER_PORT", {"x", "0", "65536", "80 "}},
                                                       {"RANK", {"4", "-1", "one", "1.0"}},
                                                       {"WORLD_SIZE", {"0", "-4", "four", "3"}}}) {
    for (const std::string& value : text) {
      // A WORLD_SIZE of 3 makes RANK=3 wrong.
      EXPECT_THAT(store_refusal(with(kTorchrun, {{name, value}})),
                  HasSubstr(value == "3" ? "RANK is '3'" : name + " is '" + value + "'"));
    }
  }
}

TEST(Launcher, WhatStartedThisVeryProcessDecides) {
  const auto launched = [](const std::map<std::string, std::string>& values) {
    return how_launched(table(values), false);
  };
  const std::map<std::string, std::string> store{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(launched({}), Launch::kAlone);
  EXPECT_EQ(launched({{"WORLD_SIZE", "1"}, {"RANK", "0"}}), Launch::kAlone);
  EXPECT_EQ(launched(kTorchrun), Launch::kStore);
  EXPECT_EQ(launched(with(store, {{"SLURM_PROCID", "0"}})), Launch::kStore);
  // torchrun inside a task of an srun that speaks PMI.
  EXPECT_EQ(launched(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}, {"PMI_RANK", "0"}})),
            Launch::kStore);
#if TANDEM_HAVE_MPI
  EXPECT_EQ(launched({{"SLURM_PROCID", "0"}}), Launch::kMpi);
  EXPECT_EQ(launched({{"TORCHELASTIC_RUN_ID", "none"}, {"PMI_RANK", "0"}}), Launch::kMpi);
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    EXPECT_EQ(launched(with(kTorchrun, {{name, "1"}})), Launch::kMpi) << name;
  }
  EXPECT_EQ(how_launched(table(kTorchrun), true), Launch::kMpi);
#else
  EXPECT_EQ(launched(with(kTorchrun, {{"OMPI_COMM_WORLD_SIZE", "2"}})), Launch::kStore);
#endif
}

TEST(Launcher, AProgramStartedAloneIsAWorldOfOne) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                           "SLURM_PROCID", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK"}) {
    unsetenv(name);
  }
  const auto rendezvous = rendezvous_from_environment(Deadline::after(std::chrono::seconds(10)));
  EXPECT_EQ(rendezvous->group().size, 1);
  EXPECT_EQ(rendezvous->group().rank, 0);
  setenv("WORLD_SIZE", "3", 1);
  EXPECT_THROW(rendezvous_from_environment(Deadline::after(std::chrono::seconds(10))), SystemError);
  unsetenv("WORLD_SIZE");
}

}  // namespace
}  // namespace tandem::comm
