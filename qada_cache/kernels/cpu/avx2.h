// The operations of operations.h by AVX2 and FMA, and AVX-VNNI.

#pragma once

#include <immintrin.h>

namespace {

INLINED Singles fused(Singles a, Singles b, Singles c) {
    return (Singles)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINED Singles larger(Singles a, Singles b) { return (Singles)_mm256_max_ps((__m256)a, (__m256)b); }
INLINED float sum_of(Singles lanes) {
    const __m256 all = (__m256)lanes;
    __m128 halves = _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1);
    halves = _mm_hadd_ps(halves, halves);
    return _mm_cvtss_f32(_mm_hadd_ps(halves, halves));
}
INLINED float largest(Singles lanes) {
    const __m256 all = (__m256)lanes;
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
INLINED Integers to_nearest(Singles x) { return (Integers)_mm256_cvtps_epi32((__m256)x); }
INLINED Integers not_negative(Integers x) { return (Integers)_mm256_max_epi32((__m256i)x, _mm256_setzero_si256()); }
INLINED Singles bounded(Singles power) { return larger(all(-127), power); }  // by that 1 becomes 0; a nan stays one
INLINED Singles whole(Singles x) { return (Singles)_mm256_floor_ps((__m256)x); }
INLINED Singles fraction(Singles x) { return bounded(x) - whole(bounded(x)); }
INLINED Singles scaled(Singles x, Singles power) {
    return (Singles)((Integers)x + (to_nearest(whole(bounded(power))) << 23));
}

constexpr bool QUERY_SIGNED = false;
#if defined(__AVXVNNI__)
constexpr int LEVELS = 127, TOGETHER = 1;
template <int COUNT>
INLINED Singles added_codes(Singles sum, const Words* query, const Words* keys) {  // in assembly as in avx512.h
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(*query), "x"(*keys));
    return sum;
}
#else
// Sums have 16 bits first: of 8 products of a query's bytes, up to 126, and a key's, which selected_prompt.py bounds.
constexpr int LEVELS = 63, TOGETHER = 4;
template <int COUNT>
INLINED Singles added_codes(Singles sum, const Words* query, const Words* keys) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)query[0], (__m256i)keys[0]);
    UNROLLED for (int word = 1; word < COUNT; word++) pairs =
        _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)query[word], (__m256i)keys[word]));
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    return sum;
}
#endif

// All bits of a lane, or none.
typedef Integers Marks;
INLINED Marks at_least(Singles a, Singles b) { return a >= b; }
INLINED Singles without(Singles lanes, Marks off) { return (Singles)((Integers)lanes & ~off); }
INLINED uint32_t bits_of(Marks marks) { return _mm256_movemask_ps((__m256)marks); }

INLINED void turn(const uint32_t* rows, int apart, uint32_t* columns, int width) {
    __m128 a = loaded<__m128>(rows), b = loaded<__m128>(rows + apart);
    __m128 c = loaded<__m128>(rows + 2 * apart), d = loaded<__m128>(rows + 3 * apart);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    store(columns, a), store(columns + width, b), store(columns + 2 * width, c), store(columns + 3 * width, d);
}

}  // namespace
