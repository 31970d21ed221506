// Exact attention of many queries, in bfloat16 by the processor's products of pairs (AVX512-BF16), or in float32: the
// contract of `partial_attention` (reference.py), causal or not. `prompt.py` builds this file for a head's two sizes,
// the macros DIM and VALUE_DIM, and for NUMBER, uint16_t for bfloat16 or float.
//
// A strip of queries meets a tile of keys at a time: its scores, their weights and its sums stay in the first caches
// and in registers. Keys and values are packed first, once for a head, so that one load has what 16 sums need:
//
//   keys     [chunk][DIM / IN_WORD][CHUNK]         neighbouring dimensions, of CHUNK keys
//   values   [chunk][CHUNK / IN_WORD][VALUE_DIM]   neighbouring tokens
//
// words of 32 bits, each a float or a pair of bfloat16.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace {

using Number = NUMBER;

constexpr int LANES = 16;
constexpr int IN_WORD = 4 / sizeof(Number);
constexpr int STRIP = 6;              // queries whose sums, of 4 vectors each, stay in registers: 24 of 32
constexpr int CHUNK = 4 * LANES;      // keys whose scores a strip sums at once
constexpr int TILE = 4 * CHUNK;       // keys between two looks at a strip's sums of values
constexpr int BLOCK = 16 * STRIP;     // queries of a job
constexpr int WORDS = DIM / IN_WORD;  // of a query or a key
constexpr int SUMMED = 64;            // of these, at once
// Vectors of values summed at once, a divisor of a row's.
constexpr int ROW = VALUE_DIM / LANES;
constexpr int SLAB = ROW % 4 == 0 ? 4 : ROW % 3 == 0 ? 3 : ROW % 2 == 0 ? 2 : 1;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
constexpr float NOTHING = -200;    // 2 to the power of less is 0

#define INLINED inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

struct Strides {
    int64_t batch, head, token;  // in elements; those of a token lie one after the other
};

// What Python passes, in its order.
struct Call {
    const Number *query, *key, *value;  // [batch, heads or kv_heads, queries or tokens, DIM or VALUE_DIM]
    void* out;                            // [batch, heads, queries, VALUE_DIM], bfloat16 or float32
    float* lse;                           // [batch, heads, queries] contiguous, of natural logarithms, or null
    Strides query_strides, key_strides, value_strides, out_strides;
    int64_t batch, heads, kv_heads, queries, tokens;
    int64_t causal;                       // whether query `i` sees tokens up to `tokens - queries + i` alone, or all
    int64_t narrow;                       // whether `out` is bfloat16
    int64_t threads;
    double scaling;
};

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

