// Tokens in records of few bits: `sketch/coded.py`, whose `RecordLayout` says what bytes hold.
//
// Keys are not decoded: a score is what the sketch's codes say, and a product with what they leave. Values are summed as
// they are rotated, and the sum is turned back once.

#pragma once

#include "select.h"

namespace {

typedef uint32_t Lanes __attribute__((vector_size(4 * WIDTH)));
typedef int32_t SignedLanes __attribute__((vector_size(4 * WIDTH)));

constexpr int SCALE_BYTES = 2;  // a bfloat16, the key's before the value's
constexpr int KEYS_FROM = 2 * SCALE_BYTES, VALUES_FROM = KEYS_FROM + DIM * KEY_BITS / 8;  // bytes of a record
constexpr int KEY_BLOCK = DIM & -DIM, VALUE_BLOCK = VALUE_DIM & -VALUE_DIM;  // channels that are rotated together

// Values `first` to `first + WIDTH` of a plane of 4, 2 or 1 bits.
template <int BITS>
INLINED Lanes plane_at(const uint8_t* plane, int first) {
    constexpr int EACH = 32 / BITS;  // in 32 bits
    uint64_t word = 0;
    std::memcpy(&word, plane + first * BITS / 8, std::max(1, WIDTH * BITS / 8));
    word >>= first * BITS % 8;
    const Lanes number = loaded<Lanes>(NUMBERS), low = Lanes{} + (uint32_t)word, high = Lanes{} + (uint32_t)(word >> 32);
    return ((WIDTH > EACH && number >= (uint32_t)EACH ? high : low) >> number % EACH * BITS) & ((1u << BITS) - 1);
}

// The odd integers of values `first` to `first + WIDTH` of `size`, of `BITS` each.
template <int BITS>
INLINED Floats odd_at(const uint8_t* planes, int size, int first) {
    static_assert(BITS < 8);
    Lanes code = {};
    if constexpr (BITS & 4) code = plane_at<4>(planes, first);
    planes += size * (BITS & 4) / 8;
    if constexpr (BITS & 2) code |= plane_at<2>(planes, first) << (BITS & 4);
    planes += size * (BITS & 2) / 8;
    if constexpr (BITS & 1) code |= plane_at<1>(planes, first) << (BITS & 6);
    return 2 * __builtin_convertvector((SignedLanes)code, Floats) - (float)((1 << BITS) - 1);
}

// Records of a span of tokens at most, of which `from_codes` says what their sketch does of scores.
struct Records {
    const uint8_t* place[SPAN];
    float from_codes[QUERIES][SPAN];

    float scale(int64_t t, int of) const { return widened(loaded<uint16_t>(place[t] + of * SCALE_BYTES)); }
    INLINED void unpack_key(int64_t t, Floats* out) const {
        for (int c = 0; c < PARTS; c++) out[c] = odd_at<KEY_BITS>(place[t] + KEYS_FROM, DIM, c * WIDTH);
    }
    INLINED void unpack_value(int64_t t, Floats* out) const {
        for (int c = 0; c < VALUE_PARTS; c++) out[c] = odd_at<VALUE_BITS>(place[t] + VALUES_FROM, VALUE_DIM, c * WIDTH);
    }
    void prefetch_key_after(int64_t) const {}  // as `RecordAttention` does
    void prefetch_value_after(int64_t) const {}
    INLINED void complete_scores(int64_t first, int count, float (*scores)[BLOCK]) const {
        float scales[BLOCK] = {};
        for (int t = 0; t < count; t++) scales[t] = scale(first + t, 0);
        for (int q = 0; q < QUERIES; q++)
            for (int t = 0; t < count; t++) scores[q][t] = from_codes[q][first + t] + scales[t] * scores[q][t];
    }
    INLINED void scale_weights(int64_t first, int count, float (*weights)[BLOCK]) const {
        float scales[BLOCK] = {};
        for (int t = 0; t < count; t++) scales[t] = scale(first + t, 1);
        for (int q = 0; q < QUERIES; q++)
            for (int t = 0; t < BLOCK; t++) weights[q][t] *= scales[t];
    }
};

// Queries as records meet them: `scaling * R (q / m)`, of which `weights` [DIM] are `m`.
inline void turn(const Slots* queries, const float* weights, float scaling, float (*turned)[DIM]) {
    Slots weighed[DIM];
    for (int d = 0; d < DIM; d++) weighed[d] = queries[d] * (scaling / weights[d]);
    rotate<KEY_BLOCK>(weighed, DIM, 1 / sqrtf(KEY_BLOCK));
    for (int d = 0; d < DIM; d++)
        for (int q = 0; q < QUERIES; q++) turned[q][d] = weighed[d][q];
}

// Attention over records of one head, of its flagged queries: the first of `QUERIES`, in their order.
struct RecordAttention : Attention {
    const Estimates& found;
    const uint8_t* records;

