#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <thread>

#include "cpu_features.h"
#include "half.h"
#include "memory.h"
#include "pack_decode.h"

namespace paceline {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

// --- what a strip is made from ---

struct Row {
  const uint8_t* data = nullptr;    // null: padding, all zero
  SourceType type = SourceType::f32;
  int source = 0;
};

const SourceTypeRow& source_type_row(const std::string& name, const std::string& where) {
  std::string valid;
  for (const SourceTypeRow& row : kSourceTypes) {
    if (name == row.name) return row;
    valid += std::string(valid.empty() ? "" : ", ") + row.name;
  }
  refuse(where + ": source type " + name + " cannot be packed; it must be one of " + valid);
}

enum class Fault { none, not_finite, scale_too_large };

// Packs groups of 32 inputs of one strip; returns the first fault of a row.
using GroupPacker = Fault (*)(const Row& row, int64_t first_input, int count, int lane, uint8_t* strip);

Fault pack_group_f32(const Row& row, int64_t first, int count, int lane, uint8_t* strip) {
  float values[kGroup];
  decode(row.type, row.data, first, count, values);
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return Fault::not_finite;
    store_u32(strip + 4 * ((first + i) * kStrip + lane), float_bits(values[i]));
  }
  return Fault::none;
}

Fault pack_group_bf16(const Row& row, int64_t first, int count, int lane, uint8_t* strip) {
  float values[kGroup];
  decode(row.type, row.data, first, count, values);
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return Fault::not_finite;
    const uint16_t rounded = float_to_bf16(values[i]);
    if ((rounded & 0x7f80) == 0x7f80) return Fault::scale_too_large;
    const int64_t input = first + i;
    store_u16(strip + 2 * ((input / 2 * kStrip + lane) * 2 + input % 2), rounded);
  }
  return Fault::none;
}

struct Range { float low, high; bool is_finite; };

// Written so that the compiler may use vectors: four running extremes, no early exit.
Range range_of(const float* values) {
  float low[4], high[4];
  uint32_t not_finite = 0;
  for (int j = 0; j < 4; ++j) low[j] = high[j] = values[j];
  for (int i = 0; i < kGroup; i += 4) {
    for (int j = 0; j < 4; ++j) {
      const float v = values[i + j];
      low[j] = v < low[j] ? v : low[j];
      high[j] = v > high[j] ? v : high[j];
      not_finite |= (float_bits(v) & 0x7f800000u) == 0x7f800000u;
    }
  }
  return {std::min(std::min(low[0], low[1]), std::min(low[2], low[3])),
          std::max(std::max(high[0], high[1]), std::max(high[2], high[3])), not_finite == 0};
}

// q = round((value - m) / d) kept within [least, most], plus offset; 0 where the scale vanished.
void quantize(const float* values, float m, float d, float least, float most, int offset, uint8_t* q) {
  if (d == 0.0f) {
    std::memset(q, offset, kGroup);
    return;
  }
  for (int i = 0; i < kGroup; ++i) {
    float v = (values[i] - m) / d;
    v = v < least ? least : v;
    v = v > most ? most : v;
    q[i] = static_cast<uint8_t>(static_cast<int>(round_to_even(v)) + offset);
  }
}

// The least power of two that is not below a value of at least 0, and that f16 has: 2^-24 at least.
float power_of_two_from(float value) {
  const float power = bits_float((float_bits(value) + 0x7fffffu) & 0x7f800000u);
  return std::max(power, 0x1p-24f);
}

// Block types that dtype auto turns into int8: whoever chose such a file gets the closest step. The others come to int8 only
// where somebody asked for it, which is for speed. As paceline/ops/numpy_pack.py.
bool takes_any_step(SourceType type) {
  return type == SourceType::q5_1 || type == SourceType::q2_k || type == SourceType::q3_k || type == SourceType::q5_k ||
         type == SourceType::q6_k;
}

bool is_power_of_two(uint16_t f16) {
  const int mantissa = f16 & 0x3ff;
  return (f16 & 0x7c00) != 0 ? mantissa == 0 : mantissa != 0 && (mantissa & (mantissa - 1)) == 0;
}

