// Verbs that touch a row at a time: embed, norms, activations, add, scale, softcap, routes to experts and what comes back
// from them, and prepare (a linear's input rows).
#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {
namespace {

typedef float any_f32 __attribute__((may_alias));

float lane_of(f32x16 a, int lane) {
  float all[16];
  store(all, a);
  return all[lane];
}

void embed_f32(const uint8_t* strip, int lane, int64_t num_inputs, float* out) {
  const any_f32* from = reinterpret_cast<const any_f32*>(strip) + lane;
  for (int64_t k = 0; k < num_inputs; ++k) out[k] = from[k * kStrip];
}

void embed_bf16(const uint8_t* strip, int lane, int64_t num_inputs, float* out) {
  for (int64_t k = 0; k < num_inputs; k += 2) {
    uint32_t pair;
    memcpy(&pair, strip + (k / 2 * kStrip + lane) * 4, 4);
    const uint32_t two[2] = {pair << 16, pair & 0xffff0000u};
    memcpy(out + k, two, 8);
  }
}

// d * q is exact in f32, so the sum below rounds once, as the reference's does.
void embed_int8(const uint8_t* strip, int lane, int64_t num_inputs, float* out) {
  for (int64_t k = 0; k < num_inputs; k += kGroup, strip += int8_block_bytes) {
    const float d = lane_of(load_f16(reinterpret_cast<const uint16_t*>(strip + 32 * kStrip)), lane);
    for (int i = 0; i < kGroup; ++i) {
      out[k + i] = d * static_cast<float>(strip[(i / 4 * kStrip + lane) * 4 + i % 4] - 128);
    }
  }
}

void embed_int4(const uint8_t* strip, int lane, int64_t num_inputs, float* out) {
  for (int64_t k = 0; k < num_inputs; k += kGroup, strip += int4_block_bytes) {
    const float d = lane_of(load_f16(reinterpret_cast<const uint16_t*>(strip + 16 * kStrip)), lane);
    const float m = lane_of(load_f16(reinterpret_cast<const uint16_t*>(strip + 18 * kStrip)), lane);
    for (int i = 0; i < kGroup; ++i) {
      const int two = strip[(i / 8 * kStrip + lane) * 4 + i % 4];
      out[k + i] = d * static_cast<float>(i / 4 % 2 == 0 ? two & 15 : two >> 4) + m;
    }
  }
}

// Scales a group of 32 so that its largest magnitude becomes 127.
void quantize_group(const float* x, int8_t* q, float* scale, float* scaled_sum, int32_t* start) {
  const f32x16 a = load(x), b = load(x + 16);
  // Magnitudes compare as integers: a NaN or an infinity wins, makes the scale non-finite and so reaches the output.
  const i32x16 magnitude = set1_i32(0x7fffffff);
  const i32x16 most = max_i32(and_i32(as_i32(a), magnitude), and_i32(as_i32(b), magnitude));
  const int32_t amax_bits = reduce_max_i32(most);
  float amax;
  memcpy(&amax, &amax_bits, 4);
  const float s = amax / 127.0f;
  *scale = s;
  if (s == 0.0f) {
    memset(q, 0, kGroup);
    *scaled_sum = 0.0f;
    *start = 0;
    return;
  }
  // The limit matters only where s is subnormal and its own rounding would push a quotient past 127.
  const f32x16 limit = set1(127.0f), negative_limit = set1(-127.0f), divisor = set1(s);
  const i32x16 qa = to_i32(max(min(div(a, divisor), limit), negative_limit));
  const i32x16 qb = to_i32(max(min(div(b, divisor), limit), negative_limit));
  store_low_i8(q, qa);
  store_low_i8(q + 16, qb);
  const int32_t total = reduce_add_i32(add_i32(qa, qb));
  *start = -128 * total;
  *scaled_sum = s * static_cast<float>(total);
}

}  // namespace

