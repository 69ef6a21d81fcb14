// out[row][output] = sum over k of weight[output][k] * activation[row][k] + bias[output], for the four packed forms.
//
// Sixteen outputs lie in the lanes of a vector and K runs in order, so each output element is one chain of operations that
// neither the size of a tile nor the number of threads can change. A tile is a few rows times a few strips: as many
// accumulators as the registers hold, so that every weight loaded serves all rows of the tile.
#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {
namespace {

// Tiles in rows x strips.
#if defined(PACELINE_ISA_AVX512)
constexpr int kFloatRows = 8, kPairRows = 8, kFloatStrips = 3, kIntRows = 16;    // 24 or 16 accumulators of 32 registers
#elif defined(PACELINE_ISA_AVX2)
constexpr int kFloatRows = 6, kPairRows = 4, kFloatStrips = 1, kIntRows = 4;     // 12 or 8 of 16; pairs need 6 beside theirs
#else
constexpr int kFloatRows = 2, kPairRows = 2, kFloatStrips = 1, kIntRows = 4;
#endif
static_assert(kFloatRows <= linear_max_tile_rows && kIntRows <= linear_max_tile_rows, "units.h states the largest tile");

constexpr int kRowsAtOnce = 4;          // integer dot products in flight: enough to hide their latency
// Bytes of weights asked for ahead of use, and into which cache. The second can wait for more lines at a time than the
// first, which pays where lines are used up fast: int4 keeps to the first, and so does a path that takes longer over a
// line, whose loads would only wait for the second cache. Measured: docs/log.md.
#if defined(PACELINE_ISA_AVX512)
constexpr int64_t kFloatAhead = 2048, kInt8Ahead = 6144;
PL_INLINE void ask_for(const void* at) { prefetch_l2(at); }
#else
constexpr int64_t kFloatAhead = 4096, kInt8Ahead = 4096;
PL_INLINE void ask_for(const void* at) { prefetch(at); }
#endif
constexpr int64_t kInt4Ahead = 4096;
constexpr int kInt8Lines = 9, kInt4Lines = 5;    // that a block touches

struct Tile {
  const uint8_t* weights;      // first strip of the tile
  int64_t strip_bytes, num_inputs;
  const Activations* in;
  int64_t row;
  const float* bias;           // of the tile's first output, or null
  float* out;                  // row `row`, first output
  int64_t out_stride;
  int64_t num_outputs;         // that exist from the tile's first output on
  int64_t next_tile;           // bytes from the end of this tile's first strip to the tile after it
};

// Called with a constant r or s only, in unrolled loops: accumulators must stay in registers.
PL_INLINE void finish(const Tile& t, int r, int s, f32x16 acc) {
  float* to = t.out + r * t.out_stride + s * kStrip;
  const int64_t left = t.num_outputs - s * kStrip;
  if (left >= kStrip) {
    store(to, t.bias == nullptr ? acc : add(acc, load(t.bias + s * kStrip)));
  } else {
    const int n = static_cast<int>(left);
    store_first(to, t.bias == nullptr ? acc : add(acc, load_first(t.bias + s * kStrip, n)), n);
  }
}

#define PL_UNROLL _Pragma("GCC unroll 16")

template <int R, int S>
void tile_f32(const Tile& t) {
  f32x16 acc[R][S];
  PL_UNROLL for (int r = 0; r < R; ++r) {
    PL_UNROLL for (int s = 0; s < S; ++s) acc[r][s] = zero();
  }
  const float* x = t.in->x + t.row * t.num_inputs;
  const uint8_t* w = t.weights;
  const uint8_t* const tail = w + t.strip_bytes - kFloatAhead;
  for (int64_t k = 0; k < t.num_inputs; ++k, ++x, w += 4 * kStrip) {
    const int64_t ahead = w < tail ? kFloatAhead : kFloatAhead + t.next_tile;
    f32x16 weight[S];
    PL_UNROLL for (int s = 0; s < S; ++s) {
      weight[s] = as_f32(load_i32(w + s * t.strip_bytes));
      ask_for(w + s * t.strip_bytes + ahead);
    }
    PL_UNROLL for (int r = 0; r < R; ++r) {
      PL_UNROLL for (int s = 0; s < S; ++s) acc[r][s] = fma_at(acc[r][s], weight[s], x + r * t.num_inputs);
    }
  }
  PL_UNROLL for (int r = 0; r < R; ++r) {
    PL_UNROLL for (int s = 0; s < S; ++s) finish(t, r, s, acc[r][s]);
  }
}

template <int R, int S>
void tile_bf16(const Tile& t) {
  f32x16 acc[R][S];
  PL_UNROLL for (int r = 0; r < R; ++r) {
    PL_UNROLL for (int s = 0; s < S; ++s) acc[r][s] = zero();
  }
  const uint16_t* x = t.in->bf16 + t.row * t.num_inputs;
  const uint8_t* w = t.weights;
  const uint8_t* const tail = w + t.strip_bytes - kFloatAhead;
  for (int64_t k = 0; k < t.num_inputs; k += 2, x += 2, w += 4 * kStrip) {
    const int64_t ahead = w < tail ? kFloatAhead : kFloatAhead + t.next_tile;
    i32x16 weight[S];
    PL_UNROLL for (int s = 0; s < S; ++s) {
      weight[s] = load_i32(w + s * t.strip_bytes);
      ask_for(w + s * t.strip_bytes + ahead);
    }
    PL_UNROLL for (int r = 0; r < R; ++r) {
      PL_UNROLL for (int s = 0; s < S; ++s) acc[r][s] = dot_pairs_at(acc[r][s], weight[s], x + r * t.num_inputs);
    }
  }
  PL_UNROLL for (int r = 0; r < R; ++r) {
    PL_UNROLL for (int s = 0; s < S; ++s) finish(t, r, s, acc[r][s]);
  }
}

// Where the next row's part of the current group is: its quantised values, and its index among scales and sums.
struct GroupCursor {
  const int8_t* q;
  int64_t index;