Fault pack_group_int8(const Row& row, int64_t first, int, int lane, uint8_t* strip) {
  uint8_t* block = strip + first / kGroup * int8_block_bytes;
  uint8_t* scale_at = block + 32 * kStrip + 2 * lane;
  if (row.type == SourceType::q8_0) {
    const uint8_t* from = row.data + first / kGroup * 34;
    if (!f16_is_finite(load_u16(from))) return Fault::not_finite;
    for (int quad = 0; quad < 8; ++quad) {
      store_u32(block + (quad * kStrip + lane) * 4, load_u32(from + 2 + 4 * quad) ^ 0x80808080u);    // + 128 each
    }
    store_u16(scale_at, load_u16(from));
    return Fault::none;
  }
  int8_t own[kGroup];
  float own_scale;
  if (decode_int8(row.type, row.data, first, own, &own_scale)) {
    if (!std::isfinite(own_scale)) return Fault::not_finite;
    const uint16_t kept = float_to_f16(own_scale);
    if (!f16_is_finite(kept)) return Fault::scale_too_large;
    for (int quad = 0; quad < 8; ++quad) {
      store_u32(block + (quad * kStrip + lane) * 4, load_u32(reinterpret_cast<uint8_t*>(own) + 4 * quad) ^ 0x80808080u);
    }
    store_u16(scale_at, kept);
    return Fault::none;
  }
  float values[kGroup];
  decode(row.type, row.data, first, kGroup, values);
  const Range range = range_of(values);
  if (!range.is_finite) return Fault::not_finite;
  const float step = std::max(-range.low, range.high) / 127.0f;
  const uint16_t scale = float_to_f16(takes_any_step(row.type) ? step : power_of_two_from(step));
  if (!f16_is_finite(scale)) return Fault::scale_too_large;
  uint8_t q[kGroup];
  quantize(values, 0.0f, f16_to_float(scale), -127.0f, 127.0f, 128, q);
  for (int quad = 0; quad < 8; ++quad) store_u32(block + (quad * kStrip + lane) * 4, load_u32(q + 4 * quad));
  store_u16(scale_at, scale);
  return Fault::none;
}

// quads[q] holds the four values 4q..4q+3, a nibble's value in each byte.
void store_int4(uint8_t* block, int lane, const uint32_t quads[8], uint16_t d, uint16_t m) {
  for (int j = 0; j < 4; ++j) store_u32(block + (j * kStrip + lane) * 4, quads[2 * j] | quads[2 * j + 1] << 4);
  store_u16(block + 16 * kStrip + 2 * lane, d);
  store_u16(block + 18 * kStrip + 2 * lane, m);
}

Fault pack_group_int4(const Row& row, int64_t first, int, int lane, uint8_t* strip) {
  uint8_t* block = strip + first / kGroup * int4_block_bytes;
  uint32_t quads[8] = {};
  if (row.type == SourceType::q4_0 || row.type == SourceType::q4_1) {
    const bool has_min = row.type == SourceType::q4_1;
    const uint8_t* from = row.data + first / kGroup * (has_min ? 20 : 18);
    const uint16_t d = load_u16(from);
    if (!f16_is_finite(d) || (has_min && !f16_is_finite(load_u16(from + 2)))) return Fault::not_finite;
    const uint16_t m = has_min ? load_u16(from + 2) : float_to_f16(-8.0f * f16_to_float(d));
    if (!f16_is_finite(m)) return Fault::scale_too_large;
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = load_u32(from + (has_min ? 4 : 2) + 4 * i);
      quads[i] = word & 0x0f0f0f0fu;
      quads[i + 4] = (word >> 4) & 0x0f0f0f0fu;
    }
    store_int4(block, lane, quads, d, m);
    return Fault::none;
  }
  if (row.type == SourceType::q4_k) {    // its own quants, scale and minimum rounded to f16
    const SubScale sub = q4_k_scale(row.data, first);
    if (!std::isfinite(sub.d) || !std::isfinite(sub.minimum)) return Fault::not_finite;
    const uint16_t d = float_to_f16(sub.d), m = float_to_f16(-sub.minimum);
    if (!f16_is_finite(d) || !f16_is_finite(m)) return Fault::scale_too_large;
    for (int quad = 0; quad < 8; ++quad) quads[quad] = load_u32(sub.nibbles + 4 * quad) >> sub.shift & 0x0f0f0f0fu;
    store_int4(block, lane, quads, d, m);
    return Fault::none;
  }
  return Fault::none;
}

