// Tokens in records of few bits: `sketch/coded.py`, whose `RecordLayout` says what bytes hold.
//
// Keys are not decoded: a score is the sketch's estimate plus the product of the query with the remainder that the
// record holds. Values are summed as they are stored, rotated, and the sum is rotated back once.

#pragma once

#include "select.h"

namespace {

constexpr int SCALE_BYTES = 2;  // a bfloat16, the key's before the value's
constexpr int KEYS_FROM = 2 * SCALE_BYTES, VALUES_FROM = KEYS_FROM + DIM * KEY_BITS / 8;  // bytes of a record
constexpr int KEY_BLOCK = DIM & -DIM, VALUE_BLOCK = VALUE_DIM & -VALUE_DIM;  // channels that are rotated together
constexpr int AHEAD = 32;  // tokens: a record is prefetched this long before it is read
constexpr int BYTES = sizeof(Bytes);  // codes that one instruction multiplies by a query's bytes
constexpr int KEY_ROOM = (DIM + BYTES - 1) / BYTES * BYTES;  // codes of a key, in whole vectors

template <typename Number, int SIZE>
struct VectorOf {
    typedef Number type __attribute__((vector_size(SIZE)));
};
template <typename Number, int SIZE>
using Vector = typename VectorOf<Number, SIZE>::type;  // of `SIZE` bytes

// Bytes as wider numbers, by intrinsics, as compilers would convert them one by one.
template <typename Wide, int N>
INLINED Vector<Wide, N> widen_bytes(const uint8_t* bytes) {
#if defined(__AVX512BW__)
    if constexpr (N == 64 && sizeof(Wide) == 2)
        return (Vector<Wide, N>)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)bytes));
    if constexpr (N == 64 && sizeof(Wide) == 4)
        return (Vector<Wide, N>)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#endif
#if defined(__AVX2__)
    if constexpr (N == 32 && sizeof(Wide) == 4)
        return (Vector<Wide, N>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#endif
#if defined(__aarch64__)
    if constexpr (N == 16 && sizeof(Wide) == 4)
        return (Vector<Wide, N>)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(loaded<uint32_t>(bytes)))));
#endif
    return __builtin_convertvector(loaded<Vector<uint8_t, N / (int)sizeof(Wide)>>(bytes), Vector<Wide, N>);
}

// Unpacks `N` codes of `BITS` bits (4, 2 or 1) from a plane, a byte each, shifted left by `BY`. A wide number has as
// many bytes as a byte of the plane has codes: it begins as this byte, and shifts bring each code into its own byte.
template <int BITS, int BY, int N>
INLINED Vector<uint8_t, N> spread(const uint8_t* plane) {
#if defined(__AVX512BW__)
    if constexpr (BITS == 1 && N == 64)
        return (Vector<uint8_t, N>)_mm512_maskz_set1_epi8(loaded<uint64_t>(plane), 1 << BY);
#endif
#if defined(__aarch64__)
    if constexpr (BITS == 1 && N == 16) {
        const uint8x16_t both = vcombine_u8(vdup_n_u8(plane[0]), vdup_n_u8(plane[1]));
        const uint8x16_t places = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
        return (Vector<uint8_t, N>)vandq_u8(vtstq_u8(both, places), vdupq_n_u8(1 << BY));
    }
#endif
    using Wide = std::conditional_t<BITS == 4, uint16_t, std::conditional_t<BITS == 2, uint32_t, uint64_t>>;
    Vector<Wide, N> wide = widen_bytes<Wide, N>(plane) << BY;
    for (int places = 4 / BITS; places; places /= 2) wide |= wide << places * (8 - BITS);
    return (Vector<uint8_t, N>)(wide & (Wide)(0x0101010101010101 * (((1 << BITS) - 1) << BY)));
}

// Unpacks the codes of `SIZE` channels, `BITS` bits each, from channel `FIRST` on: in vectors of `N` bytes, and shorter
// ones at the end. `planes` are planes of 4, 2 and 1 bits, those that add up to `BITS`, one after the other.
template <int BITS, int SIZE, int FIRST = 0, int N = sizeof(Singles)>
INLINED void expand(const uint8_t* planes, uint8_t* codes) {
    static_assert(BITS < 8);
    if constexpr (N >= 8 && SIZE - FIRST >= N) {
        const uint8_t *twos = planes + SIZE * (BITS & 4) / 8, *ones = twos + SIZE * (BITS & 2) / 8;
        Vector<uint8_t, N> found = {};
        if constexpr (BITS & 4) found |= spread<4, 0, N>(planes + FIRST * 4 / 8);
        if constexpr (BITS & 2) found |= spread<2, BITS & 4, N>(twos + FIRST * 2 / 8);
        if constexpr (BITS & 1) found |= spread<1, BITS & 6, N>(ones + FIRST / 8);
        std::memcpy(codes + FIRST, &found, N);
        expand<BITS, SIZE, FIRST + N, N>(planes, codes);
    } else if constexpr (SIZE > FIRST) {
        expand<BITS, SIZE, FIRST, N / 2>(planes, codes);
    }
}

