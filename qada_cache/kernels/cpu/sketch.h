// Estimates scores from a sketch of keys: `estimate_scores` of sketch/codec.py, for queries of one head.
//
// A vector holds a word of each of several keys. One instruction multiplies four channels of each with a rounded query.

#pragma once

#include "partial.h"

namespace {

constexpr int SPAN = 64;  // keys that are scored at once
constexpr int PREFETCH_SPANS = 8;  // codes are prefetched this many spans before they are read
constexpr float LEVELS = QUERY_LEVELS;  // a rounded query's largest value
static_assert(WORD_BITS == 32);

// Numbers of words of a key's code with 4, 2 and 1 bits a channel, as `Layout` of sketch/__init__.py.
struct Words {
    int of_four, of_two, of_one;
    int count() const { return of_four + of_two + of_one; }
    // The first channel, in the sketch's order, with 2 bits, with 1 bit, and without bits.
    int first_two() const { return WORD_BITS / 4 * of_four; }
    int first_one() const { return first_two() + WORD_BITS / 2 * of_two; }
    int coded() const { return first_one() + WORD_BITS * of_one; }
};

// `Slots` has one number for each query of a head, padded to a power of two; `Wide` has `Slots` of `TOGETHER` segments.
constexpr int SLOTS = QUERIES <= 4 ? 4 : QUERIES <= 8 ? 8 : 16;
static_assert(QUERIES <= 16);
constexpr int TOGETHER = std::max(1, TOKENS / SLOTS);
typedef float Slots __attribute__((vector_size(4 * SLOTS)));
typedef float Wide __attribute__((vector_size(4 * SLOTS * TOGETHER)));
typedef int32_t WideIntegers __attribute__((vector_size(4 * SLOTS * TOGETHER)));
inline Slots slots_of(const Wide& wide, int j) { return loaded<Slots>((const char*)&wide + j * sizeof(Slots)); }

// Rotates `count` channels in place, as `rotate` of sketch/__init__.py, in Hadamard blocks of `SIZE` channels. `unit`
// is 1 / sqrt(SIZE).
template <int SIZE, typename Lanes>
inline void rotate(Lanes* values, int count, float unit) {
    for (Lanes* block = values; block < values + count; block += SIZE) {
#pragma GCC unroll 8
        for (int apart = 1; apart < SIZE; apart *= 2)
#pragma GCC unroll 8
            for (int i = 0; i < SIZE; i++)
                if (!(i & apart)) {
                    Lanes one = block[i], other = block[i + apart];
                    block[i] = one + other;
                    block[i + apart] = one - other;
                }
        for (int i = 0; i < SIZE; i++) block[i] *= unit;
    }
}

constexpr bool CODED = KEY_BITS > 0;  // whether tokens with a sketch lie in records (coded.h)
constexpr bool SCORED = CODED && !VALUES_IN_KEYS;  // whether scores come from records' codes; latents' are decoded
constexpr float FINER = 2 * LEVELS;  // the step of a rounded query over the step of its rounded remainder

// The nearest integers, half to even: a sum with 1.5 * 2^23 has no bits for fractions.
template <typename Whole, typename Numbers>
inline Whole nearest(Numbers numbers) {
    return (Whole)(numbers + 12582912.0f) - 0x4b400000;
}

// A head's flagged queries, rounded for one segment as in `estimate_scores`. Let `product` be that of `fours` and a
// token's codes, and `scale` the token's. Its score is `middle + scale * (step * product - offset) + spread * square`:
// `spread` is the expected effect of coding errors, and `square` that of `scale`, which counts up to `widest`; `offset`
// makes odd integers of codes. Records need scores more precise than a byte: they add the rounded remainders, `lows`,
// `FINER` times as fine, and leave `spread` out.
struct Rounded {
    int32_t fours[DIM / 4][SLOTS];  // rounded values of four channels, a byte each
    int32_t lows[SCORED ? DIM / 4 : 1][SLOTS];
    float middle[SLOTS], step[SLOTS], offset[SLOTS], spread[SLOTS], widest[SLOTS], low_offset[SLOTS];
};

// A head's segments: `centres`, `order` and `weights` [count, DIM], and `units` [count], by which integers become
// scales. `errors` [DIM] are squared errors in units of a squared scale, the same for all segments.
struct Segments {
    const int64_t count;
    const uint16_t* centres;
    const Channel* order;
    const uint16_t* weights;
    const float *units, *errors;

