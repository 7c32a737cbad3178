#include "comm/launcher.h"

#include <tandem/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

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

TEST(Launcher, AProgramStartedAloneIsAWorldOfOne) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                           "SLURM_PROCID", "WORLD_SIZE"}) {
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
