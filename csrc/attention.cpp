// Rotary embedding into the paged cache, and attention out of it. Layouts are those of KVCache in kernels.h.
//
// Attention takes up to kMaxRows query heads at a time against 64 keys. Scores have keys in lanes, results have dimensions
// in lanes; every score and every element of a result is one chain of sums in one order, so a query head's bits depend on
// nothing but its own position. What is masked adds p = +0 to a sum and so changes nothing but the sign of a zero, which
// finish() settles.
#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {

namespace {

#if defined(PACELINE_ISA_AVX512)
constexpr int kMaxRows = 6;      // 6 rows x 4 vectors are 24 accumulators of 32 registers
constexpr int kScoreVecs = 4;
constexpr int kValueVecs = 4;
#elif defined(PACELINE_ISA_AVX2)
constexpr int kMaxRows = 4;      // 4 rows x 1 vector are 8 of 16 registers
constexpr int kScoreVecs = 1;
constexpr int kValueVecs = 1;
#else
constexpr int kMaxRows = 2;
constexpr int kScoreVecs = 1;
constexpr int kValueVecs = 1;
#endif
constexpr int kSubs = kChunk / 16;    // 16-token pieces of a chunk
constexpr int kWordBytes = kChunk * 4;    // of one row's probabilities: 64 floats, or 32 pairs of bf16 and a gap
constexpr float kMinusInf = -__builtin_inff();

// One key and value head's addresses and sizes; bytes unless said.
struct Layout {
  int64_t head;         // K of one head in a 16-token piece; V has the same size
  int64_t piece;        // K and V of all heads, 16 tokens
  int64_t layer;
  int32_t steps;        // 64-byte vectors of K in a head and piece: pairs of dims (bf16) or dims (f32)
  int32_t value_steps;  // rows of V in a piece: pairs of tokens (bf16) or tokens (f32)
};

Layout layout_of(const KVCache& kv) {
  Layout at;
  at.steps = kv.is_bf16 ? kv.head_dim / 2 : kv.head_dim;
  at.value_steps = kv.is_bf16 ? 8 : 16;
  at.head = static_cast<int64_t>(at.steps) * 64;
  at.piece = 2 * at.head * kv.num_kv_heads;
  at.layer = at.piece * (kv.block_size / 16);
  return at;
}

// Where the 16 tokens around `position` of a row lie.
uint8_t* piece_at(const KVCache& kv, const Layout& at, int32_t layer, const int32_t* block_table, int32_t position) {
  const int64_t block = block_table[position / kv.block_size];
  return kv.data + block * kv.bytes_per_block + layer * at.layer + position % kv.block_size / 16 * at.piece;
}

// ---------------------------------------------------------------------------------------------------- rope, cache write

// The first rotary_dim values turn in pairs (i, i + rotary_dim / 2); the rest of the head stays as it is.
void rotate(const float* x, const float* cos_sin, int32_t rotary_dim, int32_t head_dim, float* out) {
  const int half = rotary_dim / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {    // whole vectors: a masked store is not forwarded to the loads that soon follow
    const f32x16 low = load(x + i), high = load(x + half + i);
    const f32x16 cosine = load(cos_sin + i), sine = load(cos_sin + half + i);
    store(out + i, sub(mul(low, cosine), mul(high, sine)));
    store(out + half + i, add(mul(high, cosine), mul(low, sine)));
  }
  if (i < half) {
    const int n = half - i;
    const f32x16 low = load_first(x + i, n), high = load_first(x + half + i, n);
    const f32x16 cosine = load_first(cos_sin + i, n), sine = load_first(cos_sin + half + i, n);
    store_first(out + i, sub(mul(low, cosine), mul(high, sine)), n);
    store_first(out + half + i, add(mul(high, cosine), mul(low, sine)), n);
  }
  if (rotary_dim < head_dim) memcpy(out + rotary_dim, x + rotary_dim, static_cast<size_t>(head_dim - rotary_dim) * 4);
}

// One key, rounded if the cache is: a 32-bit word for each vector of K.
void write_key(const float* key, const KVCache& kv, const Layout& at, uint8_t* to, int lane) {
  alignas(64) uint32_t words[kMaxHeadDim];
  if (kv.is_bf16) {
    for (int d = 0; d < kv.head_dim; d += 16) store_bf16(reinterpret_cast<uint16_t*>(words) + d, load(key + d));
  } else {
    memcpy(words, key, static_cast<size_t>(kv.head_dim) * 4);
  }
  to += lane * 4;
  for (int step = 0; step < at.steps; step += 8, to += 8 * 64) {    // head_dim is a multiple of 16
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) memcpy(to + i * 64, words + step + i, 4);
  }
}

