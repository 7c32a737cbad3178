// comm/segment.h: memory that the ranks of one node share.
//
// A segment is a memfd of a fixed virtual size. Its pages are committed piece by piece with
// fallocate, each piece only if the machine and the control group have room for it, so that a full
// memory is an OutOfMemory error with advice and neither SIGBUS nor the kernel's OOM killer, and a
// small /dev/shm does not matter. Peers map it through /proc/PID/fd. A mapping lives as long as any
// shared_ptr to it, so tensors over a segment may outlive their engine.
//
// Thread safety: commit and release may be called from any thread; bytes are the callers' to order.
// Called by comm (control and data planes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tandem::comm {

class Segment {
 public:
  static constexpr std::size_t kPage = 4096;

  /// Where a peer process finds the memory.
  struct Address {
    std::int64_t pid = 0;
    std::int64_t fd = -1;
    std::uint64_t bytes = 0;
    std::uint64_t inode = 0;  // proves that PID and fd mean what the peer meant

    /// As words for Rendezvous::all_gather; parse() throws SystemError on anything else.
    [[nodiscard]] std::string text() const;
    static Address parse(const std::string& text);
  };

  /// `name` is shown in /proc and in errors; `bytes` is rounded up to pages. Nothing is committed
  /// yet. Throws OutOfMemory (address space, file size limit), SystemError.
  static std::shared_ptr<Segment> create(const std::string& name, std::size_t bytes);
  /// Maps a peer's segment; throws SystemError saying what the operating system refused.
  static std::shared_ptr<Segment> open(const std::string& name, const Address& address);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  Segment(Segment&&) = delete;
  Segment& operator=(Segment&&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] Address address() const;

  /// Makes [offset, offset + bytes), rounded out to pages, safe to touch. Owner only; pages that
  /// are committed already cost nothing, new ones read as zero. Throws OutOfMemory, and then no
  /// page of the range has been added.
  void commit(std::size_t offset, std::size_t bytes);
  /// Gives whole pages inside [offset, offset + bytes) back to the system. Owner only.
  void release(std::size_t offset, std::size_t bytes);
  /// Committed bytes, for the memory report.
  [[nodiscard]] std::size_t committed_bytes() const;

 private:
  Segment(std::string name, int fd, std::byte* data, std::size_t bytes);

  // Both need the mutex; [first, last) in pages.
  void commit_pages(std::size_t first, std::size_t last);
  void release_pages(std::size_t first, std::size_t last);

  std::string name_;
  int fd_;  // -1 in a peer's mapping
  std::byte* data_;
  std::size_t bytes_;
  mutable std::mutex mutex_;
  std::vector<bool> committed_;  // one flag a page
  std::size_t committed_pages_ = 0;
};

}  // namespace tandem::comm
