#include "cpu_features.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace paceline {
namespace {

#if defined(__x86_64__)

struct CpuId { unsigned a = 0, b = 0, c = 0, d = 0; };

CpuId cpuid(unsigned leaf, unsigned subleaf) {
  CpuId r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// Register state the operating system saves on a context switch: a processor flag alone is not enough.
unsigned saved_state(const CpuId& basic) {
  if (!bit(basic.c, 27)) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

std::vector<std::pair<std::string, bool>> detect() {
  const CpuId basic = cpuid(1, 0), extended = cpuid(7, 0), extended1 = cpuid(7, 1);
  const unsigned saved = saved_state(basic);
  const bool ymm = (saved & 0x6u) == 0x6u;
  const bool zmm = (saved & 0xe6u) == 0xe6u;
  return {
      {"avx2", ymm && bit(extended.b, 5)},
      {"fma", ymm && bit(basic.c, 12)},
      {"f16c", ymm && bit(basic.c, 29)},
      {"avx512f", zmm && bit(extended.b, 16)},
      {"avx512dq", zmm && bit(extended.b, 17)},
      {"avx512bw", zmm && bit(extended.b, 30)},
      {"avx512vl", zmm && bit(extended.b, 31)},
      {"avx512vnni", zmm && bit(extended.c, 11)},
      {"avx512bf16", zmm && bit(extended1.a, 5)},
  };
}

#else

std::vector<std::pair<std::string, bool>> detect() { return {}; }

#endif

std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  bool avx2 = true, avx512 = true;
  for (const auto& [name, present] : cpu_features()) {
    if (name.rfind("avx512", 0) != 0) avx2 = avx2 && present;
    avx512 = avx512 && present;
  }
  static_cast<void>(avx512);    // unused where the compiler could not build that path
#if defined(PACELINE_BUILT_AVX512)
  if (avx512) tables.push_back(&kernels_avx512);
#endif
  if (avx2) tables.push_back(&kernels_avx2);
#endif
  tables.push_back(&kernels_portable);
  return tables;
}

}  // namespace

std::vector<std::pair<std::string, bool>> cpu_features() {
  static const std::vector<std::pair<std::string, bool>> features = detect();
  return features;
}

const std::vector<const KernelTable*>& available_tables() {
  static const std::vector<const KernelTable*> tables = usable_tables();
  return tables;
}

const KernelTable& find_table(const std::string& name) {
  std::string valid;
  for (const KernelTable* table : available_tables()) {
    if (name == table->name) return *table;
    valid += (valid.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("path: " + name + " is not one of " + valid);
}

}  // namespace paceline
