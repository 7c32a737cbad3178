// comm/mpi_messenger.h: messages between processes, each messenger on a communicator of its own.
//
// X1 No call blocks: MPI_Isend, MPI_Improbe, MPI_Imrecv, MPI_Irecv, MPI_Test.
// X2 MPI counts in int, so a longer message is announced by its length and follows in pieces, on
//    a tag that carries nothing else; their receives are posted with the announcement, before
//    anybody probes again.
// X3 Communicators are freed when the world is closed, not before (freeing is collective); one
//    whose messenger is gone on all ranks serves the next.
// Called by comm/mpi_rendezvous.
#pragma once

#include "comm/messenger.h"

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tandem::comm {

/// Throws SystemError with MPI's words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const std::string& what);

/// The communicators of one world's messengers, by number; the same numbers on all ranks.
class MpiSpaces {
 public:
  /// Numbers of those that no messenger of this rank uses, ascending.
  [[nodiscard]] std::vector<std::size_t> idle() const;
  std::size_t add(MPI_Comm communicator);
  [[nodiscard]] MPI_Comm take(std::size_t number);
  void give_back(std::size_t number) noexcept;
  /// Collective: every rank has made as many. No messenger is used any more.
  void free_all();

 private:
  struct Space {
    MPI_Comm communicator = MPI_COMM_NULL;
    bool used = false;
  };
  mutable std::mutex mutex_;
  std::vector<Space> spaces_;
};

inline constexpr std::size_t kLongestMpiMessage = std::size_t{1} << 30;

/// On space `number`, which is this messenger's until it is destroyed. `longest`: bytes that go
/// into one MPI message; tests make it small.
std::unique_ptr<Messenger> make_mpi_messenger(std::shared_ptr<MpiSpaces> spaces,
                                              std::size_t number,
                                              std::size_t longest = kLongestMpiMessage);

}  // namespace tandem::comm
