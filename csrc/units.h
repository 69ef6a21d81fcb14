// The functions of one path, as table.cpp sees them. Signatures are those of KernelTable.
#pragma once

#include "kernels.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int linear_max_tile_rows =
#if defined(PACELINE_ISA_AVX512)
    16;
#elif defined(PACELINE_ISA_AVX2)
    6;
#else
    4;
#endif

void embed(const Weight& w, const int32_t* token_ids, float* out, int64_t first, int64_t last);
void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t width, int64_t first, int64_t last);
void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* out, int64_t width, int64_t first,
                int64_t last);
void rms_norm_slices(float* x, const float* weight, float eps, int64_t stride, int64_t first_column, int64_t width,
                     int64_t num_slices, int64_t first, int64_t last);
void silu_mul(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last);
void gelu_tanh_mul(const float* gate_up, float* out, int64_t inner, int64_t first, int64_t last);
void add_rows(float* x, const float* y, float scale, int64_t width, int64_t first, int64_t last);
void add_gated(float* x, const float* y, const float* gate, int64_t width, int64_t first, int64_t last);
void scale_rows(float* x, float factor, int64_t width, int64_t first, int64_t last);
void softcap_rows(float* x, float cap, int64_t width, int64_t first, int64_t last);
void route(const float* logits, int64_t num_experts, int64_t top_k, bool renormalise, float* routes, int64_t first,
           int64_t last);
void combine(const float* x, const float* routes, const int32_t* rows, int64_t top_k, int64_t width, float* out, int64_t first,
             int64_t last);
void exp_values(const float* x, float* out, int64_t count);
void prepare(Form form, const float* x, const Activations& out, int64_t num_inputs, int64_t first, int64_t last);
void prepare_columns(Form form, const float* x, const Activations& out, int64_t num_inputs, int64_t first_column,
                     int64_t num_columns, int64_t first, int64_t last);

void linear(const Weight& w, const Activations& a, const float* bias, float* out, int64_t out_stride, int64_t first_row,
            int64_t last_row, int64_t first_strip, int64_t last_strip);

void rope_write_kv(const float* qkv, const float* rope, int32_t rotary_dim, float* q_out, const KVCache& kv, int32_t layer,
                   int32_t num_heads, const Batch& batch, int64_t first, int64_t last);
void attend(const float* q, const KVCache& kv, int32_t layer, int32_t num_heads, float scale, float softcap,
            const Batch& batch, const AttendJob& job, float* out, float* partials);
void merge_segments(const float* partials, int32_t partial_segments, int32_t num_segments, int32_t head_dim,
                    int32_t first_head, int32_t last_head, float* out);

int32_t sample(const float* logits, int64_t vocab_size, const Sampling& sampling, int64_t index, float* logprob,
               void* scratch);
size_t sample_scratch_bytes(int64_t vocab_size);

void int4_lines(const float* values, float* d, float* m);
void int4_quants(const float* values, const float* d, const float* m, uint32_t* words, float* error);

int64_t multiply_add(Form form, int64_t rounds);
int32_t read_memory(const uint8_t* data, int64_t num_bytes);

}  // namespace PACELINE_ISA
}  // namespace paceline
