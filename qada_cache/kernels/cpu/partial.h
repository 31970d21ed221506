// Attention of one head's few queries over many keys on the CPU, in one pass that reads every key and value once.
//
// The sizes are macros, so that the compiler can keep the sums in registers:
//
//   DIM, VALUE_DIM   of a head
//   QUERIES          that share a head's keys, the query heads of a group
//   BFLOAT16, FLOAT16 or FLOAT32   the type of queries, keys and values; sums are float32
//
// Vectors are the compilers' own extension (GCC, Clang), so that hardly anything here is of one processor.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace {

#if defined(BFLOAT16)
using Element = uint16_t;
#elif defined(FLOAT16)
using Element = _Float16;
#else
using Element = float;
#endif

using Channel = std::conditional_t<DIM <= 256, uint8_t, int16_t>;  // of codec.py's `order_dtype`

// Floats in a vector: as wide as the processor's, and a divisor of both dimensions; pairs of them for bfloat16.
constexpr int fitting(int width) {
    return DIM % (2 * width) == 0 && VALUE_DIM % (2 * width) == 0 ? width : fitting(width / 2);
}
#if defined(__AVX512F__)
constexpr int WIDTH = fitting(16);
#elif defined(__AVX__)
constexpr int WIDTH = fitting(8);
#else
constexpr int WIDTH = fitting(4);
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));

constexpr int BLOCK = 32;          // keys whose scores are held at once: few, so that reading never pauses for long
constexpr int PREFETCH_BYTES = 2048;        // bytes that are asked for before they are needed
constexpr int CACHE_LINE = 64;     // bytes
constexpr int TO_L2 = 2;           // where prefetches go: more of them are under way at once than to the first level
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 24;      // vectors of sums that stay in registers while values stream by, of 32
#else
constexpr int REGISTERS = 12;      // of 16
#endif
constexpr float LOG2_E = 1.44269504f;
constexpr float ROUNDING = 1e-3f;  // of logarithms of sums, at most
constexpr float NEGLIGIBLE = -87;  // the exponential of less is less than float32's smallest normal number

template <typename To>
inline To loaded(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline float from_bits(uint32_t bits) { return loaded<float>(&bits); }

// Where `unpack` puts dimension `d` of `SIZE`: bfloat16 pairs are split into all even and all odd dimensions, which
// takes one instruction each and no shuffling. What is computed does not depend on the order, only its ends do.
template <int SIZE>
constexpr int unpacked_index(int d) {
#if defined(BFLOAT16)
    return d % 2 * (SIZE / 2) + d / 2;
#else
    return d;
#endif
}

#if defined(FLOAT16)
// `N` = WIDTH numbers. GCC does not think of the processor's own instruction for more than one.
template <int N>
inline Floats widened(const _Float16* numbers) {
#if defined(__F16C__)
    if constexpr (N == 16) {
        __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)numbers));
        return loaded<Floats>(&wide);
    } else if constexpr (N == 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)numbers));
        return loaded<Floats>(&wide);
    } else {
        __m128 wide = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)numbers));
        return loaded<Floats>(&wide);
    }
#else
    Floats out;
    for (int i = 0; i < N; i++) out[i] = numbers[i];
    return out;
#endif
}
#endif

template <int SIZE>
inline void unpack(const Element* row, Floats* out) {
#if defined(BFLOAT16)
    typedef uint32_t Pairs __attribute__((vector_size(4 * WIDTH)));
    for (int c = 0; c < SIZE / 2 / WIDTH; c++) {
        Pairs pairs = loaded<Pairs>(row + 2 * WIDTH * c);
        out[c] = (Floats)(pairs << 16);
        out[SIZE / 2 / WIDTH + c] = (Floats)(pairs & 0xffff0000u);
    }
#elif defined(FLOAT16)
    for (int c = 0; c < SIZE / WIDTH; c++) out[c] = widened<WIDTH>(row + c * WIDTH);
#else
    for (int c = 0; c < SIZE / WIDTH; c++) out[c] = loaded<Floats>(row + c * WIDTH);
#endif
}

