#include "comm/segment.h"

#include "comm/memory_limit.h"
#include <tandem/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sstream>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace tandem::comm {

namespace {

// Memory is granted in pieces of this size, each after a look at what is left, so that several
// ranks which grow at the same time see each other's growth before the memory is gone.
constexpr std::size_t kPiece = std::size_t{64} << 20;
// Pieces below this size are not worth the look, some file reads.
constexpr std::size_t kWorthChecking = std::size_t{1} << 20;
// What is left to the rest of the program and the machine.
constexpr std::uint64_t kMargin = std::uint64_t{64} << 20;

constexpr const char* kAdvice =
    "; use fewer ranks on this node or a smaller bucket_bytes, or give the job more memory (a "
    "container's or batch job's limit counts too)";

std::string reason(int error) { return std::strerror(error); }

/// Closes a file descriptor unless it was taken.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  Fd(Fd&&) = delete;
  Fd& operator=(Fd&&) = delete;
  [[nodiscard]] int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// The kernel grants pages of a memfd without asking whether they exist, and its answer to a full
/// memory is to kill.
void check_room(std::size_t bytes) {
  const MemoryLimit limit = available_memory();
  if (limit.available_bytes < kMargin || limit.available_bytes - kMargin < bytes) {
    throw OutOfMemory(limit.source + " leaves " + describe_bytes(limit.available_bytes));
  }
}

std::byte* map(const std::string& name, int fd, std::size_t bytes) {
  void* const address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    const std::string what = "shared memory '" + name + "': cannot map " + describe_bytes(bytes) +
                             " of address space: " + reason(error);
    if (error == ENOMEM) throw OutOfMemory(what + "; raise the limit of ulimit -v" + kAdvice);
    throw SystemError(what);
  }
  return static_cast<std::byte*>(address);
}

}  // namespace

std::string Segment::Address::text() const {
  return std::to_string(pid) + " " + std::to_string(fd) + " " + std::to_string(bytes) + " " +
         std::to_string(inode);
}

Segment::Address Segment::Address::parse(const std::string& text) {
  Address address;
  std::istringstream words(text);
  if (!(words >> address.pid >> address.fd >> address.bytes >> address.inode)) {
    throw SystemError("shared memory: '" + text +
                      "' is no address of a segment; do all ranks run the same version?");
  }
  return address;
}

Segment::Segment(std::string name, int fd, std::byte* data, std::size_t bytes)
    : name_(std::move(name)), fd_(fd), data_(data), bytes_(bytes) {
  if (fd_ >= 0) committed_.resize(bytes_ / kPage);
}

Segment::~Segment() {
  munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<Segment> Segment::create(const std::string& name, std::size_t bytes) {
  const std::size_t rounded = std::max((bytes + kPage - 1) / kPage * kPage, kPage);
  // ftruncate above RLIMIT_FSIZE would end the process with SIGXFSZ.
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY &&
      rounded > file_size.rlim_cur) {
    throw OutOfMemory("shared memory '" + name + "': " + describe_bytes(rounded) +
                      " of address space asked for, but this process may make files of " +
                      describe_bytes(file_size.rlim_cur) + " only; raise the limit of ulimit -f" +
                      kAdvice);
  }
  Fd fd(memfd_create(("tandem:" + name).substr(0, 200).c_str(), MFD_CLOEXEC));
  if (fd.get() < 0) {
    throw SystemError("shared memory '" + name + "': memfd_create: " + reason(errno) +
                      "; too many open files are helped by ulimit -n");
  }
  if (ftruncate(fd.get(), static_cast<off_t>(rounded)) != 0) {
    throw SystemError("shared memory '" + name + "': cannot set a size of " +
                      describe_bytes(rounded) + ": " + reason(errno));
  }
  std::byte* const data = map(name, fd.get(), rounded);
  return std::shared_ptr<Segment>(new Segment(name, fd.take(), data, rounded));
}