// Two tokens share a 32-bit word of V and may be written by two threads, so a token alone writes its own 16 bits only.
void write_value(const float* value, const KVCache& kv, uint8_t* to, int lane) {
  if (!kv.is_bf16) {
    memcpy(to + static_cast<int64_t>(lane) * kv.head_dim * 4, value, static_cast<size_t>(kv.head_dim) * 4);
    return;
  }
  to += lane / 2 * kv.head_dim * 4;
  for (int d = 0; d < kv.head_dim; d += 16) store_halves(to + d * 4, to_bf16(load(value + d)), lane % 2);
}

// Both tokens of a pair; only for bf16.
void write_value_pair(const float* even, const float* odd, const KVCache& kv, uint8_t* to, int lane) {
  to += lane / 2 * kv.head_dim * 4;
  for (int d = 0; d < kv.head_dim; d += 16) {
    store_i32(to + d * 4, or_i32(to_bf16(load(even + d)), shift_left<16>(to_bf16(load(odd + d)))));
  }
}

// What a token will write: a word in every line of K, and its pair of V. Fetched for writing while the token ahead of it
// is worked on; one after the other, these misses are most of the time that a decode step's cache writes take.
void prefetch_slot(const KVCache& kv, const Layout& at, const uint8_t* piece, int lane) {
  const int64_t v_row = static_cast<int64_t>(kv.head_dim) * 4;
  const uint8_t* values = piece + kv.num_kv_heads * at.head + (kv.is_bf16 ? lane / 2 : lane) * v_row;
  for (int64_t i = 0; i < kv.num_kv_heads * at.head; i += 64) prefetch_to_write(piece + i);
  for (int h = 0; h < kv.num_kv_heads; ++h, values += at.head) {
    for (int64_t i = 0; i < v_row; i += 64) prefetch_to_write(values + i);
  }
}

uint8_t* piece_of_token(const KVCache& kv, const Layout& at, int32_t layer, const Batch& batch, int64_t t) {
  const int32_t* block_table = batch.block_tables + static_cast<int64_t>(batch.row_of_token[t]) * batch.max_blocks;
  return piece_at(kv, at, layer, block_table, batch.positions[t]);
}

}  // namespace

void rope_write_kv(const float* qkv, const float* rope, int32_t rotary_dim, float* q_out, const KVCache& kv, int32_t layer,
                   int32_t num_heads, const Batch& batch, int64_t first, int64_t last) {
  const Layout at = layout_of(kv);
  const int64_t dim = kv.head_dim;
  const int64_t kv_heads = kv.num_kv_heads;
  const int64_t width = (num_heads + 2 * kv_heads) * dim;
  uint8_t* next_piece = first < last ? piece_of_token(kv, at, layer, batch, first) : nullptr;
  if (first < last) prefetch_slot(kv, at, next_piece, batch.positions[first] % 16);
  bool is_written = false;    // this token's values, with those of the token ahead
  for (int64_t t = first; t < last; ++t) {
    const int32_t position = batch.positions[t];
    const float* from = qkv + t * width;
    const float* cos_sin = rotary_dim > 0 ? rope + static_cast<int64_t>(position) * rotary_dim : nullptr;
    uint8_t* piece = next_piece;
    if (t + 1 < last) {
      next_piece = piece_of_token(kv, at, layer, batch, t + 1);
      if (next_piece != piece) prefetch_slot(kv, at, next_piece, batch.positions[t + 1] % 16);
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      rotate(from + h * dim, cos_sin, rotary_dim, kv.head_dim, q_out + (t * num_heads + h) * dim);
    }

    const int lane = position % 16;
    const float* values = from + (num_heads + kv_heads) * dim;
    const bool is_pair = kv.is_bf16 && !is_written && lane % 2 == 0 && t + 1 < last && next_piece == piece &&
                         batch.positions[t + 1] == position + 1;
    for (int64_t h = 0; h < kv_heads; ++h) {
      alignas(64) float key[kMaxHeadDim];
      rotate(from + (num_heads + h) * dim, cos_sin, rotary_dim, kv.head_dim, key);
      write_key(key, kv, at, piece + h * at.head, lane);
      uint8_t* to = piece + (kv_heads + h) * at.head;
      if (is_pair) write_value_pair(values + h * dim, values + width + h * dim, kv, to, lane);
      else if (!is_written) write_value(values + h * dim, kv, to, lane);
    }
    is_written = is_pair;
  }
}

// ------------------------------------------------------------------------------------------------------------ attention

