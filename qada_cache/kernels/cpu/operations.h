// Operations on vectors that kernels for prompts consist of. Each set of instructions has a file, here a column:
//
//                     avx512.h (F, BW, DQ)      avx2.h (AVX2, FMA)          neon.h
//   floats of a vector, LANES       16          8                           4
//   vectors of a sum, VECTORS        4 of 32    2 of 16                     4 of 32
//   words of bfloat16   pairs (BF16), floats    floats                      pairs (BF16), floats
//   LEVELS of codes     127 (VNNI), 63          127 (AVX-VNNI), 63          127
//   tiles of words      pairs (AMX)
//
// The instructions that the compiler may use select the column; `prompt.py` passes them. NUMBER is uint16_t for
// bfloat16, or float. Vectors are an extension of the compilers (GCC, Clang), so code outside of those files is the
// same for all processors.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#define INLINED inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // with registers of its own
#define UNROLLED _Pragma("GCC unroll 8")

namespace {

using Number = NUMBER;

// VECTORS vectors of sums for each of 6 queries stay in registers. MULTIPLIES_PAIRS: the processor multiplies pairs of
// bfloat16; MULTIPLIES_TILES: tiles of them, too.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
constexpr int LANES = 16, VECTORS = 4;
#define COLUMN "avx512.h"
#if defined(__AVX512BF16__)
#define MULTIPLIES_PAIRS 1
#endif
#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define MULTIPLIES_TILES 1
#endif
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, VECTORS = 2;
#define COLUMN "avx2.h"
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4;
#define COLUMN "neon.h"
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MULTIPLIES_PAIRS 1
#endif
#else
#error "the processor has neither AVX2 with FMA nor AVX-512 nor NEON"
#endif

typedef float Singles __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// The type of packed numbers and of weights. A word holds one float or, where the processor multiplies pairs, a pair of
// bfloat16.
#if defined(MULTIPLIES_PAIRS)
constexpr int IN_WORD = 4 / sizeof(Number);
#else
constexpr int IN_WORD = 1;
#endif
using Packed = std::conditional_t<IN_WORD == 2, uint16_t, float>;

// Whether such words are multiplied by tiles (tiles.h), which save most of the time where they are of pairs.
#if defined(MULTIPLIES_TILES)
constexpr bool TILED = IN_WORD == 2;
#else
constexpr bool TILED = false;
#endif

template <typename To>
INLINED To loaded(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename Vector>
INLINED void store(void* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

INLINED Singles all(float each) { return Singles{} + each; }

INLINED float widen(float same) { return same; }
INLINED float widen(uint16_t bfloat16) {
    const uint32_t bits = (uint32_t)bfloat16 << 16;
    return loaded<float>(&bits);
}

INLINED Singles to_singles(Integers x) { return __builtin_convertvector(x, Singles); }

}  // namespace

// Each of the three files defines:
//
//   fused(a, b, c)            `a * b + c`, rounded once
//   added_pairs(sum, a, b)    `sum` plus the products of each word's bfloat16, where there are pairs
//   larger(a, b)              the larger ones; nan where `b` is nan
//   sum_of(a), largest(a)     of all lanes
//   to_nearest(a)             as integers
//   fraction(a)               `a` minus `a` rounded down; 0 for -inf
//   scaled(a, n)              `a` times 2 to the power of `n` rounded down; 0 where that power is too small
//   not_negative(a)           integers; 0 for negative ones
//   narrowed(to, a)           stores bfloat16, rounded to nearest, ties to even, where there are pairs
//   added_codes<n>(sum, a, b)  `sum`, integers, plus the products of a query's and keys' codes: the bytes of `n` words
//                             each, at most TOGETHER words. Codes are -LEVELS to LEVELS; unless QUERY_SIGNED, LEVELS is
//                             added to a query's
//   turn(rows, apart, columns, width)  four rows of four words, stored as columns
//   Marks, at_least(a, b)     marks of numbers; bits_of(marks), a bit each; without(a, marks), zeros at marks
#include COLUMN

namespace {

// `sum` plus the products of the numbers in two vectors of words, added up within each word.
INLINED Singles added(Singles sum, Words left, Words right) {
#if defined(MULTIPLIES_PAIRS)
    if constexpr (IN_WORD == 2) return added_pairs(sum, left, right);
#endif
    return fused((Singles)left, (Singles)right, sum);
}

// Stores a vector as bfloat16, rounded to nearest, ties to even.
INLINED void store_bfloat16(void* to, Singles row) {
#if defined(MULTIPLIES_PAIRS)
    narrowed(to, row);
#else
    const Words bits = (Words)row, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    store(to, __builtin_convertvector(row == row ? rounded : Words{} + 0x7fc0, Halves));
#endif
}

// Coefficients, highest power first, of polynomials for 2 to the power of 0 to 1. They give exactly 1 for 0, and have
// the smallest largest error: FINE less than float32's rounding; COARSE 3e-6, as weights are then rounded to bfloat16.
constexpr float FINE[] = {
    2.161291522e-04f, 1.246784638e-03f, 9.675451574e-03f, 5.548528062e-02f, 2.402293056e-01f, 6.931470444e-01f, 1.0f};
constexpr float COARSE[] = {1.342668450e-02f, 5.224247385e-02f, 2.412802049e-01f, 6.930448449e-01f, 1.0f};

// 2 to the power of `x`, which is 0 at most. The result is 0 where it would be no normal number.
INLINED Singles power_of_two(Singles x) {
    const Singles rest = fraction(x);
    const auto evaluate = [&](const auto& coefficients) {
        Singles sum = all(coefficients[0]);
        for (size_t each = 1; each < sizeof coefficients / sizeof *coefficients; each++)
            sum = fused(sum, rest, all(coefficients[each]));
        return sum;
    };
    if constexpr (IN_WORD == 1) return scaled(evaluate(FINE), x);
    else return scaled(evaluate(COARSE), x);
}

}  // namespace
