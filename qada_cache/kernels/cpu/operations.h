// Operations on vectors that kernels for prompts are made of, a column for each set of instructions:
//
//                     AVX-512 (F, BW)                    AVX2, FMA
//   floats of a vector, LANES       16                   8
//   vectors of a sum, VECTORS        4 of 32             2 of 16
//   words of bfloat16, if NUMBER is   pairs (BF16), floats   floats
//   codes                            bytes (VNNI), shorts   shorts
//
// Which ones the compiler is told of decides; `prompt.py` tells it. NUMBER is uint16_t for bfloat16, or float. Vectors
// are the compilers' own extension (GCC, Clang), so that what is not here is of no processor.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDE 1
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDE 0
#else
#error "the processor has neither AVX2 with FMA nor AVX-512"
#endif

#define INLINED inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

namespace {

using Number = NUMBER;

constexpr int LANES = WIDE ? 16 : 8;
constexpr int VECTORS = WIDE ? 4 : 2;  // of sums for each of 6 queries, which stay in registers

typedef float Singles __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// What is packed, and weights: words of one float or, where the processor multiplies them, of a pair of bfloat16.
#if defined(__AVX512BF16__) && WIDE
constexpr int IN_WORD = 4 / sizeof(Number);
#else
constexpr int IN_WORD = 1;
#endif
using Packed = std::conditional_t<IN_WORD == 2, uint16_t, float>;

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

// `a * b + c`, rounded once.
INLINED Singles fused(Singles a, Singles b, Singles c) {
#if WIDE
    return (Singles)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (Singles)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

// `sum`, and the products of the numbers in two vectors of words, of each word together.
INLINED Singles added(Singles sum, Words left, Words right) {
#if defined(__AVX512BF16__) && WIDE
    if constexpr (IN_WORD == 2) return (Singles)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
    return fused((Singles)left, (Singles)right, sum);
}

// The larger ones; `b` where one is no number.
INLINED Singles larger(Singles a, Singles b) {
#if WIDE
    return (Singles)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (Singles)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

INLINED float sum_of(Singles lanes) {
#if WIDE
    return _mm512_reduce_add_ps((__m512)lanes);
#else
    const __m256 all = (__m256)lanes;
    __m128 halves = _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1);
    halves = _mm_hadd_ps(halves, halves);
    return _mm_cvtss_f32(_mm_hadd_ps(halves, halves));
#endif
}

INLINED float largest(Singles lanes) {
#if WIDE
    return _mm512_reduce_max_ps((__m512)lanes);
#else
    const __m256 all = (__m256)lanes;
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#endif
}

INLINED Integers to_nearest(Singles x) {
#if WIDE
    return (Integers)_mm512_cvtps_epi32((__m512)x);
#else
    return (Integers)_mm256_cvtps_epi32((__m256)x);
#endif
}

INLINED Singles to_singles(Integers x) { return __builtin_convertvector(x, Singles); }

INLINED Integers not_negative(Integers x) {
#if WIDE
    return (Integers)_mm512_max_epi32((__m512i)x, _mm512_setzero_si512());
#else
    return (Integers)_mm256_max_epi32((__m256i)x, _mm256_setzero_si256());
#endif
}

// Rounded to bfloat16, of two as near to the even one.
INLINED void store_bfloat16(void* to, Singles row) {
#if defined(__AVX512BF16__) && WIDE
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)row));
#else
    const Words bits = (Words)row, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    store(to, __builtin_convertvector(row == row ? rounded : Words{} + 0x7fc0, Halves));
#endif
}

// `sum`, integers, and products of a query's and keys' codes, of CODE_BYTES, of each word together.
#if CODE_BYTES == 1
#if !defined(__AVX512VNNI__) || !WIDE
#error "the processor multiplies no bytes (AVX512-VNNI)"
#endif
#endif
// By GCC's functions, and in arrays of vectors of integers, sums are moved to memory and back. Bytes are unsigned and
// signed ones; shorts are there as products of bytes overflow without VNNI.
INLINED Singles added_codes(Singles sum, Words query, Words keys) {
#if CODE_BYTES == 1
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(query), "v"(keys));
#elif WIDE
    asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm512_madd_epi16((__m512i)query, (__m512i)keys)));
#else
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16((__m256i)query, (__m256i)keys)));
#endif
    return sum;
}

// Marked numbers of a vector: a bit each where the processor has masks, else all bits or none of its lane.
#if WIDE
typedef __mmask16 Marks;
INLINED Marks at_least(Singles a, Singles b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
INLINED Singles without(Singles lanes, Marks off) { return (Singles)_mm512_maskz_mov_ps((Marks)~off, (__m512)lanes); }
INLINED uint32_t bits_of(Marks marks) { return marks; }
#else
typedef Integers Marks;
INLINED Marks at_least(Singles a, Singles b) { return a >= b; }
INLINED Singles without(Singles lanes, Marks off) { return (Singles)((Integers)lanes & ~off); }
INLINED uint32_t bits_of(Marks marks) { return _mm256_movemask_ps((__m256)marks); }
#endif

// What gives 2 to the power of -0.5 to 0.5 with the least largest error: 8e-8, or 3e-6, as weights are then rounded.
constexpr float FINE[] = {
    1.53458120e-4f, 1.33999314e-3f, 9.61848896e-3f, 5.55032878e-2f, 2.40226469e-1f, 6.93147206e-1f, 1.0f};
constexpr float COARSE[] = {9.57010188e-3f, 5.59178618e-2f, 2.40247448e-1f, 6.93121815e-1f, 9.99999261e-1f};

// 2 to the power of `x`, at most 0; 0 where that is no normal number.
INLINED Singles power_of_two(Singles x) {
    constexpr float NOTHING = WIDE ? -200 : -125;
    const Singles least = larger(all(NOTHING), x);  // in this order it keeps a nan
#if WIDE
    const Singles whole = (Singles)_mm512_roundscale_ps((__m512)least, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Singles whole = (Singles)_mm256_round_ps((__m256)least, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
    const Singles rest = least - whole;
    Singles sum = {};
    const auto evaluate = [&](const auto& coefficients) {
        for (float coefficient : coefficients) sum = fused(sum, rest, all(coefficient));
    };
    if constexpr (IN_WORD == 1) evaluate(FINE);
    else evaluate(COARSE);
#if WIDE
    return (Singles)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
    return (Singles)(((Integers)sum + (to_nearest(whole) << 23)) & ~(Integers)(x < NOTHING));
#endif
}

}  // namespace
