// comm/messenger.h: nonblocking messages between the ranks of a world that share no memory.
//
// M1 Every messenger is a space of its own: what is sent on one is received on the same one (made
//    at the same point of the program) by the other rank.
// M2 Messages of one rank to another are probed in the order in which they were sent.
// M3 Nothing blocks. A transfer moves on only while somebody tests something (MPI's progress).
// M4 Memory given to a transfer is kept alive by `keep` until the transfer is done. One that is
//    destroyed before is abandoned: its memory stays for ever, since a late peer may still write
//    into it or read from it.
// Thread safety: any thread; a transfer is tested by one thread at a time, and who probes receives
// what was found before anyone else probes for messages of that rank.
// Called by comm (message_control_plane, slice_messages, gather_messages).
#pragma once

#include <cstddef>
#include <memory>

namespace tandem::comm {

inline constexpr int kAnyRank = -1;
inline constexpr int kMaxMessageTag = 255;

/// A message on its way, out or in.
class Transfer {
 public:
  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  Transfer(Transfer&&) = delete;
  Transfer& operator=(Transfer&&) = delete;

  /// True when the memory may be used again (sent) or holds the message (received).
  [[nodiscard]] virtual bool done() = 0;
};

/// What a look at messages has left to do.
struct Traffic {
  bool receiving = false;  // a message has been found and is being received: its data flow
  bool sending = false;    // a message is waited for or being received by its receiver
};

/// A message that was found: nobody else finds it; receive() is called once.
class Arrival {
 public:
  virtual ~Arrival() = default;

  /// Starts receiving into [bytes()].
  [[nodiscard]] virtual std::unique_ptr<Transfer> receive(std::byte* into,
                                                          std::shared_ptr<const void> keep) = 0;
  [[nodiscard]] int from() const { return from_; }
  [[nodiscard]] int tag() const { return tag_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 protected:
  Arrival(int from, int tag, std::size_t bytes) : from_(from), tag_(tag), bytes_(bytes) {}

 private:
  int from_;
  int tag_;
  std::size_t bytes_;
};

class Messenger {
 public:
  virtual ~Messenger() = default;

  /// Starts sending `bytes` bytes (0 as well) to rank `to`; `tag` in [0, kMaxMessageTag] is the
  /// sender's to choose and the receiver's to read.
  [[nodiscard]] virtual std::unique_ptr<Transfer> send(int to,
                                                       int tag,
                                                       const std::byte* data,
                                                       std::size_t bytes,
                                                       std::shared_ptr<const void> keep) = 0;
  /// The next message of `from` (or of any rank) if one has come, else null.
  [[nodiscard]] virtual std::unique_ptr<Arrival> probe(int from) = 0;
};

}  // namespace tandem::comm
