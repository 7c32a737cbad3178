// comm/shared_control_plane.h: the control plane of the ranks of one node, in shared memory.
//
// Each rank owns a segment and is the only one to write it, apart from the head of rank 0's, which
// is the world's: the bell that every rank rings and sleeps on, and the abort's state and text. A
// segment holds its rank's count of posted rounds and a ring of kRing slots. A rank writes the slot
// of its next round, then publishes the count (release); a reader that sees every rank's count
// beyond a round (acquire) merges all ranks' slots of it in rank order.
//
// B1 Round n is posted only when this rank has taken every round up to n - 2 (OpenRounds).
// B2 So the slot of round k is free for round k + kRing, kRing = 4: its writer has taken round
//    k + 2, hence every rank has posted k + 2, hence (B1) every rank has taken k.
// B3 Posting waits for nobody: a rank can always post its next round or abort, however slow or dead
//    its peers are. Every wait is the caller's and has the caller's deadline.
#pragma once

#include "comm/control_plane.h"
#include "comm/rendezvous.h"

#include <memory>

namespace tandem::comm {

/// Collective over `rendezvous`. Throws Timeout, OutOfMemory, SystemError.
std::unique_ptr<ControlPlane> make_shared_control_plane(Rendezvous& rendezvous, Deadline deadline);

}  // namespace tandem::comm
