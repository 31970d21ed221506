// What a sketch of keys says of their scores: `estimated_scores` of codec.py, for queries of one head.
//
// Words of as many keys as a vector holds are multiplied with rounded queries at once, four values at a time.

#pragma once

#include "partial.h"

namespace {

constexpr int SPAN = 64;         // keys that are scored at once
constexpr int PREFETCH_SPANS = 8;    // whose codes are asked for before they are needed
constexpr float LEVELS = 127;    // a rounded query's largest value

inline float widened(uint16_t bfloat16) { return from_bits((uint32_t)bfloat16 << 16); }

// As wide as the processor's vectors: one float of each of so many tokens.
#if defined(__AVX512F__)
constexpr int TOKENS = 16;
#elif defined(__AVX__)
constexpr int TOKENS = 8;
#else
constexpr int TOKENS = 4;
#endif
typedef float Singles __attribute__((vector_size(4 * TOKENS)));
typedef int32_t Integers __attribute__((vector_size(4 * TOKENS)));
typedef uint8_t Octets __attribute__((vector_size(TOKENS)));

// As floats; compilers would convert one after the other.
inline Singles widened(Octets octets) {
#if defined(__AVX512F__)
    return (Singles)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)octets));
#elif defined(__AVX2__)
    return (Singles)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(loaded<int64_t>(&octets))));
#else
    return __builtin_convertvector(octets, Singles);
#endif
}

constexpr int32_t NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
const Integers numbered = loaded<Integers>(NUMBERS);

// 2^x but for an error of 3e-6: a whole power times a polynomial for what is left. Far above 1, large or infinite.
inline Singles power_of_two(Singles x) {
#if defined(__AVX512DQ__)
    Singles r = (Singles)_mm512_reduce_ps((__m512)x, 1);  // above the next lower whole number
#else
    x = x > -125.0f ? x : Singles{} - 125.0f;
    x = x < 125.0f ? x : Singles{} + 125.0f;
    Integers whole = __builtin_convertvector(x + 1023, Integers) - 1023;  // as it rounds towards zero
    Singles r = x - __builtin_convertvector(whole, Singles);
#endif
    Singles p = r * 1.35341678e-2f + 5.20114601e-2f;
    p = p * r + 2.41442755e-1f;
    p = p * r + 6.93003833e-1f;
    p = p * r + 1.00000262f;
#if defined(__AVX512DQ__)
    return (Singles)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return (Singles)((Integers)p + (whole << 23));
#endif
}

// One bit for each token where `mask` is set, which is in all bits or none.
inline uint64_t bits_of(Integers mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
    return (uint64_t)_mm256_movemask_ps((__m256)mask);
#else
    uint64_t bits = 0;
    for (int i = 0; i < TOKENS; i++) bits |= (uint64_t)(mask[i] & 1) << i;
    return bits;
#endif
}

// Writes the marked ones of `lanes` one after the other, and anything behind them, as many as a vector has in all.
template <typename Lanes>
inline void compress(Lanes lanes, uint64_t bits, void* to) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)lanes));
#else
    for (Integers values = (Integers)lanes; bits; bits &= bits - 1, to = (int32_t*)to + 1) {
        int32_t value = values[__builtin_ctzll(bits)];
        std::memcpy(to, &value, sizeof value);
    }
#endif
}

// Marked tokens of a vector: a bit each where the processor has masks, else all bits or none of its lane.
#if defined(__AVX512F__)
typedef __mmask16 Marks;
inline Marks at_least(Singles lanes, float least) {
    return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(least), _CMP_GE_OQ);
}
inline Singles without(Singles lanes, Marks marks) { return (Singles)_mm512_maskz_mov_ps((Marks)~marks, (__m512)lanes); }
inline Marks first_marks(int count) { return (Marks)((1u << std::clamp(count, 0, TOKENS)) - 1); }
inline uint64_t bits_of(Marks marks) { return marks; }
#else
typedef Integers Marks;
inline Marks at_least(Singles lanes, float least) { return lanes >= least; }
inline Singles without(Singles lanes, Marks marks) { return marks ? Singles{} : lanes; }
inline Marks first_marks(int count) { return numbered < count; }
#endif

