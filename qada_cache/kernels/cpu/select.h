// Which tokens of a sketched bulk a head reads: `select_tokens` of selection.py, in one pass over the sketch.
//
// What a token must weigh depends on the weight of all, which is known at the end only. A sample says beforehand about
// what it will be: few tokens are left by it to be judged again. Should they turn out to have been asked for too much,
// which takes tokens that are most unlike the sample's, the pass is made again.

#pragma once

#include "estimates.h"

namespace {

constexpr int REFRESH = 16;        // spans after which the weight so far is looked at
constexpr float LOWEST = -1e30f;
constexpr float MAX_WEIGHT = 1e9;  // of a weight: a score may be so much above what weights are relative to

// A part of a head's sketched bulk: which of its tokens may be read, and how much its queries see in it.
struct Scan {
    int64_t head, start, stop;
    float highest[QUERIES];  // about the highest score, or the local mass
    Singles mass[QUERIES];   // relative to that
    Singles unread_mass[QUERIES];   // as much of it as is of tokens not kept: sums, as differences would be of rounding alone
    Singles lifted[QUERIES];  // these, times how far the scores are above `middle`
    Singles sum[QUERIES], squares[QUERIES];  // of how far all scores are above it
    float log_unread_mass[QUERIES];  // of what is not read
    const float* middle;      // about the mean score of each query
    int64_t count = 0;  // of tokens kept; these have room for more
    std::vector<int32_t> tokens;
    std::vector<float> estimates[QUERIES];  // of each flagged query

    // A token is kept if the score of a query, of which the local buffer has `log_buffer`, is at least `score_cut`, or
    // `log_share` more than the log-sum-exp of what has been seen so far.
    void run(Estimates& found, const float* log_buffer, const float* given, float log_share) {
        // Their number is known to the compiler where all ask, as with the group rule "any".
        if (found.count == QUERIES) run_as<true>(found, log_buffer, given, log_share);
        else run_as<false>(found, log_buffer, given, log_share);
    }
    template <bool ALL>
    void run_as(Estimates& found, const float* log_buffer, const float* given, float log_share) {
        const int queries = ALL ? QUERIES : found.count;
        float score_cut[QUERIES];
        count = 0;
        middle = found.segments[0].middle;
        for (int q = 0; q < queries; q++) {
            highest[q] = std::max(log_buffer[q], LOWEST);
            mass[q] = unread_mass[q] = lifted[q] = sum[q] = squares[q] = Singles{};
            score_cut[q] = given[q];
        }
        for (int64_t first = start, span = 0; first < stop; first += SPAN, span++) {
            int here = (int)std::min<int64_t>(SPAN, stop - first);
            found.template compute<ALL>(first, here);
            Singles weights[QUERIES][VECTORS], added[QUERIES];
            if (!weigh(found.scores, queries, weights, added)) {
                raise(found.scores, queries);
                weigh(found.scores, queries, weights, added);
            }
            for (int q = 0; q < queries; q++) mass[q] += added[q];
            if (span % REFRESH == REFRESH - 1)
                for (int q = 0; q < queries; q++)
                    score_cut[q] = std::max(score_cut[q], log_sum(log_buffer[q], log_mass(q)) + log_share - ROUNDING);
            make_room();
            for (int v = 0; v < VECTORS; v++) {
                Integers selected = {};
                for (int q = 0; q < queries; q++) selected |= found.scores[q][v] >= score_cut[q];
                Integers held = numbered + v * TOKENS < here;
                for (int q = 0; q < queries; q++) {
                    Singles above = held ? found.scores[q][v] - middle[q] : Singles{};
                    Singles left = selected ? Singles{} : weights[q][v];
                    unread_mass[q] += left;
                    lifted[q] += left * above;
                    sum[q] += above;
                    squares[q] += above * above;
                }
                keep(bits_of(selected & held), found.scores, v, queries, first);
            }
        }
    }

    // The weights of a span and their sums; whether none of its scores is too high for that.
    INLINED bool weigh(const Singles (*scores)[VECTORS], int queries, Singles (*weights)[VECTORS], Singles* added) const {
        Integers fit = ~Integers{};
        for (int q = 0; q < queries; q++) {
            Singles sum = {};
            float offset = highest[q] * LOG2_E;
            for (int v = 0; v < VECTORS; v++) sum += weights[q][v] = power_of_two(scores[q][v] * LOG2_E - offset);
            added[q] = sum;
            fit &= sum < MAX_WEIGHT;
        }
        return bits_of(~fit) == 0;
    }

    // A query's highest score is one of this span.
    void raise(const Singles (*scores)[VECTORS], int queries) {
        for (int q = 0; q < queries; q++) {
            float peak = highest[q];
            for (int v = 0; v < VECTORS; v++) peak = std::max(peak, largest(scores[q][v]));
            float shrunk = ::exponential(highest[q] - peak);
            for (Singles* part : {mass, unread_mass, lifted}) part[q] *= shrunk;
            highest[q] = peak;
        }
    }

    // For another span.
    void make_room() {
        if (count + SPAN <= (int64_t)tokens.size()) return;
        tokens.resize(2 * tokens.size() + 4 * SPAN);
        for (auto& scores : estimates) scores.resize(tokens.size());
    }

    INLINED void keep(uint64_t bits, const Singles (*scores)[VECTORS], int v, int queries, int64_t first) {
        if (!bits) return;
        compress(numbered + (int32_t)(first + v * TOKENS), bits, &tokens[count]);
        for (int q = 0; q < queries; q++) compress(scores[q][v], bits, &estimates[q][count]);
        count += __builtin_popcountll(bits);
    }

    float log_mass(int q) const { return highest[q] + logf(sum_of(mass[q])); }

    // Drops the tokens that all queries find too light: `score_cut` of each.
    void apply_cut(const float* score_cut, int queries) {
        int64_t left = 0;
        for (int64_t i = 0; i < count; i += TOKENS) {  // within what there is room for
            Integers selected = {}, token = loaded<Integers>(&tokens[i]);
            for (int q = 0; q < queries; q++) selected |= loaded<Singles>(&estimates[q][i]) >= score_cut[q];
            Integers held = numbered + (int32_t)i < (int32_t)count, dropped = held & ~selected;
            selected &= held;
            for (int q = 0; q < queries && bits_of(dropped); q++) {
                Singles scores = loaded<Singles>(&estimates[q][i]);
                Singles left = dropped ? power_of_two((scores - highest[q]) * LOG2_E) : Singles{};
                unread_mass[q] += left;
                lifted[q] += dropped ? left * (scores - middle[q]) : Singles{};
            }
            compress(token, bits_of(selected), &tokens[left]);
            left += __builtin_popcountll(bits_of(selected));
        }
        count = left;
        for (int q = 0; q < queries; q++)
            log_unread_mass[q] = count == stop - start ? -INFINITY : highest[q] + logf(sum_of(unread_mass[q]));
    }
};

}  // namespace
