// The table of kernels of one instruction-set path. Each path compiles the same units (linear.cpp, elementwise.cpp,
// attention.cpp, sample.cpp, quantize.cpp, peaks.cpp) with its own flags inside its own namespace; cpu_features.cpp finds a
// table at run time.
//
// Every function works on a part of its output that the caller names (rows, strips, heads), so that any split of the work
// over threads gives the same bits: an output element is one reduction over K in one order, done by one call.
//
// Units compiled per path include nothing but <cstdint>, <cstddef>, <cstring> and intrinsics: a std template instantiated
// with wide flags could be the copy the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

enum class Form : int32_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

constexpr int kStrip = 16;    // outputs a strip holds, one per lane
constexpr int kGroup = 32;    // inputs that share a scale in int8 and int4

// Packed weights, the same bytes on every path. num_outputs is padded to strips with zero weights.
//   f32   [strip][k][16] f32
//   bf16  [strip][k/2][16][2] bf16                                    (num_inputs even)
//   int8  [strip][k/32] { u8 [8 quads][16 outputs][4] = w + 128; f16 d[16] }           w_real = d * w
//   int4  [strip][k/32] { u8 [4][16 outputs][4]: low nibble quad 2j, high nibble quad 2j+1; f16 d[16]; f16 m[16] }
//                                                                                       w_real = d * q + m
struct Weight {
  Form form;
  int64_t num_outputs;     // real outputs
  int64_t num_inputs;
  int64_t num_strips;      // ceil(num_outputs / 16)
  const uint8_t* data;     // 64-byte aligned
  bool has_power_scales = false;    // int8: every d is a power of two, so that times it is an addition to the exponent
};

constexpr int64_t int8_block_bytes = 32 * 16 + 2 * 16;
constexpr int64_t int4_block_bytes = 16 * 16 + 2 * 16 + 2 * 16;

// A linear's input rows, prepared for a weight form. Only the members its form needs are set.
//   f32: x.   bf16: bf16 (rounded to nearest even).
//   int8, int4: q = round(x / scale) with scale = max|x| / 127 of the row's group of 32; scaled_sum = scale * sum(q);
//   start = -128 * sum(q), from where the dot product with an int8 weight's stored w + 128 starts.
struct Activations {
  const float* x;               // [rows][num_inputs]
  uint16_t* bf16;               // [rows][num_inputs]
  int8_t* q;                    // [rows][num_inputs]
  float* scale;                 // [rows][num_inputs / 32]
  float* scaled_sum;            // [rows][num_inputs / 32]
  int32_t* start;               // [rows][num_inputs / 32]
};

// Where keys and values live. A block is one contiguous piece over all layers:
//   [layer][block_size / 16] { K of all heads, then V of all heads } for 16 tokens
//   bf16: K [head][dim / 2][16 tokens][2]     V [head][8 token pairs][dim][2]
//   f32:  K [head][dim][16 tokens]            V [head][16 tokens][dim]
struct KVCache {
  uint8_t* data;
  int32_t num_layers, num_kv_heads, head_dim, block_size, num_blocks;
  bool is_bf16;
  int64_t bytes_per_block;
};

// One step's tokens, read only.
struct Batch {
  int32_t num_tokens, num_rows, num_wanted, max_blocks;
  const int32_t* token_ids;        // [T]
  const int32_t* positions;        // [T]
  const int32_t* row_starts;       // [R + 1]
  const int32_t* row_of_token;     // [T]
  const int32_t* block_tables;     // [R][max_blocks]
  const int32_t* wanted;           // [W]
};

// Lists of token ids end to end: list i is values[starts[i]] up to values[starts[i + 1]].
struct Ragged {
  const int32_t* starts;
  const int32_t* values;
  int32_t begin(int64_t i) const { return starts[i]; }
  int32_t end(int64_t i) const { return starts[i + 1]; }
  bool is_empty(int64_t i) const { return starts[i] == starts[i + 1]; }
};

// What only `count` of the wanted positions ask for, as SamplingExtras (paceline/ops/interface.py) has it.
struct SamplingExtras {
  int64_t count;
  const int32_t* rows;
  const float *min_p, *typical_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t *num_prompt, *num_top, *target;
  Ragged history, allowed, banned, biased;
  const float* bias;
  int64_t top_width;      // the largest num_top
  int32_t* top_ids;       // [count][top_width], filled by the caller with -1, written by sample
  float* top_logprobs;    // [count][top_width], filled with 0
};

struct Sampling {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const uint64_t* seed;
  const uint32_t* prompt_index;
  const uint32_t* choice_index;
  const uint64_t* position;
  const uint8_t* wants_logprob;
  const SamplingExtras* extras = nullptr;
  const int32_t* entry_of = nullptr;    // [W] a wanted position's entry in the extras, or -1; null without extras
};

// Attention works in chunks of 64 keys inside segments of 512, both at absolute positions. One segment of one query head
// leaves a partial { m, l, 14 unused, o[head_dim] }; segments are always merged left to right.
constexpr int kChunk = 64;
constexpr int kSegment = 512;
constexpr int kPartialHead = 16;
constexpr int kMaxQueries = 96;    // query heads one attend call may hold: tokens x heads of the KV heads it covers
constexpr int kMaxHeadDim = 256;

