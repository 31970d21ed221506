// What attention of many queries is made of, in bfloat16 by the processor's products of pairs (AVX512-BF16), or in
// float32. Files that include this are built for a head's two sizes, the macros DIM and VALUE_DIM, and for NUMBER,
// uint16_t for bfloat16 or float.
//
// A strip of queries meets a tile of keys at a time: its scores, their weights and its sums stay in the first caches
// and in registers. Keys and values are packed first, once for a head, so that one load has what 16 sums need:
//
//   keys     [chunk][DIM / IN_WORD][CHUNK]         neighbouring dimensions, of CHUNK keys
//   values   [chunk][CHUNK / IN_WORD][VALUE_DIM]   neighbouring tokens
//
// words of 32 bits, each a float or a pair of bfloat16.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#if !defined(__AVX512F__) || !defined(__AVX512BF16__)
#error "the processor multiplies no pairs of bfloat16 (AVX512-BF16)"
#endif

namespace {

using Number = NUMBER;

constexpr int LANES = 16;
constexpr int IN_WORD = 4 / sizeof(Number);
constexpr int STRIP = 6;              // queries whose sums, of 4 vectors each, stay in registers: 24 of 32
constexpr int CHUNK = 4 * LANES;      // keys whose scores a strip sums at once
constexpr int TILE = 4 * CHUNK;       // keys between two looks at a strip's sums of values
constexpr int WORDS = DIM / IN_WORD;  // of a query or a key
static_assert(DIM % IN_WORD == 0 && VALUE_DIM % LANES == 0);
constexpr int SUMMED = 64;            // of these, at once
// Vectors of values summed at once, a divisor of a row's.
constexpr int ROW = VALUE_DIM / LANES;
constexpr int SLAB = ROW % 4 == 0 ? 4 : ROW % 3 == 0 ? 3 : ROW % 2 == 0 ? 2 : 1;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
constexpr float NOTHING = -200;    // 2 to the power of less is 0

#define INLINED inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

template <typename To>
inline To loaded(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// `sum`, and the products of the numbers in two vectors of words, of each word together.
INLINED __m512 added(__m512 sum, __m512i left, __m512i right) {
    if constexpr (IN_WORD == 1) return _mm512_fmadd_ps((__m512)left, (__m512)right, sum);
    else return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
}

INLINED void store_bfloat16(void* to, __m512 row) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(row));
}

// What gives 2 to the power of -0.5 to 0.5 with the least largest error: 8e-8, or 3e-6, as weights are then rounded.
constexpr float FINE[] = {
    1.53458120e-4f, 1.33999314e-3f, 9.61848896e-3f, 5.55032878e-2f, 2.40226469e-1f, 6.93147206e-1f, 1.0f};
constexpr float COARSE[] = {9.57010188e-3f, 5.59178618e-2f, 2.40247448e-1f, 6.93121815e-1f, 9.99999261e-1f};

// 2 to the power of `x`, at most 0.
INLINED __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(NOTHING), x);  // in this order it keeps a nan
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_setzero_ps();
    const auto evaluate = [&](const auto& coefficients) {
        for (float coefficient : coefficients) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    };
    if constexpr (IN_WORD == 1) evaluate(FINE);
    else evaluate(COARSE);
    return _mm512_scalef_ps(sum, whole);
}

// A chunk of keys: those of `token(0)`, `token(1)` and so on, zeros behind `count`.
template <typename Token>
INLINED void pack_keys(const Number* key, int64_t stride, int64_t count, Token token, uint32_t* keys) {
    for (int first = 0; first < CHUNK; first += 8) {
        alignas(64) int64_t at[8];  // addresses: tokens may be far apart
        for (int each = 0; each < 8; each++)
            at[each] = (int64_t)(key + (first + each < count ? token(first + each) * stride : 0));
        const __m512i base = _mm512_load_si512(at);
        const int64_t there = count - first;
        const __mmask8 mask = there >= 8 ? 0xff : there <= 0 ? 0 : (1 << there) - 1;
        for (int word = 0; word < WORDS; word++) {
            const __m512i from = _mm512_add_epi64(base, _mm512_set1_epi64(4 * word));
            _mm256_storeu_si256((__m256i*)(keys + word * CHUNK + first),
                                _mm512_mask_i64gather_epi32(_mm256_setzero_si256(), mask, from, nullptr, 1));
        }
    }
}

// Their values.
template <typename Token>
INLINED void pack_values(const Number* value, int64_t stride, int64_t count, Token token, uint32_t* values) {
    static const Number nothing[VALUE_DIM] = {};
    for (int64_t each = 0; each < CHUNK; each += IN_WORD) {
        const Number* rows[IN_WORD];
        for (int64_t next = 0; next < IN_WORD; next++)
            rows[next] = each + next < count ? value + token(each + next) * stride : nothing;
        for (int d = 0; d < VALUE_DIM; d += LANES) {
            __m512i row;
            if constexpr (IN_WORD == 1) row = _mm512_loadu_si512(rows[0] + d);
            else {
                const auto wide = [&](int next) {
                    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(rows[next] + d)));
                };
                row = _mm512_or_si512(wide(0), _mm512_slli_epi32(wide(IN_WORD - 1), 16));
            }
            _mm512_storeu_si512(values + each / IN_WORD * VALUE_DIM + d, row);
        }
    }
}