void embed(const Weight& w, const int32_t* token_ids, float* out, int64_t first, int64_t last) {
  const int64_t groups = w.num_inputs / kGroup;
  for (int64_t row = first; row < last; ++row) {
    const int64_t strip = token_ids[row] / kStrip;
    const int lane = token_ids[row] % kStrip;
    float* to = out + row * w.num_inputs;
    switch (w.form) {
      case Form::f32: embed_f32(w.data + strip * w.num_inputs * kStrip * 4, lane, w.num_inputs, to); break;
      case Form::bf16: embed_bf16(w.data + strip * w.num_inputs * kStrip * 2, lane, w.num_inputs, to); break;
      case Form::int8: embed_int8(w.data + strip * groups * int8_block_bytes, lane, w.num_inputs, to); break;
      case Form::int4: embed_int4(w.data + strip * groups * int4_block_bytes, lane, w.num_inputs, to); break;
    }
  }
}

namespace {

int lanes_at(int64_t i, int64_t width) { return static_cast<int>(width - i < 16 ? width - i : 16); }

// Applies f to every vector of [begin, end) of x, and to what is left of the last one.
template <class F> PL_INLINE void update(float* x, int64_t begin, int64_t end, F f) {
  const int64_t whole = begin + (end - begin) / 16 * 16;
  for (int64_t i = begin; i < whole; i += 16) store(x + i, f(load(x + i)));
  const int rest = static_cast<int>(end - whole);
  if (rest > 0) store_first(x + whole, f(load_first(x + whole, rest)), rest);
}

// One row; out may be x.
void rms_norm_row(const float* from, const float* weight, float eps, float* to, int64_t width) {
  const int64_t whole = width / 16 * 16;
  const int rest = static_cast<int>(width - whole);
  f32x16 squares = zero();
  for (int64_t i = 0; i < whole; i += 16) {
    const f32x16 v = load(from + i);
    squares = fma(v, v, squares);
  }
  if (rest > 0) {
    const f32x16 v = load_first(from + whole, rest);
    squares = fma(v, v, squares);
  }
  const f32x16 factor = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < whole; i += 16) store(to + i, mul(mul(load(from + i), factor), load(weight + i)));
  if (rest > 0) {
    store_first(to + whole, mul(mul(load_first(from + whole, rest), factor), load_first(weight + whole, rest)), rest);
  }
}

// Lanes past a row's end must add nothing to the squares, so they are masked after the mean is taken off.
void layer_norm_row(const float* from, const float* weight, const float* bias, float eps, float* to, int64_t width) {
  f32x16 sum = zero();
  for (int64_t i = 0; i < width; i += 16) sum = add(sum, load_first(from + i, lanes_at(i, width)));
  const f32x16 mean = set1(reduce_add(sum) / static_cast<float>(width));
  f32x16 squares = zero();
  for (int64_t i = 0; i < width; i += 16) {
    const int n = lanes_at(i, width);
    const f32x16 v = select(first_lanes(n), sub(load_first(from + i, n), mean), zero());
    squares = fma(v, v, squares);
  }
  const f32x16 factor = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const int n = lanes_at(i, width);
    const f32x16 normed = mul(mul(sub(load_first(from + i, n), mean), factor), load_first(weight + i, n));
    store_first(to + i, bias == nullptr ? normed : add(normed, load_first(bias + i, n)), n);
  }
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t width, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) rms_norm_row(x + row * width, weight, eps, out + row * width, width);
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* out, int64_t width, int64_t first,
                int64_t last) {
  for (int64_t row = first; row < last; ++row) layer_norm_row(x + row * width, weight, bias, eps, out + row * width, width);
}

void rms_norm_slices(float* x, const float* weight, float eps, int64_t stride, int64_t first_column, int64_t width,
                     int64_t num_slices, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    float* at = x + row * stride + first_column;
    for (int64_t slice = 0; slice < num_slices; ++slice, at += width) rms_norm_row(at, weight, eps, at, width);
  }
}