  // Opaque, so that a row costs one addition and not one kept address for each of its quads.
  __attribute__((always_inline)) void next_row(int64_t num_inputs, int64_t num_groups) {
    q = opaque(q + num_inputs);
    index = opaque(index + num_groups);
  }
};

struct IntTile {
  explicit IntTile(const Tile& t)
      : num_inputs(t.num_inputs), num_groups(t.num_inputs / kGroup), scale(t.in->scale), scaled_sum(t.in->scaled_sum),
        start(t.in->start), first{t.in->q + t.row * t.num_inputs, t.row * num_groups} {}

  int64_t num_inputs, num_groups;
  const float *scale, *scaled_sum;
  const int32_t* start;
  GroupCursor first;           // row 0 of the current group
};

// d * scale: what a group's integer dot product is worth.
struct Product {
  static constexpr bool asks_twice = false;
  __attribute__((always_inline)) explicit Product(const uint16_t* d) : d_(load_f16(d)) {}
  __attribute__((always_inline)) f32x16 times(const float* scale) const { return mul(d_, set1(*scale)); }

 private:
  f32x16 d_;
};

// The same bits where d is a power of two and the scale passes are_ordinary: its exponent is added to the scale's. Additions
// have ports of their own beside the multiplications, which are what a linear of many rows is made of (docs/log.md).
struct PowerProduct {
  static constexpr bool asks_twice = true;    // for weights, the second time from the second cache into the first
  __attribute__((always_inline)) explicit PowerProduct(const uint16_t* d)
      : exponent_(sub_i32(as_i32(load_f16(d)), set1_i32(0x3f800000))) {}
  __attribute__((always_inline)) f32x16 times(const float* scale) const {
    int32_t bits;
    memcpy(&bits, scale, 4);
    return as_f32(add_i32(exponent_, set1_i32(bits)));
  }