bool keeps_own_int4(SourceType type) {
  return type == SourceType::q4_0 || type == SourceType::q4_1 || type == SourceType::q4_k;
}

// The groups of one strip, the same inputs of 16 outputs, that have no 4-bit quants of their own. Starts from step
// (max - min) / 15 and minimum min, rounded to f16, and takes the line that int4_lines finds where its error is smaller.
class Int4Search {
 public:
  explicit Int4Search(const KernelTable& kernels) : kernels_(kernels) {}

  Fault add(const Row& row, int64_t first, int lane) {
    float values[kGroup];
    decode(row.type, row.data, first, kGroup, values);
    const Range range = range_of(values);
    if (!range.is_finite) return Fault::not_finite;
    d_[lane] = float_to_f16((range.high - range.low) / 15.0f);
    m_[lane] = float_to_f16(range.low);
    if (!f16_is_finite(d_[lane]) || !f16_is_finite(m_[lane])) return Fault::scale_too_large;
    for (int i = 0; i < kGroup; ++i) values_[i * kStrip + lane] = values[i];
    lanes_ |= 1u << lane;
    return Fault::none;
  }

  // Writes what was added since the last call.
  void store(uint8_t* block) {
    if (lanes_ == 0) return;
    float plain_error[kStrip], found_error[kStrip], d[kStrip], m[kStrip];
    uint32_t plain[4 * kStrip], found[4 * kStrip];
    quants(d_, m_, plain, plain_error);
    kernels_.int4_lines(values_, d, m);
    uint16_t half_d[kStrip], half_m[kStrip];
    for (int lane = 0; lane < kStrip; ++lane) {
      half_d[lane] = float_to_f16(d[lane]);
      half_m[lane] = float_to_f16(m[lane]);
    }
    quants(half_d, half_m, found, found_error);
    for (int lane = 0; lane < kStrip; ++lane) {
      if ((lanes_ >> lane & 1) == 0) continue;
      const bool is_better = f16_to_float(d_[lane]) > 0.0f && d[lane] > 0.0f && f16_is_finite(half_d[lane]) &&
                             half_d[lane] != 0 && f16_is_finite(half_m[lane]) && found_error[lane] < plain_error[lane];
      for (int j = 0; j < 4; ++j) {
        store_u32(block + (j * kStrip + lane) * 4, (is_better ? found : plain)[j * kStrip + lane]);
      }
      store_u16(block + 16 * kStrip + 2 * lane, is_better ? half_d[lane] : d_[lane]);
      store_u16(block + 18 * kStrip + 2 * lane, is_better ? half_m[lane] : m_[lane]);
    }
    lanes_ = 0;
  }

 private:
  void quants(const uint16_t* half_d, const uint16_t* half_m, uint32_t* words, float* error) const {
    float d[kStrip], m[kStrip];
    for (int lane = 0; lane < kStrip; ++lane) {
      d[lane] = f16_is_finite(half_d[lane]) ? f16_to_float(half_d[lane]) : 0.0f;
      m[lane] = f16_is_finite(half_m[lane]) ? f16_to_float(half_m[lane]) : 0.0f;
    }
    kernels_.int4_quants(values_, d, m, words, error);
  }

  const KernelTable& kernels_;
  float values_[kGroup * kStrip] = {};
  uint16_t d_[kStrip] = {}, m_[kStrip] = {};
  uint32_t lanes_ = 0;
};

// Padding: value 0 in every form. A zeroed block is that already, except int8, whose zero is stored as 128 (times d = 0).
constexpr GroupPacker kGroupPackers[] = {pack_group_f32, pack_group_bf16, pack_group_int8, pack_group_int4};