namespace {

// 2^a for a <= 0, relative error 2e-7; below 2^-126 exactly 0, a NaN stays a NaN.
PL_INLINE f32x16 exp2_negative(f32x16 a) {
  const f32x16 lowest = set1(-126.0f);
  const f32x16 inside = max(lowest, a);
  const i32x16 n = to_i32(inside);
  const f32x16 f = sub(inside, to_f32(n));
  f32x16 p = set1(1.3264727253e-03f);
  p = fma(p, f, set1(9.6715127858e-03f));
  p = fma(p, f, set1(5.5507337445e-02f));
  p = fma(p, f, set1(2.4022242083e-01f));
  p = fma(p, f, set1(6.9314697760e-01f));
  p = fma(p, f, set1(1.0f));
  const f32x16 scale = as_f32(shift_left<23>(add_i32(n, set1_i32(127))));
  return select(less(a, lowest), zero(), mul(p, scale));
}

PL_INLINE float exp2_negative(float a) {
  float lanes[16];
  store(lanes, exp2_negative(set1(a)));
  return lanes[0];
}

PL_INLINE float largest(f32x16 a) {
#if defined(PACELINE_ISA_AVX512)
  return _mm512_reduce_max_ps(a.v);
#else
  return reduce_max(a);
#endif
}

// 64 probabilities as pairs of bf16, in token order.
PL_INLINE void store_pairs(uint8_t* to, const f32x16* p) {
#if defined(PACELINE_ISA_AVX512)
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(p[1].v, p[0].v));
  _mm512_storeu_si512(to + 64, (__m512i)_mm512_cvtne2ps_pbh(p[3].v, p[2].v));
#else
  for (int i = 0; i < kSubs; ++i) store_bf16(reinterpret_cast<uint16_t*>(to) + 16 * i, p[i]);
#endif
}

// acc + key (or value) vector * query (or probability) word: one product a lane, or two for pairs of bf16.
template <bool is_bf16> PL_INLINE f32x16 accumulate(f32x16 acc, i32x16 vector, i32x16 word) {
  if (is_bf16) return dot_pairs(acc, vector, word);
  return fma(as_f32(vector), as_f32(word), acc);
}
PL_INLINE i32x16 broadcast(const void* at) { int32_t word; memcpy(&word, at, 4); return set1_i32(word); }

// What turns a dot product s into a score in units of log 2: s * scale, or with a softcap softcap * tanh(s * scale / softcap),
// scale then being without the log 2.
struct Scoring { float scale, softcap; };

// Scores become capped scores, in units of log 2. Apart from soften() so that models without a cap pay nothing for it.
__attribute__((noinline)) void cap_scores(float* scores, int count, const Scoring& scoring) {
  const f32x16 inner = set1(scoring.scale / scoring.softcap), outer = set1(scoring.softcap * 1.4426950408889634f);
  for (int i = 0; i < count; i += 16) store(scores + i, mul(tanh(mul(load(scores + i), inner)), outer));
}

// The tokens [begin, end) of a chunk that a query sees; end may lie past the chunk.
struct Visible { int begin, end; };

// The running softmax of one query head inside a segment.
struct State {
  float* m;     // [rows] largest score so far, in units of log 2
  float* l;     // [rows][16] sum of probabilities, lane by lane
  float* o;     // [rows][head_dim]
};

// The 64 keys and values of one head: four pieces of 16 tokens. Pieces past the last token repeat the first.
struct Chunk {
  const uint8_t* k[kSubs];
  const uint8_t* v[kSubs];
  const uint8_t* next_k[kSubs];   // to prefetch
  const uint8_t* next_v[kSubs];
  int num_tokens;                 // 1..64, as the last query of the job sees it
};

// scores[r][64] for rows r; query words are [step][stride].
template <bool is_bf16, int rows, int vecs, bool prefetches>
PL_INLINE void score(const uint32_t* query, int64_t stride, int steps, const Chunk& chunk, int first_sub, float* scores) {
  f32x16 acc[rows][vecs];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) acc[r][i] = zero();
  }
  const uint8_t* k[vecs];
#pragma GCC unroll 8
  for (int i = 0; i < vecs; ++i) k[i] = chunk.k[first_sub + i];
  for (int step = 0; step < steps; ++step) {
    i32x16 key[vecs];
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) key[i] = load_i32(k[i] + step * 64);
    if (prefetches) {
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) prefetch_l2(chunk.next_k[first_sub + i] + step * 64);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const i32x16 word = broadcast(query + step * stride + r);
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) acc[r][i] = accumulate<is_bf16>(acc[r][i], key[i], word);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) store(scores + r * kChunk + (first_sub + i) * 16, acc[r][i]);
  }
}

// o[r][16 * vecs dims] = o * alpha + p V over the chunk's tokens. `p` is [rows][kWordBytes]. The next chunk's values are
// asked for here and its keys in score(): all of them there are more than can be on their way at a time.
template <bool is_bf16, int rows, int vecs, bool prefetches>
PL_INLINE void weigh(const uint8_t* p, const float* alpha, const Chunk& chunk, int64_t first_byte, int64_t row_bytes,
                     float* o, int64_t o_stride) {
  f32x16 acc[rows][vecs];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) acc[r][i] = mul(load(o + r * o_stride + i * 16), set1(alpha[r]));
  }
  constexpr int per_piece = is_bf16 ? 8 : 16;
  const int num_steps = is_bf16 ? chunk.num_tokens / 2 : chunk.num_tokens;
  for (int begin = 0; begin < num_steps; begin += per_piece) {
    const uint8_t* v = chunk.v[begin / per_piece] + first_byte;
    const int end = num_steps - begin < per_piece ? num_steps - begin : per_piece;
    for (int step = 0; step < end; ++step, v += row_bytes) {
      i32x16 value[vecs];
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) value[i] = load_i32(v + i * 64);
      if (prefetches) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; ++i) prefetch_l2(chunk.next_v[begin / per_piece] + first_byte + step * row_bytes + i * 64);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const i32x16 word = broadcast(p + r * kWordBytes + (begin + step) * 4);
