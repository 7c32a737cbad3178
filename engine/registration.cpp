// engine/registration.cpp: engines come (agreed by all ranks) and go (at the same point of the
// program).
#include "engine/world_state.h"
#include "zero/tensor_type.h"
#include <tandem/error.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <unordered_map>

namespace tandem::engine {

namespace {

/// An engine that is gone, kept until its device has done what was given to it: by the job that
/// waits for that, or, where a queue that failed skips the job, by who lets go of it.
class Leaving {
 public:
  Leaving(std::shared_ptr<EngineCore> core, comm::Deadline until)
      : core_(std::move(core)), until_(until) {}
  ~Leaving() {
    if (!finished_) {
      static_cast<void>(finish());
    }
  }
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;
  Leaving(Leaving&&) = delete;
  Leaving& operator=(Leaving&&) = delete;

  [[nodiscard]] const std::string& name() const { return core_->name; }

  /// False if the device's work had to be ended, or the world is broken.
  [[nodiscard]] bool finish() noexcept {
    finished_ = true;
    Lane& lane = *core_->lane;
    const bool used = lane.finish(core_->used, until_);
    try {
      return lane.finish(lane.stream->record(), until_) && used;
    } catch (...) {  // a device that failed does no more work
      return false;
    }
  }

 private:
  const std::shared_ptr<EngineCore> core_;
  const comm::Deadline until_;
  bool finished_ = false;
};

/// Buffers of any type lie behind each other.
constexpr std::int64_t kBufferAlign = 16;

/// Where the parameters are; the CPU if there are none.
c10::Device device_of(const Named& parameters) {
  for (const auto& [name, tensor] : parameters) {
    if (tensor.defined()) {
      return tensor.device();
    }
  }
  return c10::kCPU;
}

/// The type of a tensor's gradients between ranks; nothing: the parameters' own.
std::optional<kernels::Dtype> wire_of(const EngineOptions& options) {
  switch (options.wire) {
    case Wire::kFloat32:
      return kernels::Dtype::kFloat32;
    case Wire::kBFloat16:
      return kernels::Dtype::kBFloat16;
    case Wire::kFloat16:
      return kernels::Dtype::kFloat16;
    case Wire::kParameter:
      break;
  }
  return std::nullopt;
}

std::string what_is_wrong_with(const EngineOptions& options) {
  if (options.stage != 1 && options.stage != 2) {
    return "stage " + std::to_string(options.stage) + "; it is 1 or 2";
  }
  if (options.bucket_bytes <= 0) {
    return "bucket_bytes " + std::to_string(options.bucket_bytes) + "; it is > 0";
  }
  return {};
}

std::string what_is_wrong_with(const std::string& name,
                               const at::Tensor& tensor,
                               c10::Device device,
                               const EngineOptions& options) {
  std::string fault;
  if (!tensor.defined()) {
    return "parameter '" + name + "' is undefined";
  }
  if (tensor.device() != device) {
    fault = "is on " + tensor.device().str() + ", the parameters before it are on " + device.str() +
            "; an engine's parameters are on one device";
  } else if (tensor.layout() != at::kStrided) {
    fault = "is not a dense tensor";
  } else if (!zero::dtype_of(tensor)) {
    fault = std::string("has type ") + c10::toString(tensor.scalar_type()) +
            "; float32, bfloat16 and float16 are trained";
  } else if (tensor.scalar_type() == at::kHalf && options.masters == Masters::kRemainder) {
    fault =
        "has type float16, for which masters cannot be kept as remainders; use "
        "Masters::kSeparate";
  } else if (!tensor.is_leaf()) {
    fault = "is the result of an operation; only leaves can be trained";
  }
  return fault.empty() ? fault : "parameter '" + name + "' " + fault;
}

/// Two tensors over the same memory cannot both be moved into a bucket; tied parameters are one
/// tensor.
std::string overlap_in(const std::vector<zero::ParameterInfo>& infos,
                       const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const char*, std::size_t>> starts;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0) {
      starts.emplace_back(static_cast<const char*>(tensors[i].const_data_ptr()), i);
    }
  }
  std::sort(starts.begin(), starts.end());
  for (std::size_t k = 1; k < starts.size(); ++k) {
    const at::Tensor& before = tensors[starts[k - 1].second];
    std::int64_t last = 0;  // element of `before`, counted in its storage
    for (std::int64_t d = 0; d < before.dim(); ++d) {
      last += (before.size(d) - 1) * before.stride(d);
    }
    if (starts[k].first < starts[k - 1].first + (last + 1) * before.element_size()) {
      return "parameters '" + infos[starts[k - 1].second].name + "' and '" +
             infos[starts[k].second].name +
             "' are different tensors over the same memory; tie them by using one tensor twice, or "
             "give each its own memory";
    }
  }
  return {};
}

}  // namespace

