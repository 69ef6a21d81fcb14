// Checks the kernels of every path this processor has, without Python: exactness by bits, errors against double precision.
// `make test-native` runs it here, `make test-arm` runs it cross-compiled on an emulated Arm processor.
#include <cstdarg>

#include "../cpu_features.h"
#include "../pool.h"
#include "check.h"

namespace paceline::test {
namespace {

int passed = 0, failed = 0;

}  // namespace

Check::~Check() {
  const bool is_right = num_wrong_ == 0 && num_looked_at_ > 0;
  (is_right ? passed : failed) += 1;
  if (num_looked_at_ == 0) std::printf("FAILED %s: looked at nothing\n", name_.c_str());
  if (num_wrong_ > 0) {
    std::printf("FAILED %s: %lld of %lld wrong\n", name_.c_str(), static_cast<long long>(num_wrong_),
                static_cast<long long>(num_looked_at_));
  }
  std::fflush(stdout);
}

void Check::expect(bool is_right, const char* format, ...) {
  ++num_looked_at_;
  if (is_right) return;
  if (++num_wrong_ > 3) return;
  std::printf("  %s: ", name_.c_str());
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}

void Check::same_bits(const float* a, const float* b, int64_t count, const char* what, int64_t where) {
  const bool is_same = std::memcmp(a, b, static_cast<size_t>(count) * 4) == 0;
  int64_t first = 0;
  while (!is_same && std::memcmp(a + first, b + first, 4) == 0) ++first;
  expect(is_same, "%s %lld: element %lld is %.9g, alone it is %.9g", what, static_cast<long long>(where),
         static_cast<long long>(first), is_same ? 0.0 : static_cast<double>(a[first]),
         is_same ? 0.0 : static_cast<double>(b[first]));
}

int num_failed() { return failed; }
int num_passed() { return passed; }

uint64_t Random::next() {
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return state_ * 0x2545f4914f6cdd1dull;
}

float Random::bell() {
  float sum = 0.0f;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum - 6.0f;
}

std::vector<float> Random::bells(int64_t count, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = scale * bell();
  return values;
}

}  // namespace paceline::test

int main() {
  using namespace paceline;
  FloatState float_state;
  for (const KernelTable* table : available_tables()) {
    std::printf("path %s\n", table->name);
    test::test_linear(*table);
    test::test_elementwise(*table);
    test::test_attention(*table);
    test::test_sample(*table);
    test::test_program(*table);
    test::test_calibration(*table);
  }
  test::test_pool();
  std::printf("%d passed, %d failed\n", test::num_passed(), test::num_failed());
  return test::num_failed() == 0 && test::num_passed() > 0 ? 0 : 1;
}