    RecordAttention(const Estimates& found, const uint8_t* records, const float (*turned)[DIM])
        : found(found), records(records) {
        for (int q = 0; q < QUERIES; q++)
            for (int c = 0; c < PARTS; c++) scaled[q][c] = loaded<Floats>(turned[q] + c * WIDTH);
    }

    const Rounded& segment(int64_t token) const { return found.segments[token / found.segment_tokens]; }

    // Tokens from `start` to `stop`, whole spans.
    void add_spans(int64_t start, int64_t stop) {
        Records all;
        for (int64_t first = start; first < stop; first += SPAN) {
            found.prefetch_span(first + PREFETCH_SPANS * SPAN);
            found.compute_exactly(found.codes + first, found.room, found.scales + first, segment(first),
                                  all.from_codes);
            for (int t = 0; t < SPAN; t++) all.place[t] = records + (first + t) * RECORD_SIZE;
            for (int64_t byte = 0; byte < SPAN * RECORD_SIZE; byte += CACHE_LINE)
                __builtin_prefetch(all.place[0] + SPAN * RECORD_SIZE + byte, 0, TO_L2);
            add(all, SPAN);
        }
    }

    // `count` tokens of a list, ascending.
    void add_listed(const int32_t* tokens, int64_t count) {
        Records all;
        uint32_t codes[DIM / 8 * SPAN] = {};  // no more words than blocks of channels
        uint8_t scales[SPAN] = {};
        const int words = found.words.count();
        prefetch_listed(tokens, std::min<int64_t>(SPAN, count));
        for (int64_t first = 0; first < count;) {
            const Rounded& own = segment(tokens[first]);
            int here = 0;
            for (; here < SPAN && first + here < count && &segment(tokens[first + here]) == &own; here++) {
                const int64_t token = tokens[first + here];
                for (int word = 0; word < words; word++) codes[word * SPAN + here] = found.codes[word * found.room + token];
                scales[here] = found.scales[token];
                all.place[here] = records + token * RECORD_SIZE;
            }
            const int64_t next = std::min<int64_t>(first + SPAN, count);
            prefetch_listed(tokens + next, std::min<int64_t>(here, count - next));
            found.compute_exactly(codes, SPAN, scales, own, all.from_codes);
            add(all, here);
            first += here;
        }
    }
    void prefetch_listed(const int32_t* tokens, int64_t count) const {
        for (int64_t i = 0; i < count; i++) {
            const uint8_t* record = records + (int64_t)tokens[i] * RECORD_SIZE;
            for (int byte = 0; byte < RECORD_SIZE; byte += CACHE_LINE) __builtin_prefetch(record + byte, 0, TO_L2);
            __builtin_prefetch(record + RECORD_SIZE - 1, 0, TO_L2);
        }
    }

    // As `Attention::finish`, of query `q` for the `asking[q]`-th of the head; nothing of those that do not ask.
    void finish(const int* asking, int count, float* out, float* lse) const {
        Slots turned[VALUE_DIM] = {};
        for (int d = 0; d < VALUE_DIM; d++)
            for (int q = 0; q < count; q++)
                turned[d][q] = total[q] == 0 ? 0 : sums[q][d / WIDTH][d % WIDTH] / total[q];
        rotate<VALUE_BLOCK>(turned, VALUE_DIM, 1 / sqrtf(VALUE_BLOCK));
        for (int q = 0; q < count; q++) {
            lse[asking[q]] = log_mass(q);
            for (int d = 0; d < VALUE_DIM; d++) out[asking[q] * VALUE_DIM + d] = turned[d][q];
        }
    }
};

}  // namespace