int64_t strip_bytes(Form form, int64_t num_inputs) {
  switch (form) {
    case Form::f32: return num_inputs * kStrip * 4;
    case Form::bf16: return num_inputs * kStrip * 2;
    case Form::int8: return num_inputs / kGroup * int8_block_bytes;
    case Form::int4: return num_inputs / kGroup * int4_block_bytes;
  }
  refuse("form: not a packed form");
}

// Calls work(begin, end) on slices of [0, count) from num_threads threads (0: one a core).
template <class Work>
void in_parallel(int64_t count, int64_t slice, int num_threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t at = next.fetch_add(slice); at < count; at = next.fetch_add(slice)) work(at, std::min(count, at + slice));
  };
  const int64_t wanted = num_threads > 0 ? num_threads : std::max(1u, std::thread::hardware_concurrency());
  const int64_t most = std::min<int64_t>((count + slice - 1) / slice, wanted);
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < most; ++i) helpers.emplace_back(run);
  run();
  for (std::thread& helper : helpers) helper.join();
}

std::vector<Row> gather_rows(int64_t num_inputs, const std::vector<Source>& sources) {
  std::vector<Row> rows;
  for (size_t s = 0; s < sources.size(); ++s) {
    const Source& source = sources[s];
    const std::string where = "sources[" + std::to_string(s) + "]";
    const SourceTypeRow& type = source_type_row(source.type, where);
    if (num_inputs % type.block_values != 0 || source.row_bytes != num_inputs / type.block_values * type.block_bytes) {
      refuse(where + ": a row of " + std::to_string(source.row_bytes) + " bytes does not hold num_inputs=" +
             std::to_string(num_inputs) + " values of type " + source.type);
    }
    for (int64_t i = 0; i < source.num_rows; ++i) {
      const int64_t row = source.row_order == nullptr ? i : source.row_order[i];
      if (row < 0 || row >= source.num_rows) refuse(where + ": row_order names row " + std::to_string(row));
      rows.push_back({source.rows + row * source.row_stride, type.type, static_cast<int>(s)});
    }
  }
  if (rows.empty()) refuse("sources: nothing to pack");
  return rows;
}

void check_num_inputs(Form form, int64_t num_inputs) {
  const int64_t multiple = form == Form::f32 ? 1 : form == Form::bf16 ? 2 : kGroup;
  if (num_inputs < 1 || num_inputs % multiple != 0) {
    refuse("num_inputs: form " + std::string(form_name(form)) + " needs a multiple of " + std::to_string(multiple) +
           ", got " + std::to_string(num_inputs));
  }
}

[[noreturn]] void refuse_fault(int source, Fault fault) {
  refuse("sources[" + std::to_string(source) + "]: " +
         (fault == Fault::not_finite ? "a weight is not finite" : "a weight is too large for the packed form"));
}

}  // namespace

const char* form_name(Form form) {
  constexpr const char* names[] = {"f32", "bf16", "int8", "int4"};
  return names[static_cast<int>(form)];
}

Form form_from_name(const std::string& name) {
  for (Form form : {Form::f32, Form::bf16, Form::int8, Form::int4}) {
    if (name == form_name(form)) return form;
  }
  refuse("form: " + name + " is not one of f32, bf16, int8, int4");
}

