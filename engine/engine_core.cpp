#include "engine/engine_core.h"

#include "zero/update_rule.h"
#include <tandem/error.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <cstring>
#include <sstream>
#include <utility>

namespace tandem::engine {

void Window::clear(std::size_t parameters, std::size_t buckets) {
  passes = 0;
  pairs = 0;
  tokens = 0;
  counted = false;
  seen.assign(parameters, false);
  fresh.assign(buckets, true);
  passed_over = false;
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

const std::byte* EngineCore::bytes_of(std::size_t parameter) const {
  const std::int32_t bucket = plan.bucket_of[parameter];
  return parameters->bucket(bucket) + static_cast<std::size_t>(plan.offset_of[parameter]) *
                                          kernels::bytes_of(infos[parameter].dtype);
}

void EngineCore::pack_buffers() const {
  std::byte* place = channel->parameters().get() + plan.flat_bytes;
  for (const Buffer& buffer : buffers) {
    const at::Tensor values = buffer.tensor.detach().contiguous();
    std::memcpy(place, values.data_ptr(), values.nbytes());
    place += values.nbytes();
  }
}

void EngineCore::unpack_buffers() {
  const std::byte* place = channel->parameters().get() + plan.flat_bytes;
  for (Buffer& buffer : buffers) {
    const at::Tensor values = at::empty_like(buffer.tensor, at::MemoryFormat::Contiguous);
    std::memcpy(values.data_ptr(), place, values.nbytes());
    buffer.tensor.detach().copy_(values);
    place += values.nbytes();
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
                                      const std::optional<zero::ParameterGroups>& groups,
                                      const std::vector<std::string>& buffers) {
  const EngineOptions& options = core.options;
  std::vector<std::string> lines;
  std::ostringstream head;
  head << "engine '" << core.name << "': stage " << options.stage << ", bucket_bytes "
       << options.bucket_bytes << ", broadcast " << options.broadcast << ", buffers policy "
       << static_cast<int>(options.buffers) << ", wire " << static_cast<int>(options.wire)
       << ", masters " << static_cast<int>(options.masters) << ", share_parameters_on_node "
       << options.share_parameters_on_node;
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

std::uint64_t parameter_hash(const EngineCore& core) {
  std::vector<std::uint64_t> parts{hash_lines({core.name}), hash_lines(zero::describe(core.infos))};
  for (std::size_t p = 0; p < core.parameter_count(); ++p) {
    const std::size_t bytes =
        static_cast<std::size_t>(core.infos[p].numel) * kernels::bytes_of(core.infos[p].dtype);
    parts.push_back(bytes == 0 ? 0 : XXH3_64bits(core.bytes_of(p), bytes));
  }
  return combine_hashes(parts);
}

std::uint64_t hash_of_values(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint64_t> parts;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = tensor.detach().contiguous();
    parts.push_back(values.nbytes() == 0 ? 0
                                         : XXH3_64bits(values.const_data_ptr(), values.nbytes()));
  }
  return combine_hashes(parts);
}

std::uint64_t combine_hashes(const std::vector<std::uint64_t>& hashes) {
  return XXH3_64bits(hashes.data(), hashes.size() * sizeof(std::uint64_t));
}

}  // namespace tandem::engine
