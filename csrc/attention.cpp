// Placeholder until the attention kernels arrive.
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {

void rope_write_kv(const float*, const float*, float*, const KVCache&, int32_t, int32_t, const Batch&, int64_t, int64_t) {}
void attend(const float*, const KVCache&, int32_t, int32_t, float, const Batch&, const AttendJob&, float*, float*) {}
void merge_segments(const float*, int32_t, int32_t, int32_t, int32_t, int32_t, float*) {}

}  // namespace PACELINE_ISA
}  // namespace paceline