// Where a head's records lie: `records` of tokens in closed segments, `open` of the tokens after these.
struct RecordPlaces {
    const uint8_t *records, *open;
    const int64_t closed;  // number of tokens in closed segments
    const uint8_t* of(int64_t token) const {
        return token < closed ? records + token * RECORD_SIZE : open + (token - closed) * RECORD_SIZE;
    }
};

// A head's queries for products with records, `scaling * R (q / m)`: rounded to a byte (`high`), and the remainder
// rounded `FINER` times as finely (`low`). A product with codes, times `step`, less `offset`, is one with odd integers.
struct Turned {
    alignas(CACHE_LINE) int8_t high[QUERIES][KEY_ROOM], low[QUERIES][KEY_ROOM];
    float step[QUERIES], offset[QUERIES];

    // `weights` [DIM] are `m`.
    void turn(const Slots* queries, const float* weights, float scaling) {
        Slots weighed[DIM], highest = Slots{} + (float)MIN_PEAK;
        for (int d = 0; d < DIM; d++) weighed[d] = queries[d] * (scaling / weights[d]);
        rotate<KEY_BLOCK>(weighed, DIM, 1 / sqrtf(KEY_BLOCK));
        for (int d = 0; d < DIM; d++) {
            const Slots size = weighed[d] < 0.0f ? -weighed[d] : weighed[d];
            highest = size > highest ? size : highest;
        }
        using Whole = Vector<int32_t, sizeof(Slots)>;
        const Slots inverse = LEVELS / highest;
        Slots sum = {};
        std::memset(high, 0, sizeof high);
        std::memset(low, 0, sizeof low);
        for (int d = 0; d < DIM; d++) {
            const Slots exact = weighed[d] * inverse;
            const Whole whole = nearest<Whole>(exact);
            const Slots rounded = __builtin_convertvector(whole, Slots);
            const Whole rest = nearest<Whole>((exact - rounded) * FINER);
            sum += rounded + __builtin_convertvector(rest, Slots) * (1 / FINER);
            for (int q = 0; q < QUERIES; q++) high[q][d] = (int8_t)whole[q], low[q][d] = (int8_t)rest[q];
        }
        for (int q = 0; q < QUERIES; q++) {
            step[q] = 2 * highest[q] / LEVELS;
            offset[q] = sum[q] * highest[q] / LEVELS * ((1 << KEY_BITS) - 1);
        }
    }
};

// Records of up to a span of tokens, as `Tokens` of `Attention::add`. `from_codes` are scores by the sketch alone.
struct Records {
    const Turned& queries;
    const uint8_t *place[SPAN], *ahead[SPAN];  // each token's record, and a later token's to prefetch with it
    float from_codes[QUERIES][SPAN];
    uint8_t values[BLOCK][VALUE_DIM];  // codes of the values of the block that `scale` was last called for

    // Of keys (`which` 0) or values (`which` 1).
    float scale_of(int64_t t, int which) const { return widen(loaded<uint16_t>(place[t] + which * SCALE_BYTES)); }

    INLINED void score(const Floats (*)[PARTS], int64_t first, int count, float (*scores)[BLOCK]) const {
        alignas(CACHE_LINE) uint8_t codes[4][KEY_ROOM] = {};
        for (int t = 0; t < count; t += 4) {
            float scales[4];
            for (int i = 0; i < 4; i++) {
                const int64_t token = first + std::min(t + i, count - 1);
                for (int byte = 0; byte < RECORD_SIZE; byte += CACHE_LINE)
                    __builtin_prefetch(ahead[token] + byte, 0, TO_L2);
                __builtin_prefetch(ahead[token] + RECORD_SIZE - 1, 0, TO_L2);
                expand<KEY_BITS, DIM>(place[token] + KEYS_FROM, codes[i]);
                scales[i] = scale_of(token, 0);
            }
            for (int q = 0; q < QUERIES; q++) {
                Vector<float, BYTES> products[4];
                for (int i = 0; i < 4; i++) {
                    Bytes high = {}, low = {};
                    for (int c = 0; c < KEY_ROOM; c += BYTES) {
                        const Bytes own = loaded<Bytes>(codes[i] + c);
                        high = add_products(high, own, loaded<Bytes>(queries.high[q] + c));
                        low = add_products(low, own, loaded<Bytes>(queries.low[q] + c));
                    }
                    products[i] = __builtin_convertvector(high, Vector<float, BYTES>) +
                                  __builtin_convertvector(low, Vector<float, BYTES>) * (1 / FINER);
                }
                sum_of_each(products, &scores[q][t]);
                for (int i = 0; i < std::min(4, count - t); i++)
                    scores[q][t + i] = from_codes[q][first + t + i] +
                                       scales[i] * (queries.step[q] * scores[q][t + i] - queries.offset[q]);
            }
        }
    }