std::shared_ptr<Segment> Segment::open(const std::string& name, const Address& address) {
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const std::string what = "shared memory '" + name + "' of process " +
                           std::to_string(address.pid) + ": cannot open " + path + ": ";
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (fd.get() < 0) {
    throw SystemError(what + reason(errno) +
                      "; ranks of one node must run as the same user in the same container (PID "
                      "namespace), with /proc mounted");
  }
  struct stat status {};
  if (fstat(fd.get(), &status) != 0) throw SystemError(what + reason(errno));
  if (status.st_ino != address.inode ||
      static_cast<std::uint64_t>(status.st_size) != address.bytes) {
    throw SystemError(what +
                      "it is another file; ranks of one node must run in the same container (PID "
                      "namespace)");
  }
  std::byte* const data = map(name, fd.get(), address.bytes);
  return std::shared_ptr<Segment>(new Segment(name, -1, data, address.bytes));
}

Segment::Address Segment::address() const {
  struct stat status {};
  if (fd_ < 0 || fstat(fd_, &status) != 0) {
    throw SystemError("shared memory '" + name_ + "': only its owner can tell its address");
  }
  return Address{getpid(), fd_, bytes_, status.st_ino};
}

void Segment::commit(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  if (fd_ < 0 || offset > bytes_ || bytes > bytes_ - offset) {
    throw InvalidArgument("shared memory '" + name_ + "': bytes [" + std::to_string(offset) +
                          ", +" + std::to_string(bytes) + ") are not this rank's to commit");
  }
  const std::size_t first = offset / kPage;
  const std::size_t last = (offset + bytes - 1) / kPage + 1;
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::size_t, std::size_t>> added;
  try {
    // The whole first, so that what cannot succeed takes nothing from anybody.
    const auto missing = static_cast<std::size_t>(
        std::count(committed_.begin() + static_cast<std::ptrdiff_t>(first),
                   committed_.begin() + static_cast<std::ptrdiff_t>(last), false));
    if (missing * kPage > kPiece) check_room(missing * kPage);
    for (std::size_t page = first; page < last;) {
      if (committed_[page]) {
        ++page;
        continue;
      }
      std::size_t end = page;
      while (end < last && !committed_[end] && (end - page) * kPage < kPiece) ++end;
      commit_pages(page, end);
      added.emplace_back(page, end);
      page = end;
    }
  } catch (const OutOfMemory& error) {
    for (const auto& [begin, end] : added) release_pages(begin, end);
    throw OutOfMemory("shared memory '" + name_ + "': " + describe_bytes(bytes) +
                      " asked for, on top of " + describe_bytes(committed_pages_ * kPage) +
                      " held: " + error.what() + kAdvice);
  }
}

void Segment::commit_pages(std::size_t first, std::size_t last) {
  const std::size_t offset = first * kPage;
  const std::size_t bytes = (last - first) * kPage;
  if (bytes >= kWorthChecking) check_room(bytes);
  int result = -1;
  do {
    result = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) throw OutOfMemory(reason(errno));
#ifdef MADV_POPULATE_WRITE
  // Fills the page tables now rather than at the first touch, in the middle of a backward pass.
  // Kernels before 5.14 refuse, which costs speed only.
  static_cast<void>(madvise(data_ + offset, bytes, MADV_POPULATE_WRITE));
#endif
  std::fill(committed_.begin() + static_cast<std::ptrdiff_t>(first),
            committed_.begin() + static_cast<std::ptrdiff_t>(last), true);
  committed_pages_ += last - first;
}

void Segment::release(std::size_t offset, std::size_t bytes) {
  if (fd_ < 0 || offset > bytes_ || bytes > bytes_ - offset) {
    throw InvalidArgument("shared memory '" + name_ + "': bytes [" + std::to_string(offset) +
                          ", +" + std::to_string(bytes) + ") are not this rank's to release");
  }
  const std::size_t first = (offset + kPage - 1) / kPage;
  const std::size_t last = (offset + bytes) / kPage;
  if (first >= last) return;
  const std::lock_guard lock(mutex_);
  release_pages(first, last);
}

void Segment::release_pages(std::size_t first, std::size_t last) {
  // A refusal leaves the pages where they are, committed as before: memory is not saved, that is
  // all.
  if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first * kPage),
                static_cast<off_t>((last - first) * kPage)) != 0) {
    return;
  }
  for (std::size_t page = first; page < last; ++page) {
    if (committed_[page]) --committed_pages_;
    committed_[page] = false;
  }
}

std::size_t Segment::committed_bytes() const {
  const std::lock_guard lock(mutex_);
  return committed_pages_ * kPage;
}

}  // namespace tandem::comm