// silu(g) = g / (1 + e^-g): e^-g may be infinite, which gives the right 0.
PL_INLINE f32x16 silu_times(f32x16 gate, f32x16 up) {
  const f32x16 negative = as_f32(xor_i32(as_i32(gate), set1_i32(static_cast<int32_t>(0x80000000u))));
  return mul(div(gate, add(set1(1.0f), exp(negative))), up);
}

// gelu_tanh(g) = g (1 + tanh u) / 2 = g / (1 + e^-2u) with u = sqrt(2 / pi) (g + 0.044715 g^3).
PL_INLINE f32x16 gelu_tanh_times(f32x16 gate, f32x16 up) {
  const f32x16 cubic = fma(mul(gate, gate), set1(0.044715f), set1(1.0f));
  const f32x16 exponent = mul(mul(gate, cubic), set1(-1.5957691216057308f));
  return mul(div(gate, add(set1(1.0f), exp(exponent))), up);
}

template <class F>
PL_INLINE void gated(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last, F f) {
  const int64_t whole = inner / 16 * 16;
  const int rest = static_cast<int>(inner - whole);
  for (int64_t row = first; row < last; ++row) {
    const float* gate = gate_up + row * 2 * inner;
    const float* up = gate + inner;
    float* to = out + row * inner;
    for (int64_t i = 0; i < whole; i += 16) store(to + i, f(load(gate + i), load(up + i)));
    if (rest > 0) store_first(to + whole, f(load_first(gate + whole, rest), load_first(up + whole, rest)), rest);
  }
}

void silu_mul(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last) {
  gated(gate_up, out, inner, first, last, [](f32x16 gate, f32x16 up) { return silu_times(gate, up); });
}

void gelu_tanh_mul(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last) {
  gated(gate_up, out, inner, first, last, [](f32x16 gate, f32x16 up) { return gelu_tanh_times(gate, up); });
}

void add_rows(float* x, const float* y, float scale, int64_t width, int64_t first, int64_t last) {
  const int64_t begin = first * width, end = last * width;
  const int64_t whole = begin + (end - begin) / 16 * 16;
  const f32x16 factor = set1(scale);    // 1 changes no bit
  for (int64_t i = begin; i < whole; i += 16) store(x + i, add(load(x + i), mul(load(y + i), factor)));
  const int rest = static_cast<int>(end - whole);
  if (rest > 0) {
    store_first(x + whole, add(load_first(x + whole, rest), mul(load_first(y + whole, rest), factor)), rest);
  }
}

void add_gated(float* x, const float* y, const float* gate, int64_t width, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const f32x16 factor = div(set1(1.0f), add(set1(1.0f), exp(set1(-gate[row]))));    // e^-g may be infinite: 0
    for (int64_t i = 0; i < width; i += 16) {
      const int n = lanes_at(i, width);
      float* at = x + row * width + i;
      store_first(at, add(load_first(at, n), mul(load_first(y + row * width + i, n), factor)), n);
    }
  }
}

void scale_rows(float* x, float factor, int64_t width, int64_t first, int64_t last) {
  update(x, first * width, last * width, [=](f32x16 v) { return mul(v, set1(factor)); });
}

void softcap_rows(float* x, float cap, int64_t width, int64_t first, int64_t last) {
  update(x, first * width, last * width, [=](f32x16 v) { return mul(tanh(div(v, set1(cap))), set1(cap)); });
}

namespace {

// Keeps the best so far in order of their logits. An equal logit or a NaN stays behind those already there.
void choose_experts(const float* logits, int64_t num_experts, int64_t top_k, float* ids) {
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    int64_t place = expert < top_k ? expert : top_k;
    for (; place > 0 && logits[expert] > logits[static_cast<int64_t>(ids[place - 1])]; --place) {
      if (place < top_k) ids[place] = ids[place - 1];
    }
    if (place < top_k) ids[place] = static_cast<float>(expert);
  }
}

