// The 16-lane vector on GCC's and Clang's vector extensions: no intrinsics, compiles for any machine.
#pragma once

namespace paceline {
namespace PACELINE_ISA {

typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef uint32_t v4u __attribute__((vector_size(16)));

struct f32x16 { v4f p[4]; };
struct i32x16 { v4i p[4]; };
struct mask16 { v4i p[4]; };    // a lane is 0 or -1

#define PL_EACH for (int i = 0; i < 4; ++i)

// --- floats ---
PL_INLINE f32x16 load(const float* from) { f32x16 r; memcpy(&r, from, 64); return r; }
PL_INLINE void store(float* to, f32x16 a) { memcpy(to, &a, 64); }
PL_INLINE f32x16 set1(float a) { f32x16 r; PL_EACH r.p[i] = v4f{a, a, a, a}; return r; }
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { PL_EACH a.p[i] = a.p[i] + b.p[i]; return a; }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { PL_EACH a.p[i] = a.p[i] - b.p[i]; return a; }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { PL_EACH a.p[i] = a.p[i] * b.p[i]; return a; }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { PL_EACH a.p[i] = a.p[i] / b.p[i]; return a; }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { PL_EACH c.p[i] = a.p[i] * b.p[i] + c.p[i]; return c; }

// --- integers ---
PL_INLINE i32x16 load_i32(const void* from) { i32x16 r; memcpy(&r, from, 64); return r; }
PL_INLINE void store_i32(void* to, i32x16 a) { memcpy(to, &a, 64); }
PL_INLINE i32x16 set1_i32(int32_t a) { i32x16 r; PL_EACH r.p[i] = v4i{a, a, a, a}; return r; }
PL_INLINE i32x16 add_i32(i32x16 a, i32x16 b) { PL_EACH a.p[i] = (v4i)((v4u)a.p[i] + (v4u)b.p[i]); return a; }
PL_INLINE i32x16 sub_i32(i32x16 a, i32x16 b) { PL_EACH a.p[i] = (v4i)((v4u)a.p[i] - (v4u)b.p[i]); return a; }
PL_INLINE i32x16 and_i32(i32x16 a, i32x16 b) { PL_EACH a.p[i] = a.p[i] & b.p[i]; return a; }
PL_INLINE i32x16 or_i32(i32x16 a, i32x16 b) { PL_EACH a.p[i] = a.p[i] | b.p[i]; return a; }
PL_INLINE i32x16 xor_i32(i32x16 a, i32x16 b) { PL_EACH a.p[i] = a.p[i] ^ b.p[i]; return a; }
template <int n> PL_INLINE i32x16 shift_left(i32x16 a) { PL_EACH a.p[i] = (v4i)((v4u)a.p[i] << n); return a; }
template <int n> PL_INLINE i32x16 shift_right(i32x16 a) { PL_EACH a.p[i] = (v4i)((v4u)a.p[i] >> n); return a; }
template <int n> PL_INLINE i32x16 shift_right_signed(i32x16 a) { PL_EACH a.p[i] = a.p[i] >> n; return a; }
PL_INLINE i32x16 max_i32(i32x16 a, i32x16 b) {
  PL_EACH { v4i m = a.p[i] > b.p[i]; a.p[i] = (a.p[i] & m) | (b.p[i] & ~m); }
  return a;
}

PL_INLINE f32x16 as_f32(i32x16 a) { f32x16 r; PL_EACH r.p[i] = (v4f)a.p[i]; return r; }
PL_INLINE i32x16 as_i32(f32x16 a) { i32x16 r; PL_EACH r.p[i] = (v4i)a.p[i]; return r; }
PL_INLINE f32x16 to_f32(i32x16 a) { f32x16 r; PL_EACH r.p[i] = __builtin_convertvector(a.p[i], v4f); return r; }
// Rounds to nearest even. |a| must stay under 2^22: adding 1.5 * 2^23 leaves the rounded value in the low bits.
PL_INLINE i32x16 to_i32(f32x16 a) {
  return sub_i32(as_i32(add(a, set1(12582912.0f))), as_i32(set1(12582912.0f)));
}

// --- masks ---
PL_INLINE mask16 less(f32x16 a, f32x16 b) { mask16 r; PL_EACH r.p[i] = a.p[i] < b.p[i]; return r; }
PL_INLINE mask16 less_equal(f32x16 a, f32x16 b) { mask16 r; PL_EACH r.p[i] = a.p[i] <= b.p[i]; return r; }
PL_INLINE mask16 equal(f32x16 a, f32x16 b) { mask16 r; PL_EACH r.p[i] = a.p[i] == b.p[i]; return r; }
PL_INLINE mask16 equal_i32(i32x16 a, i32x16 b) { mask16 r; PL_EACH r.p[i] = a.p[i] == b.p[i]; return r; }
PL_INLINE mask16 less_i32(i32x16 a, i32x16 b) { mask16 r; PL_EACH r.p[i] = a.p[i] < b.p[i]; return r; }
PL_INLINE mask16 first_lanes(int n) {
  mask16 r;
  PL_EACH r.p[i] = v4i{4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3} < v4i{n, n, n, n};
  return r;
}
PL_INLINE mask16 mask_and(mask16 a, mask16 b) { PL_EACH a.p[i] &= b.p[i]; return a; }
PL_INLINE mask16 mask_or(mask16 a, mask16 b) { PL_EACH a.p[i] |= b.p[i]; return a; }
PL_INLINE mask16 mask_not(mask16 a) { PL_EACH a.p[i] = ~a.p[i]; return a; }
PL_INLINE uint32_t bits(mask16 a) {
  uint32_t r = 0;
  for (int lane = 0; lane < 16; ++lane) r |= (a.p[lane / 4][lane % 4] ? 1u : 0u) << lane;
  return r;
}
PL_INLINE i32x16 select_i32(mask16 m, i32x16 a, i32x16 b) {
  PL_EACH a.p[i] = (a.p[i] & m.p[i]) | (b.p[i] & ~m.p[i]);
  return a;
}
PL_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return as_f32(select_i32(m, as_i32(a), as_i32(b))); }

// b where either is NaN, as the x86 instructions do.
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(less(b, a), a, b); }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { return select(less(a, b), a, b); }