std::shared_ptr<EngineCore> WorldState::register_engine(const Named& parameters,
                                                        const Named& buffers,
                                                        const EngineOptions& options) {
  std::exception_ptr no_memory;
  std::shared_ptr<EngineCore> made = guarded([&]() -> std::shared_ptr<EngineCore> {
    Lock lock(mutex_);
    auto core = std::make_shared<EngineCore>();
    core->serial = next_serial_;  // taken when all ranks have agreed
    core->options = options;
    core->name = options.name.empty() ? "engine" + std::to_string(core->serial) : options.name;

    // What this rank has to object is said in the gate, so that all ranks throw together.
    std::string problem = what_is_wrong_with(options);
    // Tied parameters have one owner: the first engine that has them.
    std::unordered_map<const void*, const EngineCore*> owners;
    for (const auto& other : cores_) {
      if (other->retired()) {
        continue;
      }
      if (other->name == core->name && problem.empty()) {
        problem = "the name is taken by another engine of this world";
      }
      for (const at::Tensor& tensor : other->parameters->tensors()) {
        owners.emplace(tensor.unsafeGetTensorImpl(), other.get());
      }
    }
    std::vector<at::Tensor> tensors;
    const c10::Device device = device_of(parameters);
    if (problem.empty()) {
      problem = objection_to(devices_->place(core->name, device), options);
    }
    std::set<std::string> names;
    for (const auto& [name, tensor] : parameters) {
      std::string fault = what_is_wrong_with(name, tensor, device, options);
      if (fault.empty() && !names.insert(name).second) {
        fault = "parameter name '" + name + "' is used twice";
      }
      if (const auto other = tracker_->taken_by(tensor); fault.empty() && other) {
        fault = "parameter '" + name + "' belongs to engine '" + *other +
                "' of another world in this process; destroy that engine first";
      }
      if (!fault.empty()) {
        problem = problem.empty() ? fault : problem;
      } else if (owners.emplace(tensor.unsafeGetTensorImpl(), core.get()).second) {
        core->infos.push_back(
            {name, tensor.sizes().vec(), tensor.numel(), *zero::dtype_of(tensor)});
        tensors.push_back(tensor);
      }
    }
    if (problem.empty() && tensors.empty() && !parameters.empty()) {
      const auto& [name, tensor] = parameters.front();
      problem = "all its parameters belong to other engines already ('" + name + "' to engine '" +
                owners.at(tensor.unsafeGetTensorImpl())->name +
                "'), so that it would train nothing; use that engine for both, or destroy it first";
    }
    if (problem.empty()) {
      problem = overlap_in(core->infos, tensors);
    }
    std::optional<zero::ParameterGroups> groups;
    try {
      groups.emplace(options.optimizer, options.groups, core->infos);
      core->groups = groups->size();
    } catch (const std::exception& error) {  // also what a user's predicate throws
      problem = problem.empty() ? error.what() : problem;
    }
    std::vector<std::string> buffer_lines;
    for (const auto& [name, tensor] : buffers) {
      if (!tensor.defined()) {
        continue;  // BatchNorm without running statistics registers empty ones
      }
      if (tensor.device() != device && problem.empty()) {
        problem = "buffer '" + name + "' is on " + tensor.device().str() +
                  ", the parameters are on " + device.str() + "; move the module as a whole";
      }
      std::ostringstream line;
      line << name << " " << c10::toString(tensor.scalar_type()) << " " << tensor.sizes();
      buffer_lines.push_back(line.str());
      const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
      core->buffers.push_back({name, tensor, bytes, core->buffer_bytes});
      core->buffer_bytes += (bytes + kBufferAlign - 1) / kBufferAlign * kBufferAlign;
    }
    std::vector<std::string> said = layout_lines(*core, device.type(), groups, buffer_lines);
    core->layout_hash = hash_lines(said);
    if (!problem.empty()) {
      problem = "engine '" + core->name + "': " + problem;
      said.insert(said.begin(), "refuses " + problem);
    }

    GateSay say;
    say.word = Word::kRegister;
    say.register_hash = hash_lines(said);
    agree(lock, say, said);  // Mismatch names the first line that differs
    ++next_serial_;
    if (!problem.empty()) {
      throw InvalidArgument(problem);
    }

    // Agreed: from here on whatever fails on one rank breaks the world. What follows communicates
    // on this thread: in the same order on all ranks only behind what the queue still has.
    await_event(queue_->record(), "reductions before an engine is made");
    sequencer_.compact();
    drop_retired();
    core->plan = zero::plan_buckets(core->infos, options.bucket_bytes, wire_of(options));
    comm::ChannelSpec spec = zero::GradientBuckets::channel_spec(core->plan, core->name);
    spec.parameter_bytes = static_cast<std::size_t>(core->plan.flat_bytes + core->buffer_bytes);
    spec.largest_staging =
        std::max(spec.largest_staging, static_cast<std::size_t>(core->buffer_bytes) * 4);
    spec.share_parameters = options.share_parameters_on_node;
    spec.staging_slots += 2;
    spec.posts_in_flight += 2;
    try {
      core->lane = &lane_on(devices_->place(core->name, device));
      core->channel = core->lane->plane->open(spec, deadline());
    } catch (
        const OutOfMemory&) {  // on all ranks alike, and nothing has changed: the world goes on
      no_memory = std::current_exception();
      return nullptr;
    }
    compare_values(lock, *core, tensors);
    zero::TorchDevice& torch = *core->lane->torch;
    core->parameters = std::make_unique<zero::FlatParameters>(
        core->plan, torch, core->channel->parameters(), tensors,
        owns_parameter_memory(*core) ? zero::Fill::kCopy : zero::Fill::kLeave);
    broadcast_values(*core);
    core->parameters->touch(Bits(core->parameter_count(), true));
    core->gradients = std::make_unique<zero::GradientBuckets>(core->plan, *core->channel, torch);
    kernels::Stream& current = torch.current();
    core->shard = std::make_unique<zero::OptimizerShard>(core->plan, group_, torch.device(),
                                                         current, core->channel->parameters().get(),
                                                         std::move(*groups), options.masters);
    core->lane->stream->wait(current.record());  // and with it whatever comes after a reduction
    core->window.clear(core->parameter_count(), core->bucket_count());
    core->hooks = tracker_->attach_leaves(core->serial, tensors, core->name);

    EngineShape shape;
    shape.name = core->name;
    shape.bucket_of.assign(core->plan.bucket_of.begin(), core->plan.bucket_of.end());
    shape.buckets = static_cast<int>(core->bucket_count());
    shape.groups = static_cast<int>(core->groups);
    shape.honours_hold = options.stage == 1;
    sequencer_.add_engine(std::move(shape));
    core->index = static_cast<int>(cores_.size());
    index_of_[core->serial] = core->index;
    cores_.push_back(core);
    if (trace_->on()) {
      name_in_trace(*core);
    }

    GateSay largest;
    largest.tunables.resize(static_cast<std::size_t>(sequencer_.shape().groups));
    largest.tokens.resize(cores_.size());
    largest.multipliers.resize(cores_.size());
    largest.multiplications.resize(cores_.size());
    const comm::Message message = encode(largest, sequencer_.shape(), group_.rank);
    const std::size_t close_words = static_cast<std::size_t>(sequencer_.shape().buckets);
    const std::size_t norm_words = cores_.size() * kernels::Superaccumulator::kWords;
    control_->reserve(8 * (message.ors.size() + message.mins.size() + message.maxs.size() +
                           message.sums.size() + close_words + norm_words));
    return core;
  });
  if (no_memory) {
    std::rethrow_exception(no_memory);
  }
  return made;
}

