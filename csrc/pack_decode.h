// What a source row is made of: blocks of the file formats -> float. For pack.cpp only. The values are those of
// paceline/ops/dequantize.py to the bit: every product is exact, so a value is rounded at most once.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace paceline {

enum class SourceType {
  f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, mxfp4
};

struct SourceTypeRow { const char* name; SourceType type; int64_t block_values, block_bytes; };

// Block layouts, all little endian. Blocks of 32; nibbles n[16]: low nibbles are values 0..15, high nibbles 16..31:
//   Q4_0    f16 d, n                       value = d * (n - 8)
//   Q4_1    f16 d, f16 m, n                value = d * n + m
//   Q5_0    f16 d, u32 bits, n             value = d * (n + 16 * bit - 16)
//   Q5_1    f16 d, f16 m, u32 bits, n      value = d * (n + 16 * bit) + m
//   Q8_0    f16 d, int8 q[32]              value = d * q
//   IQ4_NL  f16 d, n                       value = d * kIq4Values[n]
//   MXFP4   u8 exponent, n                 value = 2^(exponent - 128) * kMxfp4Values[n]
// Blocks of 256 in 8 groups of 32; group g, or its halves of 16, have scales of their own:
//   Q2_K    u8 scale | min << 4 [16], 2-bit q[64], f16 d, f16 dmin       value = d * scale * q - dmin * min
//   Q3_K    third bits [32], 2-bit q[64], 6-bit scales [12], f16 d       value = d * (scale - 32) * (q + 4 * bit - 4)
//   Q4_K    f16 d, f16 dmin, 6-bit scales and mins [12], 4-bit q[128]    value = d * scale * q - dmin * min
//   Q5_K    likewise, fifth bits [32] before q                           value = d * scale * (q + 16 * bit) - dmin * min
//   Q6_K    4-bit q[128], upper bits [64], int8 scales [16], f16 d       value = d * scale * (q + 16 * upper - 32)
constexpr SourceTypeRow kSourceTypes[] = {
    {"F32", SourceType::f32, 1, 4},       {"F16", SourceType::f16, 1, 2},       {"BF16", SourceType::bf16, 1, 2},
    {"Q4_0", SourceType::q4_0, 32, 18},   {"Q4_1", SourceType::q4_1, 32, 20},   {"Q5_0", SourceType::q5_0, 32, 22},
    {"Q5_1", SourceType::q5_1, 32, 24},   {"Q8_0", SourceType::q8_0, 32, 34},   {"Q2_K", SourceType::q2_k, 256, 84},
    {"Q3_K", SourceType::q3_k, 256, 110}, {"Q4_K", SourceType::q4_k, 256, 144}, {"Q5_K", SourceType::q5_k, 256, 176},
    {"Q6_K", SourceType::q6_k, 256, 210}, {"IQ4_NL", SourceType::iq4_nl, 32, 18}, {"MXFP4", SourceType::mxfp4, 32, 17},
};

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline uint16_t load_u16(const uint8_t* from) { uint16_t h; std::memcpy(&h, from, 2); return h; }
inline uint32_t load_u32(const uint8_t* from) { uint32_t w; std::memcpy(&w, from, 4); return w; }
inline void store_u16(uint8_t* to, uint16_t h) { std::memcpy(to, &h, 2); }
inline void store_u32(uint8_t* to, uint32_t w) { std::memcpy(to, &w, 4); }
inline float load_f16(const uint8_t* from) { return f16_to_float(load_u16(from)); }

inline float mxfp4_scale(uint8_t exponent) {
  return bits_float(exponent < 2 ? 0x00200000u << exponent : static_cast<uint32_t>(exponent - 1) << 23);
}

// Scale and minimum of a group of 32 of Q4_K or Q5_K, and where its low four bits are.
struct SubScale { float d, minimum; const uint8_t* nibbles; int shift; };

inline SubScale six_bit_scale(const uint8_t* block, int group, const uint8_t* quants) {
  const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
  const int g = group % 4;
  const int scale = group < 4 ? first[g] & 63 : (third[g] & 15) | (first[g] >> 6) << 4;
  const int minimum = group < 4 ? second[g] & 63 : third[g] >> 4 | (second[g] >> 6) << 4;
  return {load_f16(block) * static_cast<float>(scale), load_f16(block + 2) * static_cast<float>(minimum),
          quants + group / 2 * 32, group % 2 * 4};
}

inline SubScale q4_k_scale(const uint8_t* row, int64_t first) {
  const uint8_t* block = row + first / 256 * 144;
  return six_bit_scale(block, static_cast<int>(first % 256 / 32), block + 16);
}

// The 32 quants of a group and its scale, where the type is a scale times an 8-bit integer: value = *scale * q[i].
inline bool decode_int8(SourceType type, const uint8_t* row, int64_t first, int8_t* q, float* scale) {
  const int64_t index = first / kGroup;
  if (type == SourceType::q5_0) {
    const uint8_t* block = row + index * 22;
    const uint32_t bits = load_u32(block + 2);
    *scale = load_f16(block);
    for (int i = 0; i < 16; ++i) {
      q[i] = static_cast<int8_t>((block[6 + i] & 15) + static_cast<int>(bits >> i & 1) * 16 - 16);
      q[i + 16] = static_cast<int8_t>((block[6 + i] >> 4) + static_cast<int>(bits >> (i + 16) & 1) * 16 - 16);
    }
    return true;
  }
  if (type != SourceType::iq4_nl && type != SourceType::mxfp4) return false;
  const bool is_iq4 = type == SourceType::iq4_nl;
  const uint8_t* block = row + index * (is_iq4 ? 18 : 17);
  const uint8_t* nibbles = block + (is_iq4 ? 2 : 1);
  const int8_t* values = is_iq4 ? kIq4Values : kMxfp4Values;
  *scale = is_iq4 ? load_f16(block) : mxfp4_scale(block[0]);
  for (int i = 0; i < 16; ++i) {
    q[i] = values[nibbles[i] & 15];
    q[i + 16] = values[nibbles[i] >> 4];
  }
  return true;
}

