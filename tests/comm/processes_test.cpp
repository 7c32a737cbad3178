// Both planes between processes, found by MPI: sharing a node, and forced to be nodes of one and of
// two ranks. One rank needs no MPI.
#include "comm/launcher.h"
#include "comm/planes.h"
#include "tests/comm/messages.h"
#include "tests/comm/thread_ranks.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <cstdlib>
#include <cstring>
#include <sys/resource.h>

#if TANDEM_HAVE_MPI
#include "comm/mpi_messenger.h"
#include "comm/mpi_rendezvous.h"
#endif

namespace tandem::comm {
namespace {

using kernels::Accumulator;
using kernels::Dtype;
using testing::HasSubstr;

std::unique_ptr<Rendezvous> make_rendezvous([[maybe_unused]] int ranks_per_node = 0) {
#if TANDEM_HAVE_MPI
  return make_mpi_rendezvous(patient(), ranks_per_node);
#else
  return make_self_rendezvous();
#endif
}

Message wait_message(ControlPlane& plane, RoundId round) {
  const Deadline deadline = patient();
  while (!deadline.passed()) {
    const std::uint32_t seen = plane.change();
    if (auto message = plane.test(round)) return *message;
    plane.wait_for_change(seen, deadline.at);
  }
  throw Timeout("round " + std::to_string(round));
}

TEST(Processes, GatherTextsAndSeeEachOthersMemory) {
  const auto rendezvous = make_rendezvous();
  const auto [rank, size] = rendezvous->group();
  const auto text = [](int of) {
    return std::string(static_cast<std::size_t>(of) * 1000, 't') + ".";
  };
  const auto texts = rendezvous->all_gather("texts", text(rank), patient());
  ASSERT_EQ(texts.size(), static_cast<std::size_t>(size));
  for (int of = 0; of < size; ++of) EXPECT_EQ(texts[static_cast<std::size_t>(of)], text(of));

  const auto mine = Segment::create("test", Segment::kPage);
  mine->commit(0, 1);
  mine->data()[3] = static_cast<std::byte>(rank + 1);
  const auto all = rendezvous->exchange("segments", mine, patient());
  for (int of = 0; of < size; ++of) {
    const auto& segment = all[static_cast<std::size_t>(of)];
    ASSERT_EQ(segment != nullptr, rendezvous->nodes().together(of, rank));
    if (segment) {
      EXPECT_EQ(segment->data()[3], static_cast<std::byte>(of + 1));
    }
  }
  rendezvous->close(patient());
}

TEST(Processes, WorldsAreMadeOneAfterAnother) {
  for (int world = 0; world < 3; ++world) {
    const auto rendezvous = rendezvous_from_environment(patient());
    const auto control = make_control_plane(*rendezvous, patient());
    const auto merged = wait_message(*control, control->post(Message{{}, {}, {}, {world}}));
    EXPECT_EQ(merged.sums, std::vector<std::int64_t>{world * control->group().size});
    rendezvous->close(patient());
  }
}

TEST(Processes, RoundsFoldsAndGathersAgreeUnderRandomPauses) {
  for (const int ranks_per_node : {0, 1, 2}) {
    SCOPED_TRACE(ranks_per_node);
    const auto rendezvous = make_rendezvous(ranks_per_node);
    const int rank = rendezvous->group().rank;
    const int size = rendezvous->group().size;
    const auto control = make_control_plane(*rendezvous, patient());
    const auto plane = make_data_plane(*rendezvous, *control);
    constexpr std::int64_t kNumel = 20000;
    const auto channel = plane->open(ChannelSpec{.name = "critic",
                                                 .parameter_bytes = kNumel * sizeof(float),
                                                 .largest_staging = kNumel * sizeof(float),
                                                 .staging_slots = 2,
                                                 .posts_in_flight = 2},
                                     patient());
    auto* const parameters = reinterpret_cast<float*>(channel->parameters().get());
    const auto part = [size](int of) {
      return ByteRange{static_cast<std::size_t>(kNumel * of / size) * sizeof(float),
                       static_cast<std::size_t>(kNumel * (of + 1) / size) * sizeof(float)};
    };
    const std::int64_t begin = kNumel * rank / size;
    const std::int64_t numel = kNumel * (rank + 1) / size - begin;
    // Thirds do not add up the same in another order.
    const auto value = [](int of, int step, std::int64_t i) {
      return static_cast<float>(i % 1000 + step) / 3.0F * static_cast<float>(of * 37 + 1);
    };
    Pauses pause(rank, 500);
    std::vector<float> acc(static_cast<std::size_t>(numel));
    for (int step = 0; step < (ranks_per_node == 0 ? 200 : 60); ++step) {
      if (step % 4 == 0) pause();
      const Staging staging = channel->acquire(kNumel * sizeof(float));
      for (std::int64_t i = 0; i < kNumel; ++i) {
        reinterpret_cast<float*>(staging.data)[i] = value(rank, step, i);
      }
      const PostId post = channel->post(staging, Dtype::kFloat32, [&](int of) {
        return ElementRange{kNumel * of / size, kNumel * (of + 1) / size};
      });
      channel->fold(post, begin, numel, acc.data(), Accumulator::kFresh, "bucket", patient());
      channel->wait_gathered_by_all("before the update", patient());
      std::memcpy(parameters + begin, acc.data(), acc.size() * sizeof(float));
      const std::uint64_t gather = channel->post_gather({});
      channel->gather(gather, part, "parameters", patient());
      for (std::int64_t i = 0; i < kNumel; i += 97) {
        float expected = 0.0F;
        for (int of = 0; of < size; ++of) expected += value(of, step, i);
        ASSERT_EQ(parameters[i], expected) << "element " << i << ", step " << step;
      }
      const auto merged =
          wait_message(*control, control->post(Message{{1ULL << rank}, {}, {}, {step}}));
      ASSERT_EQ(merged.ors[0], (1ULL << size) - 1);
      ASSERT_EQ(merged.sums[0], std::int64_t{step} * size);
      channel->wait_folded_by_all("staging", patient());
    }
    rendezvous->close(patient());
  }
}

// A1, H4: MPI moves a long message on only while its sender looks. Rank 0 says and posts much, has
// all it needs of the others at once, and goes on to compute: nobody waits for that.
TEST(Processes, NobodyWaitsForARankThatHasGoneOnToCompute) {
  constexpr std::chrono::seconds kComputing{2};
  const auto rendezvous = make_rendezvous(1);
  const auto [rank, size] = rendezvous->group();
  if (size != 2 && std::getenv("TANDEM_TEST_HOSTS") == nullptr) {  // it takes its time
    rendezvous->close(patient());
    return;
  }
  const auto control = make_control_plane(*rendezvous, patient());
  const auto plane = make_data_plane(*rendezvous, *control);
  constexpr std::size_t kBytes = std::size_t{8} << 20;
  const auto channel = plane->open(ChannelSpec{.name = "critic",
                                               .parameter_bytes = kBytes,
                                               .largest_staging = kBytes,
                                               .staging_slots = 1,
                                               .posts_in_flight = 1},
                                   patient());
  const auto without_rank_0 = [&, rank = rank](const std::function<void()>& take) {
    rendezvous->all_gather("start", "", patient());
    const auto begin = Clock::now();
    take();
    if (rank == 0) std::this_thread::sleep_for(kComputing);
    EXPECT_LT(Clock::now() - begin, rank == 0 ? 10 * kComputing : kComputing * 3 / 4);
  };
  without_rank_0([&, rank = rank] {
    const std::string text(rank == 0 ? kBytes : 10, 'x');
    const RoundId round = control->post_text(text);
    const Deadline deadline = patient();
    while (!deadline.passed()) {
      const std::uint32_t seen = control->change();
      if (control->test_texts(round)) return;
      control->wait_for_change(seen, deadline.at);
    }
  });
  without_rank_0([&, rank = rank] {
    const auto numel = static_cast<std::int64_t>(kBytes / sizeof(float));
    const auto part = [&](int of) { return of == 0 ? ElementRange{} : ElementRange{0, numel}; };
    // Rank 0 has what it folds, nothing, before it posts; the others take theirs a little later.
    if (rank != 0) channel->post({}, Dtype::kFloat32, part);
    rendezvous->all_gather("all but rank 0 have posted", "", patient());
    if (rank == 0) channel->post(channel->acquire(kBytes), Dtype::kFloat32, part);
    if (rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::vector<float> acc(kBytes / sizeof(float));
    channel->fold(0, 0, rank == 0 ? 0 : numel, acc.data(), Accumulator::kFresh, "bucket",
                  patient());
  });
  without_rank_0([&] {
    const auto of_rank = [&](int of) { return ByteRange{0, of == 0 ? kBytes : 0}; };
    channel->gather(channel->post_gather({}), of_rank, "parameters", patient());
  });
  rendezvous->close(patient());
}

#if TANDEM_HAVE_MPI

TEST(Processes, RanksOfAHostAreANodeUnlessForced) {
  for (const int ranks_per_node : {0, 1, 2, 3}) {
    const auto rendezvous = make_rendezvous(ranks_per_node);
    const auto [rank, size] = rendezvous->group();
    if (std::getenv("TANDEM_TEST_HOSTS") != nullptr) {  // a rank on each, whatever is forced
      EXPECT_EQ(rendezvous->nodes().count(), size);
    } else {
      EXPECT_EQ(rendezvous->nodes().count(),
                ranks_per_node == 0 ? 1 : (size + ranks_per_node - 1) / ranks_per_node);
    }
    rendezvous->close(patient());
  }
  EXPECT_THROW(make_mpi_rendezvous(patient(), -1), InvalidArgument);
}

TEST(Processes, MessagesOfAllSizesComeInOrderFromEveryRank) {
  const auto rendezvous = make_rendezvous();
  const auto messenger = rendezvous->make_messenger("test", patient());
  exchange_messages_of_all_sizes(*messenger, rendezvous->group(), std::size_t{5} << 20);
  rendezvous->close(patient());
}

TEST(Processes, MessagesTooLongForMpiTravelInPieces) {
  const auto rendezvous = make_rendezvous();
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
  const auto spaces = std::make_shared<MpiSpaces>();
  const std::size_t number = spaces->add(communicator);
  for (const std::size_t longest : {10U, 1000U, 100'000U}) {
    const auto messenger = make_mpi_messenger(spaces, number, longest);
    exchange_messages_of_all_sizes(*messenger, rendezvous->group(), 10'000);
    rendezvous->all_gather("all are through", "", patient());
  }
  spaces->free_all();
  rendezvous->close(patient());
}

TEST(Processes, MessengersAreApartAndTheirSpacesAreUsedAgain) {
  const auto rendezvous = make_rendezvous();
  for (int time = 0; time < 3; ++time) {
    tell_two_messengers_apart(*rendezvous);
    // An odd rank that lets go late makes all ranks take another space.
    const auto mine = rendezvous->make_messenger("kept on some", patient());
    auto later = rendezvous->make_messenger("gone on some", patient());
    if (rendezvous->group().rank % 2 == 0) later.reset();
    tell_two_messengers_apart(*rendezvous);
  }
  rendezvous->close(patient());
}

#endif

TEST(Processes, MemoryThatOneRankCannotHaveIsTheSameErrorOnAll) {
  for (const int ranks_per_node : {0, 1, 2}) {
    SCOPED_TRACE(ranks_per_node);
    const auto rendezvous = make_rendezvous(ranks_per_node);
    const auto [rank, size] = rendezvous->group();
    const auto control = make_control_plane(*rendezvous, patient());
    const auto plane = make_data_plane(*rendezvous, *control);
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    if (rank == size - 1) {
      const rlimit small{1 << 20, before.rlim_max};
      setrlimit(RLIMIT_FSIZE, &small);
    }
    std::string text;
    try {
      plane->open(ChannelSpec{.name = "critic", .parameter_bytes = 8 << 20}, patient());
    } catch (const OutOfMemory& error) {
      text = error.what();
    }
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(size - 1) + ": shared memory"));
    for (const std::string& other : rendezvous->all_gather("texts", text, patient())) {
      EXPECT_EQ(other, text);
    }
    rendezvous->close(patient());
  }
}

TEST(Processes, AnAbortReachesTheOtherProcesses) {
  for (const int ranks_per_node : {0, 1, 2}) {
    SCOPED_TRACE(ranks_per_node);
    const auto rendezvous = make_rendezvous(ranks_per_node);
    const auto [rank, size] = rendezvous->group();
    const auto control = make_control_plane(*rendezvous, patient());
    const auto plane = make_data_plane(*rendezvous, *control);
    const auto channel =
        plane->open(ChannelSpec{.name = "critic", .posts_in_flight = 1}, patient());
    if (rank == 0) {
      control->abort("rank 0 gave up");
    } else {
      const PostId post = channel->post({}, Dtype::kFloat32, [](int) { return ElementRange{}; });
      EXPECT_THROW(channel->fold(post, 0, 0, nullptr, Accumulator::kContinue, "bucket", patient()),
                   WorldBroken);
    }
    EXPECT_THROW(wait_message(*control, control->post(Message{})), WorldBroken);
    EXPECT_EQ(control->aborted(), "rank 0 gave up");
    rendezvous->close(patient());
  }
}

TEST(Processes, ARankThatDoesNotComeIsATimeout) {
  const auto rendezvous = make_rendezvous();
  const auto [rank, size] = rendezvous->group();
  if (size == 1 || rank != 0) return;  // they do not come
  const auto begin = Clock::now();
  try {
    rendezvous->all_gather("opening engine 'a'", "", soon());
    ADD_FAILURE() << "met ranks that were not there";
  } catch (const Timeout& error) {
    EXPECT_THAT(error.what(), HasSubstr("opening engine 'a'"));
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace tandem::comm
