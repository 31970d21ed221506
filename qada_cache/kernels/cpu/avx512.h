// The operations of operations.h by AVX-512 (F, BW, DQ), VNNI and BF16.

#pragma once

#include <immintrin.h>

namespace {

INLINED Singles fused(Singles a, Singles b, Singles c) {
    return (Singles)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINED Singles larger(Singles a, Singles b) { return (Singles)_mm512_max_ps((__m512)a, (__m512)b); }
INLINED float sum_of(Singles lanes) { return _mm512_reduce_add_ps((__m512)lanes); }
INLINED float largest(Singles lanes) { return _mm512_reduce_max_ps((__m512)lanes); }
INLINED Integers to_nearest(Singles x) { return (Integers)_mm512_cvtps_epi32((__m512)x); }
INLINED Singles fraction(Singles x) {
    return (Singles)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
INLINED Integers not_negative(Integers x) { return (Integers)_mm512_max_epi32((__m512i)x, _mm512_setzero_si512()); }
INLINED Singles scaled(Singles x, Singles power) { return (Singles)_mm512_scalef_ps((__m512)x, (__m512)power); }

#if defined(MULTIPLIES_PAIRS)
INLINED Singles added_pairs(Singles sum, Words left, Words right) {
    return (Singles)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}
INLINED void narrowed(void* to, Singles row) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)row));
}
#endif

// By GCC's functions, and in arrays of vectors of integers, sums are moved to memory and back.
constexpr bool QUERY_SIGNED = false;
#if defined(__AVX512VNNI__)
constexpr int LEVELS = 127, TOGETHER = 1;
template <int COUNT>
INLINED Singles added_codes(Singles sum, const Words* query, const Words* keys) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(*query), "v"(*keys));
    return sum;
}
#else
// As in avx2.h.
constexpr int LEVELS = 63, TOGETHER = 4;
template <int COUNT>
INLINED Singles added_codes(Singles sum, const Words* query, const Words* keys) {
    __m512i pairs = _mm512_maddubs_epi16((__m512i)query[0], (__m512i)keys[0]);
    UNROLLED for (int word = 1; word < COUNT; word++) pairs =
        _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)query[word], (__m512i)keys[word]));
    asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
    return sum;
}
#endif

typedef __mmask16 Marks;
INLINED Marks at_least(Singles a, Singles b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
INLINED Singles without(Singles lanes, Marks off) { return (Singles)_mm512_maskz_mov_ps((Marks)~off, (__m512)lanes); }
INLINED uint32_t bits_of(Marks marks) { return marks; }

INLINED void turn(const uint32_t* rows, int apart, uint32_t* columns, int width) {
    __m128 a = loaded<__m128>(rows), b = loaded<__m128>(rows + apart);
    __m128 c = loaded<__m128>(rows + 2 * apart), d = loaded<__m128>(rows + 3 * apart);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    store(columns, a), store(columns + width, b), store(columns + 2 * width, c), store(columns + 3 * width, d);
}

}  // namespace