// One piece of attention. With partials set, every segment of the range leaves a partial instead of a result. Block table
// entries of tokens that no query of the job's row sees are never read.
struct AttendJob {
  int32_t row;
  int32_t first, last;                   // query tokens, consecutive positions of one row
  int32_t first_head, last_head;         // KV heads
  int32_t first_segment, last_segment;   // segments; last_segment may lie past the end
  int32_t next_row;                      // the row whose first keys the caller will want next, or -1
  int64_t partial;                       // first float of the job's tokens in `partials`
  int32_t partial_segments;              // segments a (token, head) has room for there
  int32_t base_segment;                  // the one that the first of them is for
  int32_t window;                        // tokens a query sees, itself included; 0: all before it
};

struct KernelTable {
  const char* name;
  int max_tile_rows;               // the largest row tile of any linear kernel on this path

  // elementwise.cpp: rows [first, last)
  void (*embed)(const Weight& w, const int32_t* token_ids, float* out, int64_t first, int64_t last);
  void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int64_t width, int64_t first, int64_t last);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* out, int64_t width,
                     int64_t first, int64_t last);    // bias may be null
  // In place: slices of `width` values in each row, from first_column on, each divided by its own root mean square.
  void (*rms_norm_slices)(float* x, const float* weight, float eps, int64_t stride, int64_t first_column, int64_t width,
                          int64_t num_slices, int64_t first, int64_t last);
  void (*silu_mul)(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last);
  void (*gelu_tanh_mul)(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last);
  void (*add)(float* x, const float* y, float scale, int64_t width, int64_t first, int64_t last);    // x += scale * y
  // x += sigmoid(gate) * y, one gate a row.
  void (*add_gated)(float* x, const float* y, const float* gate, int64_t width, int64_t first, int64_t last);
  void (*scale)(float* x, float factor, int64_t width, int64_t first, int64_t last);
  void (*softcap)(float* x, float cap, int64_t width, int64_t first, int64_t last);    // x = cap * tanh(x / cap)
  // routes [row][2 top_k]: ids (as floats) of the top_k largest logits, ascending, then their shares. Ids are always
  // top_k different ones, whatever the logits hold.
  void (*route)(const float* logits, int64_t num_experts, int64_t top_k, bool renormalise, float* routes, int64_t first,
                int64_t last);
  // out[t] = sum over j of share j of token t * x[rows[t * top_k + j]], j ascending
  void (*combine)(const float* x, const float* routes, const int32_t* rows, int64_t top_k, int64_t width, float* out,
                  int64_t first, int64_t last);
  void (*exp)(const float* x, float* out, int64_t count);    // what softmax and silu use, for tests
  void (*prepare)(Form form, const float* x, const Activations& out, int64_t num_inputs, int64_t first, int64_t last);
  // A part of the columns, both multiples of 32 but for f32: x [last - first][num_columns] holds just these.
  void (*prepare_columns)(Form form, const float* x, const Activations& out, int64_t num_inputs, int64_t first_column,
                          int64_t num_columns, int64_t first, int64_t last);

  // linear.cpp: rows [first_row, last_row) x strips [first_strip, last_strip); out row stride in floats; bias may be null
  void (*linear)(const Weight& w, const Activations& a, const float* bias, float* out, int64_t out_stride,
                 int64_t first_row, int64_t last_row, int64_t first_strip, int64_t last_strip);

  // attention.cpp: tokens [first, last)
  // rope [position][rotary_dim]; the first rotary_dim dims of a head are rotated, none when it is 0.
  void (*rope_write_kv)(const float* qkv, const float* rope, int32_t rotary_dim, float* q_out, const KVCache& kv,
                        int32_t layer, int32_t num_heads, const Batch& batch, int64_t first, int64_t last);
  // out [token][num_heads][head_dim]; partials [token of the job][num_heads][partial_segments][kPartialHead + head_dim] or
  // null. A row's query tokens have consecutive positions. Scores s become softcap * tanh(s / softcap) unless it is 0.
  void (*attend)(const float* q, const KVCache& kv, int32_t layer, int32_t num_heads, float scale, float softcap,
                 const Batch& batch, const AttendJob& job, float* out, float* partials);
  // Heads [first_head, last_head) of one token: partials [head][partial_segments][...] -> out [head][head_dim].
  void (*merge_segments)(const float* partials, int32_t partial_segments, int32_t num_segments, int32_t head_dim,
                         int32_t first_head, int32_t last_head, float* out);

  // sample.cpp: one row of logits; -1 where no finite maximum exists. logprob is written where the row wants it, else 0.
  int32_t (*sample)(const float* logits, int64_t vocab_size, const Sampling& sampling, int64_t index, float* logprob,
                    void* scratch);
  size_t (*sample_scratch_bytes)(int64_t vocab_size);

  // quantize.cpp: a group of one strip, values [32 inputs][16 outputs]; the same bits on every path. int4_lines finds the
  // line d q + m close to each output's values (d = 0: none). int4_quants rounds to a given line: words [4][16] as an int4
  // block holds them (all 0 where d = 0), and the weighted squared error of each output.
  void (*int4_lines)(const float* values, float* d, float* m);
  void (*int4_quants)(const float* values, const float* d, const float* m, uint32_t* words, float* error);

  // peaks.cpp: the calling thread's ceilings. multiply_add spins on products in registers, in the instructions the path has
  // for the form, and tells how many multiplications and additions it did; read_memory walks memory in order, the bytes
  // or-ed together so that none is left out.
  int64_t (*multiply_add)(Form form, int64_t rounds);
  int32_t (*read_memory)(const uint8_t* data, int64_t num_bytes);
};

extern const KernelTable kernels_portable;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
#endif

}  // namespace paceline
