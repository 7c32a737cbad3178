// What is NCCL's own: which calls are made, on which stream, and what follows when one fails or
// hangs. What all channels over devices do is in device_channel_test.cpp.
#include "comm/nccl_library.h"
#include "kernels/cuda_device.h"
#include "tests/comm/device_rig.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

namespace tandem::comm {
namespace {

using test_support::FakeNccl;
using testing::AllOf;
using testing::HasSubstr;

const ChannelSpec kSpec{.name = "critic",
                        .parameter_bytes = 64 * 1024,
                        .largest_staging = 64 * 1024,
                        .staging_slots = 8,
                        .posts_in_flight = 8};

ByteRange kilobyte_of(int rank) {
  const auto begin = static_cast<std::size_t>(rank) * 1024;
  return {begin, begin + 1024};
}

TEST(NcclChannel, MakesOneGroupAReductionOnThePlanesStream) {
  FakeNccl nccl(3);
  on_device_ranks(Way::kNccl, 3, nccl, [&](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    const auto other = on.plane.open(kSpec, patient());
    Reducer reducer(on, *channel);
    Reducer of_other(on, *other);
    const Bucket whole{9000, Dtype::kBFloat16, dealt(9000, 3)};
    reducer.fold(whole, reducer.post(whole, 0), 0.0F);
    of_other.fold(whole, of_other.post(whole, 1), 0.0F);
    EXPECT_EQ(nccl.groups(on.rank), 2);
    // group_start, two sends, two receives, group_end.
    EXPECT_EQ(nccl.calls(on.rank), 2 * 6);
    // One rank folds it all: it only receives, the others only send.
    const Bucket first{1000, Dtype::kFloat32, dealt(1000, 3)};
    reducer.fold(first, reducer.post(first, 2), 0.0F);
    EXPECT_EQ(nccl.calls(on.rank), 2 * 6 + (on.rank == 0 ? 4 : 3));
    // 12,000 elements on every rank: in pieces of the largest slice of a bucket of 16,384 elements,
    // 5,461 and up to one block, in whole blocks: 5 and 2.
    const Bucket all{12000, Dtype::kFloat32, everything(12000)};
    reducer.fold(all, reducer.post(all, 3), 0.0F);
    EXPECT_EQ(nccl.groups(on.rank), 3 + 2);
    on.finish(on.stream);
    EXPECT_EQ(nccl.streams(on.rank), std::vector<std::uintptr_t>{on.stream.id()});
    const auto& sums = reducer.sums();
    EXPECT_TRUE(same_bits(sums.front(), expected_sum(whole, 0, on.rank, 3, 0.0F)));
    EXPECT_TRUE(same_bits(sums.back(), expected_sum(all, 3, on.rank, 3, 0.0F)));
    EXPECT_TRUE(same_bits(of_other.sums().front(), expected_sum(whole, 1, on.rank, 3, 0.0F)));
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(nccl.cut_off(rank), 0);
}

TEST(NcclChannel, GathersEqualPartsInARowByOneAllGather) {
  FakeNccl nccl(3);
  on_device_ranks(Way::kNccl, 3, nccl, [&](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    channel->gather(channel->post_gather({}), kilobyte_of, "parameters", patient());
    EXPECT_EQ(nccl.all_gathers(on.rank), 1);
    EXPECT_EQ(nccl.broadcasts(on.rank), 0);
    const auto uneven = [](int rank) {
      return rank == 0 ? ByteRange{0, 512} : ByteRange{512, rank == 1 ? 2048U : 512U};
    };
    channel->gather(channel->post_gather({}), uneven, "parameters", patient());
    EXPECT_EQ(nccl.all_gathers(on.rank), 1);
    EXPECT_EQ(nccl.broadcasts(on.rank), 2) << "rank 2 has nothing";
    EXPECT_EQ(nccl.groups(on.rank), 2);
    on.finish(on.stream);
  });
}

TEST(NcclChannel, AWorldOfOneNeedsNoNccl) {
  FakeNccl nccl(1);
  on_device_ranks(Way::kNccl, 1, nccl, [&](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    Reducer reducer(on, *channel);
    const Bucket bucket{16384, Dtype::kFloat16, everything(16384)};
    reducer.fold(bucket, reducer.post(bucket, 0), 0.0F);
    channel->gather(channel->post_gather({}), kilobyte_of, "parameters", patient());
    on.finish(on.stream);
    EXPECT_TRUE(same_bits(reducer.sums().front(), expected_sum(bucket, 0, 0, 1, 0.0F)));
    EXPECT_EQ(channel->reduced_bytes() + channel->gathered_bytes(), 0U);
    EXPECT_EQ(on.device.allocated(), kSpec.parameter_bytes + channel->staging_bytes());
    on.plane.abort();
    EXPECT_THROW(on.plane.check(), WorldBroken);
  });
  EXPECT_EQ(nccl.calls(0), 0);
}

TEST(NcclChannel, AHangIsATimeoutAndAnAbortEndsIt) {
  FakeNccl nccl(2);
  nccl.set_faults(1, {.hanging_group = 1});
  on_device_ranks(Way::kNccl, 2, nccl, [&](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    Reducer reducer(on, *channel);
    const Bucket bucket{9000, Dtype::kFloat32, dealt(9000, 2)};
    reducer.fold(bucket, reducer.post(bucket, 0), 0.0F);
    on.finish(on.stream);
    reducer.fold(bucket, reducer.post(bucket, 1), 0.0F);
    EXPECT_TRUE(channel->folded_by_all()) << "all has been given to the stream";
    const kernels::Mark mark = on.stream.record();
    const std::string where = "engine 'critic'";
    const std::string what = "reductions before the step";
    const auto begin = Clock::now();
    EXPECT_THROW(await_mark(
                     mark, [&] { on.plane.check(); }, {where, what, {on.rank, 2}}, soon()),
                 Timeout);
    EXPECT_FALSE(mark.complete());
    on.plane.abort();
    EXPECT_TRUE(mark.wait_until(patient().at));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
    EXPECT_THROW(await_mark(
                     mark, [&] { on.plane.check(); }, {where, what, {on.rank, 2}}, patient()),
                 WorldBroken)
        << "complete, but not done";
    const PostId post = reducer.post(bucket, 2);
    const ElementRange part = bucket.part(on.rank);
    std::vector<float> sum(9000);
    EXPECT_THROW(channel->fold(post, part.begin, part.end - part.begin, sum.data(),
                               Accumulator::kFresh, "x", patient()),
                 WorldBroken);
    EXPECT_EQ(nccl.calls_after_abort(on.rank), 0);
    on.abort();
  });
}

TEST(NcclChannel, AGroupThatIsNotTakenIsATimeout) {
  FakeNccl nccl(2);
  nccl.set_faults(0, {.untaken_group = 0});
  on_device_ranks(Way::kNccl, 2, nccl, [&](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    const PostId post = channel->post({}, Dtype::kFloat32, everything(100));
    std::vector<float> sum(100);
    const auto fold = [&](Deadline deadline) {
      channel->fold(post, 0, 100, sum.data(), Accumulator::kFresh, "bucket 3", deadline);
    };
    if (on.rank == 0) {
      EXPECT_THROW(fold(soon()), Timeout);
      EXPECT_FALSE(channel->folded_by_all());
    } else {
      fold(patient());
    }
    on.abort();
  });
}

TEST(NcclChannel, AnErrorThatComesLateReachesWhoWaits) {
  FakeNccl nccl(2);
  nccl.set_faults(0, {.hanging_group = 0});
  on_device_ranks(Way::kNccl, 2, nccl, [&](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    channel->gather(channel->post_gather({}), kilobyte_of, "parameters", patient());
    const std::string where = "engine 'critic'";
    const auto wait = [&] {
      await_mark(
          on.stream.record(), [&] { on.plane.check(); }, {where, where, {on.rank, 2}}, patient());
    };
    if (on.rank == 1) {
      nccl.report_async_error(1, "remote process exited or there was a network error");
      try {
        wait();
        ADD_FAILURE() << "the communicator has failed";
      } catch (const kernels::DeviceError& error) {
        EXPECT_THAT(error.what(), HasSubstr("network error"));
        on.control.abort(error.what());
      }
    } else {
      EXPECT_THROW(wait(), WorldBroken) << "the other rank has said so";
    }
    on.abort();
  });
}

TEST(NcclChannel, AnyCallMayFail) {
  // A reduction makes group_start, send, receive, group_end; then the gather group_start,
  // all_gather, group_end.
  for (std::int64_t failing = 0; failing < 7; ++failing) {
    SCOPED_TRACE("call " + std::to_string(failing));
    FakeNccl nccl(2);
    nccl.set_faults(0, {.failing_call = failing});
    on_device_ranks(Way::kNccl, 2, nccl, [&](DeviceRank& on) {
      const auto channel = on.plane.open(kSpec, patient());
      Reducer reducer(on, *channel);
      const Bucket bucket{9000, Dtype::kFloat32, dealt(9000, 2)};
      const auto work = [&] {
        reducer.fold(bucket, reducer.post(bucket, 0), 0.0F);
        channel->gather(channel->post_gather({}), kilobyte_of, "parameters", patient());
        on.finish(on.stream);
      };
      if (on.rank == 0) {
        try {
          work();
          ADD_FAILURE() << "a call has failed";
        } catch (const kernels::DeviceError& error) {
          EXPECT_EQ(nccl.calls(0), failing + 1) << "nothing was called afterwards";
          on.control.abort(error.what());
        }
      } else {
        EXPECT_THROW(work(), WorldBroken);
      }
      on.abort();
      EXPECT_EQ(nccl.calls_after_abort(on.rank), 0);
    });
  }
}

// Without an abort: the communicator's end is one.
TEST(NcclChannel, MayGoWithItsPlaneWhileAPeerHangs) {
  constexpr std::int64_t kNumel = 16384;
  FakeNccl nccl(2);
  nccl.set_faults(1, {.hanging_group = 1});
  const auto values = contribution(0, 0, kNumel, Dtype::kFloat32);
  std::vector<std::vector<float>> sums(8, std::vector<float>(kNumel));  // outlive all streams
  const auto begin = Clock::now();
  on_device_ranks(Way::kNccl, 2, nccl,
                  [&](DeviceRank& on) {
                    const auto channel = on.plane.open(kSpec, patient());
                    for (int number = 0; number < 4; ++number) {
                      Staging staging = channel->acquire(values.size());
                      on.user.wait(staging.pending);
                      on.device.copy(on.user, staging.data, values.data(), values.size());
                      staging.pending = {on.user.record()};
                      const PostId post =
                          channel->post(staging, Dtype::kFloat32, everything(kNumel));
                      if (number == 3) continue;  // posted, and never folded
                      channel->fold(post, 0, kNumel,
                                    sums[static_cast<std::size_t>(number * 2 + on.rank)].data(),
                                    Accumulator::kFresh, "bucket", patient());
                    }
                    const auto parameters = channel->parameters();
                    on.device.copy(on.user, parameters.get(), values.data(), 1024);
                    channel->post_gather({on.user.record()});
                  },
                  {.shape = {}, .max_us = 5000, .seed = 1});
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(nccl.calls_after_abort(0) + nccl.calls_after_abort(1), 0);
}

TEST(NcclDataPlane, AFailureToJoinIsTheSameErrorOnAllRanks) {
  FakeNccl nccl(3);
  nccl.set_faults(1, {.join = true});
  std::vector<std::string> texts(3);
  on_thread_ranks(3, [&](Rendezvous& rendezvous) {
    const int rank = rendezvous.group().rank;
    const auto control = make_control_plane(rendezvous, patient());
    const auto device = kernels::make_simulated_device({});
    const auto stream = device->make_stream(kernels::Priority::kHigh);
    const DeviceLinks links{rendezvous, *control, *device, *stream};
    try {
      make_nccl_data_plane(links, nccl.library(rank), Deadline::after(std::chrono::seconds(2)));
      ADD_FAILURE() << "rank 1 has not joined";
    } catch (const kernels::DeviceError& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("rank 1"), HasSubstr("joining failed")));
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST(NcclDataPlane, SeveralRanksNeedNccl) {
  on_thread_ranks(2, [](Rendezvous& rendezvous) {
    const auto control = make_control_plane(rendezvous, patient());
    const auto device = kernels::make_simulated_device({});
    const auto stream = device->make_stream(kernels::Priority::kHigh);
    EXPECT_THROW(make_nccl_data_plane({rendezvous, *control, *device, *stream}, nullptr, patient()),
                 InvalidArgument);
  });
}

// The fake must see what NCCL would leave undefined.
struct FakeNcclTest : testing::Test {
  static constexpr std::size_t kNumel = 100;

  void on_two(const std::function<void(NcclCommunicator&, kernels::Stream&, int)>& body) {
    on_thread_ranks(2, [&](Rendezvous& rendezvous) {
      const int rank = rendezvous.group().rank;
      const auto device = kernels::make_simulated_device({});
      const auto stream = device->make_stream(kernels::Priority::kHigh);
      const auto library = nccl.library(rank);
      const auto communicator = library->join("an id", {rank, 2}, patient());
      body(*communicator, *stream, rank);
      ASSERT_TRUE(stream->record().wait_until(patient().at));
    });
  }

  FakeNccl nccl{2};
};

TEST_F(FakeNcclTest, SeesCountsAndTypesThatDiffer) {
  std::vector<std::byte> memory[2] = {std::vector<std::byte>(800), std::vector<std::byte>(800)};
  on_two([&](NcclCommunicator& communicator, kernels::Stream& stream, int rank) {
    communicator.group_start();
    if (rank == 0) {
      communicator.send(memory[0].data(), kNumel, Dtype::kFloat32, 1, stream);
    } else {
      communicator.receive(memory[1].data(), 2 * kNumel, Dtype::kBFloat16, 0, stream);
    }
    communicator.group_end(patient());
  });
  EXPECT_THAT(nccl.take_problems(), testing::ElementsAre(HasSubstr("100 fp32")));
}

TEST_F(FakeNcclTest, SeesCollectivesThatDiffer) {
  std::vector<std::byte> memory[2] = {std::vector<std::byte>(800), std::vector<std::byte>(800)};
  on_two([&](NcclCommunicator& communicator, kernels::Stream& stream, int rank) {
    communicator.group_start();
    communicator.broadcast(memory[rank].data(), 800, rank, stream);
    communicator.group_end(patient());
  });
  EXPECT_THAT(nccl.take_problems(), testing::ElementsAre(HasSubstr("broadcast of 800 from")));
}

TEST_F(FakeNcclTest, SeesCallsOutsideOfGroupsAndOverlappingReceives) {
  std::vector<std::byte> memory(800);
  const auto device = kernels::make_simulated_device({});
  const auto elsewhere = device->make_stream(kernels::Priority::kNormal);
  on_two([&](NcclCommunicator& communicator, kernels::Stream& stream, int rank) {
    if (rank == 1) return;
    communicator.send(memory.data(), kNumel, Dtype::kFloat32, 1, stream);
    communicator.group_start();
    communicator.receive(memory.data(), kNumel, Dtype::kFloat32, 1, stream);
    communicator.receive(memory.data() + 399, kNumel, Dtype::kFloat32, 1, *elsewhere);
    communicator.abort();
    EXPECT_THROW(communicator.group_end(patient()), kernels::DeviceError);
  });
  EXPECT_EQ(nccl.calls_after_abort(0), 1);
  EXPECT_THAT(nccl.take_problems(),
              testing::UnorderedElementsAre(HasSubstr("outside"), HasSubstr("overlap"),
                                            HasSubstr("two streams")));
}

// The rank's own work is done, and yet it must not go.
TEST_F(FakeNcclTest, SeesAnEndBeforePeersHaveReceived) {
  std::vector<std::byte> memory[2] = {std::vector<std::byte>(800), std::vector<std::byte>(800)};
  on_two([&](NcclCommunicator& communicator, kernels::Stream& stream, int rank) {
    communicator.group_start();
    if (rank == 0) {
      communicator.send(memory[0].data(), kNumel, Dtype::kFloat32, 1, stream);
      communicator.send(memory[0].data() + 400, kNumel, Dtype::kFloat32, 1, stream);
    } else {
      communicator.receive(memory[1].data(), kNumel, Dtype::kFloat32, 0, stream);
    }
    communicator.group_end(patient());
  });
  EXPECT_EQ(nccl.cut_off(0), 1);
  EXPECT_EQ(nccl.cut_off(1), 0);
}

TEST(NcclLibrary, IsMissingInABuildWithoutCuda) {
  if (kernels::cuda_built()) GTEST_SKIP() << "built with CUDA";
  try {
    static_cast<void>(make_nccl_library(0));
    ADD_FAILURE() << "there is none";
  } catch (const kernels::DeviceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("TANDEM_CUDA=ON"));
  }
}

// It is linked and loaded; what needs a GPU says so.
TEST(NcclLibrary, RefusesToJoinWithoutAGpuOrWithAForeignIdentifier) {
  if (!kernels::cuda_built()) GTEST_SKIP() << "built without CUDA";
  const auto library = make_nccl_library(0);
  const auto reason = [&](const std::string& id) -> std::string {
    try {
      static_cast<void>(library->join(id, {0, 2}, soon()));
    } catch (const kernels::DeviceError& error) {
      return error.what();
    }
    return "joined";
  };
  EXPECT_THAT(reason("fake"), HasSubstr("identifier of 4 bytes"));
  if (kernels::cuda_device_count() > 0) return;
  EXPECT_THAT(reason(std::string(128, 'x')), HasSubstr("cuda"));
}

}  // namespace
}  // namespace tandem::comm