    INLINED void scale(int64_t first, int count, float (*weights)[BLOCK]) {
        float scales[BLOCK] = {};
        for (int t = 0; t < count; t++) {
            scales[t] = scale_of(first + t, 1);
            expand<VALUE_BITS, VALUE_DIM>(place[first + t] + VALUES_FROM, values[t]);
        }
        for (int q = 0; q < QUERIES; q++)
            for (int t = 0; t < BLOCK; t++) weights[q][t] *= scales[t];
    }
    INLINED void unpack_value(int64_t t, Floats* out) const {
        for (int c = 0; c < VALUE_PARTS; c++)
            out[c] = 2 * widen_codes(values[t % BLOCK] + c * WIDTH) - (float)((1 << VALUE_BITS) - 1);
    }
    void prefetch_value_after(int64_t) const {}  // `score` has prefetched whole records

    // `WIDTH` codes as floats.
    static INLINED Floats widen_codes(const uint8_t* codes) {
        if constexpr (WIDTH == TOKENS) {
            const Singles wide = widen(loaded<Octets>(codes));
            return loaded<Floats>(&wide);
        }
        return __builtin_convertvector(loaded<Vector<uint8_t, WIDTH>>(codes), Floats);
    }
};

// Attention of a head's flagged queries over its records. Flagged query number `q` is query `asking[q]` of the head.
struct RecordAttention : Attention {
    const Estimates found;
    const RecordPlaces records;
    const int* asking;
    Records all;

    RecordAttention(const Estimates& found, const RecordPlaces& records, const Turned& queries, const int* asking)
        : found(found), records(records), asking(asking), all{queries, {}, {}, {}, {}} {}

    const Rounded& segment(int64_t token) const {
        return found.segments[std::min(token / found.segment_tokens, found.segment_count - 1)];
    }

    // Adds tokens `start..stop`, span by span; each span lies in one segment, and the last one may be shorter.
    void add_spans(int64_t start, int64_t stop) {
        for (int64_t first = start; first < stop; first += SPAN) {
            if (stop - first < SPAN) {
                int32_t rest[SPAN];
                for (int t = 0; t < SPAN; t++) rest[t] = (int32_t)first + t;
                add_listed(rest, stop - first);
                return;
            }
            found.prefetch_span(first + PREFETCH_SPANS * SPAN);
            found.compute_exactly(found.codes + first, found.room, found.scales + first, segment(first),
                                  all.from_codes);
            for (int t = 0; t < SPAN; t++) {
                all.place[t] = records.of(first + t);
                all.ahead[t] = all.place[t] + AHEAD * RECORD_SIZE;
            }
            add(all, SPAN);
        }
    }

    // Adds `count` listed tokens, ascending.
    void add_listed(const int32_t* tokens, int64_t count) {
        for (int64_t i = 0; i < std::min<int64_t>(AHEAD, count); i++)
            __builtin_prefetch(records.of(tokens[i]), 0, TO_L2);
        for (int64_t first = 0; first < count; first += SPAN) {
            const int here = (int)std::min<int64_t>(SPAN, count - first);
            for (int t = 0; t < here; t++) {
                all.place[t] = records.of(tokens[first + t]);
                all.ahead[t] = records.of(tokens[std::min(first + t + AHEAD, count - 1)]);
            }
            for (int start = 0; start < here;) start = score_codes(tokens + first, start, here);
            add(all, here);
        }
    }

    // Writes `from_codes` of the listed tokens from number `start` on that lie in one segment; returns where they end.
    int score_codes(const int32_t* tokens, int start, int stop) {
        uint32_t codes[DIM / 8 * SPAN];  // no more words than blocks of channels
        uint8_t scales[SPAN];
        float scores[QUERIES][SPAN];
        const Rounded& own = segment(tokens[start]);
        int count = 0;
        for (; start + count < stop && &segment(tokens[start + count]) == &own; count++) {
            const int64_t token = tokens[start + count];
            for (int word = 0; word < found.words.count(); word++)
                codes[word * SPAN + count] = found.codes[word * found.room + token];
            scales[count] = found.scales[token];
        }
        found.compute_exactly(codes, SPAN, scales, own, scores, count);
        for (int q = 0; q < QUERIES; q++) std::copy(scores[q], scores[q] + count, all.from_codes[q] + start);
        return start + count;
    }

    // As `Attention::finish`, for flagged queries alone.
    void finish(float* out, float* lse) const {
        Slots turned[VALUE_DIM] = {};
        for (int d = 0; d < VALUE_DIM; d++)
            for (int q = 0; q < found.count; q++)
                turned[d][q] = total[q] == 0 ? 0 : sums[q][d / WIDTH][d % WIDTH] / total[q];
        rotate<VALUE_BLOCK>(turned, VALUE_DIM, 1 / sqrtf(VALUE_BLOCK));
        for (int q = 0; q < found.count; q++) {
            lse[asking[q]] = log_mass(q);
            for (int d = 0; d < VALUE_DIM; d++) out[asking[q] * VALUE_DIM + d] = turned[d][q];
        }
    }
};

}  // namespace
