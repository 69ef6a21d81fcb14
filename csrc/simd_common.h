// What the three vector headers need not write themselves: bf16 rounding, reductions in a fixed order, exp.
#pragma once

namespace paceline {
namespace PACELINE_ISA {

PL_INLINE f32x16 zero() { return set1(0.0f); }

// Rounds to nearest even into the low 16 bits of each lane; a NaN stays a NaN. Subnormals are kept (vcvtneps2bf16 would
// flush them), so every path writes the same bits.
PL_INLINE i32x16 to_bf16(f32x16 a) {
  const i32x16 raw = as_i32(a);
  const i32x16 odd = and_i32(shift_right<16>(raw), set1_i32(1));
  const i32x16 rounded = shift_right<16>(add_i32(add_i32(raw, set1_i32(0x7fff)), odd));
  const i32x16 quiet = or_i32(shift_right<16>(raw), set1_i32(0x0040));
  return select_i32(equal(a, a), rounded, quiet);
}
PL_INLINE void store_bf16(uint16_t* to, f32x16 a) { store_low_u16(to, to_bf16(a)); }
PL_INLINE f32x16 round_bf16(f32x16 a) { return as_f32(shift_left<16>(to_bf16(a))); }

#if !defined(PACELINE_ISA_AVX512)
// Two bf16 products a lane, first the even then the odd one.
PL_INLINE f32x16 dot_pairs(f32x16 acc, i32x16 w, i32x16 x) {
  acc = fma(as_f32(shift_left<16>(w)), as_f32(shift_left<16>(x)), acc);
  const i32x16 high = set1_i32(static_cast<int32_t>(0xffff0000u));
  return fma(as_f32(and_i32(w, high)), as_f32(and_i32(x, high)), acc);
}
PL_INLINE f32x16 dot_pairs_at(f32x16 acc, i32x16 w, const uint16_t* two) { return dot_pairs(acc, w, load_pair(two)); }
PL_INLINE f32x16 fma_at(f32x16 acc, f32x16 w, const float* one) { return fma(w, set1(*one), acc); }
#endif

// Reductions fold lanes i and i + 8, then i + 4, i + 2, i + 1: one order on every path. reduce_max's lanes must not be NaN.
#if defined(PACELINE_ISA_PORTABLE)
PL_INLINE float reduce_add(f32x16 a) {
  const v4f s = (a.p[0] + a.p[2]) + (a.p[1] + a.p[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
PL_INLINE float reduce_max(f32x16 a) {
  float s[16];
  store(s, a);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
  }
  return s[0];
}
PL_INLINE int32_t reduce_add_i32(i32x16 a) {
  const v4i s = (a.p[0] + a.p[1]) + (a.p[2] + a.p[3]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
PL_INLINE int32_t reduce_max_i32(i32x16 a) {
  int32_t s[16];
  store_i32(s, a);
  int32_t most = s[0];
  for (int i = 1; i < 16; ++i) most = s[i] > most ? s[i] : most;
  return most;
}
#else
#if defined(PACELINE_ISA_AVX512)
PL_INLINE __m256 half_of(f32x16 a, int upper) {
  return upper ? _mm512_extractf32x8_ps(a.v, 1) : _mm512_castps512_ps256(a.v);
}
PL_INLINE __m256i half_of(i32x16 a, int upper) {
  return upper ? _mm512_extracti32x8_epi32(a.v, 1) : _mm512_castsi512_si256(a.v);
}
#else
PL_INLINE __m256 half_of(f32x16 a, int upper) { return upper ? a.hi : a.lo; }
PL_INLINE __m256i half_of(i32x16 a, int upper) { return upper ? a.hi : a.lo; }
#endif
PL_INLINE float reduce_add(f32x16 a) {
  const __m256 eight = _mm256_add_ps(half_of(a, 0), half_of(a, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
PL_INLINE float reduce_max(f32x16 a) {
  const __m256 eight = _mm256_max_ps(half_of(a, 0), half_of(a, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
PL_INLINE int32_t reduce_add_i32(i32x16 a) {
  const __m256i eight = _mm256_add_epi32(half_of(a, 0), half_of(a, 1));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
PL_INLINE int32_t reduce_max_i32(i32x16 a) {
  const __m256i eight = _mm256_max_epi32(half_of(a, 0), half_of(a, 1));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
#endif

// e^a within one unit in the last place. Results below the smallest normal are 0 (so e^-inf is 0), above the largest float
// they are inf; a NaN stays a NaN.
PL_INLINE f32x16 exp(f32x16 a) {
  const f32x16 low = set1(-87.33654f);
  const f32x16 high = set1(88.72283f);
  const f32x16 inside = min(max(a, low), high);     // a NaN becomes -87.3 here and is put back below
  const i32x16 n = to_i32(mul(inside, set1(1.44269504f)));
  const f32x16 nf = to_f32(n);
  // ln 2 in two parts; the first has 15 significant bits, so n * part is exact without fma too.
  f32x16 r = fma(nf, set1(-0.69314575f), inside);
  r = fma(nf, set1(-1.4286068e-06f), r);
  // e^r = 1 + r + r^2 p(r) for |r| <= 0.3466; p fitted for the smallest largest relative error (2^-34).
  f32x16 p = set1(0.00019790344f);
  p = fma(p, r, set1(0.0013944657f));
  p = fma(p, r, set1(0.008333497f));
  p = fma(p, r, set1(0.041666295f));
  p = fma(p, r, set1(0.16666666f));
  p = fma(p, r, set1(0.5f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  // 2^n in two factors: n = 128 has no float of its own.
  const i32x16 half = shift_right_signed<1>(n);
  const i32x16 rest = sub_i32(n, half);
  const f32x16 scale_half = as_f32(shift_left<23>(add_i32(half, set1_i32(127))));
  const f32x16 scale_rest = as_f32(shift_left<23>(add_i32(rest, set1_i32(127))));
  f32x16 result = mul(mul(p, scale_half), scale_rest);
  result = select(less(a, low), zero(), result);
  result = select(less(high, a), as_f32(set1_i32(0x7f800000)), result);
  return select(equal(a, a), result, a);
}

// tanh within three units in the last place; a NaN stays a NaN. Near 0 an odd polynomial (Cephes), elsewhere from e^-2|a|.
PL_INLINE f32x16 tanh(f32x16 a) {
  const i32x16 sign = set1_i32(static_cast<int32_t>(0x80000000u));
  const f32x16 magnitude = as_f32(and_i32(as_i32(a), set1_i32(0x7fffffff)));
  const f32x16 e = exp(mul(magnitude, set1(-2.0f)));
  const f32x16 far = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  const f32x16 square = mul(a, a);
  f32x16 p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const f32x16 near = fma(mul(p, square), a, a);
  return select(less(magnitude, set1(0.625f)), near, as_f32(or_i32(as_i32(far), and_i32(as_i32(a), sign))));
}

}  // namespace PACELINE_ISA
}  // namespace paceline