inline float largest(Singles lanes) {
    float found = lanes[0];
    for (int i = 1; i < TOKENS; i++) found = std::max(found, lanes[i]);
    return found;
}

// Words of a key's code, by `Layout` of sketch/__init__.py.
struct Words {
    int of_four, of_two, of_one;  // bits
    int count() const { return of_four + of_two + of_one; }
    int coded() const { return 8 * of_four + 16 * of_two + 32 * of_one; }
};

// One number of each query of a head, in vectors of whole powers of two: one channel at a time, all queries at once.
constexpr int SLOTS = QUERIES <= 4 ? 4 : QUERIES <= 8 ? 8 : 16;
constexpr int SLOT_VECTORS = (QUERIES + SLOTS - 1) / SLOTS;
typedef float Slots __attribute__((vector_size(4 * SLOTS)));
typedef int32_t SlotIntegers __attribute__((vector_size(4 * SLOTS)));

// In place, as by `layout.rotate`.
inline void rotate(Slots* values, int count) {
    for (Slots* block = values; block < values + count; block += 8) {
#pragma GCC unroll 3
        for (int apart = 1; apart < 8; apart *= 2)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                if (!(i & apart)) {
                    Slots one = block[i], other = block[i + apart];
                    block[i] = one + other;
                    block[i + apart] = one - other;
                }
        for (int i = 0; i < 8; i++) block[i] *= 0.35355339f;
    }
}

// The flagged queries of a head, the first `count`, as one segment's codes meet them: rounded as by `codec.round_query`,
// and what else estimates take, `middle + scale * (step * product - offset + spread * scale)`.
struct Rounded {
    int count;
    int32_t fours[DIM / 4][SLOT_VECTORS * SLOTS];  // of four channels the rounded values, a byte each
    float middle[SLOT_VECTORS * SLOTS], step[SLOT_VECTORS * SLOTS], offset[SLOT_VECTORS * SLOTS];
    float spread[SLOT_VECTORS * SLOTS];

    // `queries` [DIM] of vector `v`; `centre`, `order`, `weights` and `errors` [DIM]; `unit` of the segment's scales,
    // which are integers from here on.
    void round(int v, const Slots* queries, const uint16_t* centre, const Channel* order, const uint16_t* weights,
               const float* errors, Words words, float unit, float scaling) {
        Slots rotated[DIM], highest = {}, along = {}, error = {};
        for (int d = 0; d < DIM; d++) {
            rotated[d] = queries[order[d]] / widened(weights[d]);
            error += rotated[d] * rotated[d] * errors[d];
            along += queries[d] * widened(centre[d]);
        }
        const int coded = words.coded();
        rotate(rotated, coded);
        for (int d = 0; d < coded; d++) {
            Slots size = rotated[d] < 0.0f ? -rotated[d] : rotated[d];
            highest = size > highest ? size : highest;
        }
        const Slots least = Slots{} + 1.17549435e-38f;
        Slots step_unit = (highest > least ? highest : least) / LEVELS;
        SlotIntegers sum = {};  // of queries times the highest levels: codes are indices, odd integers twice that less these
        for (int d = 0; d < coded; d += 4) {
            const int level = d < 8 * words.of_four ? 15 : d < 8 * words.of_four + 16 * words.of_two ? 3 : 1;
            SlotIntegers packed = {};
            for (int i = 0; i < 4; i++) {
                // The sum with 1.5 * 2^23 has no room for fractions: it rounds half to even.
                Slots shifted = rotated[d + i] / step_unit + 12582912.0f;
                SlotIntegers rounded = (SlotIntegers)shifted - 0x4b400000;
                sum += rounded * level;
                packed |= (rounded & 0xff) << (8 * i);
            }
            std::memcpy(&fours[d / 4][v * SLOTS], &packed, sizeof packed);
        }
        Slots unit_step = scaling * step_unit * unit;
        put(middle, v, along * scaling);
        put(step, v, 2 * unit_step);
        put(offset, v, __builtin_convertvector(sum, Slots) * unit_step);
        put(spread, v, error * unit * unit);
    }
    static void put(float* to, int v, Slots slots) { std::memcpy(to + v * SLOTS, &slots, sizeof slots); }
};

