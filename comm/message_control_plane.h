// comm/message_control_plane.h: the control plane of ranks on several nodes: every rank sends what
// it posts to every other rank, and merges what it has received, in rank order.
//
// A1 A round is taken when all ranks' messages are here and this rank's own have left, so that no
//    peer waits for a rank that has gone on to compute (messenger.h M3). Whoever has posted a round
//    looks until it is merged, so nobody waits for ever.
// A2 A rank that aborts, or hears of it, tells every rank once and posts nothing any more. Messages
//    of a rank come in order, so what it posted before has come when its word comes: a round is
//    dead once some rank's word is here and its post is not. Ranks that say nothing (they may be
//    dead) are waited for kAbortGrace.
// A3 The first abort that a rank hears is the one it throws: where two ranks abort at the same
//    moment for different reasons, their peers may name either.
// Called by comm/planes.
#pragma once

#include "comm/control_plane.h"
#include "comm/rendezvous.h"

#include <memory>

namespace tandem::comm {

inline constexpr std::chrono::milliseconds kAbortGrace{500};
/// Longer texts are cut: a word that ends a world travels at once, with any MPI.
inline constexpr std::size_t kAbortTextBytes = 3000;

/// Collective over `rendezvous`, which outlives the plane. Throws Timeout, SystemError.
std::unique_ptr<ControlPlane> make_message_control_plane(Rendezvous& rendezvous, Deadline deadline);

}  // namespace tandem::comm
