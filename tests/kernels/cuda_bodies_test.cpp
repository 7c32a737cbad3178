// What the CUDA kernels compute, run on the CPU: their bodies are plain functions of a lane or
// thread, and here every lane of every piece, and every thread of every tile, is called in turn.
// They give the CPU kernels' bits (B1, B2, B4 of kernels/cuda), by groups and element by element
// (E1).
#include "kernels/cuda/fold_body.h"
#include "kernels/cuda/norm_body.h"
#include "kernels/cuda/update_body.h"
#include "tests/kernels/update_rig.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <variant>

namespace tandem::kernels {
namespace {

using cuda::kThreads;
using cuda::kWarp;

/// In no order that a GPU would keep to: from the last piece and lane to the first.
void run_update_by_lanes(const Update& update, const UpdateArrays& arrays) {
  const cuda::Fragment fragment = cuda::fragment_of(arrays);
  const std::int64_t numels[] = {arrays.numel};
  std::vector<cuda::Piece> pieces = cuda::all_pieces(numels);
  std::ranges::reverse(pieces);
  for (const cuda::Piece& piece : pieces) {
    for (int lane = kWarp - 1; lane >= 0; --lane) {
      std::visit([&](const auto& functor) { cuda::update_lane(functor, fragment, piece, lane); },
                 update);
    }
  }
}

/// Elements [begin, numel) of a fragment. The rig's arrays begin at element 3 of aligned memory:
/// from element 1 on they lie where groups may be moved as one.
UpdateArrays from(UpdateArrays arrays, std::int64_t begin) {
  arrays.grad += begin;
  arrays.param = static_cast<std::byte*>(arrays.param) +
                 static_cast<std::size_t>(begin) * bytes_of(arrays.param_dtype);
  if (arrays.master != nullptr) arrays.master += begin;
  if (arrays.remainder != nullptr) arrays.remainder += begin;
  for (float*& state : arrays.state) {
    if (state != nullptr) state += begin;
  }
  arrays.numel -= begin;
  return arrays;
}

Fragment random_fragment(Storage storage, std::int64_t numel, float (*draw)(std::mt19937&)) {
  Fragment fragment(storage, random_values(numel, 1, draw));
  fragment.grad = Fragment::guarded(random_values(numel, 2, draw));
  for (std::uint32_t k = 0; k < kMaxStates; ++k) {
    fragment.state[k] = Fragment::guarded(random_values(numel, 3 + k, draw));
    for (float& value : fragment.state[k]) {
      if (k != 0) value = std::fabs(value);
    }
  }
  std::mt19937 random(9);
  for (std::size_t i = 0; i < static_cast<std::size_t>(numel); i += 5) {  // edited parameters
    fragment.half[Fragment::kStart + i] = static_cast<std::uint16_t>(random());
  }
  return fragment;
}

TEST(CudaBodies, UpdatesOfEveryOptimizerAndStorageAreTheCpus) {
  std::vector<NamedUpdate> updates = every_update(3, 1e-3, 0.125);
  for (NamedUpdate& first : every_update(1, 0.7, -3.0)) updates.push_back(std::move(first));
  for (const NamedUpdate& named : updates) {
    for (const Storage storage : kStorages) {
      for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
        for (const std::int64_t numel : {1, 2, 5, 132, 1025, 2049, 2050, 5003}) {
          for (const std::int64_t begin : {0, 1}) {
            Fragment expected = random_fragment(storage, numel, draw);
            Fragment own = expected;
            const int states = states_of(named.update);
            const UpdateArrays arrays = from(own.arrays(states), begin);
            ASSERT_EQ(cuda::fragment_of(arrays).vector, begin == 1);
            update(named.update, from(expected.arrays(states), begin));
            run_update_by_lanes(named.update, arrays);
            ASSERT_EQ(own.difference(expected), "") << named.name << ", " << name_of(storage)
                                                    << ", numel " << numel << ", from " << begin;
          }
        }
      }
    }
  }
}

TEST(CudaBodies, EveryFunctorFitsItsSlot) {
  for (const NamedUpdate& named : every_update(1, 0.1, 1.0)) {
    std::visit(
        [&](const auto& functor) {
          EXPECT_LE(sizeof functor, cuda::RuleSlot::kFunctorBytes) << named.name;
        },
        named.update);
  }
}

/// The bits of elements of one type, for a slice that begins `offset` elements into aligned memory.
struct SliceMemory {
  Dtype dtype;
  std::size_t offset;
  std::vector<float> floats;
  std::vector<std::uint16_t> halves;

