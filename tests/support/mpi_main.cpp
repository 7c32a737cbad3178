// The main of every test that runs on ranks: MPI around GoogleTest.
//
// 1. Rank 0 alone prints the progress; each rank's failures are printed with that rank's number.
// 2. After each test the ranks compare notes: a test that failed on one rank fails on all, so that
// the
//    ranks stay in step and each exits with the same, non-zero status.
// 3. A hang is not this file's business: the launcher and ctest have time limits.
// Without TANDEM_HAVE_MPI, and when the ranks were started over a store (MASTER_ADDR and RANK, no
// mpirun), 2 does not hold: each rank exits with its own status, and the starter wants all of them.

#include "kernels/cuda_device.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#if TANDEM_HAVE_MPI
#include <mpi.h>
#endif

namespace {

bool over_store() {
  return std::getenv("MASTER_ADDR") != nullptr && std::getenv("RANK") != nullptr &&
         std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
}

/// Says of each rank whether `failed` is set there.
std::vector<int> failures_by_rank(bool failed) {
  int mine = failed ? 1 : 0;
#if TANDEM_HAVE_MPI
  if (over_store()) return {mine};
  int world_size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  std::vector<int> all(static_cast<std::size_t>(world_size), 0);
  MPI_Allgather(&mine, 1, MPI_INT, all.data(), 1, MPI_INT, MPI_COMM_WORLD);
  return all;
#else
  return {mine};
#endif
}

/// Hands every event to GoogleTest's own printer on rank 0 and to nobody elsewhere, except
/// failures: those are printed on every rank, in one write each, so that lines of several ranks do
/// not mix.
class RankPrinter : public testing::TestEventListener {
 public:
  RankPrinter(int rank, std::unique_ptr<testing::TestEventListener> printer)
      : rank_(rank), printer_(std::move(printer)) {}

  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    const char* file = result.file_name() != nullptr ? result.file_name() : "unknown file";
    const std::string text = "[rank " + std::to_string(rank_) + "] " + file + ":" +
                             std::to_string(result.line_number()) + ": Failure in " +
                             current_test_ + "\n" + result.message() + "\n";
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  void OnTestProgramStart(const testing::UnitTest& test) override {
    if (printer_) printer_->OnTestProgramStart(test);
  }
  void OnTestIterationStart(const testing::UnitTest& test, int iteration) override {
    if (printer_) printer_->OnTestIterationStart(test, iteration);
  }
  void OnEnvironmentsSetUpStart(const testing::UnitTest& test) override {
    if (printer_) printer_->OnEnvironmentsSetUpStart(test);
  }
  void OnEnvironmentsSetUpEnd(const testing::UnitTest& test) override {
    if (printer_) printer_->OnEnvironmentsSetUpEnd(test);
  }
  void OnTestSuiteStart(const testing::TestSuite& suite) override {
    if (printer_) printer_->OnTestSuiteStart(suite);
  }
  void OnTestStart(const testing::TestInfo& info) override {
    current_test_ = std::string(info.test_suite_name()) + "." + info.name();
    if (printer_) printer_->OnTestStart(info);
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    if (printer_) printer_->OnTestEnd(info);
  }
  void OnTestSuiteEnd(const testing::TestSuite& suite) override {
    if (printer_) printer_->OnTestSuiteEnd(suite);
  }
  void OnEnvironmentsTearDownStart(const testing::UnitTest& test) override {
    if (printer_) printer_->OnEnvironmentsTearDownStart(test);
  }
  void OnEnvironmentsTearDownEnd(const testing::UnitTest& test) override {
    if (printer_) printer_->OnEnvironmentsTearDownEnd(test);
  }
  void OnTestIterationEnd(const testing::UnitTest& test, int iteration) override {
    if (printer_) printer_->OnTestIterationEnd(test, iteration);
  }
  void OnTestProgramEnd(const testing::UnitTest& test) override {
    if (printer_) printer_->OnTestProgramEnd(test);
  }

 private:
  int rank_;
  std::unique_ptr<testing::TestEventListener> printer_;
  // Kept here because GoogleTest holds the lock that would be needed to ask it inside
  // OnTestPartResult.
  std::string current_test_ = "no test";
};

/// Fails a test on every rank when it failed on one. GoogleTest tells the ends of things to the
/// listener added last first, and a failure raised in OnTestEnd still counts for that test: so this
/// one is added after the printer, which then reports the verdict of all ranks.
class VerdictOfAllRanks : public testing::EmptyTestEventListener {
 public:
  void OnTestEnd(const testing::TestInfo& info) override {
    const bool failed_here = info.result()->Failed();
    const std::vector<int> failed = failures_by_rank(failed_here);
    std::string ranks;
    for (std::size_t rank = 0; rank < failed.size(); ++rank) {
      if (failed[rank] != 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    if (!ranks.empty() && !failed_here) {
      ADD_FAILURE() << "passed here, failed on rank " << ranks;
    }
  }
};

/// What ctest reports as "Skipped": not run is never passed.
constexpr int kNotRun = 77;

bool a_gpu_is_missing() {
  const char* const device = std::getenv("TANDEM_TEST_DEVICE");
  if (device == nullptr || std::string(device) != "cuda") return false;
  if (tandem::kernels::cuda_device_count() > 0) return false;
  std::puts("not run: this process sees no GPU");
  return true;
}

int run_tests(int rank) {
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  std::unique_ptr<testing::TestEventListener> printer(
      listeners.Release(listeners.default_result_printer()));
  if (rank != 0) printer.reset();
  listeners.Append(new RankPrinter(rank, std::move(printer)));
  listeners.Append(new VerdictOfAllRanks);
  bool failed = RUN_ALL_TESTS() != 0;
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fprintf(stderr, "[rank %d] no test was selected\n", rank);
    failed = true;
  }
  for (int other : failures_by_rank(failed)) failed = failed || other != 0;
  return failed ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  int rank = 0;
  if (over_store()) rank = std::atoi(std::getenv("RANK"));
#if TANDEM_HAVE_MPI
  if (!over_store()) {
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    if (provided != MPI_THREAD_MULTIPLE) {
      std::fprintf(stderr, "this MPI library does not provide MPI_THREAD_MULTIPLE\n");
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  }
#endif
  testing::InitGoogleTest(&argc, argv);
  const int status = a_gpu_is_missing() ? kNotRun : run_tests(rank);
#if TANDEM_HAVE_MPI
  if (!over_store()) MPI_Finalize();
#endif
  return status;
}