#if defined(__AVX2__)
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef __m512i Bytes;
inline Bytes bits_of(Bytes a, int shift, int mask) {
    return _mm512_and_si512(_mm512_srli_epi16(a, shift), _mm512_set1_epi8((char)mask));
}
// Adds products of unsigned with signed bytes, four to an integer.
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) { return _mm512_dpbusd_epi32(sums, codes, query); }
inline Bytes broadcast(int32_t four) { return _mm512_set1_epi32(four); }
#else
typedef __m256i Bytes;
inline Bytes bits_of(Bytes a, int shift, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(a, shift), _mm256_set1_epi8((char)mask));
}
inline Bytes add_products(Bytes sums, Bytes codes, Bytes query) {  // pairs stay far below what 16 bits hold
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, query), _mm256_set1_epi16(1)));
}
inline Bytes broadcast(int32_t four) { return _mm256_set1_epi32(four); }
#endif
constexpr int KEYS = sizeof(Bytes) / 4;  // that are multiplied at once

// Adds products of `KEYS` keys' words of `BITS` a value to `sums`; the next word's codes lie `stride` further on. Words
// meet the queries' integers from channel `first` on.
template <int BITS>
inline void add_words(const uint32_t* codes, int64_t stride, int words, const Rounded& queries, int first, Bytes* sums) {
    for (int word = 0; word < words; word++) {
        Bytes packed = loaded<Bytes>(codes + word * stride);
#pragma GCC unroll 8
        for (int plane = 0; plane < 8 / BITS; plane++) {
            Bytes values = bits_of(packed, plane * BITS, (1 << BITS) - 1);
            const int32_t* fours = queries.fours[first / 4 + word * (8 / BITS) + plane];
            for (int q = 0; q < QUERIES; q++)  // others have integers as well, of no use
                sums[q] = add_products(sums[q], values, broadcast(fours[q]));
        }
    }
}
#else
// The same of `SPAN` keys, one after the other.
template <int BITS>
void add_words(const uint32_t* codes, int64_t stride, int words, const Rounded& queries, int first,
               int32_t (*products)[SPAN]) {
    for (int word = 0; word < words; word++)
        for (int value = 0; value < 32 / BITS; value++) {
            int shift = value % 4 * 8 + value / 4 * BITS, channel = first + word * (32 / BITS) + value;
            for (int q = 0; q < queries.count; q++) {
                int32_t factor = (int8_t)(queries.fours[channel / 4][q] >> channel % 4 * 8);
#pragma omp simd
                for (int key = 0; key < SPAN; key++)
                    products[q][key] += (int32_t)(codes[word * stride + key] >> shift & ((1 << BITS) - 1)) * factor;
            }
        }
}
#endif

// Products of rounded queries with `SPAN` keys' codes; of the codes alone, not yet of the odd integers behind them.
INLINED void multiply(const uint32_t* codes, int64_t stride, Words words, const Rounded& queries,
                      int32_t (*products)[SPAN]) {
    const uint32_t *twos = codes + words.of_four * stride, *ones = twos + words.of_two * stride;
    const int first_two = 8 * words.of_four, first_one = first_two + 16 * words.of_two;
#if defined(__AVX2__)
    for (int key = 0; key < SPAN; key += KEYS) {
        Bytes sums[QUERIES] = {};
        add_words<4>(codes + key, stride, words.of_four, queries, 0, sums);
        add_words<2>(twos + key, stride, words.of_two, queries, first_two, sums);
        add_words<1>(ones + key, stride, words.of_one, queries, first_one, sums);
        for (int q = 0; q < QUERIES; q++) std::memcpy(&products[q][key], &sums[q], sizeof(Bytes));
    }
#else
    std::memset(products, 0, sizeof(int32_t) * QUERIES * SPAN);
    add_words<4>(codes, stride, words.of_four, queries, 0, products);
    add_words<2>(twos, stride, words.of_two, queries, first_two, products);
    add_words<1>(ones, stride, words.of_one, queries, first_one, products);
#endif
}

}  // namespace
