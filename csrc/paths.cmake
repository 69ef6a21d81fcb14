# The compiler's flags and the units of each instruction-set path: for the Python module and for the kernel test alike.

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# Contract C1: the compiler neither fuses nor reorders floating point. No link-time optimisation either: it could inline
# code of one path into another.
set(PACELINE_FLAGS -O3 -ffp-contract=off -fno-math-errno -fvisibility=hidden -Wall -Wextra -Wno-psabi ${PACELINE_MORE_FLAGS})

# One set of units per instruction-set path. They share nothing but kernels.h.
set(PATH_UNITS linear.cpp elementwise.cpp attention.cpp sample.cpp quantize.cpp peaks.cpp table.cpp)
list(TRANSFORM PATH_UNITS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)

function(add_path name)
  add_library(kernels_${name} OBJECT ${PATH_UNITS})
  string(TOUPPER ${name} upper)
  target_compile_definitions(kernels_${name} PRIVATE PACELINE_ISA=${name} PACELINE_ISA_${upper}=1)
  target_compile_options(kernels_${name} PRIVATE ${PACELINE_FLAGS} -fno-exceptions -fno-rtti ${ARGN})
endfunction()

add_path(portable)
set(PATH_OBJECTS $<TARGET_OBJECTS:kernels_portable>)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  add_path(avx2 -mavx2 -mfma -mf16c)
  list(APPEND PATH_OBJECTS $<TARGET_OBJECTS:kernels_avx2>)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-mavx512bf16 COMPILER_KNOWS_AVX512)    # the youngest flag of those below: g++ 10, clang 9
  if(COMPILER_KNOWS_AVX512)
    add_compile_definitions(PACELINE_BUILT_AVX512=1)    # cpu_features.cpp names no table that was not built
    # The warnings are about g++ 12's own headers (_mm512_undefined).
    add_path(avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16
             -Wno-maybe-uninitialized -Wno-uninitialized)
    list(APPEND PATH_OBJECTS $<TARGET_OBJECTS:kernels_avx512>)
  endif()
endif()
