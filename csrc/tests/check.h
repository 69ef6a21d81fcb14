// What the kernel tests share: counting checks, a small random generator, aligned arrays, comparison of bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../kernels.h"

namespace paceline::test {

// A named check: it passes once for all the values it looks at, and prints the first few that are wrong.
class Check {
 public:
  explicit Check(std::string name) : name_(std::move(name)) {}
  ~Check();
  Check(const Check&) = delete;
  Check& operator=(const Check&) = delete;

  void expect(bool is_right, const char* format, ...) __attribute__((format(printf, 3, 4)));
  void same_bits(const float* a, const float* b, int64_t count, const char* what, int64_t where);

 private:
  std::string name_;
  int64_t num_looked_at_ = 0, num_wrong_ = 0;
};

int num_failed();
int num_passed();

// xorshift64*: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next();
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() >> 33) % bound; }
  float uniform() { return static_cast<float>(next() >> 40) / 16777216.0f; }    // [0, 1)
  float bell();                                                                  // mean 0, deviation 1, bounded
  std::vector<float> bells(int64_t count, float scale = 1.0f);

 private:
  uint64_t state_;
};

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bf16(float value) {    // nearest even; not for NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void test_linear(const KernelTable& table);
void test_elementwise(const KernelTable& table);
void test_attention(const KernelTable& table);
void test_sample(const KernelTable& table);
void test_pool();
void test_program(const KernelTable& table);
void test_calibration(const KernelTable& table);

}  // namespace paceline::test