// The group of 32 that begins at `first` of a block of 256.
inline void decode_k(SourceType type, const uint8_t* row, int64_t first, float* out) {
  const int group = static_cast<int>(first % 256 / 32), half = group / 4, shift = group % 4 * 2;
  const int64_t index = first / 256;
  if (type == SourceType::q4_k || type == SourceType::q5_k) {
    const bool has_fifth = type == SourceType::q5_k;
    const uint8_t* block = row + index * (has_fifth ? 176 : 144);
    const SubScale sub = six_bit_scale(block, group, block + (has_fifth ? 48 : 16));
    for (int i = 0; i < kGroup; ++i) {
      const int fifth = has_fifth ? (block[16 + i] >> group & 1) * 16 : 0;
      out[i] = sub.d * static_cast<float>((sub.nibbles[i] >> sub.shift & 15) + fifth) - sub.minimum;
    }
  } else if (type == SourceType::q2_k) {
    const uint8_t* block = row + index * 84;
    const float d = load_f16(block + 80), dmin = load_f16(block + 82);
    for (int part = 0; part < 2; ++part) {
      const uint8_t packed = block[2 * group + part];
      const float scale = d * static_cast<float>(packed & 15), minimum = dmin * static_cast<float>(packed >> 4);
      const uint8_t* quants = block + 16 + half * 32 + part * 16;
      for (int i = 0; i < 16; ++i) out[part * 16 + i] = scale * static_cast<float>(quants[i] >> shift & 3) - minimum;
    }
  } else if (type == SourceType::q3_k) {
    const uint8_t* block = row + index * 110;
    for (int part = 0; part < 2; ++part) {
      const int s = 2 * group + part;
      const int scale = (block[96 + s % 8] >> (s / 8 * 4) & 15) | (block[104 + s % 4] >> (s / 4 * 2) & 3) << 4;
      const float d = load_f16(block + 108) * static_cast<float>(scale - 32);
      for (int i = 16 * part; i < 16 * part + 16; ++i) {
        out[i] = d * static_cast<float>((block[32 + half * 32 + i] >> shift & 3) + (block[i] >> group & 1) * 4 - 4);
      }
    }
  } else {    // Q6_K
    const uint8_t* block = row + index * 210;
    const uint8_t* low = block + half * 64 + group % 2 * 32;
    const int low_shift = group % 4 / 2 * 4;
    for (int part = 0; part < 2; ++part) {
      const float d = load_f16(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + 2 * group + part]));
      for (int i = 16 * part; i < 16 * part + 16; ++i) {
        const int q = (low[i] >> low_shift & 15) + (block[128 + half * 32 + i] >> shift & 3) * 16 - 32;
        out[i] = d * static_cast<float>(q);
      }
    }
  }
}

// Values [first, first + count) of a row, at most 32 and inside one group.
inline void decode(SourceType type, const uint8_t* row, int64_t first, int count, float* out) {
  const uint8_t* block = nullptr;
  switch (type) {
    case SourceType::f32:
      std::memcpy(out, row + 4 * first, 4 * static_cast<size_t>(count));
      return;
    case SourceType::f16:
      for (int i = 0; i < count; ++i) out[i] = f16_to_float(load_u16(row + 2 * (first + i)));
      return;
    case SourceType::bf16:
      for (int i = 0; i < count; ++i) out[i] = bf16_to_float(load_u16(row + 2 * (first + i)));
      return;
    case SourceType::q8_0: {
      block = row + first / kGroup * 34;
      const float d = load_f16(block);
      for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
      return;
    }
    case SourceType::q4_0:
    case SourceType::q4_1: {
      const bool has_min = type == SourceType::q4_1;
      block = row + first / kGroup * (has_min ? 20 : 18);
      const float d = load_f16(block);
      const float m = has_min ? load_f16(block + 2) : -8.0f * d;
      const uint8_t* nibbles = block + (has_min ? 4 : 2);
      for (int i = 0; i < 16; ++i) {
        out[i] = d * static_cast<float>(nibbles[i] & 15) + m;
        out[i + 16] = d * static_cast<float>(nibbles[i] >> 4) + m;
      }
      return;
    }
    case SourceType::q5_1: {
      block = row + first / kGroup * 24;
      const float d = load_f16(block), m = load_f16(block + 2);
      const uint32_t bits = load_u32(block + 4);
      for (int i = 0; i < 16; ++i) {
        out[i] = d * static_cast<float>((block[8 + i] & 15) + static_cast<int>(bits >> i & 1) * 16) + m;
        out[i + 16] = d * static_cast<float>((block[8 + i] >> 4) + static_cast<int>(bits >> (i + 16) & 1) * 16) + m;
      }
      return;
    }
    case SourceType::q5_0:
    case SourceType::iq4_nl:
    case SourceType::mxfp4: {
      int8_t q[kGroup];
      float scale;
      decode_int8(type, row, first, q, &scale);
      for (int i = 0; i < kGroup; ++i) out[i] = scale * static_cast<float>(q[i]);
      return;
    }
    default:
      decode_k(type, row, first, out);
  }
}

}  // namespace paceline