// Always inlined: GCC takes a function that does nothing but this for one without effect, and drops calls of it.
#define INLINED inline __attribute__((always_inline))

template <int SIZE>
INLINED void prefetch(const Element* row) {
    for (int byte = 0; byte < int(SIZE * sizeof(Element)); byte += CACHE_LINE)
        __builtin_prefetch((const char*)row + byte, 0, TO_L2);
}

// Which rows of keys and values are read: one after the other,
struct ContiguousRows {
    int64_t operator[](int64_t t) const { return t; }
    template <int SIZE>
    INLINED void prefetch_after(const Element* rows, int64_t t) const {
        prefetch<SIZE>(rows + t * SIZE + PREFETCH_BYTES / sizeof(Element));
    }
};

// or those of a list.
struct IndexedRows {
    const int32_t* tokens;
    int64_t count;
    int64_t operator[](int64_t t) const { return tokens[t]; }
    template <int SIZE>
    INLINED void prefetch_after(const Element* rows, int64_t t) const {
        prefetch<SIZE>(rows + (int64_t)tokens[std::min(t + BLOCK, count - 1)] * SIZE);
    }
};

// Dimension `d` of what `unpack` put there. Not by a pointer to floats: compilers may take that for another thing's.
template <int SIZE>
inline float unpacked_at(const Floats* parts, int d) {
    return parts[unpacked_index<SIZE>(d) / WIDTH][unpacked_index<SIZE>(d) % WIDTH];
}

template <typename Lanes>
inline float sum_of(Lanes lanes) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < int(sizeof lanes / sizeof lanes[0]); i++) total += lanes[i];
    return total;
}