#pragma GCC unroll 8
        for (int i = 0; i < vecs; ++i) acc[r][i] = accumulate<is_bf16>(acc[r][i], value[i], word);
      }
    }
  }
  for (int step = num_steps; prefetches && step < per_piece * kSubs; ++step) {
    const uint8_t* next = chunk.next_v[step / per_piece] + step % per_piece * row_bytes + first_byte;
    for (int i = 0; i < vecs; ++i) prefetch_l2(next + i * 64);
  }
  if (is_bf16 && chunk.num_tokens % 2 != 0) {    // the pair's second token does not exist: its slot may hold a NaN
    const uint8_t* v = chunk.v[num_steps / per_piece] + num_steps % per_piece * row_bytes + first_byte;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const i32x16 word = broadcast(p + r * kWordBytes + num_steps * 4);
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) {
        const i32x16 value = and_i32(load_i32(v + i * 64), set1_i32(0xffff));
        acc[r][i] = accumulate<is_bf16>(acc[r][i], value, word);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) store(o + r * o_stride + i * 16, acc[r][i]);
  }
}

// One online-softmax update: scores become probabilities, the state's m and l move on, alpha[r] rescales o.
template <bool is_bf16, int rows>
PL_INLINE void soften(const float* scores, float scale, const Visible* visible, uint8_t* p, float* m, float* l,
                      float* alpha) {
  f32x16 x[rows][kSubs];
  float old_m[16] = {0};
  float new_m[16] = {0};
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kSubs; ++i) x[r][i] = mul(load(scores + r * kChunk + i * 16), set1(scale));
    if (visible[r].end < kChunk) {
#pragma GCC unroll 4
      for (int i = 0; i < kSubs; ++i) x[r][i] = select(first_lanes(visible[r].end - i * 16), x[r][i], set1(kMinusInf));
    }
    if (visible[r].begin > 0) {
#pragma GCC unroll 4
      for (int i = 0; i < kSubs; ++i) x[r][i] = select(first_lanes(visible[r].begin - i * 16), set1(kMinusInf), x[r][i]);
    }
    const float most = largest(max(max(x[r][0], x[r][1]), max(x[r][2], x[r][3])));
    old_m[r] = m[r];
    new_m[r] = most > m[r] ? most : m[r];
    m[r] = new_m[r];
  }
  store(alpha, exp2_negative(sub(load(old_m), load(new_m))));
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    f32x16 e[kSubs];
#pragma GCC unroll 4
    for (int i = 0; i < kSubs; ++i) e[i] = exp2_negative(sub(x[r][i], set1(new_m[r])));
    f32x16 sum = mul(load(l + r * 16), set1(alpha[r]));
    uint8_t* words = p + r * kWordBytes;
    if (is_bf16) {    // the sum is of the rounded probabilities, which are what weighs V
      store_pairs(words, e);
      const i32x16 ones = set1_i32(0x3f803f80);
      sum = dot_pairs(sum, load_i32(words), ones);
      sum = dot_pairs(sum, load_i32(words + 64), ones);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kSubs; ++i) {
        store_i32(words + i * 64, as_i32(e[i]));
        sum = add(sum, e[i]);
      }
    }
    store(l + r * 16, sum);
  }
}

template <bool is_bf16, int rows, bool prefetches>
__attribute__((noinline)) void attend_rows(const uint32_t* query, int64_t stride, const Layout& at, int32_t head_dim,
                                           const Chunk& chunk, const Visible* visible, const Scoring& scoring,
                                           const State& state) {
  alignas(64) float scores[rows * kChunk];
  alignas(64) uint8_t p[rows * kWordBytes];
  alignas(64) float alpha[16];
  const int num_subs = (chunk.num_tokens + 15) / 16;
  if (kScoreVecs == kSubs && num_subs > 1) {
    score<is_bf16, rows, kScoreVecs, prefetches>(query, stride, at.steps, chunk, 0, scores);
  } else {
    for (int sub = 0; sub < num_subs; ++sub) score<is_bf16, rows, 1, prefetches>(query, stride, at.steps, chunk, sub, scores);
    for (int sub = num_subs; sub < kSubs; ++sub) {
      for (int r = 0; r < rows; ++r) store(scores + r * kChunk + sub * 16, zero());    // masked below
      for (int step = 0; prefetches && step < at.steps; ++step) {
        prefetch_l2(chunk.next_k[sub] + step * 64);
      }
    }
  }
  if (scoring.softcap > 0.0f) cap_scores(scores, rows * kChunk, scoring);
  soften<is_bf16, rows>(scores, scoring.softcap > 0.0f ? 1.0f : scoring.scale, visible, p, state.m, state.l, alpha);
  const int64_t row_bytes = static_cast<int64_t>(head_dim) * 4;
  int32_t d = 0;
  for (; d + 16 * kValueVecs <= head_dim; d += 16 * kValueVecs) {
    weigh<is_bf16, rows, kValueVecs, prefetches>(p, alpha, chunk, d * 4, row_bytes, state.o + d, head_dim);
  }
  for (; d < head_dim; d += 16) weigh<is_bf16, rows, 1, prefetches>(p, alpha, chunk, d * 4, row_bytes, state.o + d, head_dim);
}