    // Rounds `queries` [DIM] for up to `TOGETHER` segments from number `first` on. `most` limits the expected effect of
    // coding errors.
    void round(const Slots* queries, int64_t first, Words words, float scaling, Slots most, Rounded* rounded) const {
        const int here = (int)std::min<int64_t>(TOGETHER, count - first);
        Wide rotated[DIM] = {};
        for (int j = 0; j < here; j++) {
            const int64_t segment = first + j, channel = segment * DIM;
            alignas(CACHE_LINE) float inverse[DIM], centre[DIM];
            for (int d = 0; d < DIM; d++) inverse[d] = 1 / widen(weights[channel + d]);
            for (int d = 0; d < DIM; d++) centre[d] = widen(centres[channel + d]);
            Slots along = {}, error = {};
            for (int d = 0; d < DIM; d++) {
                const Slots weighed = queries[order[channel + d]] * inverse[d];
                error += weighed * weighed * errors[d];
                along += queries[d] * centre[d];
                std::memcpy((char*)&rotated[d] + j * sizeof(Slots), &weighed, sizeof weighed);
            }
            put(rounded[segment].middle, along * scaling);
            const Slots spread = error * (units[segment] * units[segment]);
            put(rounded[segment].spread, spread);
            for (int q = 0; q < SLOTS; q++) rounded[segment].widest[q] = std::sqrt(most[q] / spread[q]);
        }
        const int coded = words.coded();
        rotate<8>(rotated, coded, (float)HADAMARD);
        Wide highest = Wide{} + (float)MIN_PEAK;
        for (int d = 0; d < coded; d++) {
            Wide size = rotated[d] < 0.0f ? -rotated[d] : rotated[d];
            highest = size > highest ? size : highest;
        }
        const Wide inverse = LEVELS / highest;
        // Sums of rounded queries times the highest level of a code: an odd integer is twice its code less this level.
        WideIntegers sum = {}, low_sum = {};
        for (int d = 0; d < coded; d += 4) {
            const int level = d < words.first_two() ? 15 : d < words.first_one() ? 3 : 1;
            WideIntegers packed = {}, low_packed = {};
            for (int i = 0; i < 4; i++) {
                const Wide exact = rotated[d + i] * inverse;
                const WideIntegers whole = nearest<WideIntegers>(exact);
                sum += whole * level;
                packed |= (whole & 0xff) << (8 * i);
                if (!SCORED) continue;
                const Wide rest = exact - __builtin_convertvector(whole, Wide);
                const WideIntegers low = nearest<WideIntegers>(rest * FINER);
                low_sum += low * level;
                low_packed |= (low & 0xff) << (8 * i);
            }
            for (int j = 0; j < here; j++) {
                put(rounded[first + j].fours[d / 4], slots_of((Wide)packed, j));
                if (SCORED) put(rounded[first + j].lows[d / 4], slots_of((Wide)low_packed, j));
            }
        }
        const Wide total = __builtin_convertvector(sum, Wide), low_total = __builtin_convertvector(low_sum, Wide);
        for (int j = 0; j < here; j++) {
            Rounded& segment = rounded[first + j];
            const Slots step = slots_of(highest, j) / LEVELS * (scaling * units[first + j]);
            put(segment.step, 2 * step);
            put(segment.offset, slots_of(total, j) * step);
            put(segment.low_offset, slots_of(low_total, j) * step / FINER);
        }
    }
    static void put(void* to, Slots slots) { std::memcpy(to, &slots, sizeof slots); }
};

// A word, or four bytes, of each of `KEYS` keys. `add_products` adds, for each key, the four products of unsigned bytes
// of codes with signed bytes of a query.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef Integers Bytes;
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {
    return (Bytes)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)query);
}
#elif defined(__AVXVNNI__)
typedef int32_t Bytes __attribute__((vector_size(32)));
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {
    return (Bytes)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)query);
}
#elif defined(__AVX2__)
typedef int32_t Bytes __attribute__((vector_size(32)));
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {  // sums of two products fit 16 bits
    return sums + (Bytes)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, (__m256i)query), _mm256_set1_epi16(1));
}
#elif defined(__aarch64__)
typedef Integers Bytes;
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {  // codes are below 128
#if defined(__ARM_FEATURE_DOTPROD)
    return (Bytes)vdotq_s32(sums, (int8x16_t)codes, (int8x16_t)query);
#else
    const int8x16_t one = (int8x16_t)codes, other = (int8x16_t)query;
    const int16x8_t low = vmull_s8(vget_low_s8(one), vget_low_s8(other)), high = vmull_high_s8(one, other);
    return (Bytes)vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
}
#else
typedef Integers Bytes;
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {
    for (int shift = 0; shift < 32; shift += 8) sums += (codes >> shift & 255) * (query << (24 - shift) >> 24);
    return sums;
}
#endif
constexpr int KEYS = sizeof(Bytes) / 4;  // keys of one vector

