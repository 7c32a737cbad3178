// tests/kernels/fake_launches.cpp: kernels/cuda/launches.h on tests/kernels/fake_cuda.h: the
// kernels' bodies, thread by thread and last block first, when the stream comes to them.
#include "kernels/cuda/launches.h"
#include "tests/kernels/fake_cuda.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tandem::kernels::cuda {
namespace {

template <class Launch>
void for_tiles(cudaStream_t stream,
               const Launch& launch,
               void (*body)(const Launch&, std::int64_t, int)) {
  if (launch.numel <= 0) return;
  fake_cuda::give(stream, [launch, body] {
    for (std::int64_t tile = divided_up(launch.numel, kTileNumel) - 1; tile >= 0; --tile) {
      for (int thread = 0; thread < kThreads; ++thread) body(launch, tile, thread);
    }
  });
}

template <int kKind>
void update_pieces(const UpdateLaunch& update) {
  for (std::int64_t p = update.count - 1; p >= 0; --p) {
    for (int lane = 0; lane < kWarp; ++lane) update_piece<kKind>(update, p, lane);
  }
}

template <int... kKinds>
constexpr auto updates_of(std::integer_sequence<int, kKinds...> /*kinds*/) {
  return std::array<void (*)(const UpdateLaunch&), sizeof...(kKinds)>{update_pieces<kKinds>...};
}

double block_sum(const float* x, std::int32_t numel, const Power* power) {
  std::array<double, kWarp> lanes{};
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    lanes[lane] = power == nullptr ? lane_sum(x, numel, static_cast<int>(lane))
                                   : lane_sum(x, numel, static_cast<int>(lane), *power);
  }
  for (std::size_t half = kWarp / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return power == nullptr ? lanes[0] : on_grid(lanes[0]);
}

/// body(a thread block, the gradients of a piece that it takes, their number).
template <class Body>
void for_pieces_of(const NormLaunch& norm, std::int64_t block, const Body& body) {
  for (int warp = 0; warp < kWarps; ++warp) {
    for (std::int64_t p = block * kWarps + warp; p < norm.count;
         p += norm_blocks(norm.count) * kWarps) {
      const Piece piece = norm.pieces[p];
      if (norm.chosen[piece.fragment] == 0) continue;
      body(norm.fragments[piece.fragment].grad + piece.begin, piece.numel);
    }
  }
}

void sum(const NormLaunch& norm, const Power* power) {
  const std::int64_t blocks = norm_blocks(norm.count);
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::array<std::int64_t, Superaccumulator::kWords> words{};
    for_pieces_of(norm, block, [&](const float* grad, std::int32_t numel) {
      for (std::int32_t begin = 0; begin < numel; begin += kNormBlock) {
        const std::int32_t rest = numel - begin;
        const double of_block =
            block_sum(grad + begin, rest < kNormBlock ? rest : kNormBlock, power);
        for (std::size_t w = 0; w < words.size(); ++w) {
          words[w] += word_of(of_block, static_cast<int>(w));
        }
      }
    });
    for (std::size_t w = 0; w < words.size(); ++w) {
      norm.partials[partial_index(static_cast<int>(w), block, blocks)] = words[w];
    }
  }
  for (int w = 0; w < Superaccumulator::kWords; ++w) {
    std::int64_t sum = 0;
    for (std::int64_t b = 0; b < blocks; ++b) sum += norm.partials[partial_index(w, b, blocks)];
    norm.words[w] = sum;
  }
}

void find_largest(const NormLaunch& norm) {
  const std::int64_t blocks = norm_blocks(norm.count);
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::uint32_t largest = 0;
    for_pieces_of(norm, block, [&](const float* grad, std::int32_t numel) {
      for (int lane = 0; lane < kWarp; ++lane) {
        largest = std::max(largest, lane_largest(grad, numel, lane));
      }
    });
    norm.partials[block] = largest;
  }
  norm.words[0] = *std::max_element(norm.partials, norm.partials + blocks);
}

}  // namespace

void check_kernels() {}

void launch_fill(cudaStream_t stream, const FillLaunch& fill) {
  for_tiles<FillLaunch>(stream, fill, [](const FillLaunch& launch, std::int64_t tile, int thread) {
    fill_groups(launch, tile, thread);
  });
}

void launch_multiply(cudaStream_t stream, const MultiplyLaunch& multiply) {
  for_tiles<MultiplyLaunch>(stream, multiply,
                            [](const MultiplyLaunch& launch, std::int64_t tile, int thread) {
                              multiply_groups(launch, tile, thread);
                            });
}

void launch_widen(cudaStream_t stream, const WidenLaunch& widen) {
  for_tiles<WidenLaunch>(stream, widen,
                         [](const WidenLaunch& launch, std::int64_t tile, int thread) {
                           widen_groups(launch, tile, thread);
                         });
}

void launch_fold(cudaStream_t stream, const FoldLaunch& fold) {
  for_tiles<FoldLaunch>(stream, fold, [](const FoldLaunch& launch, std::int64_t tile, int thread) {
    fold_groups(launch, tile, thread);
  });
}

void launch_update(cudaStream_t stream, std::int32_t kind, const UpdateLaunch& update) {
  constexpr auto kUpdates =
      updates_of(std::make_integer_sequence<int, static_cast<int>(std::variant_size_v<Update>)>());
  fake_cuda::give(stream,
                  [body = kUpdates.at(static_cast<std::size_t>(kind)), update] { body(update); });
}

void launch_sum_squares(cudaStream_t stream, const NormLaunch& norm) {
  fake_cuda::give(stream, [norm] { sum(norm, nullptr); });
}

void launch_sum_powers(cudaStream_t stream, const NormLaunch& norm) {
  fake_cuda::give(stream, [norm] { sum(norm, &norm.power); });
}

void launch_find_largest(cudaStream_t stream, const NormLaunch& norm) {
  fake_cuda::give(stream, [norm] { find_largest(norm); });
}

}  // namespace tandem::kernels::cuda