template <bool is_bf16, bool prefetches>
void attend_some(int rows, const uint32_t* query, int64_t stride, const Layout& at, int32_t head_dim, const Chunk& chunk,
                 const Visible* visible, const Scoring& scoring, const State& state) {
  switch (rows) {
    case 1: return attend_rows<is_bf16, 1, prefetches>(query, stride, at, head_dim, chunk, visible, scoring, state);
    case 2: return attend_rows<is_bf16, 2, prefetches>(query, stride, at, head_dim, chunk, visible, scoring, state);
#if !defined(PACELINE_ISA_PORTABLE)
    case 3: return attend_rows<is_bf16, 3, prefetches>(query, stride, at, head_dim, chunk, visible, scoring, state);
    case 4: return attend_rows<is_bf16, 4, prefetches>(query, stride, at, head_dim, chunk, visible, scoring, state);
#endif
#if defined(PACELINE_ISA_AVX512)
    case 5: return attend_rows<is_bf16, 5, prefetches>(query, stride, at, head_dim, chunk, visible, scoring, state);
    case 6: return attend_rows<is_bf16, 6, prefetches>(query, stride, at, head_dim, chunk, visible, scoring, state);
#endif
    default: return;
  }
}

// A job with its query words and the state of all its query heads, [KV head][token][head of the group].
struct Work {
  const KVCache& kv;
  const Batch& batch;
  const AttendJob& job;
  Layout at;
  int32_t layer, num_heads, group, num_tokens, rows_per_head, num_rows, first_position;
  Scoring scoring;
  State state;
  uint32_t* query;      // [KV head][step][rows_per_head]
};

int32_t output_head(const Work& w, int row) {
  return (w.job.first_head + row / w.rows_per_head) * w.group + row % w.group;
}
int32_t token_of(const Work& w, int row) { return row % w.rows_per_head / w.group; }

// The first key that the query at `position` sees.
int32_t first_key(int32_t position, int32_t window) { return window > 0 && position >= window ? position - window + 1 : 0; }

Visible visible_of(const Work& w, int row, int32_t chunk_start) {
  const int32_t position = w.first_position + row / w.group;
  const int32_t begin = first_key(position, w.job.window) - chunk_start;
  return {begin > 0 ? begin : 0, position + 1 - chunk_start};
}

void gather_queries(const Work& w, const float* q) {
  const int32_t dim = w.kv.head_dim;
  for (int row = 0; row < w.num_rows; ++row) {
    const float* from = q + (static_cast<int64_t>(w.job.first + token_of(w, row)) * w.num_heads + output_head(w, row)) * dim;
    uint32_t* to = w.query + static_cast<int64_t>(row / w.rows_per_head) * w.at.steps * w.rows_per_head + row % w.rows_per_head;
    alignas(64) uint16_t rounded[kMaxHeadDim];
    if (w.kv.is_bf16) {
      for (int d = 0; d < dim; d += 16) store_bf16(rounded + d, load(from + d));
    }
    for (int step = 0; step < w.at.steps; ++step) {
      if (w.kv.is_bf16) memcpy(to + static_cast<int64_t>(step) * w.rows_per_head, rounded + 2 * step, 4);
      else memcpy(to + static_cast<int64_t>(step) * w.rows_per_head, from + step, 4);
    }
  }
}

// The pieces of the chunk at chunk_start of a row, all heads, of which no query sees a key before `seen_from`. What is not
// there to be seen, before or behind, is stood in for by a piece that is, and masked. Returns whether there is one.
bool find_pieces(const Work& w, int32_t row, int32_t chunk_start, int32_t seen_from, int32_t num_keys, const uint8_t** pieces) {
  const int32_t* block_table = w.batch.block_tables + static_cast<int64_t>(row) * w.batch.max_blocks;
  const int first = seen_from > chunk_start ? (seen_from - chunk_start) / 16 : 0;
  int end = first;
  for (; end < kSubs && chunk_start + end * 16 < num_keys; ++end) {
    pieces[end] = piece_at(w.kv, w.at, w.layer, block_table, chunk_start + end * 16);
  }
  if (end == first) return false;
  for (int i = 0; i < first; ++i) pieces[i] = pieces[first];
  for (int i = end; i < kSubs; ++i) pieces[i] = pieces[first];
  return true;
}

