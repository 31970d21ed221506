// Selected attention: the arguments from Python, the state of a block of queries, and the queries' codes.

#pragma once

#include <vector>

#undef __AMX_TILE__  // by tiles nothing is selected (`selects_sizes` of selected_prompt.py)
#include "prompt.h"

namespace {

// `selected_prompt.py` defines SEGMENT, BLOCK, MOST_SUM, and ROTATED, the channels that are rotated together.
static_assert(SEGMENT % CHUNK == 0 && BLOCK % STRIP == 0);
using Code = std::conditional_t<QUERY_SIGNED, int8_t, uint8_t>;  // of a query
constexpr int ZERO = QUERY_SIGNED ? 0 : LEVELS;
constexpr int STRIPS = BLOCK / STRIP;
constexpr int CODE_WORDS = DIM / 4;
constexpr int PARTS = SEGMENT / LANES;  // vectors of a segment's keys
constexpr int AT_ONCE = TOGETHER == 1 ? VECTORS : 1;  // vectors of keys whose estimates fit into registers
constexpr int WIDTH = (DIM + VALUE_DIM + 15) / 16 * 16;  // of a key and its value: zeros behind
constexpr int PADDED = (DIM + 15) / 16 * 16;  // of a key: zeros behind
constexpr float FLAT = 1e-6;  // a lower variance of scores is rounding: the slope of values is 0 then
constexpr int SAMPLED = 16;  // keys of a segment that count for all if no other may be selected
constexpr float REACH = 3.5;  // standard deviations above a mean score, beyond which no key is expected
constexpr float MOST = 100;  // a key with a higher score, less `base`, is always read

// The arguments from Python, in its order. Tokens are those of the prompt; queries are of tokens from `start` on.
struct Call {
    const Number *query, *key, *value;  // [group, queries, DIM], [tokens, DIM], [tokens, VALUE_DIM]
    const float* weights;  // [DIM]: keys are coded times these, and queries over them
    const float* spreads;  // [DIM, PADDED]: covariance of keys within a segment whose coded keys have a length of 1
    void* out;  // [group, queries, VALUE_DIM], bfloat16 or float32
    int64_t* unread;  // the number of pairs of a query and an unread far key is added to it
    int64_t query_head, query_token, key_token, value_token, out_head, out_token;  // strides, in numbers
    int64_t group, queries, tokens, start, first, window;
    int64_t narrow;  // whether `out` is bfloat16
    int64_t threads;
    double scaling, threshold;
};

// The end of a block's far keys, whole segments between sinks and the window of its first query.
inline int64_t far_stop(const Call& call, int64_t query) {
    return (call.start + query - call.window + 1) / SEGMENT * SEGMENT;
}

struct Block {
    Strip strips[STRIPS];
    uint32_t query[BLOCK][WORDS], query_codes[BLOCK][CODE_WORDS];
    alignas(64) float query_steps[BLOCK], base[BLOCK], cut[BLOCK];
    alignas(64) float spreads[BLOCK];  // standard deviations of scores with keys of such a segment
    alignas(64) float centred[CHUNK][BLOCK];  // scores of the centres of some segments, less `base`
    alignas(64) float scores[BLOCK][SEGMENT];
    // Sums of estimated weights: of all keys so far, of unread ones, and of unread ones times their scores.
    Singles met[BLOCK], unread[BLOCK], lifted[BLOCK];
    alignas(64) float slopes[BLOCK][VALUE_DIM], mean_scores[BLOCK];  // of regression; scores are times log2(e)
    alignas(64) float means[WIDTH];  // means of far keys, less the first centre, and of their values
    uint32_t keys[TILE * WORDS], values[TILE / IN_WORD * VALUE_DIM];
    std::vector<int64_t> chosen;
};

// Rotates the channels of COUNT keys or queries, before they are coded, by Hadamard blocks of ROTATED channels.
template <int COUNT>
void rotate(float (*states)[COUNT]) {
    for (int half = 1; half < ROTATED; half *= 2)
        for (int first = 0; first < DIM; first += 2 * half)
            for (int each = first; each < first + half; each++)
                for (int c = 0; c < COUNT; c++) {
                    const float one = states[each][c], other = states[each + half][c];
                    states[each][c] = one + other, states[each + half][c] = one - other;
                }
    for (int d = 0; d < DIM; d++)
        for (int c = 0; c < COUNT; c++) states[d][c] *= 1 / std::sqrt(float(ROTATED));
}

// Rotates the queries' `states` in place, and codes them.
void encode(Block& block, float (*states)[BLOCK], float scaling) {
    rotate(states);
    float most[BLOCK], inverse_steps[BLOCK];
    std::fill_n(most, BLOCK, std::numeric_limits<float>::min());
    for (int d = 0; d < DIM; d++)
        for (int q = 0; q < BLOCK; q++) most[q] = std::max(most[q], std::abs(states[d][q]));
    for (int q = 0; q < BLOCK; q++)
        inverse_steps[q] = LEVELS / most[q], block.query_steps[q] = most[q] / LEVELS * scaling;
    for (int d = 0; d < DIM; d++) {
        Code codes[BLOCK];
        for (int q = 0; q < BLOCK; q++) codes[q] = ZERO + (int)std::nearbyint(states[d][q] * inverse_steps[q]);
        for (int q = 0; q < BLOCK; q++) ((Code*)block.query_codes[q])[d] = codes[q];
    }
}

// Writes the products of a strip's queries `states` and a matrix [DIM, WIDTH] to `along`.
template <int WIDTH>
INLINED void project(const float (*states)[DIM], const float* matrix, float (*along)[WIDTH]) {
    constexpr int SLAB = find_slab(WIDTH / LANES);
    for (int first = 0; first < WIDTH; first += SLAB * LANES) {
        Singles sums[STRIP][SLAB];
        multiply<SLAB, false>(states[0], DIM, matrix + first, WIDTH, DIM, sums);
        UNROLLED for (int q = 0; q < STRIP; q++) UNROLLED for (int c = 0; c < SLAB; c++)
            store(along[q] + first + c * LANES, sums[q][c]);
    }
}

// Sets `block.spreads` of a strip's queries `states`.
void spread(Block& block, int strip, const float (*states)[DIM], const float* spreads, float scaling) {
    alignas(64) float along[STRIP][PADDED];
    project(states, spreads, along);
    for (int q = 0; q < STRIP; q++) {
        float variance = 0;
        for (int d = 0; d < DIM; d++) variance += along[q][d] * states[q][d];
        block.spreads[strip * STRIP + q] = scaling * std::sqrt(variance);
    }
}

}  // namespace