// exp(x) for x <= 0 to float32 rounding: 2^n times the series of e^r, |r| <= ln(2)/2.
inline float exponential(float x) {
    x = std::max(x, NEGLIGIBLE);
    float n = floorf(x * LOG2_E + 0.5f), r = x - n * 0.693147181f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

inline float log_sum(float a, float b) {  // nan if one is, which may not be the peak
    float peak = std::max(a, b);
    return peak == -INFINITY ? a + b : peak + logf(expf(a - peak) + expf(b - peak));
}

constexpr int PARTS = DIM / WIDTH, VALUE_PARTS = VALUE_DIM / WIDTH;

// Values times weights, added to `sums`: `COUNT` vectors of every query from `FIRST` on, which stay in registers.
template <int FIRST, int COUNT, typename Rows>
inline void average(const Element* value, Rows rows, int64_t first, const float (*weights)[BLOCK], int tokens,
                    Floats (*sums)[VALUE_PARTS]) {
    Floats held[QUERIES][COUNT] = {};  // of these tokens alone: one long sum would lose more to rounding
    for (int t = 0; t < tokens; t++) {
        if (FIRST == 0) rows.template prefetch_after<VALUE_DIM>(value, first + t);
        Floats unpacked[VALUE_PARTS];
        unpack<VALUE_DIM>(value + rows[first + t] * VALUE_DIM, unpacked);  // the compiler drops what is not used
        for (int q = 0; q < QUERIES; q++)
            for (int c = 0; c < COUNT; c++) held[q][c] += weights[q][t] * unpacked[FIRST + c];
    }
    for (int q = 0; q < QUERIES; q++)
        for (int c = 0; c < COUNT; c++) sums[q][FIRST + c] += held[q][c];
    constexpr int NEXT = FIRST + COUNT;
    if constexpr (NEXT < VALUE_PARTS)
        average<NEXT, std::min(COUNT, VALUE_PARTS - NEXT)>(value, rows, first, weights, tokens, sums);
}

// Attention of a head's queries over the keys added so far.
struct Partial {
    Floats scaled[QUERIES][PARTS], sums[QUERIES][VALUE_PARTS] = {};
    float highest[QUERIES], total[QUERIES];

    // `query` [QUERIES, DIM].
    Partial(const Element* query, float scaling) {
        for (int q = 0; q < QUERIES; q++) {
            highest[q] = -INFINITY;
            total[q] = 0;
            unpack<DIM>(query + q * DIM, scaled[q]);
            for (int c = 0; c < PARTS; c++) scaled[q][c] *= scaling;
        }
    }

    // The scores of one key for all queries, `stride` apart.
    void score(const Element* row, float* scores, int stride) const {
        Floats unpacked[PARTS];
        unpack<DIM>(row, unpacked);
        for (int q = 0; q < QUERIES; q++) {
            Floats products = scaled[q][0] * unpacked[0];
            for (int c = 1; c < PARTS; c++) products += scaled[q][c] * unpacked[c];
            scores[q * stride] = sum_of(products);
        }
    }

    // `key` [*, DIM] and `value` [*, VALUE_DIM], contiguous, of which `tokens` rows are read.
    template <typename Rows = ContiguousRows>
    void add(const Element* key, const Element* value, int64_t tokens, Rows rows = {}) {
        float scores[QUERIES][BLOCK];
        if constexpr (std::is_same_v<Rows, IndexedRows>)  // which no hardware foresees
            for (int64_t t = 0; t < std::min<int64_t>(BLOCK, tokens); t++) {
                prefetch<DIM>(key + rows[t] * DIM);
                prefetch<VALUE_DIM>(value + rows[t] * VALUE_DIM);
            }
        for (int64_t first = 0; first < tokens; first += BLOCK) {
            int count = (int)std::min<int64_t>(BLOCK, tokens - first);
            for (int t = 0; t < count; t++) {
                rows.template prefetch_after<DIM>(key, first + t);
                score(key + rows[first + t] * DIM, &scores[0][t], BLOCK);
            }
            for (int q = 0; q < QUERIES; q++) weigh(q, scores[q], count);
            constexpr int HELD = std::min(VALUE_PARTS, std::max(1, REGISTERS / QUERIES));
            average<0, HELD>(value, rows, first, scores, count, sums);
        }
    }

    // Scores of `count` keys become weights relative to the highest score so far, and so do the sums before them.
    void weigh(int q, float* scores, int count) {
        for (int t = count; t < BLOCK; t++) scores[t] = -INFINITY;
        float peak = highest[q], mass = 0;
#pragma omp simd reduction(max : peak)
        for (int t = 0; t < BLOCK; t++) peak = std::max(peak, scores[t]);
        if (peak > highest[q]) {
            float shrunk = exponential(highest[q] - peak);
            highest[q] = peak;
            total[q] *= shrunk;
            for (int c = 0; c < VALUE_PARTS; c++) sums[q][c] *= shrunk;
        }
#pragma omp simd reduction(+ : mass)
        for (int t = 0; t < BLOCK; t++) {
            float weight = exponential(scores[t] - peak);
            scores[t] = weight;
            mass += weight;
        }
        total[q] += mass;
    }

    float log_mass(int q) const { return highest[q] + logf(total[q]); }

    // `out` [QUERIES, VALUE_DIM] and `lse` [QUERIES]; of no keys 0 and -inf.
    void finish(float* out, float* lse) const {
        for (int q = 0; q < QUERIES; q++) {
            float scale = total[q] == 0 ? 0 : 1 / total[q];
            lse[q] = log_mass(q);
            for (int d = 0; d < VALUE_DIM; d++) out[q * VALUE_DIM + d] = unpacked_at<VALUE_DIM>(sums[q], d) * scale;
        }
    }
};

constexpr int SIZE = QUERIES * VALUE_DIM;

// `out` and `lse` of query `q` over all of `count` parts [count, QUERIES, VALUE_DIM] and [count, QUERIES].
void merge(const float* parts, const float* part_lse, int64_t count, int q, float* out, float* lse) {
    float peak = -INFINITY, total = 0, sums[VALUE_DIM] = {};
    for (int64_t part = 0; part < count; part++) peak = std::max(peak, part_lse[part * QUERIES + q]);
    for (int64_t part = 0; part < count; part++) {
        float weight = expf(part_lse[part * QUERIES + q] - peak);
        total += weight;
        for (int d = 0; d < VALUE_DIM; d++) sums[d] += weight * parts[part * SIZE + q * VALUE_DIM + d];
    }
    *lse = peak + logf(total);
    for (int d = 0; d < VALUE_DIM; d++) out[d] = sums[d] / total;
}

}  // namespace