  SliceMemory(Dtype type, std::size_t start, std::int64_t numel, std::uint32_t seed)
      : dtype(type), offset(start) {
    const auto all = numel + static_cast<std::int64_t>(offset);
    floats = random_values(all, seed, &anything);
    halves.resize(static_cast<std::size_t>(all));
    std::mt19937 random(seed);
    for (std::uint16_t& half : halves) half = static_cast<std::uint16_t>(random());
  }
  [[nodiscard]] Slice slice() const {
    if (dtype == Dtype::kFloat32) return {floats.data() + offset, dtype};
    return {halves.data() + offset, dtype};
  }
};

void fold_by_threads(std::span<const Slice> slices,
                     std::int64_t numel,
                     float* acc,
                     Accumulator state) {
  cuda::for_fold_launches(slices, numel, acc, state, [&](const cuda::FoldLaunch& launch) {
    for (std::int64_t tile = cuda::divided_up(numel, cuda::kTileNumel) - 1; tile >= 0; --tile) {
      for (int thread = 0; thread < kThreads; ++thread) cuda::fold_groups(launch, tile, thread);
    }
  });
}

TEST(CudaBodies, FoldsOfAnyMixAreTheCpus) {
  std::mt19937 random(3);
  for (const std::size_t count : {0U, 1U, 2U, 3U, 4U, 5U, 8U, 9U, 64U, 65U, 130U}) {
    for (const std::int64_t numel : {1, 3, 4, 1027, 2048, 5001}) {
      for (const bool aligned : {true, false}) {
        std::vector<SliceMemory> memory;
        std::vector<Slice> slices;
        memory.reserve(count);
        for (std::size_t s = 0; s < count; ++s) {
          const std::size_t offset = aligned ? 0 : random() % 4;
          memory.emplace_back(static_cast<Dtype>(random() % 3), offset, numel,
                              static_cast<std::uint32_t>(s));
          slices.push_back(random() % 5 == 0 ? Slice{nullptr, Dtype::kFloat32}
                                             : memory.back().slice());
        }
        const std::size_t start = aligned ? 0 : 1;
        for (const Accumulator state : {Accumulator::kFresh, Accumulator::kContinue}) {
          std::vector<float> expected = random_values(numel + 2, 77, &any_finite);
          std::vector<float> own = expected;
          fold(slices, numel, expected.data() + start, state);
          fold_by_threads(slices, numel, own.data() + start, state);
          ASSERT_EQ(first_difference(own.data(), expected.data(), numel + 2), "")
              << count << " slices, numel " << numel << (aligned ? ", aligned" : "");
        }
      }
    }
  }
}

TEST(CudaBodies, AFreshFoldIsNeverMinusZero) {
  const std::vector<float> minus(9, -0.0F);
  const Slice slices[] = {{minus.data(), Dtype::kFloat32}};
  std::vector<float> acc(9, 5.0F);
  fold_by_threads(slices, 9, acc.data(), Accumulator::kFresh);
  for (const float value : acc) EXPECT_FALSE(std::signbit(value));
  acc.assign(9, 5.0F);
  fold_by_threads({}, 9, acc.data(), Accumulator::kFresh);
  EXPECT_EQ(acc, std::vector<float>(9, 0.0F));
}

TEST(CudaBodies, CastsAreExactForEveryHalf) {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    for (const std::size_t offset : {0U, 1U}) {
      std::vector<std::uint16_t> all(65536 + 1);
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i] = static_cast<std::uint16_t>(i - offset);
      }
      std::vector<float> wide(65536 + 1, 9.0F);
      cuda::WidenLaunch launch;
      launch.to = wide.data();
      launch.from = all.data() + offset;
      launch.dtype = dtype;
      launch.to_vector = true;
      launch.from_vector = cuda::vector_start(launch.from, 2);
      ASSERT_EQ(launch.from_vector, offset == 0);
      launch.numel = 65535;  // the last group is not whole
      for (int tile = 0; tile < 65536 / cuda::kTileNumel; ++tile) {
        for (int thread = 0; thread < kThreads; ++thread) {
          cuda::widen_groups(launch, tile, thread);
        }
      }
      for (std::uint32_t bits = 0; bits < 65535; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        const float expected =
            dtype == Dtype::kBFloat16 ? to_float(Bf16{half}) : to_float(Fp16{half});
        ASSERT_EQ(first_difference(&wide[bits], &expected, 1), "") << name_of(dtype) << bits;
      }
      EXPECT_EQ(wide[65535], 9.0F);
    }
  }
}

TEST(CudaBodies, ProductsTouchNothingElse) {
  for (const std::size_t start : {0U, 1U}) {
    std::vector<float> memory(2060);
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = 0.1F * static_cast<float>(i);
    const std::vector<float> before = memory;
    const cuda::MultiplyLaunch launch{memory.data() + start, -0.3F, start == 0, 2055};
    for (int tile = 0; tile < 2; ++tile) {
      for (int thread = 0; thread < kThreads; ++thread) cuda::multiply_groups(launch, tile, thread);
    }
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const bool inside = i >= start && i < start + 2055;
      ASSERT_EQ(memory[i], inside ? before[i] * -0.3F : before[i]) << i;
    }
  }
}