 private:
  i32x16 exponent_;
};

// y += d * scale * (sum of (w + 128) * q - 128 * sum of q), the bracket in integers.
template <int N, class Scale>
PL_INLINE void add_int8_group(f32x16* acc, const quad8* weight, const Scale& d, const IntTile& t, GroupCursor& at) {
  const int8_t* q[N];
  int64_t index[N];
  group_dot dot[N];
  PL_UNROLL for (int r = 0; r < N; ++r, at.next_row(t.num_inputs, t.num_groups)) {
    q[r] = at.q;
    index[r] = at.index;
    dot[r] = start_dot(t.start + at.index);
  }
  PL_UNROLL for (int quad = 0; quad < 8; ++quad) {
    PL_UNROLL for (int r = 0; r < N; ++r) dot[r] = add_quad(dot[r], weight[quad], q[r] + 4 * quad);
  }
  PL_UNROLL for (int r = 0; r < N; ++r) acc[r] = fma(finish_dot(dot[r]), d.times(t.scale + index[r]), acc[r]);
}

// y += d * scale * (sum of w * q), then y += m * (scale * sum of q).
template <int N>
PL_INLINE void add_int4_group(f32x16* acc, const i32x16* weight, f32x16 d, f32x16 m, const IntTile& t, GroupCursor& at) {
  const int8_t* q[N];
  int64_t index[N];
  group_dot4 dot[N];
  PL_UNROLL for (int r = 0; r < N; ++r, at.next_row(t.num_inputs, t.num_groups)) {
    q[r] = at.q;
    index[r] = at.index;
    dot[r] = start_dot4();
  }
  PL_UNROLL for (int quad = 0; quad < 8; ++quad) {
    PL_UNROLL for (int r = 0; r < N; ++r) dot[r] = add_quad4(dot[r], weight[quad], q[r] + 4 * quad);
  }
  PL_UNROLL for (int r = 0; r < N; ++r) {
    acc[r] = fma(finish_dot4(dot[r]), mul(d, set1(t.scale[index[r]])), acc[r]);
    acc[r] = fma_at(acc[r], m, t.scaled_sum + index[r]);
  }
}

template <int R, class Scale>
void tile_int8_of(const Tile& tile) {
  constexpr int whole = R / kRowsAtOnce * kRowsAtOnce;
  IntTile t(tile);
  f32x16 acc[R];
  PL_UNROLL for (int r = 0; r < R; ++r) acc[r] = zero();
  const uint8_t* const end = tile.weights + tile.strip_bytes;
  for (const uint8_t* w = tile.weights; w != end; w += int8_block_bytes, t.first.q += kGroup, ++t.first.index) {
    quad8 weight[8];
    PL_UNROLL for (int quad = 0; quad < 8; ++quad) weight[quad] = load_quad8(w + quad * 4 * kStrip);
    PL_UNROLL for (int line = 0; line < kInt8Lines; ++line) ask_for(w + line * 64 + kInt8Ahead);
    if constexpr (Scale::asks_twice && R >= 8) {
      PL_UNROLL for (int line = 0; line < kInt8Lines; ++line) prefetch(w + line * 64 + 2 * int8_block_bytes);
    }
    const Scale d(reinterpret_cast<const uint16_t*>(w + 32 * kStrip));
    GroupCursor at = t.first;
    PL_UNROLL for (int r = 0; r < whole; r += kRowsAtOnce) add_int8_group<kRowsAtOnce>(acc + r, weight, d, t, at);
    if constexpr (whole < R) add_int8_group<R - whole>(acc + whole, weight, d, t, at);
  }
  PL_UNROLL for (int r = 0; r < R; ++r) finish(tile, r, 0, acc[r]);
}

template <int R, int>
void tile_int8(const Tile& tile) { tile_int8_of<R, Product>(tile); }

#if defined(PACELINE_ISA_AVX512)
template <int R, int>
void tile_int8_power(const Tile& tile) { tile_int8_of<R, PowerProduct>(tile); }
#endif

template <int R, int>
void tile_int4(const Tile& tile) {
  constexpr int whole = R / kRowsAtOnce * kRowsAtOnce;
  const i32x16 nibble = set1_i32(0x0f0f0f0f);
  IntTile t(tile);
  f32x16 acc[R];
  PL_UNROLL for (int r = 0; r < R; ++r) acc[r] = zero();
  const uint8_t* const end = tile.weights + tile.strip_bytes;
  for (const uint8_t* w = tile.weights; w != end; w += int4_block_bytes, t.first.q += kGroup, ++t.first.index) {
    i32x16 weight[8];
    PL_UNROLL for (int j = 0; j < 4; ++j) {
      const i32x16 two = load_i32(w + j * 4 * kStrip);
      weight[2 * j] = and_i32(two, nibble);
      weight[2 * j + 1] = and_i32(shift_right<4>(two), nibble);
    }
    PL_UNROLL for (int line = 0; line < kInt4Lines; ++line) prefetch(w + line * 64 + kInt4Ahead);
    const f32x16 d = load_f16(reinterpret_cast<const uint16_t*>(w + 16 * kStrip));
    const f32x16 m = load_f16(reinterpret_cast<const uint16_t*>(w + 18 * kStrip));
    GroupCursor at = t.first;
    PL_UNROLL for (int r = 0; r < whole; r += kRowsAtOnce) add_int4_group<kRowsAtOnce>(acc + r, weight, d, m, t, at);
    if constexpr (whole < R) add_int4_group<R - whole>(acc + whole, weight, d, m, t, at);
  }
  PL_UNROLL for (int r = 0; r < R; ++r) finish(tile, r, 0, acc[r]);
}

using TileKernel = void (*)(const Tile&);

// One kernel a row count, rows 1 to the tile's most.
#define PL_2(tile, S) tile<1, S>, tile<2, S>
#define PL_4(tile, S) PL_2(tile, S), tile<3, S>, tile<4, S>
#define PL_6(tile, S) PL_4(tile, S), tile<5, S>, tile<6, S>
#define PL_8(tile, S) PL_6(tile, S), tile<7, S>, tile<8, S>
#define PL_16(tile, S) \
  PL_8(tile, S), tile<9, S>, tile<10, S>, tile<11, S>, tile<12, S>, tile<13, S>, tile<14, S>, tile<15, S>, tile<16, S>

#if defined(PACELINE_ISA_AVX512)
constexpr TileKernel kF32Tiles[kFloatStrips][kFloatRows] = {{PL_8(tile_f32, 1)}, {PL_8(tile_f32, 2)}, {PL_8(tile_f32, 3)}};
constexpr TileKernel kBf16Tiles[kFloatStrips][kPairRows] = {
    {PL_8(tile_bf16, 1)}, {PL_8(tile_bf16, 2)}, {PL_8(tile_bf16, 3)}};
constexpr TileKernel kInt8Tiles[1][kIntRows] = {{PL_16(tile_int8, 1)}};
constexpr TileKernel kInt8PowerTiles[1][kIntRows] = {{PL_16(tile_int8_power, 1)}};
constexpr TileKernel kInt4Tiles[1][kIntRows] = {{PL_16(tile_int4, 1)}};
#elif defined(PACELINE_ISA_AVX2)
constexpr TileKernel kF32Tiles[kFloatStrips][kFloatRows] = {{PL_6(tile_f32, 1)}};
constexpr TileKernel kBf16Tiles[kFloatStrips][kPairRows] = {{PL_4(tile_bf16, 1)}};
constexpr TileKernel kInt8Tiles[1][kIntRows] = {{PL_4(tile_int8, 1)}};
constexpr TileKernel kInt4Tiles[1][kIntRows] = {{PL_4(tile_int4, 1)}};
#else
constexpr TileKernel kF32Tiles[kFloatStrips][kFloatRows] = {{PL_2(tile_f32, 1)}};
constexpr TileKernel kBf16Tiles[kFloatStrips][kPairRows] = {{PL_2(tile_bf16, 1)}};
constexpr TileKernel kInt8Tiles[1][kIntRows] = {{PL_4(tile_int8, 1)}};
constexpr TileKernel kInt4Tiles[1][kIntRows] = {{PL_4(tile_int4, 1)}};
#endif

struct FormKernels {
  const TileKernel* tiles;     // [strips][rows]
  int64_t max_rows, max_strips;
  int64_t strip_bytes;
};

#if defined(PACELINE_ISA_AVX512)
// Whether exponents of d (f16) can be added to all `count` scales: none is 0, not finite, or so near to the ends that the
// product would leave the ordinary numbers.
bool are_ordinary(const float* scales, int64_t count) {
  const i32x16 ones = set1_i32(-1);
  i32x16 most = set1_i32(0), most_inverted = set1_i32(INT32_MIN);    // of ~scale, whose order is the other way round
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const i32x16 scale = load_i32(scales + i);
    most = max_i32(most, scale);
    most_inverted = max_i32(most_inverted, xor_i32(scale, ones));
  }
  const mask16 rest = first_lanes(static_cast<int>(count - i));
  const i32x16 last = as_i32(load_first(scales + i, static_cast<int>(count - i)));
  most = max_i32(most, last);
  most_inverted = max_i32(most_inverted, select_i32(rest, xor_i32(last, ones), most_inverted));
  return reduce_max_i32(most) <= 0x71800000 && ~reduce_max_i32(most_inverted) >= 0x0d800000;    // 2^100, 2^-100
}
#endif

