// The kernel table of one path.
#include "units.h"

#define PL_TEXT_(name) #name
#define PL_TEXT(name) PL_TEXT_(name)
#define PL_JOIN_(a, b) a##b
#define PL_JOIN(a, b) PL_JOIN_(a, b)

namespace paceline {

const KernelTable PL_JOIN(kernels_, PACELINE_ISA) = {
    PL_TEXT(PACELINE_ISA),
    PACELINE_ISA::linear_max_tile_rows,
    PACELINE_ISA::embed,
    PACELINE_ISA::rms_norm,
    PACELINE_ISA::layer_norm,
    PACELINE_ISA::rms_norm_slices,
    PACELINE_ISA::silu_mul,
    PACELINE_ISA::gelu_tanh_mul,
    PACELINE_ISA::add_rows,
    PACELINE_ISA::add_gated,
    PACELINE_ISA::scale_rows,
    PACELINE_ISA::softcap_rows,
    PACELINE_ISA::route,
    PACELINE_ISA::combine,
    PACELINE_ISA::exp_values,
    PACELINE_ISA::prepare,
    PACELINE_ISA::prepare_columns,
    PACELINE_ISA::linear,
    PACELINE_ISA::rope_write_kv,
    PACELINE_ISA::attend,
    PACELINE_ISA::merge_segments,
    PACELINE_ISA::sample,
    PACELINE_ISA::sample_scratch_bytes,
    PACELINE_ISA::int4_lines,
    PACELINE_ISA::int4_quants,
    PACELINE_ISA::multiply_add,
    PACELINE_ISA::read_memory,
};

}  // namespace paceline
