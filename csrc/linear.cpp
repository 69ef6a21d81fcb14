#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {

void linear(const Weight&, const Activations&, const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t) {}

}  // namespace PACELINE_ISA
}  // namespace paceline
