// tandem/error.h: every error Tandem throws.
//
// A message says what happened, where (engine, parameter, rank) and what to do. Where ranks could
// differ, the same error is thrown on all of them.
#pragma once

#include <stdexcept>
#include <string>

namespace tandem {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

/// Bad input, refused when it is given. Nothing has changed, unless the message says that windows
/// were discarded: what a user did to parameters, found by a pass or a step (see EngineBase).
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Ranks asked for different things at the same point (a step of other engines, another layout,
/// a value against a backward). Thrown on every rank, naming what differs.
class Mismatch : public Error {
 public:
  using Error::Error;
};

/// A backward pass failed on some rank. Thrown on every rank whose own backward did not throw;
/// all windows are discarded, parameters and optimizer states are as before.
class BackwardFailed : public Error {
 public:
  using Error::Error;
};

/// Something awaited did not happen before the deadline. The world is broken from then on.
class Timeout : public Error {
 public:
  using Error::Error;
};

/// The world was broken by an earlier error, or closed. Says which.
class WorldBroken : public Error {
 public:
  using Error::Error;
};

/// Shared memory, or a GPU's, could not be had. Says how much was asked for and what to do.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A GPU, its driver or NCCL did not do what was asked, or cannot be had. Says which call failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// MPI, the operating system or the launcher did not do what was asked.
class SystemError : public Error {
 public:
  using Error::Error;
};

}  // namespace tandem
