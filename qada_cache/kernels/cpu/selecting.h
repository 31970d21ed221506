// Selected attention's call, and a block of queries and their codes.

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
constexpr int AT_ONCE = TOGETHER == 1 ? VECTORS : 1;  // vectors of keys whose scores are estimated, as registers hold
constexpr int WIDTH = (DIM + VALUE_DIM + 15) / 16 * 16;  // of a key and its value: zeros behind
constexpr float FLAT = 1e-6;  // a variance of scores below is rounding, and values follow nothing
constexpr float MOST = 100;  // a key of a score beyond is always read

// What Python passes, in its order. Tokens are of the prompt, queries those from `start` on.
struct Call {
    const Number *query, *key, *value;  // [group, queries, DIM], [tokens, DIM], [tokens, VALUE_DIM]
    void* out;  // [group, queries, VALUE_DIM], bfloat16 or float32
    int64_t* unread;  // to which the pairs of a query and a far key that were not read are added
    int64_t query_head, query_token, key_token, value_token, out_head, out_token;  // strides, in numbers
    int64_t group, queries, tokens, start, first, window;
    int64_t narrow;  // whether `out` is bfloat16
    int64_t threads;
    double scaling, threshold;
};

// Far keys of a block: whole segments between sinks and the window of its first query.
inline int64_t far_stop(const Call& call, int64_t query) {
    return (call.start + query - call.window + 1) / SEGMENT * SEGMENT;
}

struct Block {
    Strip strips[STRIPS];
    uint32_t query[BLOCK][WORDS], query_codes[BLOCK][CODE_WORDS];
    alignas(64) float query_steps[BLOCK], base[BLOCK], cut[BLOCK];
    alignas(64) float centred[BLOCK][CHUNK];  // scores of the centres of some segments, less `base`
    alignas(64) float scores[BLOCK][SEGMENT];
    Singles met[BLOCK], unread[BLOCK], lifted[BLOCK];  // sums of weights, of those unread, and of these by their scores
    alignas(64) float slopes[BLOCK][VALUE_DIM], mean_scores[BLOCK];  // of lines of regression, in powers of two
    alignas(64) float means[WIDTH];  // of far keys and their values
    uint32_t keys[TILE * WORDS], values[TILE / IN_WORD * VALUE_DIM];
    std::vector<int64_t> chosen;
};

// What codes are of: Hadamard blocks, of COUNT keys or queries at once.
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

// The queries' codes, from their states, which are rotated.
void encode(Block& block, float (*states)[BLOCK], float scaling) {
    rotate(states);
    float most[BLOCK], finer[BLOCK];
    std::fill_n(most, BLOCK, std::numeric_limits<float>::min());
    for (int d = 0; d < DIM; d++)
        for (int q = 0; q < BLOCK; q++) most[q] = std::max(most[q], std::abs(states[d][q]));
    for (int q = 0; q < BLOCK; q++) finer[q] = LEVELS / most[q], block.query_steps[q] = most[q] / LEVELS * scaling;
    for (int d = 0; d < DIM; d++) {
        Code codes[BLOCK];
        for (int q = 0; q < BLOCK; q++) codes[q] = ZERO + (int)std::nearbyint(states[d][q] * finer[q]);
        for (int q = 0; q < BLOCK; q++) ((Code*)block.query_codes[q])[d] = codes[q];
    }
}

}  // namespace
