// Exact attention of many queries in bfloat16, by the processor's products of pairs of bfloat16 (AVX512-BF16): the
// contract of `partial_attention` (reference.py), causal or not. `prompt.py` builds this file for a head's two sizes,
// the macros DIM and VALUE_DIM.
//
// A strip of queries meets a tile of keys at a time: its scores, their weights and its sums stay in the first caches
// and in registers. Keys and values are packed first, once for a head, so that one load has what 16 sums need:
//
//   keys     [chunk][DIM / 2][CHUNK]         pairs of neighbouring dimensions, of CHUNK keys
//   values   [chunk][CHUNK / 2][VALUE_DIM]   pairs of neighbouring tokens

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace {

constexpr int LANES = 16;
constexpr int STRIP = 6;           // queries whose sums, of 4 vectors each, stay in registers: 24 of 32
constexpr int CHUNK = 4 * LANES;   // keys whose scores a strip sums at once
constexpr int TILE = 4 * CHUNK;    // keys between two looks at a strip's sums of values
constexpr int BLOCK = 16 * STRIP;  // queries of a job
constexpr int PAIRS = DIM / 2;
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
    const uint16_t *query, *key, *value;  // [batch, heads or kv_heads, queries or tokens, DIM or VALUE_DIM]
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

INLINED __m512bh pairs_at(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
INLINED __m512bh repeated(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(pair); }

// 2 to the power of `x`, at most 0, to 3e-7 of it.
INLINED __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(NOTHING), x);  // in this order it keeps a nan
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.33335581e-3f);
    for (float coefficient : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(sum, whole);
}

// A chunk of keys and values from `start` on, zeros where there are none.
void pack(const Call& call, const uint16_t* key, const uint16_t* value, int64_t start, uint32_t* keys,
          uint32_t* values) {
    const int count = std::min<int64_t>(CHUNK, call.tokens - start);
    for (int token = 0; token < CHUNK; token++)
        for (int pair = 0; pair < PAIRS; pair++)
            keys[pair * CHUNK + token] =
                token < count ? loaded<uint32_t>(key + (start + token) * call.key_strides.token + 2 * pair) : 0;
    for (int token = 0; token < CHUNK; token += 2) {
        const uint16_t* row = value + (start + token) * call.value_strides.token;
        for (int d = 0; d < VALUE_DIM; d++) {
            uint32_t first = token < count ? row[d] : 0;
            uint32_t second = token + 1 < count ? row[call.value_strides.token + d] : 0;
            values[token / 2 * VALUE_DIM + d] = first | second << 16;
        }
    }
}

// Scores of a strip and a chunk of keys, `[STRIP][TILE]` floats.
INLINED void score(const uint32_t (*query)[PAIRS], const uint32_t* keys, float (*scores)[TILE]) {
    __m512 sums[STRIP][4];
    UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < 4; c++) sums[q][c] = _mm512_setzero_ps();
    for (int pair = 0; pair < PAIRS; pair++) {
        __m512bh column[4];
        UNROLLED for (int c = 0; c < 4; c++) column[c] = pairs_at(keys + pair * CHUNK + c * LANES);
        UNROLLED for (int q = 0; q < STRIP; q++) {
            const __m512bh row = repeated(query[q][pair]);
            UNROLLED for (int c = 0; c < 4; c++) sums[q][c] = _mm512_dpbf16_ps(sums[q][c], column[c], row);
        }
    }
    UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < 4; c++)
        _mm512_storeu_ps(scores[q] + c * LANES, sums[q][c]);
}

// What is known of a strip's queries after some tiles: sums of weighted values, of weights, and the largest score, in
// powers of two.
struct Strip {
    float sums[STRIP][VALUE_DIM];
    float total[STRIP], peak[STRIP];
};

