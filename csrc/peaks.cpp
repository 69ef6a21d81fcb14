// What one thread reaches at best with nothing in its way: products added up in registers, and memory read in order. The
// ceilings that `paceline bench kernels` holds its figures against.
#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {
namespace {

#define PL_UNROLL _Pragma("GCC unroll 16")

constexpr int64_t kAhead = 4096;

// The bare instructions in which a path multiplies and adds for a form, on as many accumulators as hide their latency.
// Volatile: nothing changes from round to round, and a compiler would move it all out of the loop.
#if defined(PACELINE_ISA_AVX512)
constexpr int kChains = 12;

int64_t spin_dot(int64_t rounds) {
  __m512i acc[kChains] = {};
  const __m512i w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(5);
  for (int64_t i = 0; i < rounds; ++i) {
    PL_UNROLL for (int c = 0; c < kChains; ++c) asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc[c]) : "v"(w), "v"(x));
  }
  return rounds * kChains * 64 * 2;
}
int64_t spin_pairs(int64_t rounds) {
  __m512 acc[kChains] = {};
  const __m512 w = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < rounds; ++i) {
    PL_UNROLL for (int c = 0; c < kChains; ++c) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(acc[c]) : "v"(w));
  }
  return rounds * kChains * 32 * 2;
}
int64_t spin_floats(int64_t rounds) {
  __m512 acc[kChains] = {};
  const __m512 w = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < rounds; ++i) {
    PL_UNROLL for (int c = 0; c < kChains; ++c) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(acc[c]) : "v"(w));
  }
  return rounds * kChains * 16 * 2;
}
int64_t spin(Form form, int64_t rounds) {
  return form == Form::f32 ? spin_floats(rounds) : form == Form::bf16 ? spin_pairs(rounds) : spin_dot(rounds);
}

#elif defined(PACELINE_ISA_AVX2)
constexpr int kChains = 10;

// Bytes times bytes into 16-bit pairs: weights of at most 15 may be added up there, others go to 32 bits each time.
int64_t spin_nibbles(int64_t rounds) {
  __m256i acc[kChains] = {};
  const __m256i w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(5);
  for (int64_t i = 0; i < rounds; ++i) {
    PL_UNROLL for (int c = 0; c < kChains; ++c) {
      __m256i products;
      asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc[c]), "=&x"(products) : "x"(w), "x"(x));
    }
  }
  return rounds * kChains * 32 * 2;
}
int64_t spin_bytes(int64_t rounds) {
  __m256i acc[kChains] = {};
  const __m256i w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < rounds; ++i) {
    PL_UNROLL for (int c = 0; c < kChains; ++c) {
      __m256i products;
      asm volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
                   : "+x"(acc[c]), "=&x"(products)
                   : "x"(w), "x"(x), "x"(ones));
    }
  }
  return rounds * kChains * 32 * 2;
}
int64_t spin_floats(int64_t rounds) {
  __m256 acc[kChains] = {};
  const __m256 w = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < rounds; ++i) {
    PL_UNROLL for (int c = 0; c < kChains; ++c) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(acc[c]) : "x"(w));
  }
  return rounds * kChains * 8 * 2;
}
// bf16 has no unit of its own here: its products are floats'.
int64_t spin(Form form, int64_t rounds) {
  return form == Form::int4 ? spin_nibbles(rounds) : form == Form::int8 ? spin_bytes(rounds) : spin_floats(rounds);
}

#else
constexpr int kChains = 4;

// The path's own verbs on operands in cache: what bare instructions this becomes is the compiler's choice.
template <class Acc, class Add>
int64_t spin_with(Acc start, int products, int64_t rounds, Add add_to) {
  Acc acc[kChains] = {start, start, start, start};
  int8_t operand[64] = {};
  const int8_t* at = operand;
  for (int64_t i = 0; i < rounds; ++i) {
    at = opaque(at);
    PL_UNROLL for (int c = 0; c < kChains; ++c) acc[c] = add_to(acc[c], at);
  }
  const Acc* kept = opaque(static_cast<const Acc*>(acc));
  asm volatile("" : : "r"(kept) : "memory");
  return rounds * kChains * products * 2;
}
int64_t spin(Form form, int64_t rounds) {
  if (form == Form::f32) {
    return spin_with(zero(), 16, rounds, [](f32x16 acc, const int8_t* at) {
      return fma_at(acc, set1(1.0f), reinterpret_cast<const float*>(at));
    });
  }
  if (form == Form::bf16) {
    return spin_with(zero(), 32, rounds, [](f32x16 acc, const int8_t* at) {
      return dot_pairs_at(acc, set1_i32(0x3f803f80), reinterpret_cast<const uint16_t*>(at));
    });
  }
  const int32_t none = 0;
  return spin_with(start_dot(&none), 64, rounds,
                   [](group_dot acc, const int8_t* at) { return add_quad(acc, set1_i32(0x03030303), at); });
}
#endif

}  // namespace

int64_t multiply_add(Form form, int64_t rounds) { return spin(form, rounds); }

int32_t read_memory(const uint8_t* data, int64_t num_bytes) {
  i32x16 all[4] = {set1_i32(0), set1_i32(0), set1_i32(0), set1_i32(0)};
  for (int64_t i = 0; i + 256 <= num_bytes; i += 256) {
    PL_UNROLL for (int j = 0; j < 4; ++j) {
      prefetch(data + i + 64 * j + kAhead);
      all[j] = or_i32(all[j], load_i32(data + i + 64 * j));
    }
  }
  return reduce_max_i32(or_i32(or_i32(all[0], all[1]), or_i32(all[2], all[3])));
}

}  // namespace PACELINE_ISA
}  // namespace paceline
