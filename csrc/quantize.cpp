// The search for a group's 4-bit scale and minimum, sixteen outputs at a time. For packing, not for steps. Every path gives
// the same bits, those of paceline/ops/numpy_pack.py: sums run from the first input to the last, and nothing is fused.
#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {
namespace {

constexpr float kSteps[] = {-1.0f, -0.75f, -0.5f, -0.25f, 0.0f, 0.25f, 0.5f, 0.75f, 1.0f};

PL_INLINE f32x16 rounded(f32x16 a, float most) { return to_f32(to_i32(min(max(a, set1(0.0f)), set1(most)))); }

struct Group {
  f32x16 low, high, root_mean_square;
};

Group measure(const float* values) {
  f32x16 low = load(values), high = low, squares = set1(0.0f);
  for (int i = 0; i < kGroup; ++i) {
    const f32x16 x = load(values + i * kStrip);
    low = min(x, low);
    high = max(x, high);
    squares = add(squares, mul(x, x));
  }
  float root[kStrip];
  store(root, squares);
  for (float& r : root) r = __builtin_sqrtf(r / static_cast<float>(kGroup));
  return {low, high, load(root)};
}

PL_INLINE f32x16 weight_of(f32x16 x, const Group& group) {
  return add(max(x, sub(set1(0.0f), x)), group.root_mean_square);
}

}  // namespace

void int4_lines(const float* values, float* d, float* m) {
  const Group group = measure(values);
  f32x16 weights[kGroup], above[kGroup], q[kGroup];    // above the lowest value, which keeps the sums' digits
  f32x16 sum_w = set1(0.0f), sum_x = sum_w, best_d = sum_w, best_m = sum_w, least = set1(3.0e38f);
  for (int i = 0; i < kGroup; ++i) {
    const f32x16 x = load(values + i * kStrip);
    weights[i] = weight_of(x, group);
    above[i] = sub(x, group.low);
    sum_w = add(sum_w, weights[i]);
    sum_x = add(sum_x, mul(weights[i], above[i]));
  }
  for (const float step : kSteps) {
    const f32x16 per_value = div(set1(15.0f + step), sub(group.high, group.low));
    f32x16 sum_q = set1(0.0f), sum_qq = sum_q, sum_qx = sum_q, error = sum_q;
    for (int i = 0; i < kGroup; ++i) {
      q[i] = rounded(mul(above[i], per_value), 15.0f);
      const f32x16 wq = mul(weights[i], q[i]);
      sum_q = add(sum_q, wq);
      sum_qq = add(sum_qq, mul(wq, q[i]));
      sum_qx = add(sum_qx, mul(wq, above[i]));
    }
    const f32x16 spread = sub(mul(sum_w, sum_qq), mul(sum_q, sum_q));
    const f32x16 slope = div(sub(mul(sum_w, sum_qx), mul(sum_q, sum_x)), spread);
    const f32x16 start = div(sub(sum_x, mul(slope, sum_q)), sum_w);
    for (int i = 0; i < kGroup; ++i) {
      const f32x16 off = sub(add(mul(slope, q[i]), start), above[i]);
      error = add(error, mul(mul(weights[i], off), off));
    }
    const mask16 is_better = mask_and(less(set1(0.0f), spread), less(error, least));
    best_d = select(is_better, slope, best_d);
    best_m = select(is_better, add(start, group.low), best_m);
    least = select(is_better, error, least);
  }
  store(d, best_d);
  store(m, best_m);
}

void int4_quants(const float* values, const float* d, const float* m, uint32_t* words, float* error) {
  const Group group = measure(values);
  const f32x16 scale = load(d), minimum = load(m);
  const mask16 vanished = equal(scale, set1(0.0f));
  f32x16 sum = set1(0.0f);
  i32x16 quads[kGroup / 4];
  for (int i = 0; i < kGroup; ++i) {
    const f32x16 x = load(values + i * kStrip);
    const f32x16 q = select(vanished, set1(0.0f), rounded(div(sub(x, minimum), scale), 15.0f));
    const f32x16 off = sub(add(mul(scale, q), minimum), x);
    sum = add(sum, mul(mul(weight_of(x, group), off), off));
    const i32x16 whole = to_i32(q);
    i32x16& quad = quads[i / 4];
    switch (i % 4) {
      case 0: quad = whole; break;
      case 1: quad = or_i32(quad, shift_left<8>(whole)); break;
      case 2: quad = or_i32(quad, shift_left<16>(whole)); break;
      default: quad = or_i32(quad, shift_left<24>(whole));
    }
  }
  for (int j = 0; j < 4; ++j) {
    store_i32(words + j * kStrip, or_i32(quads[2 * j], shift_left<4>(quads[2 * j + 1])));
  }
  store(error, sum);
}

}  // namespace PACELINE_ISA
}  // namespace paceline
