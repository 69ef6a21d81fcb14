// Sixteen lanes, three ways. Units compiled per path include this and see the same names whatever the machine:
//
//   f32x16, i32x16      16 floats, 16 32-bit integers; i32x16 also carries raw bytes (16 x 4 u8, 16 x 2 bf16)
//   mask16              one truth value a lane
//
// Every function is static and forced inline: nothing here may leave a symbol that the linker could share between paths.
// fma() is one rounding on avx2 and avx512 and a product then a sum on portable: each path has its own numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(PACELINE_ISA)
#error "units of a path are compiled with -DPACELINE_ISA=portable|avx2|avx512"
#endif

#define PL_INLINE static inline __attribute__((always_inline))

// Hides how a pointer or index was computed. Without it g++ turns every row + constant of an unrolled tile into an address of its
// own and spills dozens of them; with it, a few base registers and constant displacements remain.
template <class T> PL_INLINE T opaque(T address) {
  asm("" : "+r"(address));
  return address;
}

#if defined(PACELINE_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(PACELINE_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#include "simd_common.h"
