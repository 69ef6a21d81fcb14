// The 16-lane vector as two 256-bit registers (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

namespace paceline {
namespace PACELINE_ISA {

struct f32x16 { __m256 lo, hi; };
struct i32x16 { __m256i lo, hi; };
struct mask16 { __m256 lo, hi; };    // a lane is all zeros or all ones

// --- floats ---
PL_INLINE f32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
PL_INLINE void store(float* to, f32x16 a) { _mm256_storeu_ps(to, a.lo); _mm256_storeu_ps(to + 8, a.hi); }
PL_INLINE f32x16 set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// b where either is NaN.
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

// --- integers ---
PL_INLINE i32x16 load_i32(const void* from) {
  const __m256i* p = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)};
}
PL_INLINE void store_i32(void* to, i32x16 a) {
  __m256i* p = static_cast<__m256i*>(to);
  _mm256_storeu_si256(p, a.lo);
  _mm256_storeu_si256(p + 1, a.hi);
}
PL_INLINE i32x16 set1_i32(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
PL_INLINE i32x16 add_i32(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
PL_INLINE i32x16 sub_i32(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
PL_INLINE i32x16 and_i32(i32x16 a, i32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
PL_INLINE i32x16 or_i32(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
PL_INLINE i32x16 xor_i32(i32x16 a, i32x16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int n> PL_INLINE i32x16 shift_left(i32x16 a) {
  return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
template <int n> PL_INLINE i32x16 shift_right(i32x16 a) {
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
template <int n> PL_INLINE i32x16 shift_right_signed(i32x16 a) {
  return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)};
}
PL_INLINE i32x16 max_i32(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }

PL_INLINE f32x16 as_f32(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
PL_INLINE i32x16 as_i32(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
PL_INLINE f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// Rounds to nearest even. |a| must stay under 2^22, the limit of the portable path.
PL_INLINE i32x16 to_i32(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

// --- masks ---
PL_INLINE mask16 less(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
PL_INLINE mask16 less_equal(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
}
PL_INLINE mask16 equal(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
PL_INLINE mask16 equal_i32(i32x16 a, i32x16 b) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}
PL_INLINE mask16 less_i32(i32x16 a, i32x16 b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
PL_INLINE mask16 first_lanes(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i count = _mm256_set1_epi32(n);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
PL_INLINE mask16 mask_and(mask16 a, mask16 b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
PL_INLINE mask16 mask_or(mask16 a, mask16 b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
PL_INLINE mask16 mask_not(mask16 a) {
  const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return {_mm256_xor_ps(a.lo, ones), _mm256_xor_ps(a.hi, ones)};
}
PL_INLINE uint32_t bits(mask16 a) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a.lo)) | static_cast<uint32_t>(_mm256_movemask_ps(a.hi)) << 8;
}
PL_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
PL_INLINE i32x16 select_i32(mask16 m, i32x16 a, i32x16 b) { return as_i32(select(m, as_f32(a), as_f32(b))); }

// --- part of a vector: lanes past n read as zero and are not written ---
PL_INLINE f32x16 load_first(const float* from, int n) {
  const mask16 m = first_lanes(n);
  return {_mm256_maskload_ps(from, _mm256_castps_si256(m.lo)), _mm256_maskload_ps(from + 8, _mm256_castps_si256(m.hi))};
}
PL_INLINE void store_first(float* to, f32x16 a, int n) {
  const mask16 m = first_lanes(n);
  _mm256_maskstore_ps(to, _mm256_castps_si256(m.lo), a.lo);
  _mm256_maskstore_ps(to + 8, _mm256_castps_si256(m.hi), a.hi);
}

// The low byte of each lane.
PL_INLINE void store_low_i8(int8_t* to, i32x16 a) {
  const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                        0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i lo = _mm256_shuffle_epi8(a.lo, pick), hi = _mm256_shuffle_epi8(a.hi, pick);
  const __m256i both = _mm256_unpacklo_epi32(lo, hi);    // dwords: lanes 0-3, 8-11, then 4-7, 12-15 in the upper half
  const __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), joined);
}

// --- 16-bit floats ---
PL_INLINE i32x16 load_u16(const uint16_t* from) {
  const __m128i* p = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), _mm256_cvtepu16_epi32(_mm_loadu_si128(p + 1))};
}
PL_INLINE void store_low_u16(uint16_t* to, i32x16 a) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
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
  const __m128i* p = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
}

// --- dot products; w holds 16 x 4 u8 or 16 x 2 bf16 ---
PL_INLINE i32x16 load_pair(const uint16_t* two) { int32_t q; memcpy(&q, two, 4); return set1_i32(q); }
PL_INLINE __m256i load_quad(const int8_t* four) { int32_t q; memcpy(&q, four, 4); return _mm256_set1_epi32(q); }

// Sums in inline assembly: sums of integers may be taken in any order, so g++ 12 computes all products of a group first,
// spills them and then adds them up in a tree.
PL_INLINE __m256i then_add_32(__m256i sum, __m256i a) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(a)); return sum; }
PL_INLINE __m256i then_add_16(__m256i sum, __m256i a) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(a)); return sum; }

// A group's integer dot product of w with q. The weights come as w + 128; vpmaddubsw, which takes an unsigned and a signed
// operand, gets |w| and q with w's sign: a pair's sum stays at 2 * 128 * 127 < 2^15, where (w + 128) * q would saturate.
// A quad is kept as its address: sixteen registers hold four rows' sums and one quad at a time.
typedef i32x16 group_dot;
struct quad8 { const __m256i* at; };
PL_INLINE quad8 load_quad8(const void* from) { return {static_cast<const __m256i*>(from)}; }
PL_INLINE group_dot start_dot(const int32_t*) { return set1_i32(0); }
PL_INLINE __m256i add_quad_half(__m256i acc, __m256i stored, __m256i x) {
  const __m256i w = _mm256_xor_si256(stored, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return then_add_32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
PL_INLINE group_dot add_quad(group_dot acc, quad8 w, const int8_t* four) {
  const __m256i x = load_quad(four);
  return {add_quad_half(acc.lo, _mm256_loadu_si256(w.at), x), add_quad_half(acc.hi, _mm256_loadu_si256(w.at + 1), x)};
}
PL_INLINE f32x16 finish_dot(group_dot acc) { return to_f32(acc); }

// The same for weights of at most 15: a group's sum in 16-bit halves stays below 8 * 2 * 15 * 128 < 2^15.
struct group_dot4 { __m256i lo, hi; };
PL_INLINE group_dot4 start_dot4() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PL_INLINE group_dot4 add_quad4(group_dot4 acc, i32x16 w, const int8_t* four) {
  const __m256i x = load_quad(four);
  return {then_add_16(acc.lo, _mm256_maddubs_epi16(w.lo, x)), then_add_16(acc.hi, _mm256_maddubs_epi16(w.hi, x))};
}
PL_INLINE f32x16 finish_dot4(group_dot4 acc) {
  const __m256i ones = _mm256_set1_epi16(1);
  return to_f32(i32x16{_mm256_madd_epi16(acc.lo, ones), _mm256_madd_epi16(acc.hi, ones)});
}

PL_INLINE void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }
PL_INLINE void prefetch_to_write(const void* at) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at))); }
PL_INLINE void prefetch_l2(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1); }

}  // namespace PACELINE_ISA
}  // namespace paceline