// A chunk of keys and values from `start` on, zeros where there are none.
void pack(const Call& call, const Number* key, const Number* value, int64_t start, uint32_t* keys, uint32_t* values) {
    const int count = std::min<int64_t>(CHUNK, call.tokens - start);
    for (int token = 0; token < CHUNK; token++)
        for (int word = 0; word < WORDS; word++)
            keys[word * CHUNK + token] =
                token < count ? loaded<uint32_t>(key + (start + token) * call.key_strides.token + IN_WORD * word) : 0;
    for (int token = 0; token < CHUNK; token += IN_WORD) {
        const Number* row = value + (start + token) * call.value_strides.token;
        for (int d = 0; d < VALUE_DIM; d++) {
            Number word[IN_WORD];
            for (int each = 0; each < IN_WORD; each++)
                word[each] = token + each < count ? row[each * call.value_strides.token + d] : 0;
            values[token / IN_WORD * VALUE_DIM + d] = loaded<uint32_t>(word);
        }
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

void write(const Call& call, const Strip& strip, int q, int64_t batch, int64_t head, int64_t query) {
    const Strides& strides = call.out_strides;
    const int64_t at = batch * strides.batch + head * strides.head + query * strides.token;
    const float share = 1 / strip.total[q];
    for (int d = 0; d < VALUE_DIM; d += LANES) {
        __m512 row = _mm512_mul_ps(_mm512_set1_ps(share), _mm512_loadu_ps(strip.sums[q] + d));
        if (call.narrow) store_bfloat16((uint16_t*)call.out + at + d, row);
        else _mm512_storeu_ps((float*)call.out + at + d, row);
    }
    if (call.lse)
        call.lse[(batch * call.heads + head) * call.queries + query] =
            (strip.peak[q] + std::log2(strip.total[q])) * LN_2;
}

// The queries of a block, of all heads that share `keys` and `values`, packed: a tile serves all of them in turn.
void attend(const Call& call, int64_t batch, int64_t kv_head, int64_t start, const uint32_t* keys,
            const uint32_t* values, Strip* strips) {
    const int64_t group = call.heads / call.kv_heads, stop = std::min(start + BLOCK, call.queries);
    const int64_t ahead = call.causal ? call.tokens - call.queries : call.tokens;  // seen by query 0, less itself
    const auto seen = [&](int64_t query) { return std::min(ahead + query + 1, call.tokens); };
    const int count = (stop - start + STRIP - 1) / STRIP;
    const float scaling = call.scaling * LOG2_E;
    for (int64_t each = 0; each < group * count; each++) {
        std::memset(strips[each].sums, 0, sizeof strips[each].sums);
        std::fill_n(strips[each].total, STRIP, 0.0f);
        std::fill_n(strips[each].peak, STRIP, -std::numeric_limits<float>::infinity());
    }
    for (int64_t tile = 0; tile < seen(stop - 1); tile += TILE)
        for (int64_t each = 0; each < group * count; each++) {
            const int64_t head = kv_head * group + each / count, first = start + each % count * STRIP;
            const int64_t last = std::min(first + STRIP, stop) - 1, most = seen(last) - tile;
            if (most <= 0) continue;
            const int columns = std::min<int64_t>(TILE, (most + CHUNK - 1) / CHUNK * CHUNK);
            uint32_t query[STRIP][WORDS];
            alignas(64) float scores[STRIP][TILE], kept[STRIP];
            alignas(64) Number weights[STRIP][TILE];
            for (int q = 0; q < STRIP; q++)  // the last one again, where there are fewer
                std::memcpy(query[q],
                            call.query + batch * call.query_strides.batch + head * call.query_strides.head +
                                std::min(first + q, last) * call.query_strides.token,
                            sizeof query[q]);
            for (int column = 0; column < columns; column += CHUNK)
                score(query, keys + (tile + column) * WORDS, (float (*)[TILE])(scores[0] + column));
            for (int q = 0; q < STRIP; q++)
                kept[q] = weigh(strips[each], q, scores[q], columns, seen(std::min(first + q, last)) - tile, scaling,
                                weights[q]);
            add(strips[each], kept, weights, values + tile / IN_WORD * VALUE_DIM, columns);
        }
    for (int64_t each = 0; each < group * count; each++)
        for (int64_t q = 0, first = start + each % count * STRIP; q < STRIP && first + q < stop; q++)
            write(call, strips[each], q, batch, kv_head * group + each / count, first + q);
}

void attend(const Call& call) {
    const int64_t chunks = (call.tokens + TILE - 1) / TILE * (TILE / CHUNK), group = call.heads / call.kv_heads;
    const int64_t blocks = (call.queries + BLOCK - 1) / BLOCK, strips = group * (BLOCK / STRIP);
    std::unique_ptr<uint32_t[]> keys(new uint32_t[chunks * CHUNK * WORDS]);
    std::unique_ptr<uint32_t[]> values(new uint32_t[chunks * CHUNK / IN_WORD * VALUE_DIM]);
    std::unique_ptr<Strip[]> room(new Strip[call.threads * strips]);
    for (int64_t each = 0; each < call.batch * call.kv_heads; each++) {
        const int64_t batch = each / call.kv_heads, head = each % call.kv_heads;
        const Number* key = call.key + batch * call.key_strides.batch + head * call.key_strides.head;
        const Number* value = call.value + batch * call.value_strides.batch + head * call.value_strides.head;
#pragma omp parallel for num_threads(call.threads)
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            pack(call, key, value, chunk * CHUNK, &keys[chunk * CHUNK * WORDS],
                 &values[chunk * CHUNK / IN_WORD * VALUE_DIM]);
        // The last ones first: they see most.
#pragma omp parallel for num_threads(call.threads) schedule(dynamic)
        for (int64_t block = blocks - 1; block >= 0; block--)
            attend(call, batch, head, block * BLOCK, keys.get(), values.get(), &room[omp_get_thread_num() * strips]);
    }
}

}  // namespace

// What prompt.py says of the size of the arguments is compared with this before they are read.
extern "C" int64_t call_size() { return sizeof(Call); }

// Returns 1 if memory ran out.
extern "C" int prompt_attention(const Call* call) try {
    attend(*call);
    return 0;
} catch (...) {
    return 1;
}
