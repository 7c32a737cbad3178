#include "comm/mpi_rendezvous.h"

#include "comm/mpi_messenger.h"
#include "comm/process_ranks.h"
#include <tandem/error.h>

#include <mpi.h>

#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

namespace tandem::comm {

namespace {

/// MPI is one for a process, so its state cannot belong to a world.
struct ProcessState {
  std::mutex mutex;
  bool ours = false;   // initialised by us, so ours to finalize
  int not_closed = 0;  // rendezvous made and not closed in order
};

ProcessState& process_state() {
  static ProcessState state;  // constructed before atexit() below, so destroyed after its call
  return state;
}

void finalize_at_exit() {
  ProcessState& state = process_state();
  const std::lock_guard lock(state.mutex);
  int finalized = 0;
  MPI_Finalized(&finalized);
  // A rank whose world was not closed would wait in MPI_Finalize for peers that may be gone; mpirun
  // notices the end without it and ends the others.
  if (finalized == 0 && state.not_closed == 0) MPI_Finalize();
}

void initialize() {
  ProcessState& state = process_state();
  const std::lock_guard lock(state.mutex);
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    throw SystemError("MPI was finalized already; make every world before MPI_Finalize");
  }
  int initialized = 0;
  MPI_Initialized(&initialized);
  int provided = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    MPI_Query_thread(&provided);
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
              "initialising MPI");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    state.ours = true;
    std::atexit(finalize_at_exit);
  }
  if (provided < MPI_THREAD_MULTIPLE) {
    throw SystemError(
        "MPI does not provide MPI_THREAD_MULTIPLE; if the program calls MPI_Init itself, call "
        "MPI_Init_thread with MPI_THREAD_MULTIPLE (or let Tandem do it), else use an MPI built "
        "with thread support");
  }
}

/// Waits for `request` without blocking in MPI. False when the deadline passes first; the operation
/// then stays as it is, and so must its buffers.
[[nodiscard]] bool finish(MPI_Request& request, const std::string& what, Deadline deadline) {
  for (int look = 0;; ++look) {
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return true;
    if (deadline.passed()) return false;
    // The first looks are quick, since peers come at the same time; then the core is left alone.
    std::this_thread::sleep_for(std::chrono::microseconds(look < 1000 ? 50 : 1000));
  }
}

/// A copy of `original` that reports errors instead of ending the program.
MPI_Comm duplicate(MPI_Comm original, const std::string& what, Deadline deadline) {
  auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(original, copy.get(), &request), what);
  if (!finish(request, what, deadline)) {
    static_cast<void>(copy.release());
    throw Timeout(what +
                  ": some rank did not come by the deadline; did every rank make this world?");
  }
  MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN);
  return *copy;
}

class MpiRendezvous final : public Rendezvous {
 public:
  MpiRendezvous(Deadline deadline, int ranks_per_node) {
    const std::string what = "duplicating MPI's communicator";
    communicator_ = duplicate(MPI_COMM_WORLD, what, deadline);
    check_mpi(MPI_Comm_rank(communicator_, &group_.rank), what);
    check_mpi(MPI_Comm_size(communicator_, &group_.size), what);
    const std::string key = host_key() + " " + forced_node(group_.rank, ranks_per_node);
    nodes_ = Nodes(all_gather("finding out which ranks share a host", key, deadline));
  }

  [[nodiscard]] Group group() const override { return group_; }
  [[nodiscard]] const Nodes& nodes() const override { return nodes_; }

