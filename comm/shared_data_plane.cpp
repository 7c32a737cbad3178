#include "comm/shared_data_plane.h"

#include "comm/collective_try.h"
#include "comm/shared_channel.h"

#include <utility>

namespace tandem::comm {

namespace {

class SharedDataPlane final : public DataPlane {
 public:
  SharedDataPlane(Rendezvous& rendezvous, ControlPlane& control)
      : rendezvous_(rendezvous), control_(control) {}

  std::unique_ptr<Channel> open(const ChannelSpec& spec, Deadline deadline) override {
    const Group group = rendezvous_.group();
    const Nodes& nodes = rendezvous_.nodes();
    const std::string what = "opening the channel of engine '" + spec.name + "'";
    std::shared_ptr<Segment> mine;
    try_on_all_ranks(rendezvous_, what, describe(spec), deadline,
                     [&] { mine = SharedChannel::make_segment(spec, group.rank, nodes); });
    auto segments = rendezvous_.exchange(what, std::move(mine), deadline);
    SharedChannel::BetweenNodes messengers;
    if (nodes.count() > 1) {
      messengers.slices = rendezvous_.make_messenger(what, deadline);
      messengers.parameters = rendezvous_.make_messenger(what, deadline);
    }
    return std::make_unique<SharedChannel>(spec, group, nodes, std::move(segments),
                                           std::move(messengers), control_);
  }
  void check() override {}  // its waits look for themselves
  void abort() noexcept override {}

 private:
  Rendezvous& rendezvous_;
  ControlPlane& control_;
};

}  // namespace

std::unique_ptr<DataPlane> make_shared_data_plane(Rendezvous& rendezvous, ControlPlane& control) {
  return std::make_unique<SharedDataPlane>(rendezvous, control);
}

}  // namespace tandem::comm
