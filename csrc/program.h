// A recorded program (paceline/ops/program.py) as this backend sees it: checked against its weights and the cache, then
// turned into operations that threads can share. Knows shapes, not a step's arrays.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "pack.h"

namespace paceline {

// What a buffer has a row for: each token, each wanted one, or each token and each of the experts chosen for it.
enum class Rows { tokens, wanted, routed };

struct BufferSpec {
  int64_t id;
  Rows rows;
  int64_t width;
};

// A packed matrix, or an array of floats: a vector has one row.
struct WeightSpec {
  bool is_packed = false;
  PackedWeight packed;
  std::vector<float> values;
  int64_t rows = 0, columns = 0;
};

struct NodeSpec {
  std::string verb;
  std::vector<int64_t> inputs;
  int64_t output;    // -1: none
  std::vector<std::string> weights;
  std::map<std::string, double> attrs;
};

struct ProgramSpec {
  std::vector<BufferSpec> buffers;
  std::vector<NodeSpec> nodes;
  std::map<std::string, WeightSpec> weights;
  int64_t num_heads, num_kv_heads, head_dim, vocab_size;
};

struct KVSpec {
  int64_t num_layers, num_kv_heads, head_dim, block_size, num_blocks;
  bool is_bf16;
  bool has_early_pages = false;    // the system gives its memory in the background, not as it is written
};

enum class Verb {
  embed, rms_norm, layer_norm, rms_norm_slices, linear, rope_write_kv, paged_attention, silu_mul, gelu_tanh_mul, add,
  add_gated, scale, softcap, route, gather_routed, expert_linear, combine_routed, select_wanted, sample, prepare
};

// One verb with its buffers (indices into ProgramSpec::buffers) and its weights resolved.
struct Step {
  Verb verb;
  int in = -1, in2 = -1, in3 = -1, out = -1;
  const Weight* weight = nullptr;
  std::vector<const Weight*> experts{};  // expert_linear: by id, equal in form and shape
  const float* array = nullptr;    // norm weight or rope table
  const float* bias = nullptr;
  float eps = 0.0f, scale = 0.0f, softcap = 0.0f;
  int32_t layer = 0, kv_group = 0; // rope_write_kv, paged_attention: which layer of which group of the cache
  int plan = 0;                    // paged_attention: index into Compiled::windows
  int64_t out_column = 0;          // linear, rms_norm_slices: where its columns start
  int64_t width = 0, count = 0;    // rms_norm_slices: of a slice, and how many; rope_write_kv: width is rotary_dim;
                                   // route: width is the number of experts, count how many a token has
  bool renormalises = false;       // route
  int prepared = -1;               // linear: the prepared form it reads, -1 for f32; prepare: the one it writes
};

// A buffer's rows in the form that a linear reads.
struct PreparedSpec {
  int buffer;
  Form form;
};

// What threads share tile by tile. Verbs that treat each row by itself are chained: a tile takes its rows through all.
// `gated` is a linear of gate and up, the activation of the one times the other, and their rounding for the linear after it:
// a tile takes some columns of both through all three, so that nothing of them goes through memory between.
// `sort` puts a step's routed rows in the order of their experts, in one tile, and sets how many tiles the expert_linear
// operations that read them have: until then nobody can know.
struct Op {
  enum Kind { rows, linear, gated, attend, merge, sort, expert_linear, sample } kind;
  Rows of;                    // what its rows are
  std::vector<Step> steps;
  std::string label;
  std::vector<int> linears{};    // sort: its expert_linear operations
  int index = 0;                 // expert_linear: its place among them
};

struct Compiled {
  std::vector<Op> ops;
  std::vector<PreparedSpec> prepared;
  int64_t num_positions;           // rows of the shortest rope table
  std::vector<int32_t> windows;          // the different ones of the program's attention; 0: none
  std::vector<int32_t> group_windows;    // of each KV group, how far its layers look back at most; 0: to the start
  int64_t experts_per_token = 0;   // routed rows a token has
  int64_t most_experts = 0;        // of any route
};

// Throws std::invalid_argument naming the node at fault. The result points into the spec's weights.
Compiled compile(const ProgramSpec& spec, const KVSpec& kv);

}  // namespace paceline