// --- part of a vector: lanes past n read as zero and are not written ---
PL_INLINE f32x16 load_first(const float* from, int n) {
  f32x16 r = set1(0.0f);
  memcpy(&r, from, 4 * static_cast<size_t>(n));
  return r;
}
PL_INLINE void store_first(float* to, f32x16 a, int n) { memcpy(to, &a, 4 * static_cast<size_t>(n)); }

// The low byte of each lane.
PL_INLINE void store_low_i8(int8_t* to, i32x16 a) {
  for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<int8_t>(a.p[lane / 4][lane % 4] & 0xff);
}

// --- 16-bit floats ---
PL_INLINE i32x16 load_u16(const uint16_t* from) {
  i32x16 r;
  for (int lane = 0; lane < 16; ++lane) r.p[lane / 4][lane % 4] = from[lane];
  return r;
}
PL_INLINE void store_low_u16(uint16_t* to, i32x16 a) {
  for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<uint16_t>(a.p[lane / 4][lane % 4]);
}
// The low 16 bits of each lane into the lower or upper half of 16 words; the other halves are not touched.
PL_INLINE void store_halves(void* to, i32x16 a, int upper) {
  uint16_t low[16];
  store_low_u16(low, a);
  uint8_t* at = static_cast<uint8_t*>(to) + 2 * upper;
  for (int lane = 0; lane < 16; ++lane) memcpy(at + 4 * lane, low + lane, 2);
}
PL_INLINE f32x16 load_bf16(const uint16_t* from) { return as_f32(shift_left<16>(load_u16(from))); }
PL_INLINE f32x16 load_f16(const uint16_t* from) {
  // Moves exponent and mantissa to f32's place and lets one exact product by 2^112 fix the exponent, subnormals included;
  // an exponent of all ones must stay all ones.
  i32x16 h = load_u16(from);
  i32x16 magnitude = shift_left<13>(and_i32(h, set1_i32(0x7fff)));
  i32x16 scaled = as_i32(mul(as_f32(magnitude), set1(0x1p112f)));
  i32x16 special = or_i32(magnitude, set1_i32(0x7f800000));
  i32x16 value = select_i32(less_i32(magnitude, set1_i32(0x0f800000)), scaled, special);
  return as_f32(or_i32(value, shift_left<16>(and_i32(h, set1_i32(0x8000)))));
}

// --- dot products; w holds 16 x 4 u8 or 16 x 2 bf16 ---
PL_INLINE i32x16 load_pair(const uint16_t* two) { int32_t q; memcpy(&q, two, 4); return set1_i32(q); }

// A group's integer dot product of w + 128 with q, started at -128 * (sum of q), held in floats: every partial sum is below 32 * 255 * 128 < 2^24, so it is exact, and any
// machine multiplies floats by the vector.
struct group_dot { f32x16 sum; };
typedef i32x16 quad8;    // what a quad of int8 weights is kept as while rows pass by
PL_INLINE quad8 load_quad8(const void* from) { return load_i32(from); }
PL_INLINE group_dot start_dot(const int32_t* start) { return {set1(static_cast<float>(*start))}; }
PL_INLINE group_dot add_quad(group_dot acc, i32x16 w, const int8_t* four) {
  const i32x16 byte = set1_i32(0xff);
  acc.sum = fma(to_f32(and_i32(w, byte)), set1(static_cast<float>(four[0])), acc.sum);
  acc.sum = fma(to_f32(and_i32(shift_right<8>(w), byte)), set1(static_cast<float>(four[1])), acc.sum);
  acc.sum = fma(to_f32(and_i32(shift_right<16>(w), byte)), set1(static_cast<float>(four[2])), acc.sum);
  acc.sum = fma(to_f32(shift_right<24>(w)), set1(static_cast<float>(four[3])), acc.sum);
  return acc;
}
PL_INLINE f32x16 finish_dot(group_dot acc) { return acc.sum; }
// The same for weights of at most 15.
typedef group_dot group_dot4;
PL_INLINE group_dot4 start_dot4() { return {set1(0.0f)}; }
PL_INLINE group_dot4 add_quad4(group_dot4 acc, i32x16 w, const int8_t* four) { return add_quad(acc, w, four); }
PL_INLINE f32x16 finish_dot4(group_dot4 acc) { return acc.sum; }

PL_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
PL_INLINE void prefetch_to_write(const void* at) { __builtin_prefetch(at, 1, 3); }
PL_INLINE void prefetch_l2(const void* at) { __builtin_prefetch(at, 0, 2); }

}  // namespace PACELINE_ISA
}  // namespace paceline