FormKernels kernels_of(const Weight& w, const Activations& a, int64_t first_row, int64_t last_row) {
  const int64_t num_inputs = w.num_inputs;
#if defined(PACELINE_ISA_AVX512)
  const int64_t groups = num_inputs / kGroup;
  if (w.has_power_scales && are_ordinary(a.scale + first_row * groups, (last_row - first_row) * groups)) {
    return {kInt8PowerTiles[0], kIntRows, 1, groups * int8_block_bytes};
  }
#else
  (void)a, (void)first_row, (void)last_row;
#endif
  switch (w.form) {
    case Form::f32: return {kF32Tiles[0], kFloatRows, kFloatStrips, num_inputs * kStrip * 4};
    case Form::bf16: return {kBf16Tiles[0], kPairRows, kFloatStrips, num_inputs * kStrip * 2};
    case Form::int8: return {kInt8Tiles[0], kIntRows, 1, num_inputs / kGroup * int8_block_bytes};
    case Form::int4: break;
  }
  return {kInt4Tiles[0], kIntRows, 1, num_inputs / kGroup * int4_block_bytes};
}

PL_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

// Strips outside, rows inside: a strip's weights (6 to 150 KB) stay in cache while the rows pass by.
void linear(const Weight& w, const Activations& a, const float* bias, float* out, int64_t out_stride, int64_t first_row,
            int64_t last_row, int64_t first_strip, int64_t last_strip) {
  const FormKernels kernels = kernels_of(w, a, first_row, last_row);
  for (int64_t strip = first_strip; strip < last_strip;) {
    const int64_t strips = smaller(kernels.max_strips, last_strip - strip);
    const TileKernel* tiles = kernels.tiles + (strips - 1) * kernels.max_rows;
    Tile t;
    t.weights = w.data + strip * kernels.strip_bytes;
    t.strip_bytes = kernels.strip_bytes;
    t.num_inputs = w.num_inputs;
    t.in = &a;
    t.bias = bias == nullptr ? nullptr : bias + strip * kStrip;
    t.out_stride = out_stride;
    t.num_outputs = w.num_outputs - strip * kStrip;
    t.next_tile = (strips - 1) * kernels.strip_bytes;
    for (int64_t row = first_row; row < last_row;) {
      const int64_t rows = smaller(kernels.max_rows, last_row - row);
      t.row = row;
      t.out = out + row * out_stride + strip * kStrip;
      tiles[rows - 1](t);
      row += rows;
    }
    strip += strips;
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