/// The lane of a device, made when its first engine is.
Lane& WorldState::lane_on(c10::Device device) {
  for (const auto& lane : lanes_) {
    if (lane->where == device) {
      return *lane;
    }
  }
  lanes_.push_back(devices_->open(device, {*rendezvous_, *control_, deadline()}));
  Lane& lane = *lanes_.back();
  lane.asynchronous = lane.stream->record().state() != nullptr;
  return lane;
}

std::string WorldState::objection_to(c10::Device device, const EngineOptions& options) const {
  if (const std::string objection = devices_->objection(device); !objection.empty()) {
    return "its parameters are on " + device.str() + "; " + objection;
  }
  if (device.is_cpu()) {
    return {};
  }
  for (const auto& lane : lanes_) {
    if (!lane->where.is_cpu() && lane->where != device) {
      return "its parameters are on " + device.str() + ", those of another engine on " +
             lane->where.str() + "; a rank trains on one GPU (and the CPU): start a rank for each";
    }
  }
  if (options.share_parameters_on_node) {
    return "share_parameters_on_node is for engines on the CPU; its parameters are on " +
           device.str();
  }
  return {};
}

/// Without a broadcast every rank shows that it holds rank 0's parameters already.
void WorldState::compare_values(Lock& lock,
                                const EngineCore& core,
                                const std::vector<at::Tensor>& tensors) {
  if (group_.size == 1 || core.options.broadcast) {
    return;
  }
  const std::vector<std::string> hashes =
      gather_texts(lock, std::to_string(hash_of_values(tensors)),
                   "the other ranks' initial parameters of engine '" + core.name + "'");
  for (std::size_t r = 1; r < hashes.size(); ++r) {
    if (hashes[r] != hashes[0]) {
      throw Mismatch("engine '" + core.name +
                     "' was made with broadcast = false, but the parameters of rank " +
                     std::to_string(r) +
                     " differ from rank 0's; make them equal (seed, file) or leave "
                     "broadcast on");
    }
  }
}

