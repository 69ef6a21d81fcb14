// Memory for weights: 64-byte aligned, in chunks large enough for huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paceline {

// The chunk lives as long as any weight in it.
std::shared_ptr<void> allocate_weight_memory(size_t num_bytes, uint8_t** data);

}  // namespace paceline
