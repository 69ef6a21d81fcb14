// The 16-lane vector as one 512-bit register (AVX-512 F, BW, DQ, VL, VNNI, BF16).
#pragma once

#include <immintrin.h>

namespace paceline {
namespace PACELINE_ISA {

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct mask16 { __mmask16 v; };

// --- floats ---
PL_INLINE f32x16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
PL_INLINE void store(float* to, f32x16 a) { _mm512_storeu_ps(to, a.v); }
PL_INLINE f32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
PL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PL_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where either is NaN.
PL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }

// --- integers ---
PL_INLINE i32x16 load_i32(const void* from) { return {_mm512_loadu_si512(from)}; }
PL_INLINE void store_i32(void* to, i32x16 a) { _mm512_storeu_si512(to, a.v); }
PL_INLINE i32x16 set1_i32(int32_t a) { return {_mm512_set1_epi32(a)}; }
PL_INLINE i32x16 add_i32(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PL_INLINE i32x16 sub_i32(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PL_INLINE i32x16 and_i32(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
PL_INLINE i32x16 or_i32(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
PL_INLINE i32x16 xor_i32(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n> PL_INLINE i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> PL_INLINE i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, n)}; }
template <int n> PL_INLINE i32x16 shift_right_signed(i32x16 a) { return {_mm512_srai_epi32(a.v, n)}; }
PL_INLINE i32x16 max_i32(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }

PL_INLINE f32x16 as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
PL_INLINE i32x16 as_i32(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
PL_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Rounds to nearest even. |a| must stay under 2^22, the limit of the portable path.
PL_INLINE i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }

// --- masks ---
PL_INLINE mask16 less(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PL_INLINE mask16 less_equal(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
PL_INLINE mask16 equal(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
PL_INLINE mask16 equal_i32(i32x16 a, i32x16 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
PL_INLINE mask16 less_i32(i32x16 a, i32x16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
PL_INLINE mask16 first_lanes(int n) {
  return {static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u)};
}
PL_INLINE mask16 mask_and(mask16 a, mask16 b) { return {static_cast<__mmask16>(a.v & b.v)}; }
PL_INLINE mask16 mask_or(mask16 a, mask16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
PL_INLINE mask16 mask_not(mask16 a) { return {static_cast<__mmask16>(~a.v)}; }
PL_INLINE uint32_t bits(mask16 a) { return a.v; }
PL_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
PL_INLINE i32x16 select_i32(mask16 m, i32x16 a, i32x16 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }

// --- part of a vector: lanes past n read as zero and are not written ---
PL_INLINE f32x16 load_first(const float* from, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n).v, from)}; }
PL_INLINE void store_first(float* to, f32x16 a, int n) { _mm512_mask_storeu_ps(to, first_lanes(n).v, a.v); }

// The low byte of each lane.
PL_INLINE void store_low_i8(int8_t* to, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a.v));
}

// --- 16-bit floats ---
PL_INLINE i32x16 load_u16(const uint16_t* from) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
PL_INLINE void store_low_u16(uint16_t* to, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(a.v));
}
// The low 16 bits of each lane into the lower or upper half of 16 words; the other halves are not touched.
PL_INLINE void store_halves(void* to, i32x16 a, int upper) {
  const __m512i v = upper ? _mm512_slli_epi32(a.v, 16) : a.v;
  _mm512_mask_storeu_epi16(to, upper ? 0xaaaaaaaau : 0x55555555u, v);
}
PL_INLINE f32x16 load_bf16(const uint16_t* from) { return as_f32(shift_left<16>(load_u16(from))); }
PL_INLINE f32x16 load_f16(const uint16_t* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}

// --- dot products; w holds 16 x 4 u8 or 16 x 2 bf16 ---
// The _at forms broadcast their right operand from memory inside the instruction. They are inline assembly because
// g++ 12, given the intrinsics and an array of accumulators, spills the accumulators and does not fold the broadcast:
// less than half the speed.
typedef int32_t any_i32 __attribute__((may_alias));
typedef float any_f32 __attribute__((may_alias));

PL_INLINE i32x16 load_pair(const uint16_t* two) { int32_t q; memcpy(&q, two, 4); return set1_i32(q); }

PL_INLINE f32x16 dot_pairs(f32x16 acc, i32x16 w, i32x16 x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}
PL_INLINE f32x16 dot_pairs_at(f32x16 acc, i32x16 w, const uint16_t* two) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0"
      : "+v"(acc.v)
      : "v"(w.v), "m"(*reinterpret_cast<const any_i32*>(two)));
  return acc;
}
PL_INLINE f32x16 fma_at(f32x16 acc, f32x16 w, const float* one) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0"
      : "+v"(acc.v)
      : "v"(w.v), "m"(*reinterpret_cast<const any_f32*>(one)));
  return acc;
}

// A group's integer dot product of w + 128 with q, from its start on.
typedef i32x16 group_dot;
typedef i32x16 quad8;    // what a quad of int8 weights is kept as while rows pass by
PL_INLINE quad8 load_quad8(const void* from) { return load_i32(from); }
PL_INLINE group_dot start_dot(const int32_t* start) { return set1_i32(*start); }
PL_INLINE group_dot add_quad(group_dot acc, i32x16 w, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc.v)
      : "v"(w.v), "m"(*reinterpret_cast<const any_i32*>(four)));
  return acc;
}
PL_INLINE f32x16 finish_dot(group_dot acc) { return to_f32(acc); }
// The same for weights of at most 15 (which other machines add up more cheaply).
typedef group_dot group_dot4;
PL_INLINE group_dot4 start_dot4() { return set1_i32(0); }
PL_INLINE group_dot4 add_quad4(group_dot4 acc, i32x16 w, const int8_t* four) { return add_quad(acc, w, four); }
PL_INLINE f32x16 finish_dot4(group_dot4 acc) { return to_f32(acc); }

PL_INLINE void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }
PL_INLINE void prefetch_to_write(const void* at) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at))); }
PL_INLINE void prefetch_l2(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1); }

}  // namespace PACELINE_ISA
}  // namespace paceline