TEST(CudaBodies, FillsTouchNothingElse) {
  for (const std::size_t start : {0U, 1U}) {
    std::vector<float> memory(2060, 1.0F);
    cuda::FillLaunch launch{memory.data() + start, -0.0F, start == 0, 2055};
    for (int tile = 0; tile < 2; ++tile) {
      for (int thread = 0; thread < kThreads; ++thread) cuda::fill_groups(launch, tile, thread);
    }
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const bool inside = i >= start && i < start + 2055;
      ASSERT_EQ(memory[i], inside ? 0.0F : 1.0F) << i;
      ASSERT_EQ(std::signbit(memory[i]), inside) << i;
    }
  }
}

/// A warp: N2's tree as __shfl_down_sync does it, then a word with each lane.
using Words = std::array<std::int64_t, Superaccumulator::kWords>;
void add_block_by_lanes(const float* x,
                        std::int32_t numel,
                        Words& words,
                        const Power* power = nullptr) {
  std::array<double, kWarp> lanes{};
  for (int lane = 0; lane < kWarp; ++lane) {
    lanes[static_cast<std::size_t>(lane)] =
        power == nullptr ? cuda::lane_sum(x, numel, lane) : cuda::lane_sum(x, numel, lane, *power);
  }
  for (std::size_t half = kWarp / 2; half > 0; half /= 2) {
    const std::array<double, kWarp> before = lanes;
    for (std::size_t lane = 0; lane < kWarp; ++lane) {
      lanes[lane] += before[lane + half < kWarp ? lane + half : lane];
    }
  }
  const double sum = power == nullptr ? lanes[0] : on_grid(lanes[0]);
  for (int word = 0; word < Superaccumulator::kWords; ++word) {
    words[static_cast<std::size_t>(word)] += cuda::word_of(sum, word);
  }
}

TEST(CudaBodies, NormsAreTheCpusWords) {
  for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
    for (const std::int64_t numel : kLengths) {
      const std::vector<float> x = random_values(numel + 1, 4, draw);
      Superaccumulator expected;
      add_sum_of_squares(x.data() + 1, numel, expected);
      Words words{};
      const std::int64_t numels[] = {numel};
      for (const cuda::Piece& piece : cuda::all_pieces(numels)) {
        for (std::int32_t begin = 0; begin < piece.numel; begin += kNormBlock) {
          add_block_by_lanes(x.data() + 1 + piece.begin + begin,
                             std::min<std::int32_t>(kNormBlock, piece.numel - begin), words);
        }
      }
      EXPECT_TRUE(std::ranges::equal(words, expected.words())) << numel;
    }
  }
}

TEST(CudaBodies, SumsOfPowersAndMaximaAreTheCpus) {
  for (const double p : {0.5, 1.0, 3.0, 64.0, 65.0}) {
    for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
      for (const std::int64_t numel : {1, 33, 1024, 5003}) {
        const std::vector<float> x = random_values(numel + 1, 4, draw);
        const std::uint32_t largest = largest_magnitude(x.data() + 1, numel);
        const Power power = power_of(p, magnitude_of(largest));
        Superaccumulator expected;
        add_sum_of_powers(x.data() + 1, numel, power, expected);
        Words words{};
        std::uint32_t found = 0;
        const std::int64_t numels[] = {numel};
        for (const cuda::Piece& piece : cuda::all_pieces(numels)) {
          const float* const start = x.data() + 1 + piece.begin;
          for (int lane = 0; lane < kWarp; ++lane) {
            found = std::max(found, cuda::lane_largest(start, piece.numel, lane));
          }
          for (std::int32_t begin = 0; begin < piece.numel; begin += kNormBlock) {
            add_block_by_lanes(start + begin,
                               std::min<std::int32_t>(kNormBlock, piece.numel - begin), words,
                               &power);
          }
        }
        EXPECT_EQ(found, largest);
        EXPECT_TRUE(std::ranges::equal(words, expected.words())) << "p " << p << ", " << numel;
      }
    }
  }
}

TEST(CudaBodies, AWordALaneIsTheSuperaccumulator) {
  std::vector<double> values = {
      0.0,     -0.0,     0x1p-320, 0x1p-319, 0x1p-298, 0x1p-1, 0x1p31, 0x1.FFFFFFFFFFFFFp319,
      0x1p320, 0x1p1000, INFINITY, NAN,      -NAN};
  std::mt19937_64 random(5);
  for (int exponent = -320; exponent < 330; ++exponent) {
    // 53 bits where all of them are multiples of 2^-320, else as many as are.
    const int bits = std::min(52, exponent + 320);
    const std::uint64_t mantissa = random() >> (64 - 52) >> (52 - bits) << (52 - bits);
    values.push_back(std::ldexp(1.0 + std::ldexp(static_cast<double>(mantissa), -52), exponent));
    values.push_back(std::ldexp(1.0, exponent));
  }
  for (const double value : values) {
    Superaccumulator expected;
    expected.add(value);
    for (int word = 0; word < kWarp; ++word) {
      const std::int64_t wanted =
          word < Superaccumulator::kWords ? expected.words()[static_cast<std::size_t>(word)] : 0;
      ASSERT_EQ(cuda::word_of(value, word), wanted) << value << ", word " << word;
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
