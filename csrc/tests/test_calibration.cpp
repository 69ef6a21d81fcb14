// The ceilings are measured on what they claim: every line of the memory is read, and every form multiplies.
#include <stdexcept>
#include <string>
#include <vector>

#include "../calibration.h"
#include "../pack.h"
#include "check.h"

namespace paceline::test {

void test_calibration(const KernelTable& table) {
  Check check(std::string(table.name) + " calibration");
  std::vector<uint8_t> memory(4096 + 256, 0);
  const int64_t size = 4096;
  check.expect(table.read_memory(memory.data(), size) == 0, "zeros read as something else");
  for (int64_t at = 0; at < size; at += 64) {
    memory[static_cast<size_t>(at)] = 1;
    check.expect(table.read_memory(memory.data(), size) == 1, "line %lld was not read", static_cast<long long>(at / 64));
    memory[static_cast<size_t>(at)] = 0;
  }
  for (Form form : {Form::f32, Form::bf16, Form::int8, Form::int4}) {
    const int64_t one = table.multiply_add(form, 1);
    check.expect(one > 0 && table.multiply_add(form, 10) == 10 * one, "%s: operations are miscounted", form_name(form));
  }
  Calibration calibration(table, 3, 1 << 20);
  check.expect(calibration.read_gb_per_second() > 0 && calibration.barrier_nanoseconds() > 0, "no time passed");
  bool was_refused = false;
  try {
    Calibration none(table, 0, 1 << 20);
  } catch (const std::invalid_argument&) {
    was_refused = true;
  }
  check.expect(was_refused, "no threads were accepted");
}

}  // namespace paceline::test
