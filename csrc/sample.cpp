// Placeholder until the sampling kernels arrive.
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {

int32_t sample(const float*, int64_t, const Sampling&, int64_t, float*, void*) { return -1; }
size_t sample_scratch_bytes(int64_t) { return 0; }

}  // namespace PACELINE_ISA
}  // namespace paceline