// The number of vectors of keys that are multiplied together: as many as keep all queries' sums in registers.
constexpr int fitting_columns(int columns) {
    return columns == 1 || columns * QUERIES <= REGISTERS ? columns : fitting_columns(columns / 2);
}
constexpr int MOST_COLUMNS = fitting_columns(SPAN / KEYS);

// Adds to `sums` the products of `KEYS * COLUMNS` keys' words of `BITS` bits a channel with queries, from channel
// `first` on. A key's next word lies `stride` further. All loops but the first are unrolled early: otherwise GCC leaves
// the sums in memory.
template <int BITS, int COLUMNS>
INLINED void add_words(const uint32_t* codes, int64_t stride, int words, const int32_t (*queries)[SLOTS], int first,
                       Bytes (*sums)[COLUMNS]) {
    for (int word = 0; word < words; word++) {
        Bytes packed[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) packed[c] = loaded<Bytes>(codes + word * stride + c * KEYS);
#pragma GCC unroll 8
        for (int plane = 0; plane < 8 / BITS; plane++) {
            const int32_t* fours = queries[first / 4 + word * (8 / BITS) + plane];
            Bytes values[COLUMNS];
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) values[c] = packed[c] >> plane * BITS & ((1 << BITS) - 1) * 0x01010101;
#pragma GCC unroll 16
            for (int q = 0; q < QUERIES; q++) {  // slots without a flagged query yield numbers that nobody reads
                const Bytes four = Bytes{} + fours[q];
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; c++) sums[q][c] = add_products(sums[q][c], values[c], four);
            }
        }
    }
}

// Products of rounded queries with the codes (not yet the odd integers) of `keys` keys, rounded up to whole vectors.
template <int COLUMNS = MOST_COLUMNS>
INLINED void multiply(const uint32_t* codes, int64_t stride, Words words, const int32_t (*queries)[SLOTS],
                      int32_t (*products)[SPAN], int keys = SPAN) {
    const uint32_t *twos = codes + words.of_four * stride, *ones = twos + words.of_two * stride;
    for (int key = 0; key < keys; key += KEYS * COLUMNS) {
        Bytes sums[QUERIES][COLUMNS] = {};
        add_words<4>(codes + key, stride, words.of_four, queries, 0, sums);
        add_words<2>(twos + key, stride, words.of_two, queries, words.first_two(), sums);
        add_words<1>(ones + key, stride, words.of_one, queries, words.first_one(), sums);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) std::memcpy(&products[q][key + c * KEYS], &sums[q][c], sizeof(Bytes));
    }
}

}  // namespace
