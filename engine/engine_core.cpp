#include "engine/engine_core.h"

#include "zero/update_rule.h"
#include <tandem/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <functional>
#include <numeric>
#include <sstream>
#include <utility>

namespace tandem::engine {

void Multipliers::add(double factor) {
  if (factor != 1.0) {
    calls_.push_back(factor);
    settle();
  }
}

double Multipliers::product() const {
  double product = 1.0;
  for (const double call : calls_) {
    product *= call;
  }
  return product;
}

void Multipliers::joined(double product, std::int64_t calls) {
  if (calls > 0) {
    owed_.push_back({product, calls});
    settle();
  }
}

void Multipliers::clear() {
  calls_.clear();
  owed_.clear();
}

// The sayers multiplied their calls from the first on, so the same calls give the same bits here.
// Other factors stay, and are found out at the next gate that this rank says something at.
void Multipliers::settle() {
  while (!owed_.empty() && calls() >= owed_.front().calls) {
    const auto end = calls_.begin() + static_cast<std::ptrdiff_t>(owed_.front().calls);
    const double own = std::accumulate(calls_.begin(), end, 1.0, std::multiplies<>());
    if (own != owed_.front().product) {
      return;
    }
    calls_.erase(calls_.begin(), end);
    owed_.erase(owed_.begin());
  }
}

void Window::clear(std::size_t parameters, std::size_t buckets) {
  passes = 0;
  pairs = 0;
  drop_arithmetic();
  seen.assign(parameters, false);
  fresh.assign(buckets, true);
  passed_over = false;
}

void Window::drop_arithmetic() {
  tokens = 0;
  unread.clear();
  counted = false;
  multipliers.clear();
}

std::vector<Tunables> EngineCore::tunables() const {
  std::vector<Tunables> all(groups);
  for (std::size_t g = 0; g < groups && shard != nullptr; ++g) {
    all[g] = {shard->groups().learning_rate(g), shard->groups().weight_decay(g)};
  }
  return all;
}

void EngineCore::clear_window() {
  window.clear(parameter_count(), bucket_count());
  gradients->discard();
}

at::Tensor EngineCore::place_of(const Buffer& buffer) const {
  std::byte* const places = channel->parameters().get() + plan.flat_bytes;
  return at::for_blob(places + buffer.place, buffer.tensor.sizes())
      .options(buffer.tensor.options())
      .target_device(buffer.tensor.device())
      .make_tensor();
}

void EngineCore::pack_buffers() const {
  const at::NoGradGuard no_grad;
  for (const Buffer& buffer : buffers) {
    place_of(buffer).copy_(buffer.tensor.detach());
  }
}

void EngineCore::unpack_buffers() {
  const at::NoGradGuard no_grad;
  for (Buffer& buffer : buffers) {
    buffer.tensor.detach().copy_(place_of(buffer));
  }
}

void EngineCore::check_buffers() const {
  for (const Buffer& buffer : buffers) {
    if (static_cast<std::int64_t>(buffer.tensor.nbytes()) != buffer.bytes) {
      throw InvalidArgument(
          "buffer '" + buffer.name + "' of engine '" + name + "' had " +
          std::to_string(buffer.bytes) + " bytes when the engine was made and has " +
          std::to_string(buffer.tensor.nbytes()) +
          " now; give buffers their final shape and type before wrapping the module");
    }
  }
}

std::vector<std::string> layout_lines(const EngineCore& core,
                                      c10::DeviceType device,
                                      const std::optional<zero::ParameterGroups>& groups,
                                      const std::vector<std::string>& buffers) {
  const EngineOptions& options = core.options;
  std::vector<std::string> lines;
  std::ostringstream head;
  head << "engine '" << core.name << "': stage " << options.stage << ", bucket_bytes "
       << options.bucket_bytes << ", broadcast " << options.broadcast << ", buffers policy "
       << static_cast<int>(options.buffers) << ", wire " << static_cast<int>(options.wire)
       << ", masters " << static_cast<int>(options.masters) << ", share_parameters_on_node "
       << options.share_parameters_on_node << ", on " << c10::DeviceTypeName(device, true);
  lines.push_back(head.str());
  for (std::size_t g = 0; groups && g < groups->size(); ++g) {
    lines.push_back((g == 0 ? "" : "group '" + groups->name(g) + "': ") +
                    zero::describe(groups->settings(g)));
  }
  const std::vector<std::string> parameters = zero::describe(core.infos);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const std::size_t group = groups ? groups->group_of(p) : 0;
    lines.push_back("parameter " + parameters[p] +
                    (group == 0 ? "" : " in group '" + groups->name(group) + "'"));
  }
  for (const std::string& line : buffers) {
    lines.push_back("buffer " + line);
  }
  return lines;
}

std::uint64_t hash_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line;
    text += '\n';
  }
  return XXH3_64bits(text.data(), text.size());
}

namespace {

/// Of the bits, wherever they lie.
std::uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().cpu().contiguous();
  return values.nbytes() == 0 ? 0 : XXH3_64bits(values.const_data_ptr(), values.nbytes());
}

}  // namespace

std::uint64_t parameter_hash(const EngineCore& core) {
  std::vector<std::uint64_t> parts{hash_lines({core.name}), hash_lines(zero::describe(core.infos))};
  for (const at::Tensor& tensor : core.parameters->tensors()) {
    parts.push_back(hash_of(tensor));
  }
  return combine_hashes(parts);
}

std::uint64_t hash_of_values(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint64_t> parts;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(hash_of(tensor));
  }
  return combine_hashes(parts);
}

std::uint64_t combine_hashes(const std::vector<std::uint64_t>& hashes) {
  return XXH3_64bits(hashes.data(), hashes.size() * sizeof(std::uint64_t));
}

}  // namespace tandem::engine