// The chunk after this one that the thread will read: the row's own, else the first of the next row. False: none.
bool find_next(const Work& w, int32_t chunk_start, int32_t num_keys, bool is_last_segment, const uint8_t** pieces) {
  const int32_t next = chunk_start + kChunk;
  if (next < num_keys && !(is_last_segment && next % kSegment == 0)) {
    return find_pieces(w, w.job.row, next, 0, num_keys, pieces);
  }
  if (w.job.next_row < 0) return false;
  const int32_t row = w.job.next_row;
  const int32_t seen_from = first_key(w.batch.positions[w.batch.row_starts[row]], w.job.window);
  const int32_t row_keys = w.batch.positions[w.batch.row_starts[row + 1] - 1] + 1;
  return find_pieces(w, row, seen_from / kChunk * kChunk, seen_from, row_keys, pieces);
}

// Whether a value of tokens [first, end) is an infinity or a NaN; it may look at a neighbour of either end.
template <bool is_bf16>
bool has_wild_values(const Chunk& chunk, int first, int end, int32_t head_dim) {
  constexpr int per_piece = is_bf16 ? 8 : 16;
  const int64_t row_bytes = static_cast<int64_t>(head_dim) * 4;
  const i32x16 high = set1_i32(0x7f800000);
  i32x16 worst = set1_i32(0);
  for (int token = is_bf16 ? first / 2 * 2 : first; token < end; token += is_bf16 ? 2 : 1) {
    const int row = is_bf16 ? token / 2 : token;
    const uint8_t* v = chunk.v[row / per_piece] + row % per_piece * row_bytes;
    const i32x16 exists = set1_i32(is_bf16 && token + 1 == chunk.num_tokens ? 0xffff : -1);
    for (int64_t i = 0; i < row_bytes; i += 64) {
      const i32x16 words = and_i32(load_i32(v + i), exists);
      worst = max_i32(worst, and_i32(words, high));
      if (is_bf16) worst = max_i32(worst, and_i32(shift_left<16>(words), high));
    }
  }
  return reduce_max_i32(worst) == 0x7f800000;
}

// Values as a query may read them: what it does not see is zero, for 0 x NaN is a NaN.
template <bool is_bf16>
void copy_visible(const Chunk& chunk, const Visible& visible, int32_t head_dim, uint8_t* to) {
  constexpr int per_piece = is_bf16 ? 8 : 16;
  const size_t row_bytes = static_cast<size_t>(head_dim) * 4;
  memset(to, 0, per_piece * kSubs * row_bytes);
  for (int token = is_bf16 ? visible.begin / 2 * 2 : visible.begin; token < visible.end; token += is_bf16 ? 2 : 1) {
    const int row = is_bf16 ? token / 2 : token;
    const uint8_t* v = chunk.v[row / per_piece] + static_cast<size_t>(row % per_piece) * row_bytes;
    uint8_t* copy = to + static_cast<size_t>(row) * row_bytes;
    int32_t seen = -1;
    if (is_bf16 && token < visible.begin) seen &= ~0xffff;
    if (is_bf16 && token + 1 == visible.end) seen &= 0xffff;
    for (size_t i = 0; i < row_bytes; i += 64) store_i32(copy + i, and_i32(load_i32(v + i), set1_i32(seen)));
  }
}

// Rows [first_row, last_row) of one head, one by one, none of which may meet a value that it does not see. The bits are
// those of the tiles.
template <bool is_bf16>
__attribute__((noinline)) void attend_apart(const Work& w, const uint32_t* query, const Chunk& chunk, int first_row,
                                            int last_row, int32_t chunk_start, const State& state) {
  alignas(64) uint8_t values[kChunk * kMaxHeadDim * 4];
  const int64_t piece_bytes = static_cast<int64_t>(is_bf16 ? 8 : 16) * w.kv.head_dim * 4;
  Chunk apart = chunk;
  for (int i = 0; i < kSubs; ++i) apart.v[i] = values + i * piece_bytes;
  for (int row = first_row; row < last_row; ++row) {
    const Visible visible = visible_of(w, row, chunk_start);
    copy_visible<is_bf16>(chunk, {visible.begin, visible.end < chunk.num_tokens ? visible.end : chunk.num_tokens},
                          w.kv.head_dim, values);
    attend_some<is_bf16, false>(1, query + row, w.rows_per_head, w.at, w.kv.head_dim, apart, &visible, w.scoring,
                                {state.m + row, state.l + row * 16, state.o + static_cast<int64_t>(row) * w.kv.head_dim});
  }
}

