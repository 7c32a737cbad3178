#include "comm/collective_try.h"
#include "comm/device_data_plane.h"
#include "comm/nccl_channel.h"
#include <tandem/error.h>

#include <utility>

namespace tandem::comm {

namespace {

/// Time to tell each other what came of it must be left when joining has failed on one rank and the
/// others waited for it.
Deadline before(Deadline deadline) {
  const auto now = Clock::now();
  return Deadline{now + (deadline.at - now) * 3 / 4};
}

std::unique_ptr<NcclCommunicator> join(Rendezvous& rendezvous, Nccl* nccl, Deadline deadline) {
  const Group group = rendezvous.group();
  if (group.size == 1) return nullptr;
  const std::string what =
      "making the NCCL communicator of " + std::to_string(group.size) + " ranks";
  std::string id;
  try_on_all_ranks(rendezvous, what, "NCCL", deadline, [&] {
    if (nccl == nullptr) throw InvalidArgument("no NCCL given to a world of several ranks");
    if (group.rank == 0) id = nccl->unique_id();
  });
  id = rendezvous.all_gather(what, id, deadline).front();
  std::unique_ptr<NcclCommunicator> communicator;
  try_on_all_ranks(rendezvous, what, "joined", deadline,
                   [&] { communicator = nccl->join(id, group, before(deadline)); });
  return communicator;
}

class NcclDataPlane final : public DataPlane {
 public:
  NcclDataPlane(Rendezvous& rendezvous, std::shared_ptr<NcclLink> link)
      : rendezvous_(rendezvous), link_(std::move(link)) {}

  std::unique_ptr<Channel> open(const ChannelSpec& spec, Deadline deadline) override {
    check_device_spec(spec);
    const std::string what = "opening the channel of engine '" + spec.name + "' on devices";
    std::shared_ptr<std::byte> parameters;
    try_on_all_ranks(rendezvous_, what, describe(spec), deadline, [&] {
      const std::string whose = "engine '" + spec.name + "'";
      const int peers = link_->group().size - 1;
      if (peers > 0) {
        const std::size_t piece = piece_bytes(spec, link_->group().size);
        link_->received().grow(static_cast<std::size_t>(peers) * piece, whose);
        link_->zeros().grow(piece, whose);
      }
      parameters = allocate_on(link_->device(), spec.parameter_bytes, whose);
    });
    return std::make_unique<NcclChannel>(spec, link_, std::move(parameters));
  }
  void check() override { link_->check(); }
  void abort() noexcept override { link_->abort(); }

 private:
  Rendezvous& rendezvous_;
  const std::shared_ptr<NcclLink> link_;
};

}  // namespace

std::unique_ptr<DataPlane> make_nccl_data_plane(const DeviceLinks& links,
                                                std::unique_ptr<Nccl> nccl,
                                                Deadline deadline) {
  auto communicator = join(links.rendezvous, nccl.get(), deadline);
  return std::make_unique<NcclDataPlane>(
      links.rendezvous,
      std::make_shared<NcclLink>(links, std::move(nccl), std::move(communicator)));
}

}  // namespace tandem::comm
