#include "comm/mpi_messenger.h"

#include <tandem/error.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace tandem::comm {

namespace {

// Above the caller's tags; MPI grants 32767 at least.
constexpr int kAnnounced = 1 << 8;  // added to the tag of an announcement
constexpr int kPieceTag = 1 << 9;

class MpiTransfer final : public Transfer {
 public:
  explicit MpiTransfer(std::shared_ptr<const void> keep) : keep_(std::move(keep)) {}

  ~MpiTransfer() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    for (; finalized == 0 && !requests_.empty(); requests_.pop_back()) {
      int complete = 0;  // perhaps it only was never looked at
      MPI_Test(&requests_.back(), &complete, MPI_STATUS_IGNORE);
      if (complete == 0) break;
    }
    // Abandoned: MPI goes on using the memory, so it must never be freed (M4).
    if (!requests_.empty()) static_cast<void>(new std::shared_ptr<const void>(std::move(keep_)));
  }
  MpiTransfer(const MpiTransfer&) = delete;
  MpiTransfer& operator=(const MpiTransfer&) = delete;
  MpiTransfer(MpiTransfer&&) = delete;
  MpiTransfer& operator=(MpiTransfer&&) = delete;

  MPI_Request& add() { return requests_.emplace_back(MPI_REQUEST_NULL); }

  [[nodiscard]] bool done() override {
    while (!requests_.empty()) {
      int complete = 0;
      check_mpi(MPI_Test(&requests_.back(), &complete, MPI_STATUS_IGNORE), "testing a message");
      if (complete == 0) return false;
      requests_.pop_back();
    }
    keep_.reset();
    return true;
  }

 private:
  std::shared_ptr<const void> keep_;
  std::vector<MPI_Request> requests_;  // not done yet
};

class MpiArrival final : public Arrival {
 public:
  /// `message`: matched; null if it follows in pieces of `longest` bytes.
  MpiArrival(MPI_Comm communicator,
             int from,
             int tag,
             std::size_t bytes,
             MPI_Message message,
             std::size_t longest)
      : Arrival(from, tag, bytes),
        communicator_(communicator),
        message_(message),
        longest_(longest) {}

  [[nodiscard]] std::unique_ptr<Transfer> receive(std::byte* into,
                                                  std::shared_ptr<const void> keep) override {
    auto transfer = std::make_unique<MpiTransfer>(std::move(keep));
    if (message_ != MPI_MESSAGE_NULL) {
      check_mpi(MPI_Imrecv(into, static_cast<int>(bytes()), MPI_BYTE, &message_, &transfer->add()),
                "receiving a message");
      return transfer;
    }
    for (std::size_t at = 0; at < bytes(); at += longest_) {
      const auto piece = static_cast<int>(std::min(longest_, bytes() - at));
      check_mpi(
          MPI_Irecv(into + at, piece, MPI_BYTE, from(), kPieceTag, communicator_, &transfer->add()),
          "receiving a long message");
    }
    return transfer;
  }

 private:
  const MPI_Comm communicator_;
  MPI_Message message_;
  const std::size_t longest_;
};

class MpiMessenger final : public Messenger {
 public:
  MpiMessenger(std::shared_ptr<MpiSpaces> spaces, std::size_t number, std::size_t longest)
      : spaces_(std::move(spaces)),
        number_(number),
        communicator_(spaces_->take(number)),
        longest_(longest) {}
  ~MpiMessenger() override { spaces_->give_back(number_); }
  MpiMessenger(const MpiMessenger&) = delete;
  MpiMessenger& operator=(const MpiMessenger&) = delete;
  MpiMessenger(MpiMessenger&&) = delete;
  MpiMessenger& operator=(MpiMessenger&&) = delete;

