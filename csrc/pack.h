// Packed weights: source tensors in, the layouts of kernels.h out. Knows file formats' blocks, not files.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {

// A weight and the memory it lies in (64-byte aligned, huge pages asked for, shared with other weights).
struct PackedWeight {
  Weight weight;
  int64_t num_bytes;
  std::shared_ptr<void> memory;
};

struct Source {
  std::string type;             // a row of pack_decode.h's table: F32, Q4_1, Q6_K, ...
  const uint8_t* rows;          // row i starts at rows + i * row_stride
  int64_t num_rows, row_bytes, row_stride;
  const int64_t* row_order;     // num_rows entries, or null
};

Form form_from_name(const std::string& name);
const char* form_name(Form form);

// Stacks the sources along the outputs. Throws std::invalid_argument naming the source for anything it cannot pack
// faithfully: unknown types, wrong sizes, values that are not finite or do not fit the form's f16 scales.
// The values do not depend on num_threads (0: one a core), nor on whose search for 4-bit scales it is (null: the best path's).
PackedWeight pack(Form form, int64_t num_inputs, const std::vector<Source>& sources, int num_threads = 0,
                  const KernelTable* kernels = nullptr);

// The values the kernels compute with, [num_outputs][num_inputs].
void unpack(const Weight& weight, float* out);

}  // namespace paceline