PackedWeight pack(Form form, int64_t num_inputs, const std::vector<Source>& sources, int num_threads,
                  const KernelTable* kernels) {
  check_num_inputs(form, num_inputs);
  const std::vector<Row> rows = gather_rows(num_inputs, sources);
  const int64_t num_outputs = static_cast<int64_t>(rows.size());
  const int64_t num_strips = (num_outputs + kStrip - 1) / kStrip;
  const int64_t bytes = strip_bytes(form, num_inputs);
  uint8_t* data = nullptr;
  std::shared_ptr<void> memory = allocate_weight_memory(static_cast<size_t>(num_strips * bytes), &data);

  std::atomic<bool> has_other_scales{form != Form::int8};
  // The lowest fault wins, so that the message does not depend on the threads.
  std::atomic<int64_t> first_fault{std::numeric_limits<int64_t>::max()};
  const GroupPacker pack_group = kGroupPackers[static_cast<int>(form)];
  in_parallel(num_strips, std::max<int64_t>(1, (1 << 18) / bytes), num_threads, [&](int64_t begin, int64_t end) {
    Int4Search search(kernels == nullptr ? *available_tables().front() : *kernels);
    for (int64_t strip = begin; strip < end; ++strip) {
      uint8_t* const to = data + strip * bytes;
      const int64_t lanes = std::min<int64_t>(kStrip, num_outputs - strip * kStrip);
      if (lanes < kStrip) std::memset(to, form == Form::int8 ? 128 : 0, static_cast<size_t>(bytes));
      if (lanes < kStrip && form == Form::int8) {
        for (int64_t g = 1; g <= num_inputs / kGroup; ++g) std::memset(to + g * int8_block_bytes - 32, 0, 32);
      }
      for (int64_t first = 0; first < num_inputs; first += kGroup) {
        const int count = static_cast<int>(std::min<int64_t>(kGroup, num_inputs - first));
        for (int lane = 0; lane < lanes; ++lane) {
          const Row& row = rows[static_cast<size_t>(strip * kStrip + lane)];
          const bool is_searched = form == Form::int4 && !keeps_own_int4(row.type);
          const Fault fault = is_searched ? search.add(row, first, lane) : pack_group(row, first, count, lane, to);
          if (fault == Fault::none) continue;
          const int64_t code = int64_t{row.source} * 4 + static_cast<int>(fault);
          int64_t seen = first_fault.load();
          while (code < seen && !first_fault.compare_exchange_weak(seen, code)) {}
        }
        search.store(to + first / kGroup * int4_block_bytes);
        if (has_other_scales.load(std::memory_order_relaxed)) continue;
        const uint8_t* scales = to + first / kGroup * int8_block_bytes + 32 * kStrip;
        for (int lane = 0; lane < lanes; ++lane) {
          if (!is_power_of_two(load_u16(scales + 2 * lane))) has_other_scales = true;
        }
      }
    }
  });
  if (const int64_t code = first_fault.load(); code != std::numeric_limits<int64_t>::max()) {
    refuse_fault(static_cast<int>(code / 4), static_cast<Fault>(code % 4));
  }
  return {{form, num_outputs, num_inputs, num_strips, data, !has_other_scales}, num_strips * bytes, std::move(memory)};
}

void unpack(const Weight& w, float* out) {
  const int64_t bytes = strip_bytes(w.form, w.num_inputs);
  in_parallel(w.num_outputs, 16, 0, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      const uint8_t* strip = w.data + output / kStrip * bytes;
      const int64_t lane = output % kStrip;
      float* row = out + output * w.num_inputs;
      for (int64_t k = 0; k < w.num_inputs; ++k) {
        const int64_t quad = k % kGroup / 4;
        if (w.form == Form::f32) {
          row[k] = bits_float(load_u32(strip + 4 * (k * kStrip + lane)));
        } else if (w.form == Form::bf16) {
          row[k] = bf16_to_float(load_u16(strip + 2 * ((k / 2 * kStrip + lane) * 2 + k % 2)));
        } else if (w.form == Form::int8) {
          const uint8_t* block = strip + k / kGroup * int8_block_bytes;
          const int q = block[(quad * kStrip + lane) * 4 + k % 4] - 128;
          row[k] = f16_to_float(load_u16(block + 32 * kStrip + 2 * lane)) * static_cast<float>(q);
        } else {
          const uint8_t* block = strip + k / kGroup * int4_block_bytes;
          const int q = (block[(quad / 2 * kStrip + lane) * 4 + k % 4] >> (4 * (quad % 2))) & 15;
          const float d = f16_to_float(load_u16(block + 16 * kStrip + 2 * lane));
          row[k] = d * static_cast<float>(q) + f16_to_float(load_u16(block + 18 * kStrip + 2 * lane));
        }
      }
    }
  });
}

}  // namespace paceline