// The weights of a query's scores in a tile, of which the first `visible` count, to `weights`; what its sums so far
// are to be multiplied by.
INLINED float weigh(Strip& strip, int q, float* scores, int columns, int64_t visible, float scaling,
                    uint16_t* weights) {
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
        _mm256_storeu_si256((__m256i*)(weights + column), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    const float kept = std::exp2(strip.peak[q] - peak);
    strip.total[q] = strip.total[q] * kept + _mm512_reduce_add_ps(total);
    strip.peak[q] = peak;
    return kept;
}

// Adds a tile's weighted values to a strip's sums, which are multiplied by `kept` first.
INLINED void add(Strip& strip, const float* kept, const uint16_t (*weights)[TILE], const uint32_t* values,
                 int columns) {
    for (int slab = 0; slab < ROW; slab += SLAB) {
        __m512 sums[STRIP][SLAB];
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < SLAB; c++) sums[q][c] =
            _mm512_mul_ps(_mm512_set1_ps(kept[q]), _mm512_loadu_ps(strip.sums[q] + (slab + c) * LANES));
        for (int pair = 0; pair < columns / 2; pair++) {
            __m512bh column[SLAB];
            UNROLLED for (int c = 0; c < SLAB; c++) column[c] =
                pairs_at(values + pair * VALUE_DIM + (slab + c) * LANES);
            UNROLLED for (int q = 0; q < STRIP; q++) {
                const __m512bh row = repeated(loaded<uint32_t>(weights[q] + 2 * pair));
                UNROLLED for (int c = 0; c < SLAB; c++) sums[q][c] = _mm512_dpbf16_ps(sums[q][c], column[c], row);
            }
        }
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < SLAB; c++)
            _mm512_storeu_ps(strip.sums[q] + (slab + c) * LANES, sums[q][c]);
    }
}

void write(const Call& call, const Strip& strip, int q, int64_t batch, int64_t head, int64_t query) {
    const Strides& strides = call.out_strides;
    const int64_t at = batch * strides.batch + head * strides.head + query * strides.token;
    const float share = 1 / strip.total[q];
    for (int d = 0; d < VALUE_DIM; d += LANES) {
        __m512 row = _mm512_mul_ps(_mm512_set1_ps(share), _mm512_loadu_ps(strip.sums[q] + d));
        if (call.narrow)
            _mm256_storeu_si256((__m256i*)((uint16_t*)call.out + at + d), (__m256i)_mm512_cvtneps_pbh(row));
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
            uint32_t query[STRIP][PAIRS];
            alignas(64) float scores[STRIP][TILE], kept[STRIP];
            alignas(64) uint16_t weights[STRIP][TILE];
            for (int q = 0; q < STRIP; q++)  // the last one again, where there are fewer
                std::memcpy(query[q],
                            call.query + batch * call.query_strides.batch + head * call.query_strides.head +
                                std::min(first + q, last) * call.query_strides.token,
                            sizeof query[q]);
            for (int column = 0; column < columns; column += CHUNK)
                score(query, keys + (tile + column) * PAIRS, (float (*)[TILE])(scores[0] + column));
            for (int q = 0; q < STRIP; q++)
                kept[q] = weigh(strips[each], q, scores[q], columns, seen(std::min(first + q, last)) - tile, scaling,
                                weights[q]);
            add(strips[each], kept, weights, values + tile / 2 * VALUE_DIM, columns);
        }
    for (int64_t each = 0; each < group * count; each++)
        for (int64_t q = 0, first = start + each % count * STRIP; q < STRIP && first + q < stop; q++)
            write(call, strips[each], q, batch, kv_head * group + each / count, first + q);
}

void attend(const Call& call) {
    const int64_t chunks = (call.tokens + TILE - 1) / TILE * (TILE / CHUNK), group = call.heads / call.kv_heads;
    const int64_t blocks = (call.queries + BLOCK - 1) / BLOCK, strips = group * (BLOCK / STRIP);
    std::unique_ptr<uint32_t[]> keys(new uint32_t[chunks * CHUNK * PAIRS]);
    std::unique_ptr<uint32_t[]> values(new uint32_t[chunks * CHUNK / 2 * VALUE_DIM]);
    std::unique_ptr<Strip[]> room(new Strip[call.threads * strips]);
    for (int64_t each = 0; each < call.batch * call.kv_heads; each++) {
        const int64_t batch = each / call.kv_heads, head = each % call.kv_heads;
        const uint16_t* key = call.key + batch * call.key_strides.batch + head * call.key_strides.head;
        const uint16_t* value = call.value + batch * call.value_strides.batch + head * call.value_strides.head;
#pragma omp parallel for num_threads(call.threads)
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            pack(call, key, value, chunk * CHUNK, &keys[chunk * CHUNK * PAIRS], &values[chunk * CHUNK / 2 * VALUE_DIM]);
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