void sort_ascending(float* ids, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const float id = ids[i];
    int64_t place = i;
    for (; place > 0 && ids[place - 1] > id; --place) ids[place] = ids[place - 1];
    ids[place] = id;
  }
}

float exp_of(float a) { return lane_of(exp(set1(a)), 0); }

}  // namespace

void route(const float* logits, int64_t num_experts, int64_t top_k, bool renormalise, float* routes, int64_t first,
           int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* from = logits + row * num_experts;
    float* ids = routes + row * 2 * top_k;
    float* shares = ids + top_k;
    choose_experts(from, num_experts, top_k, ids);
    const float most = from[static_cast<int64_t>(ids[0])];
    sort_ascending(ids, top_k);
    f32x16 sums = zero();
    for (int64_t i = 0; i < num_experts; i += 16) {
      const int n = lanes_at(i, num_experts);
      sums = add(sums, select(first_lanes(n), exp(sub(load_first(from + i, n), set1(most))), zero()));
    }
    const float sum = reduce_add(sums);
    float sum_of_chosen = 0.0f;
    for (int64_t j = 0; j < top_k; ++j) {
      shares[j] = exp_of(from[static_cast<int64_t>(ids[j])] - most) / sum;
      sum_of_chosen += shares[j];
    }
    for (int64_t j = 0; renormalise && j < top_k; ++j) shares[j] /= sum_of_chosen;
  }
}

void combine(const float* x, const float* routes, const int32_t* rows, int64_t top_k, int64_t width, float* out, int64_t first,
             int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* shares = routes + row * 2 * top_k + top_k;
    const int32_t* from = rows + row * top_k;
    for (int64_t i = 0; i < width; i += 16) {
      const int n = lanes_at(i, width);
      f32x16 sum = mul(set1(shares[0]), load_first(x + from[0] * width + i, n));
      for (int64_t j = 1; j < top_k; ++j) sum = fma(set1(shares[j]), load_first(x + from[j] * width + i, n), sum);
      store_first(out + row * width + i, sum, n);
    }
  }
}

void exp_values(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const int n = static_cast<int>(count - i < 16 ? count - i : 16);
    store_first(out + i, exp(load_first(x + i, n)), n);
  }
}

void prepare(Form form, const float* x, const Activations& out, int64_t num_inputs, int64_t first, int64_t last) {
  if (form == Form::f32) return;    // the kernel reads x itself
  if (form == Form::bf16) {
    const int64_t begin = first * num_inputs, end = last * num_inputs;
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) store_bf16(out.bf16 + i, load(x + i));
    if (i < end) {
      uint16_t rounded[16];
      store_bf16(rounded, load_first(x + i, static_cast<int>(end - i)));
      memcpy(out.bf16 + i, rounded, 2 * static_cast<size_t>(end - i));
    }
    return;
  }
  for (int64_t group = first * (num_inputs / kGroup); group < last * (num_inputs / kGroup); ++group) {
    quantize_group(x + group * kGroup, out.q + group * kGroup, out.scale + group, out.scaled_sum + group,
                   out.start + group);
  }
}

void prepare_columns(Form form, const float* x, const Activations& out, int64_t num_inputs, int64_t first_column,
                     int64_t num_columns, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row, x += num_columns) {
    Activations to = out;    // as if it began with these columns of this row
    const int64_t at = row * num_inputs + first_column;
    if (form == Form::bf16) {
      to.bf16 = out.bf16 + at;
    } else if (form != Form::f32) {
      to.q = out.q + at;
      to.scale = out.scale + at / kGroup;
      to.scaled_sum = out.scaled_sum + at / kGroup;
      to.start = out.start + at / kGroup;
    }
    prepare(form, x, to, num_columns, 0, 1);
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
