#include "engine/engine_core.h"

#include <tandem/error.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <cstring>
#include <sstream>
#include <utility>
#include <variant>

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

Tunables EngineCore::tunables() const {
  return std::visit(
      [](const auto& o) {
        return Tunables{o.lr, o.weight_decay};
      },
      shard->optimizer());
}

void EngineCore::set_tunables(const Tunables& tunables) {
  shard->set_learning_rate(tunables.lr);
  shard->set_weight_decay(tunables.weight_decay);
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

std::vector<std::string> layout_lines(const std::string& name,
                                      const EngineOptions& options,
                                      const std::vector<zero::ParameterInfo>& parameters,
                                      const std::vector<std::string>& buffers) {
  std::vector<std::string> lines;
  std::ostringstream head;
  head << "engine '" << name << "': stage " << options.stage << ", bucket_bytes "
       << options.bucket_bytes << ", broadcast " << options.broadcast << ", buffers policy "
       << static_cast<int>(options.buffers);
  lines.push_back(head.str());
  std::ostringstream optimizer;
  optimizer.precision(17);
  if (const auto* adamw = std::get_if<AdamW>(&options.optimizer)) {
    optimizer << "AdamW lr " << adamw->lr << ", betas (" << adamw->beta1 << ", " << adamw->beta2
              << "), eps " << adamw->eps << ", weight_decay " << adamw->weight_decay;
  } else if (const auto* sgd = std::get_if<Sgd>(&options.optimizer)) {
    optimizer << "Sgd lr " << sgd->lr << ", momentum " << sgd->momentum << ", weight_decay "
              << sgd->weight_decay;
  }
  lines.push_back(optimizer.str());
  for (std::string& line : zero::describe(parameters)) {
    lines.push_back("parameter " + std::move(line));
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

std::uint64_t combine_hashes(const std::vector<std::uint64_t>& hashes) {
  return XXH3_64bits(hashes.data(), hashes.size() * sizeof(std::uint64_t));
}

}  // namespace tandem::engine