// One head's rows that see anything of one chunk.
template <bool is_bf16>
void attend_chunk(const Work& w, int head, const Chunk& chunk, bool prefetches, int32_t chunk_start) {
  const int32_t first_token = chunk_start > w.first_position ? chunk_start - w.first_position : 0;
  int32_t last_token = w.num_tokens;
  if (w.job.window > 0 && chunk_start + kChunk - 1 + w.job.window - w.first_position < last_token) {
    last_token = chunk_start + kChunk - 1 + w.job.window - w.first_position;    // later ones have left the chunk behind
  }
  const int first_row = first_token * w.group;
  const int last_row = last_token * w.group;
  const int count = last_row - first_row;
  const int num_tiles = (count + kMaxRows - 1) / kMaxRows;
  const int64_t head_at = static_cast<int64_t>(head) * w.rows_per_head;
  const State all = {w.state.m + head_at, w.state.l + head_at * 16, w.state.o + head_at * w.kv.head_dim};
  const uint32_t* head_query = w.query + head_at * w.at.steps;
  if (count <= 0) return;
  const int seen_to = visible_of(w, first_row, chunk_start).end;             // by all rows
  const int seen_from = visible_of(w, last_row - 1, chunk_start).begin;
  if ((seen_to < chunk.num_tokens && has_wild_values<is_bf16>(chunk, seen_to, chunk.num_tokens, w.kv.head_dim)) ||
      (seen_from > 0 && has_wild_values<is_bf16>(chunk, 0, seen_from, w.kv.head_dim))) {
    return attend_apart<is_bf16>(w, head_query, chunk, first_row, last_row, chunk_start, all);
  }
  int done = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int rows = (count - done) / (num_tiles - tile);
    const int row = first_row + done;
    Visible visible[kMaxRows];
    for (int r = 0; r < rows; ++r) visible[r] = visible_of(w, row + r, chunk_start);
    const State state = {all.m + row, all.l + row * 16, all.o + static_cast<int64_t>(row) * w.kv.head_dim};
    const uint32_t* query = head_query + row;
    if (prefetches && tile == 0) {
      attend_some<is_bf16, true>(rows, query, w.rows_per_head, w.at, w.kv.head_dim, chunk, visible, w.scoring, state);
    } else {
      attend_some<is_bf16, false>(rows, query, w.rows_per_head, w.at, w.kv.head_dim, chunk, visible, w.scoring, state);
    }
    done += rows;
  }
}

void attend_segment(const Work& w, int32_t segment, int32_t num_keys, bool is_last_segment) {
  for (int row = 0; row < w.num_rows; ++row) w.state.m[row] = kMinusInf;
  memset(w.state.l, 0, static_cast<size_t>(w.num_rows) * 16 * sizeof(float));
  memset(w.state.o, 0, static_cast<size_t>(w.num_rows) * static_cast<size_t>(w.kv.head_dim) * sizeof(float));
  const int32_t end = num_keys < (segment + 1) * kSegment ? num_keys : (segment + 1) * kSegment;
  const int32_t seen_from = first_key(w.first_position, w.job.window);
  const int32_t begin = seen_from > segment * kSegment ? seen_from / kChunk * kChunk : segment * kSegment;
  for (int32_t chunk_start = begin; chunk_start < end; chunk_start += kChunk) {
    const uint8_t* pieces[kSubs];
    const uint8_t* next[kSubs] = {nullptr};
    find_pieces(w, w.job.row, chunk_start, seen_from, num_keys, pieces);
    const bool prefetches = find_next(w, chunk_start, num_keys, is_last_segment, next);
    for (int head = 0; head < w.job.last_head - w.job.first_head; ++head) {
      Chunk chunk;
      const int64_t k_at = (w.job.first_head + head) * w.at.head;
      const int64_t v_at = k_at + w.kv.num_kv_heads * w.at.head;
      for (int i = 0; i < kSubs; ++i) {
        chunk.k[i] = pieces[i] + k_at;
        chunk.v[i] = pieces[i] + v_at;
        chunk.next_k[i] = prefetches ? next[i] + k_at : nullptr;
        chunk.next_v[i] = prefetches ? next[i] + v_at : nullptr;
      }
      chunk.num_tokens = end - chunk_start < kChunk ? end - chunk_start : kChunk;
      if (w.kv.is_bf16) attend_chunk<true>(w, head, chunk, prefetches, chunk_start);
      else attend_chunk<false>(w, head, chunk, prefetches, chunk_start);
    }
  }
}

// Adds a segment (m, l, o) to the segments before it.
void merge(float& total_m, float& total_l, float* total_o, float m, float l, const float* o, int32_t head_dim) {
  const float most = m > total_m ? m : total_m;
  const float keep = exp2_negative(total_m - most);
  const float take = exp2_negative(m - most);
  total_m = most;
  total_l = total_l * keep + l * take;
  for (int32_t d = 0; d < head_dim; d += 16) {
    store(total_o + d, add(mul(load(total_o + d), set1(keep)), mul(load(o + d), set1(take))));
  }
}

// A sum that met masked keys may have become +0 where it would have been -0 without them; adding +0 makes both +0.
void finish(const float* o, float l, int32_t head_dim, float* out) {
  const f32x16 scale = set1(1.0f / l);
  for (int32_t d = 0; d < head_dim; d += 16) store(out + d, add(mul(load(o + d), scale), zero()));
}

