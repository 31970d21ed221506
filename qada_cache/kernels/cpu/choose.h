// Which tokens of a sketched bulk a head reads: `chosen_tokens` of sketch.py, in one pass over the sketch.
//
// What a token must weigh depends on the weight of all, which is known at the end only. But it only grows: a token that
// is too light by the weight so far can be dropped at once, and few are left to be judged again.

#pragma once

#include "sketch.h"

namespace {

inline float log_sum(float a, float b) {
    float peak = std::max(a, b);
    return peak == -INFINITY ? peak : peak + logf(expf(a - peak) + expf(b - peak));
}

// A part of a head's sketched bulk: which of its tokens may be read, and how much its queries see in it.
struct Scan {
    int64_t head, start, stop;
    float highest[QUERIES], total[QUERIES];  // total weight relative to the highest score, which may be what is near
    std::vector<int32_t> tokens;
    std::vector<float> estimates;  // [tokens, queries that ask]

    // `codes` [tokens, *] and `scales` [tokens] of the whole head; `log_near` of every query that asks. A token is kept
    // if one of them would give it at least `least_share` of its attention.
    template <int BITS>
    void run(const Rounded& queries, const uint8_t* codes, const uint16_t* scales, const float* log_near,
             float least_share) {
        constexpr int CODE = Products<BITS>::CODE, ODD = (1 << BITS) - 1;
        const Products<BITS> products(queries);
        float near[QUERIES];
        for (int q = 0; q < queries.count; q++) {
            highest[q] = log_near[q];
            near[q] = 1;
            total[q] = 0;
        }
        for (int64_t first = start; first < stop; first += SPAN) {
            const uint8_t* block = codes + first * CODE;
            int count = (int)std::min<int64_t>(SPAN, stop - first);
            uint8_t padded[SPAN * CODE];
            int32_t exact[QUERIES][SPAN];
            float scores[QUERIES][SPAN], scale[SPAN];
            if (count < SPAN) {
                std::memset(padded, 0, sizeof padded);
                std::memcpy(padded, block, count * CODE);
                block = padded;
            } else {
                for (int byte = 0; byte < SPAN * CODE; byte += CACHE_LINE)
                    __builtin_prefetch(block + CODE_AHEAD + byte);
            }
            products.compute(block, exact);
            for (int t = 0; t < count; t++) scale[t] = from_bits((uint32_t)scales[first + t] << 16);
            for (int t = count; t < SPAN; t++) scale[t] = 0;
            int32_t kept[SPAN] = {};
            for (int q = 0; q < queries.count; q++) {
                float middle = queries.middle[q], step = queries.step[q], spread = queries.spread[q];
                float shift = ODD * queries.total[q], peak = highest[q], mass = 0;
#pragma omp simd
                for (int t = 0; t < SPAN; t++)
                    scores[q][t] = middle + scale[t] * (step * (2 * (float)exact[q][t] - shift) + spread * scale[t]);
                for (int t = count; t < SPAN; t++) scores[q][t] = -INFINITY;
#pragma omp simd reduction(max : peak)
                for (int t = 0; t < SPAN; t++) peak = std::max(peak, scores[q][t]);
                if (peak > highest[q]) {
                    float shrunk = exponential(highest[q] - peak);
                    highest[q] = peak;
                    total[q] *= shrunk;
                    near[q] *= shrunk;
                }
                float weights[SPAN];
#pragma omp simd reduction(+ : mass)
                for (int t = 0; t < SPAN; t++) {
                    weights[t] = exponential(scores[q][t] - peak);
                    mass += weights[t];
                }
                total[q] += mass;
                float least = least_share * (total[q] + near[q]) * ROOM;
#pragma omp simd
                for (int t = 0; t < SPAN; t++) kept[t] |= weights[t] >= least;
            }
            keep(kept, scores, queries.count, first, count);
        }
    }

    // Keeps of `count` tokens from `first` on those marked.
    void keep(const int32_t* kept, const float (*scores)[SPAN], int queries, int64_t first, int count) {
        size_t held = tokens.size(), end = held;
        tokens.resize(held + SPAN);
        for (int t = 0; t < count; t++) {
            tokens[end] = (int32_t)(first + t);
            end += kept[t];
        }
        tokens.resize(end);
        estimates.resize(end * queries);
        for (size_t i = held; i < end; i++)
            for (int q = 0; q < queries; q++) estimates[i * queries + q] = scores[q][tokens[i] - first];
    }

    float log_mass(int q) const { return highest[q] + logf(total[q]); }

    // Drops the tokens that all queries find too light: `least` of each.
    void judge(const float* least, int queries) {
        size_t end = 0;
        for (size_t i = 0; i < tokens.size(); i++) {
            bool asked = false;
            for (int q = 0; q < queries; q++) asked |= estimates[i * queries + q] >= least[q];
            tokens[end] = tokens[i];
            end += asked;
        }
        tokens.resize(end);
    }

    static constexpr float ROOM = 0.999f;  // for rounding
};

}  // namespace