  std::vector<std::string> all_gather(const std::string& what,
                                      const std::string& text,
                                      Deadline deadline) override {
    const auto ranks = static_cast<std::size_t>(group_.size);
    if (text.size() > std::numeric_limits<int>::max() / ranks) {
      throw InvalidArgument(what + ": a text of " + std::to_string(text.size()) +
                            " bytes is too long to be gathered");
    }
    auto work = std::make_unique<Gathering>();
    work->mine = text;
    work->my_size = static_cast<int>(text.size());
    work->sizes.resize(ranks);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Iallgather(&work->my_size, 1, MPI_INT, work->sizes.data(), 1, MPI_INT,
                             communicator_, &request),
              what);
    finish_or_leave(request, what, deadline, work);
    work->offsets.resize(ranks);
    std::exclusive_scan(work->sizes.begin(), work->sizes.end(), work->offsets.begin(), 0);
    work->all.resize(static_cast<std::size_t>(work->offsets.back() + work->sizes.back()));
    check_mpi(MPI_Iallgatherv(work->mine.data(), work->my_size, MPI_CHAR, work->all.data(),
                              work->sizes.data(), work->offsets.data(), MPI_CHAR, communicator_,
                              &request),
              what);
    finish_or_leave(request, what, deadline, work);
    std::vector<std::string> texts;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      texts.push_back(work->all.substr(static_cast<std::size_t>(work->offsets[rank]),
                                       static_cast<std::size_t>(work->sizes[rank])));
    }
    return texts;
  }

  std::vector<std::shared_ptr<Segment>> exchange(const std::string& what,
                                                 std::shared_ptr<Segment> mine,
                                                 Deadline deadline) override {
    return exchange_by_address(*this, what, mine, deadline);
  }

  std::unique_ptr<Messenger> make_messenger(const std::string& what, Deadline deadline) override {
    // The first space that is idle on every rank, else a new one.
    std::string idle;
    for (const std::size_t number : spaces_->idle()) idle += std::to_string(number) + " ";
    std::map<std::size_t, int> ranks_with;
    for (const std::string& text : all_gather(what, idle, deadline)) {
      std::istringstream numbers(text);
      for (std::size_t number = 0; numbers >> number;) ++ranks_with[number];
    }
    for (const auto& [number, ranks] : ranks_with) {
      if (ranks == group_.size) return make_mpi_messenger(spaces_, number);
    }
    return make_mpi_messenger(spaces_, spaces_->add(duplicate(communicator_, what, deadline)));
  }

  void close(Deadline deadline) override {
    const std::string what = "closing the world";
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Ibarrier(communicator_, &request), what);
    if (!finish(request, what, deadline)) {
      throw Timeout(what +
                    ": some rank did not come by the deadline; does every rank close this world?");
    }
    spaces_->free_all();
    check_mpi(MPI_Comm_free(&communicator_), what);
    ProcessState& state = process_state();
    const std::lock_guard lock(state.mutex);
    --state.not_closed;
  }

 private:
  struct Gathering {
    std::string mine;
    int my_size = 0;
    std::vector<int> sizes;
    std::vector<int> offsets;
    std::string all;
  };

  void finish_or_leave(MPI_Request& request,
                       const std::string& what,
                       Deadline deadline,
                       std::unique_ptr<Gathering>& work) {
    if (finish(request, what, deadline)) return;
    static_cast<void>(work.release());  // R2: a late peer may still write into it
    throw Timeout(what + ": rank " + std::to_string(group_.rank) +
                  " waited past its deadline for some of " + std::to_string(group_.size) +
                  " ranks; did one of them end or take another path?");
  }

  MPI_Comm communicator_ = MPI_COMM_NULL;
  Group group_;
  Nodes nodes_ = Nodes::consecutive(1, 0);
  const std::shared_ptr<MpiSpaces> spaces_ = std::make_shared<MpiSpaces>();
};

}  // namespace

bool mpi_is_initialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}

std::unique_ptr<Rendezvous> make_mpi_rendezvous(Deadline deadline, int ranks_per_node) {
  initialize();
  {
    ProcessState& state = process_state();
    const std::lock_guard lock(state.mutex);
    ++state.not_closed;  // until close(); what fails below is never closed
  }
  return std::make_unique<MpiRendezvous>(deadline, ranks_per_node);
}

}  // namespace tandem::comm