  [[nodiscard]] std::unique_ptr<Transfer> send(int to,
                                               int tag,
                                               const std::byte* data,
                                               std::size_t bytes,
                                               std::shared_ptr<const void> keep) override {
    const std::string what = "sending to rank " + std::to_string(to);
    if (bytes <= longest_) {
      auto transfer = std::make_unique<MpiTransfer>(std::move(keep));
      check_mpi(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, communicator_,
                          &transfer->add()),
                what);
      return transfer;
    }
    // The announcement's number must live as long as the pieces: it is kept with their memory.
    struct Announced {
      std::uint64_t bytes;
      std::shared_ptr<const void> memory;
    };
    const auto announced = std::make_shared<Announced>(Announced{bytes, std::move(keep)});
    auto transfer = std::make_unique<MpiTransfer>(announced);
    check_mpi(MPI_Isend(&announced->bytes, sizeof(announced->bytes), MPI_BYTE, to, tag + kAnnounced,
                        communicator_, &transfer->add()),
              what);
    for (std::size_t at = 0; at < bytes; at += longest_) {
      const auto piece = static_cast<int>(std::min(longest_, bytes - at));
      check_mpi(
          MPI_Isend(data + at, piece, MPI_BYTE, to, kPieceTag, communicator_, &transfer->add()),
          what);
    }
    return transfer;
  }

  [[nodiscard]] std::unique_ptr<Arrival> probe(int from) override {
    // A rank's messages are found in order, so an announcement is found before its pieces; and
    // those are spoken for when receive() has posted their receives.
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(from == kAnyRank ? MPI_ANY_SOURCE : from, MPI_ANY_TAG, communicator_,
                          &found, &message, &status),
              "looking for messages");
    if (found == 0) return nullptr;
    int bytes = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "looking at a message");
    if ((status.MPI_TAG & kAnnounced) == 0) {
      return std::make_unique<MpiArrival>(communicator_, status.MPI_SOURCE, status.MPI_TAG,
                                          static_cast<std::size_t>(bytes), message, longest_);
    }
    // Eight bytes come with the envelope that was matched: this receive has nothing to wait for.
    std::uint64_t announced = 0;
    check_mpi(MPI_Mrecv(&announced, sizeof(announced), MPI_BYTE, &message, MPI_STATUS_IGNORE),
              "reading the length of a message");
    return std::make_unique<MpiArrival>(
        communicator_, status.MPI_SOURCE, status.MPI_TAG - kAnnounced,
        static_cast<std::size_t>(announced), MPI_MESSAGE_NULL, longest_);
  }

 private:
  const std::shared_ptr<MpiSpaces> spaces_;
  const std::size_t number_;
  const MPI_Comm communicator_;
  const std::size_t longest_;
};

}  // namespace

void check_mpi(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw SystemError(what +
                    ": MPI says: " + std::string(text.data(), static_cast<std::size_t>(length)));
}

std::vector<std::size_t> MpiSpaces::idle() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::size_t> numbers;
  for (std::size_t number = 0; number < spaces_.size(); ++number) {
    if (!spaces_[number].used) numbers.push_back(number);
  }
  return numbers;
}

std::size_t MpiSpaces::add(MPI_Comm communicator) {
  const std::lock_guard lock(mutex_);
  spaces_.push_back(Space{communicator, false});
  return spaces_.size() - 1;
}

MPI_Comm MpiSpaces::take(std::size_t number) {
  const std::lock_guard lock(mutex_);
  spaces_[number].used = true;
  return spaces_[number].communicator;
}

void MpiSpaces::give_back(std::size_t number) noexcept {
  const std::lock_guard lock(mutex_);
  if (number < spaces_.size()) spaces_[number].used = false;
}

void MpiSpaces::free_all() {
  const std::lock_guard lock(mutex_);
  for (Space& space : spaces_) check_mpi(MPI_Comm_free(&space.communicator), "closing the world");
  spaces_.clear();
}

std::unique_ptr<Messenger> make_mpi_messenger(std::shared_ptr<MpiSpaces> spaces,
                                              std::size_t number,
                                              std::size_t longest) {
  return std::make_unique<MpiMessenger>(std::move(spaces), number, longest);
}

}  // namespace tandem::comm