/// Every rank gets rank 0's parameters and buffers. Without a broadcast the ranks of a node that
/// shares its parameters still wait until they are there.
void WorldState::broadcast_values(EngineCore& core) {
  if (group_.size == 1 || !(core.options.broadcast || core.options.share_parameters_on_node)) {
    return;
  }
  if (core.options.broadcast && owns_parameter_memory(core)) {
    core.pack_buffers();
  }
  kernels::Stream& current = core.lane->torch->current();
  const std::uint64_t gather = core.channel->post_gather({current.record()});
  const auto end = core.options.broadcast
                       ? static_cast<std::size_t>(core.plan.flat_bytes + core.buffer_bytes)
                       : std::size_t{0};
  core.channel->gather(
      gather,
      [&](int rank) {
        return rank == 0 ? comm::ByteRange{0, end} : comm::ByteRange{};
      },
      "initial parameters", deadline());
  core.channel->wait_gathered_by_all("initial parameters", deadline());
  await_mark(*core.lane, core.lane->stream->record(),
             "initial parameters of engine '" + core.name + "'");
  if (core.options.broadcast) {
    core.unpack_buffers();
  }
}

bool WorldState::owns_parameter_memory(const EngineCore& core) const {
  return !core.options.share_parameters_on_node || rendezvous_->nodes().is_first(group_.rank);
}

// Called by destructors: a device that has failed says so at the next call.
void WorldState::retire_engine(EngineCore& core) noexcept {
  Lock lock(mutex_);
  try {
    sequencer_.retire_engine(core.index);
    core.hooks.reset();
    core.armed = false;
    core.window.clear(core.parameter_count(), core.bucket_count());
    core.used = core.lane->torch->current().record();
    drop_retired();
  } catch (const std::exception& error) {
    break_world("engine '" + core.name + "' could not be taken out of its world: " + error.what());
  }
}

// Gives back the memory of engines that are gone, once no pass may still launch their buckets.
// Their numbers stay until the next registration, when all ranks drop them at the same point.
void WorldState::drop_retired() {
  if (sequencer_.in_pass()) {
    return;
  }
  for (auto& core : cores_) {
    if (core->retired() && core->channel) {
      retired_wire_.reduce_bytes += static_cast<std::int64_t>(core->channel->reduced_bytes());
      retired_wire_.gather_bytes += static_cast<std::int64_t>(core->channel->gathered_bytes());
      retired_wire_.between_nodes_bytes +=
          static_cast<std::int64_t>(core->channel->between_nodes_bytes());
      // The module's tensors may keep the segment for long: staging in it goes back now.
      core->gradients->discard();
      if (!core->lane->asynchronous) {
        core->channel->trim(0);
      }
      // Folds that are still enqueued keep the old object, and with it the memory, until they ran;
      // on a device also a job that waits until what was given to it is done.
      if (core->lane->asynchronous) {
        core->parameters.reset();  // users' tensors go here; the channel keeps their memory
        core->buffers.clear();
        queue_->enqueue([leaving = std::make_shared<Leaving>(core, deadline())] {
          if (!leaving->finish()) {
            throw Timeout("engine '" + leaving->name() +
                          "' is gone, and the work of its device had to be ended");
          }
        });
      }
      auto husk = std::make_shared<EngineCore>();
      husk->serial = core->serial;
      husk->index = core->index;
      husk->name = core->name;
      husk->infos = core->infos;
      husk->plan = core->plan;
      husk->groups = core->groups;
      core = std::move(husk);
    }
  }
  if (static_cast<std::size_t>(sequencer_.shape().engines) == cores_.size()) {
    return;
  }
  std::erase_if(cores_, [](const auto& core) { return core->retired(); });
  index_of_.clear();
  for (std::size_t i = 0; i < cores_.size(); ++i) {
    cores_[i]->index = static_cast<int>(i);
    index_of_[cores_[i]->serial] = cores_[i]->index;
  }
}

std::uint64_t WorldState::world_hash() const {
  std::vector<std::uint64_t> parts{sequencer_.order_hash(), static_cast<std::uint64_t>(average_)};
  for (const auto& core : cores_) {
    parts.push_back(core->retired() ? 0 : core->layout_hash);
  }
  return combine_hashes(parts);
}

}  // namespace tandem::engine
