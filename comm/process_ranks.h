// comm/process_ranks.h: what ranks that are processes have in common, however they find each other.
//
// Called by comm (mpi_rendezvous, store_rendezvous).
#pragma once

#include "comm/rendezvous.h"

#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

/// Equal for processes that can share memory, which needs one kernel and one numbering of
/// processes.
[[nodiscard]] std::string host_key();

/// Rendezvous::exchange by way of all_gather() and /proc: every rank maps the segments of its node.
std::vector<std::shared_ptr<Segment>> exchange_by_address(Rendezvous& rendezvous,
                                                          const std::string& what,
                                                          const std::shared_ptr<Segment>& mine,
                                                          Deadline deadline);

}  // namespace tandem::comm
