// What a sketch of keys in few bits says of their scores: `estimated_scores` of codec.py, for queries of one head.
//
// A key's codes are multiplied with rounded queries as integers, a vector of several keys at a time where the codes
// fill vectors evenly and the processor has such products; in plain loops otherwise.

#pragma once

#include "partial.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int SPAN = 64;         // keys that are scored at once
constexpr int CODE_AHEAD = 2048;  // bytes of codes that are asked for before they are needed
constexpr float LEVELS = 127;    // a rounded query's largest value

inline float widened(uint16_t bfloat16) {
    uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The queries of a head that ask for tokens, as one segment's codes meet them: rounded as by `codec.rounded_query`, and
// what else estimates take, `middle + scale * (step * product + spread * scale)`.
struct Rounded {
    int count = 0;
    int8_t integers[QUERIES][DIM];
    float total[QUERIES], middle[QUERIES], step[QUERIES], spread[QUERIES];

    // Adds `query` [DIM]; `rotation` [DIM, DIM], transposed, `centre` and `weights` [DIM]; `unit` of the segment's
    // scales, which are integers from here on; `spread_unit` of a query of length 1.
    void add(const float* query, const float* rotation, const uint16_t* centre, const uint16_t* weights, float unit,
             float scaling, float spread_unit) {
        float weighed[DIM], turned[DIM] = {}, highest = 0, square = 0, along = 0;
        for (int d = 0; d < DIM; d++) {
            weighed[d] = query[d] / widened(weights[d]);
            square += weighed[d] * weighed[d];
            along += query[d] * widened(centre[d]);
        }
        for (int j = 0; j < DIM; j++) {
            float value = weighed[j];
#pragma omp simd
            for (int i = 0; i < DIM; i++) turned[i] += rotation[j * DIM + i] * value;
        }
        for (int d = 0; d < DIM; d++) highest = std::max(highest, fabsf(turned[d]));
        float step_unit = std::max(highest, 1.17549435e-38f) / LEVELS;
        int sum = 0;
        for (int d = 0; d < DIM; d++) {
            integers[count][d] = (int8_t)nearbyintf(turned[d] / step_unit);
            sum += integers[count][d];
        }
        total[count] = sum;
        middle[count] = along * scaling;
        step[count] = scaling * step_unit * unit;
        spread[count] = spread_unit * square * unit * unit;
        count++;
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE_PRODUCTS
typedef __m512i Bytes;
inline Bytes loaded(const void* from) { return _mm512_loadu_si512(from); }
inline void store(void* to, Bytes a) { _mm512_storeu_si512(to, a); }
inline Bytes zeros() { return _mm512_setzero_si512(); }
inline Bytes plus(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline Bytes bits_of(Bytes a, int shift, int mask) {
    return _mm512_and_si512(_mm512_srli_epi16(a, shift), _mm512_set1_epi8((char)mask));
}
// Adds products of unsigned with signed bytes, four to an integer.
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) { return _mm512_dpbusd_epi32(sums, codes, query); }
inline Bytes low_singles(Bytes a, Bytes b) { return _mm512_unpacklo_epi32(a, b); }
inline Bytes high_singles(Bytes a, Bytes b) { return _mm512_unpackhi_epi32(a, b); }
inline Bytes low_pairs(Bytes a, Bytes b) { return _mm512_unpacklo_epi64(a, b); }
inline Bytes high_pairs(Bytes a, Bytes b) { return _mm512_unpackhi_epi64(a, b); }
inline Bytes even_lanes(Bytes a, Bytes b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
inline Bytes odd_lanes(Bytes a, Bytes b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }
inline Bytes ordered(Bytes a, Bytes order) { return _mm512_permutexvar_epi32(order, a); }
#elif defined(__AVX2__)
#define WIDE_PRODUCTS
typedef __m256i Bytes;
inline Bytes loaded(const void* from) { return _mm256_loadu_si256((const Bytes*)from); }
inline void store(void* to, Bytes a) { _mm256_storeu_si256((Bytes*)to, a); }
inline Bytes zeros() { return _mm256_setzero_si256(); }
inline Bytes plus(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline Bytes bits_of(Bytes a, int shift, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(a, shift), _mm256_set1_epi8((char)mask));
}
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {  // pairs stay far below what 16 bits hold
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, query), _mm256_set1_epi16(1)));
}
inline Bytes low_singles(Bytes a, Bytes b) { return _mm256_unpacklo_epi32(a, b); }
inline Bytes high_singles(Bytes a, Bytes b) { return _mm256_unpackhi_epi32(a, b); }
inline Bytes low_pairs(Bytes a, Bytes b) { return _mm256_unpacklo_epi64(a, b); }
inline Bytes high_pairs(Bytes a, Bytes b) { return _mm256_unpackhi_epi64(a, b); }
inline Bytes even_lanes(Bytes a, Bytes b) { return _mm256_permute2x128_si256(a, b, 0x20); }
inline Bytes odd_lanes(Bytes a, Bytes b) { return _mm256_permute2x128_si256(a, b, 0x31); }
inline Bytes ordered(Bytes a, Bytes order) { return _mm256_permutevar8x32_epi32(a, order); }
#else
typedef uint64_t Bytes;
#endif

// Products of rounded queries with codes of `BITS` a value.
template <int BITS>
struct Products {
    static constexpr int CODE = DIM * BITS / 8, PLANES = 8 / BITS, MASK = (1 << BITS) - 1;
    static constexpr int WIDE = sizeof(Bytes), LANES = WIDE / 16;
#if defined(WIDE_PRODUCTS)
    static constexpr bool EVEN = CODE % 16 == 0 && (WIDE % CODE == 0 || CODE % WIDE == 0);
#else
    static constexpr bool EVEN = false;
#endif
    static constexpr int CHUNKS = EVEN && CODE > WIDE ? CODE / WIDE : 1;  // vectors that one key's codes take
    const Rounded* queries = nullptr;
    alignas(CACHE_LINE) int8_t spread[QUERIES][CHUNKS][PLANES][WIDE];  // each plane's integers, per key

    void prepare(const Rounded& given) {
        queries = &given;
        for (int q = 0; q < given.count && EVEN; q++)
            for (int chunk = 0; chunk < CHUNKS; chunk++)
                for (int plane = 0; plane < PLANES; plane++) {
                    const int8_t* integers = &given.integers[q][plane * CODE + chunk * WIDE];
                    for (int i = 0; i < WIDE; i += CODE)
                        std::memcpy(&spread[q][chunk][plane][i], integers, std::min(CODE, WIDE));
                }
    }

    // Of `SPAN` keys; of the codes alone, not yet of the odd integers that they stand for.
    void compute(const uint8_t* codes, int32_t (*products)[SPAN]) const {
        if constexpr (EVEN) {
            if (queries->count == QUERIES) this->template wide<QUERIES>(codes, products, QUERIES);
            else this->template wide<0>(codes, products, queries->count);
        }
        else this->plain(codes, products);
    }

    void plain(const uint8_t* codes, int32_t (*products)[SPAN]) const {
        for (int t = 0; t < SPAN; t++) {
            uint8_t values[DIM];
            for (int plane = 0; plane < PLANES; plane++)
                for (int i = 0; i < CODE; i++) values[plane * CODE + i] = codes[t * CODE + i] >> (plane * BITS) & MASK;
            for (int q = 0; q < queries->count; q++) {
                int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int d = 0; d < DIM; d++) sum += (int16_t)values[d] * (int16_t)queries->integers[q][d];
                products[q][t] = sum;
            }
        }
    }

#if defined(WIDE_PRODUCTS)
    // Every 16 bytes of codes, a lane, give four partial sums. Four vectors are added up together: a transposition on
    // the way leaves sums of the same lane side by side. Where a key takes several lanes, these are added likewise.
    template <int KNOWN>  // the number of queries, where the compiler is to know it
    void wide(const uint8_t* codes, int32_t (*products)[SPAN], int count) const {
        if (KNOWN) count = KNOWN;
        constexpr int PER_KEY = std::min(CODE, WIDE) / 16, KEYS = LANES / PER_KEY;  // lanes of a key, keys of a vector
        int32_t source[4 * LANES];
        for (int t = 0; t < 4 * LANES; t++) source[t] = (t / KEYS / 4 * KEYS + t % KEYS) * 4 + t / KEYS % 4;
        const Bytes order = loaded(source);
        for (int first = 0; first < SPAN; first += 4 * LANES) {
            Bytes sums[QUERIES][PER_KEY];
            for (int part = 0; part < PER_KEY; part++)
                for (int chunk = 0; chunk < CHUNKS; chunk++) {
                    Bytes values[4][PLANES];
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {
                        const uint8_t* row = codes + (first + (4 * part + i) * KEYS) * CODE + chunk * WIDE;
                        Bytes packed = loaded(row);
#pragma GCC unroll 8
                        for (int plane = 0; plane < PLANES; plane++)
                            values[i][plane] = bits_of(packed, plane * BITS, MASK);
                    }
                    for (int q = 0; q < count; q++) {
                        Bytes own[4] = {zeros(), zeros(), zeros(), zeros()};
#pragma GCC unroll 8
                        for (int plane = 0; plane < PLANES; plane++) {
                            Bytes query = loaded(spread[q][chunk][plane]);
#pragma GCC unroll 4
                            for (int i = 0; i < 4; i++) own[i] = add_products(own[i], values[i][plane], query);
                        }
                        Bytes a = plus(low_singles(own[0], own[1]), high_singles(own[0], own[1]));
                        Bytes b = plus(low_singles(own[2], own[3]), high_singles(own[2], own[3]));
                        Bytes all = plus(low_pairs(a, b), high_pairs(a, b));
                        sums[q][part] = chunk ? plus(sums[q][part], all) : all;
                    }
                }
            for (int q = 0; q < count; q++) {
                for (int left = PER_KEY; left > 1; left /= 2)
                    for (int i = 0; i < left / 2; i++)
                        sums[q][i] = plus(even_lanes(sums[q][2 * i], sums[q][2 * i + 1]),
                                          odd_lanes(sums[q][2 * i], sums[q][2 * i + 1]));
                store(&products[q][first], ordered(sums[q][0], order));
            }
        }
    }
#endif
};

}  // namespace