// Keys and values of all tokens, in so many chunks.
inline void pack(const Number* key, int64_t key_stride, const Number* value, int64_t value_stride, int64_t tokens,
                 int64_t chunks, int64_t threads, uint32_t* keys, uint32_t* values) {
#pragma omp parallel for num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const auto token = [&](int64_t each) { return chunk * CHUNK + each; };
        pack_keys(key, key_stride, tokens - chunk * CHUNK, token, keys + chunk * CHUNK * WORDS);
        pack_values(value, value_stride, tokens - chunk * CHUNK, token, values + chunk * CHUNK / IN_WORD * VALUE_DIM);
    }
}

// Scores of a strip and a chunk of keys, `[STRIP][TILE]` floats; sums of fewer products round less.
INLINED void score(const uint32_t (*query)[WORDS], const uint32_t* keys, float (*scores)[TILE]) {
    for (int first = 0; first < WORDS; first += SUMMED) {
        __m512 sums[STRIP][4];
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < 4; c++) sums[q][c] = _mm512_setzero_ps();
        for (int word = first; word < std::min(first + SUMMED, WORDS); word++) {
            __m512i column[4];
            UNROLLED for (int c = 0; c < 4; c++) column[c] = _mm512_loadu_si512(keys + word * CHUNK + c * LANES);
            UNROLLED for (int q = 0; q < STRIP; q++) {
                const __m512i row = _mm512_set1_epi32(query[q][word]);
                UNROLLED for (int c = 0; c < 4; c++) sums[q][c] = added(sums[q][c], column[c], row);
            }
        }
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < 4; c++) {
            float* to = scores[q] + c * LANES;
            _mm512_storeu_ps(to, first ? _mm512_add_ps(_mm512_loadu_ps(to), sums[q][c]) : sums[q][c]);
        }
    }
}

// What is known of a strip's queries after some tiles: sums of weighted values, of weights, and the largest score, in
// powers of two.
struct Strip {
    float sums[STRIP][VALUE_DIM];
    float total[STRIP], peak[STRIP];
};

// The weights of a query's scores in a tile, of which the first `visible` count, to `weights`; what its sums so far
// are to be multiplied by.
INLINED float weigh(Strip& strip, int q, float* scores, int columns, int64_t visible, float scaling, Number* weights) {
    for (int64_t column = std::max<int64_t>(visible, 0); column < columns; column++)
        scores[column] = -std::numeric_limits<float>::infinity();
    __m512 most = _mm512_loadu_ps(scores);
    for (int column = LANES; column < columns; column += LANES)
        most = _mm512_max_ps(most, _mm512_loadu_ps(scores + column));
    const float peak = std::max(strip.peak[q], scaling * _mm512_reduce_max_ps(most));
    const __m512 scale = _mm512_set1_ps(scaling), less = _mm512_set1_ps(peak);
    __m512 total = _mm512_setzero_ps();
    for (int column = 0; column < columns; column += LANES) {
        __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + column), scale, less));
        total = _mm512_add_ps(total, weight);
        if constexpr (IN_WORD == 1) _mm512_storeu_ps(weights + column, weight);
        else store_bfloat16(weights + column, weight);
    }
    const float kept = std::exp2(strip.peak[q] - peak);
    strip.total[q] = strip.total[q] * kept + _mm512_reduce_add_ps(total);
    strip.peak[q] = peak;
    return kept;
}

// Adds a tile's weighted values to a strip's sums, which are multiplied by `kept` first. The tile's are summed by
// themselves.
INLINED void add(Strip& strip, const float* kept, const Number (*weights)[TILE], const uint32_t* values, int columns) {
    for (int slab = 0; slab < ROW; slab += SLAB) {
        __m512 sums[STRIP][SLAB];
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < SLAB; c++) sums[q][c] =
            _mm512_setzero_ps();
        for (int word = 0; word < columns / IN_WORD; word++) {
            __m512i column[SLAB];
            UNROLLED for (int c = 0; c < SLAB; c++) column[c] =
                _mm512_loadu_si512(values + word * VALUE_DIM + (slab + c) * LANES);
            UNROLLED for (int q = 0; q < STRIP; q++) {
                const __m512i row = _mm512_set1_epi32(loaded<uint32_t>(weights[q] + IN_WORD * word));
                UNROLLED for (int c = 0; c < SLAB; c++) sums[q][c] = added(sums[q][c], column[c], row);
            }
        }
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < SLAB; c++) {
            float* sum = strip.sums[q] + (slab + c) * LANES;
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_set1_ps(kept[q]), _mm512_loadu_ps(sum), sums[q][c]));
        }
    }
}

void begin(Strip& strip) {
    std::memset(strip.sums, 0, sizeof strip.sums);
    std::fill_n(strip.total, STRIP, 0.0f);
    std::fill_n(strip.peak, STRIP, -std::numeric_limits<float>::infinity());
}

// Adds what a strip's queries give the first `columns`, whole chunks, of a tile of packed keys and values; query `q`
// sees the first `visible(q)` of them. `scaling` is that of scores times log2(e).
template <typename Visible>
INLINED void meet(Strip& strip, const uint32_t (*query)[WORDS], const uint32_t* keys, const uint32_t* values,
                  int columns, Visible visible, float scaling) {
    alignas(64) float scores[STRIP][TILE], kept[STRIP];
    alignas(64) Number weights[STRIP][TILE];
    for (int column = 0; column < columns; column += CHUNK)
        score(query, keys + column * WORDS, (float (*)[TILE])(scores[0] + column));
    for (int q = 0; q < STRIP; q++) kept[q] = weigh(strip, q, scores[q], columns, visible(q), scaling, weights[q]);
    add(strip, kept, weights, values, columns);
}

}  // namespace
