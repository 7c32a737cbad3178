// settings.h: what the command line says. Filled by main.cpp, read by train.cpp and report.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace code_search {

struct Settings {
  // --- changes results ---
  std::string source;  // folder of C++ headers
  int steps = 300;     // updates
  std::uint64_t seed = 1;
  bool bf16 = false;      // towers in bf16, the loss head stays fp32
  int stage = 2;          // of Tandem's engines
  int micro_batches = 1;  // per rank and update
  bool shuffle = false;   // the control

  // --- changes speed only ---
  int threads = 0;  // of LibTorch, per rank; 0: OMP_NUM_THREADS, or the cores shared by the ranks

  // --- files and queries ---
  std::string metrics;               // JSON lines; empty: none
  std::string model;                 // where the search index is saved; empty: nowhere
  std::vector<std::string> queries;  // answered instead of training
};

}  // namespace code_search
