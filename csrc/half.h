// Scalar 16-bit floats, for packing. Kernels convert 16 lanes at a time in simd.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline {

inline uint32_t float_bits(float a) { uint32_t b; std::memcpy(&b, &a, 4); return b; }
inline float bits_float(uint32_t b) { float a; std::memcpy(&a, &b, 4); return a; }

inline float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

// Nearest even; the caller has refused NaN.
inline uint16_t float_to_bf16(float a) {
  const uint32_t b = float_bits(a);
  return static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// Nearest integer, ties to even, for magnitudes below 2^22; larger ones come back nearly unchanged. (std::nearbyint is a
// library call on the baseline x86-64 this file is built for.)
inline float round_to_even(float a) { return (a + 12582912.0f) - 12582912.0f; }

inline bool f16_is_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
  if (!f16_is_finite(h)) return bits_float(sign | magnitude | 0x7f800000);
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));    // exact, subnormals too
}

// Nearest even; beyond the largest f16 gives infinity.
inline uint16_t float_to_f16(float a) {
  const uint32_t b = float_bits(a);
  const uint32_t sign = (b >> 16) & 0x8000;
  const uint32_t magnitude = b & 0x7fffffff;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);    // rounds to 65536 or more
  if (magnitude < 0x38800000) {
    // A subnormal f16 is a multiple of 2^-24: adding 0.5, whose last bit weighs 2^-24, lets the addition round.
    return static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) >> 13));
}

}  // namespace paceline