int32_t first_segment_of(const Work& w, int row) {
  return first_key(w.first_position + token_of(w, row), w.job.window) / kSegment;
}
bool sees_segment(const Work& w, int row, int32_t segment) {
  return w.first_position + token_of(w, row) >= segment * kSegment && first_segment_of(w, row) <= segment;
}

void leave_partials(const Work& w, int32_t segment, float* partials) {
  const int32_t dim = w.kv.head_dim;
  for (int row = 0; row < w.num_rows; ++row) {
    if (!sees_segment(w, row, segment)) continue;
    const int64_t slot = static_cast<int64_t>(token_of(w, row)) * w.num_heads + output_head(w, row);
    const int64_t at = slot * w.job.partial_segments + segment - w.job.base_segment;
    float* to = partials + w.job.partial + at * (kPartialHead + dim);
    to[0] = w.state.m[row];
    to[1] = reduce_add(load(w.state.l + row * 16));
    memcpy(to + kPartialHead, w.state.o + static_cast<int64_t>(row) * dim, static_cast<size_t>(dim) * sizeof(float));
  }
}

// Merges the segment into the totals; true totals start with the first segment as it is.
void take_segment(const Work& w, int32_t segment, float* total_m, float* total_l, float* total_o) {
  const int32_t dim = w.kv.head_dim;
  for (int row = 0; row < w.num_rows; ++row) {
    if (!sees_segment(w, row, segment)) continue;
    const float* o = w.state.o + static_cast<int64_t>(row) * dim;
    const float l = reduce_add(load(w.state.l + row * 16));
    float* to = total_o + static_cast<int64_t>(row) * dim;
    if (segment > first_segment_of(w, row)) {
      merge(total_m[row], total_l[row], to, w.state.m[row], l, o, dim);
    } else {
      total_m[row] = w.state.m[row];
      total_l[row] = l;
      memcpy(to, o, static_cast<size_t>(dim) * sizeof(float));
    }
  }
}

}  // namespace

void attend(const float* q, const KVCache& kv, int32_t layer, int32_t num_heads, float scale, float softcap,
            const Batch& batch, const AttendJob& job, float* out, float* partials) {
  alignas(64) float m[kMaxQueries];
  alignas(64) float l[kMaxQueries * 16];
  alignas(64) float o[kMaxQueries * kMaxHeadDim];
  alignas(64) uint32_t query[kMaxQueries * kMaxHeadDim];
  alignas(64) float total_m[kMaxQueries];
  alignas(64) float total_l[kMaxQueries];
  alignas(64) float total_o[kMaxQueries * kMaxHeadDim];

  const int32_t group = num_heads / kv.num_kv_heads;
  const int32_t num_tokens = job.last - job.first;
  const int32_t rows_per_head = num_tokens * group;
  // Scores are kept in units of log 2, so that probabilities are powers of two.
  const Work w = {kv, batch, job, layout_of(kv), layer, num_heads, group, num_tokens, rows_per_head,
                  rows_per_head * (job.last_head - job.first_head), batch.positions[job.first],
                  {softcap > 0.0f ? scale : scale * 1.4426950408889634f, softcap}, {m, l, o}, query};
  gather_queries(w, q);

  const int32_t num_keys = batch.positions[job.last - 1] + 1;
  const int32_t num_segments = (num_keys + kSegment - 1) / kSegment;
  const int32_t last_segment = job.last_segment < num_segments ? job.last_segment : num_segments;
  for (int32_t segment = job.first_segment; segment < last_segment; ++segment) {
    attend_segment(w, segment, num_keys, segment + 1 == last_segment);
    if (partials != nullptr) leave_partials(w, segment, partials);
    else take_segment(w, segment, total_m, total_l, total_o);
  }
  if (partials != nullptr) return;
  for (int row = 0; row < w.num_rows; ++row) {
    const int64_t slot = static_cast<int64_t>(job.first + token_of(w, row)) * num_heads + output_head(w, row);
    finish(total_o + static_cast<int64_t>(row) * kv.head_dim, total_l[row], kv.head_dim, out + slot * kv.head_dim);
  }
}

void merge_segments(const float* partials, int32_t partial_segments, int32_t num_segments, int32_t head_dim,
                    int32_t first_head, int32_t last_head, float* out) {
  const int64_t size = kPartialHead + head_dim;
  for (int32_t head = first_head; head < last_head; ++head) {
    const float* from = partials + head * partial_segments * size;
    float m = from[0];
    float l = from[1];
    alignas(64) float o[kMaxHeadDim];
    memcpy(o, from + kPartialHead, static_cast<size_t>(head_dim) * sizeof(float));
    for (int32_t segment = 1; segment < num_segments; ++segment) {
      const float* next = from + segment * size;
      merge(m, l, o, next[0], next[1], next + kPartialHead, head_dim);
    }
    finish(o, l, head_dim, out + static_cast<int64_t>(head) * head_dim);
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
