#include "comm/collective_try.h"
#include "comm/device_data_plane.h"
#include "comm/staged_channel.h"

#include <utility>

namespace tandem::comm {

namespace {

class StagedDataPlane final : public DataPlane {
 public:
  StagedDataPlane(const DeviceLinks& links, DataPlane& host)
      : rendezvous_(links.rendezvous), host_(host), link_(std::make_shared<DeviceLink>(links)) {}

  std::unique_ptr<Channel> open(const ChannelSpec& spec, Deadline deadline) override {
    check_device_spec(spec);
    const std::string what = "opening the channel of engine '" + spec.name + "' on devices";
    std::shared_ptr<std::byte> parameters;
    try_on_all_ranks(rendezvous_, what, describe(spec), deadline, [&] {
      const std::string whose = "engine '" + spec.name + "'";
      const int ranks = link_->group().size;
      if (ranks > 1) {
        link_->received().grow(static_cast<std::size_t>(ranks - 1) * piece_bytes(spec, ranks),
                               whose);
      }
      parameters = allocate_on(link_->device(), spec.parameter_bytes, whose);
    });
    return std::make_unique<StagedChannel>(spec, link_, std::move(parameters), host_, deadline);
  }
  void check() override { link_->check(); }
  void abort() noexcept override { link_->abort(); }

 private:
  Rendezvous& rendezvous_;
  DataPlane& host_;
  const std::shared_ptr<DeviceLink> link_;
};

}  // namespace

std::unique_ptr<DataPlane> make_staged_data_plane(const DeviceLinks& links, DataPlane& host) {
  return std::make_unique<StagedDataPlane>(links, host);
}

}  // namespace tandem::comm
