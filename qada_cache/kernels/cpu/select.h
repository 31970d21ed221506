// Which tokens of a sketched bulk a head reads: `select_tokens` of selection.py, in one pass over the sketch, a span of
// tokens at a time.
//
// What a token must weigh depends on the weight of all, which is known at the end only. A sample says beforehand about
// what it will be: few tokens are left by it to be judged again. Should they turn out to have been asked for too much,
// which takes tokens that are most unlike the sample's, the pass is made again.

#pragma once

#include "sketch.h"

namespace {

constexpr int VECTORS = SPAN / TOKENS;
constexpr int SAMPLED_SPANS = 15;  // spans of which a sample is made, at most
constexpr int MIN_SAMPLED_SPANS = 64;  // spans from which on there is one
constexpr float MARGIN = 0.5f;  // by which the logarithm of all weight may be below what the sample says
constexpr int REFRESH = 16;  // spans after which the weight so far is looked at
constexpr float LOWEST = -1e30f;
constexpr float MAX_WEIGHT = 1e9;  // of a weight: a score may be so much above what weights are relative to

// Estimates of a head's queries over its sketch: `codes` [words, *], `room` words apart, and `scales` [tokens], in
// segments of `segment_tokens`, for each of which the queries were rounded; the last one has what is left.
struct Estimates {
    const int count;  // of queries
    const Rounded* segments;
    const int64_t segment_count, segment_tokens;
    const uint32_t* codes;
    const int64_t room;
    const Words words;
    const uint8_t* scales;

    // Scores of `tokens` tokens from `first` on, all of one segment; -inf where there is no token. They are a span if
    // `WHOLE`.
    template <bool ALL = false, bool WHOLE = false>
    INLINED void compute(int64_t first, int tokens, Singles (*scores)[VECTORS]) const {
        const int count = ALL ? QUERIES : this->count;
        const Rounded& queries = segments[std::min<int64_t>(first / segment_tokens, segment_count - 1)];
        const uint32_t* block = codes + first;
        const uint8_t* block_scales = scales + first;
        int64_t stride = room;
        uint32_t padded[DIM / 8 * SPAN];  // no more words than blocks of channels
        uint8_t padded_scales[SPAN];
        if (!WHOLE && tokens < SPAN) {
            std::memset(padded, 0, sizeof padded);
            std::memset(padded_scales, 0, sizeof padded_scales);
            for (int word = 0; word < words.count(); word++)
                std::memcpy(padded + word * SPAN, block + word * stride, tokens * sizeof *block);
            std::memcpy(padded_scales, block_scales, tokens);
            block = padded;
            block_scales = padded_scales;
            stride = SPAN;
        } else {
            prefetch_span(first + PREFETCH_SPANS * SPAN);
        }
        alignas(CACHE_LINE) int32_t exact[QUERIES][SPAN];
        multiply(block, stride, words, queries.fours, exact);
        Singles scale[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = widen(loaded<Octets>(block_scales + v * TOKENS));
        for (int q = 0; q < count; q++) {
            float step = queries.step[q], offset = queries.offset[q];
            float spread = queries.spread[q], middle = queries.middle[q];
            for (int v = 0; v < VECTORS; v++) {
                Integers whole = loaded<Integers>(&exact[q][v * TOKENS]);
                Singles along = step * __builtin_convertvector(whole, Singles) - offset;
                scores[q][v] = middle + scale[v] * (along + spread * scale[v]);
            }
        }
        for (int t = WHOLE ? SPAN : tokens; t < SPAN; t++)
            for (int q = 0; q < count; q++) scores[q][t / TOKENS][t % TOKENS] = -INFINITY;
    }

    // The same, as one function for all who need it seldom: what is inlined takes long to compile.
    __attribute__((noinline)) void compute_some(int64_t first, int tokens, Singles (*scores)[VECTORS]) const {
        compute(first, tokens, scores);
    }

    // What codes say of the scores of `keys` keys, a span at most, all of one segment, `stride` words apart: as good as
    // queries are.
    INLINED void compute_exactly(const uint32_t* block, int64_t stride, const uint8_t* block_scales,
                                 const Rounded& queries, float (*scores)[SPAN], int keys = SPAN) const {
        alignas(CACHE_LINE) int32_t high[QUERIES][SPAN], low[QUERIES][SPAN];
        if (keys <= KEYS) {
            multiply<1>(block, stride, words, queries.fours, high, keys);
            multiply<1>(block, stride, words, queries.lows, low, keys);
        } else {
            multiply(block, stride, words, queries.fours, high, keys);
            multiply(block, stride, words, queries.lows, low, keys);
        }
        for (int q = 0; q < QUERIES; q++)
            for (int v = 0; v < keys; v += TOKENS) {
                const Singles scale = widen(loaded<Octets>(block_scales + v));
                const Singles highs = __builtin_convertvector(loaded<Integers>(&high[q][v]), Singles);
                const Singles lows = __builtin_convertvector(loaded<Integers>(&low[q][v]), Singles);
                const Singles along = queries.step[q] * (highs + lows * (1 / FINER)) - queries.offset[q];
                const Singles found = queries.middle[q] + scale * (along - queries.low_offset[q]);
                std::memcpy(&scores[q][v], &found, sizeof found);
            }
    }

    INLINED void prefetch_span(int64_t first) const {
        for (int word = 0; word < words.count(); word++)
            for (int key = 0; key < SPAN; key += CACHE_LINE / 4)
                __builtin_prefetch(codes + word * room + first + key, 0, TO_L2);
    }

    // How many spans are sampled, and where the first token of one of them lies.
    static int count_sampled_spans(int64_t spans) {
        return spans < MIN_SAMPLED_SPANS ? 0 : (int)std::min<int64_t>(SAMPLED_SPANS, spans / 16 | 1);
    }
    static int64_t choose_sampled_span(int i, int64_t spans) {
        return (2 * i + 1) * spans / (2 * count_sampled_spans(spans)) * SPAN;
    }
    INLINED void prefetch_sample(int64_t tokens) const {
        for (int i = 0; i < count_sampled_spans(tokens / SPAN); i++)
            prefetch_span(choose_sampled_span(i, tokens / SPAN));
    }

    // About the log-sum-exp of each query's scores of `tokens` tokens, seldom above it; -inf where they are few.
    void sample_log_mass(int64_t tokens, float* log_mass) const {
        Singles scores[QUERIES][VECTORS];
        float sampled[QUERIES][SAMPLED_SPANS];
        int64_t spans = tokens / SPAN;
        std::fill(log_mass, log_mass + QUERIES, -INFINITY);
        const int many = count_sampled_spans(spans);
        if (!many) return;
        for (int i = 0; i < many; i++) {
            compute_some(choose_sampled_span(i, spans), SPAN, scores);
            for (int q = 0; q < count; q++) {
                Singles peaks = scores[q][0], mass = {};
                for (int v = 1; v < VECTORS; v++) peaks = scores[q][v] > peaks ? scores[q][v] : peaks;
                const float peak = largest(peaks);
                for (int v = 0; v < VECTORS; v++) mass += power_of_two((scores[q][v] - peak) * LOG2_E);
                float log_span = peak + logf(sum_of(mass));
                sampled[q][i] = log_span > -INFINITY ? log_span : -INFINITY;  // no nan, which cannot be sorted
            }
        }
        for (int q = 0; q < count; q++) {  // the median, which a few heavy tokens cannot raise
            std::nth_element(sampled[q], sampled[q] + many / 2, sampled[q] + many);
            log_mass[q] = sampled[q][many / 2] + logf((float)spans) - MARGIN;
        }
    }
};

// A part of a head's sketched bulk: which of its tokens may be read, and how much its queries see in it.
struct Scan {
    int64_t head, start, stop;
    float highest[QUERIES];  // about the highest score, or the local mass
    Singles mass[QUERIES];  // relative to that
    Singles unread_mass[QUERIES];  // as much of it as is of tokens not kept: a sum, as a difference would be rounding
    Singles lifted[QUERIES];  // these, times how far the scores are above `middle`
    Singles sum[QUERIES], squares[QUERIES];  // of how far all scores are above it
    float log_unread_mass[QUERIES];  // of what is not read
    const float* middle;  // about the mean score of each query
    int64_t count = 0;  // of tokens kept; these have room for more
    std::vector<int32_t> tokens;
    std::vector<float> estimates[QUERIES];  // of each flagged query

    // A token is kept if the score of a query, of which the near buffer has `log_buffer`, is at least `score_cut`, or
    // `log_share` more than the log-sum-exp of what has been seen so far.
    void run(const Estimates& found, const float* log_buffer, const float* given, float log_share) {
        // Their number is known to the compiler where all ask, as with the group rule "any", or a single one.
        if (QUERIES == 1 || found.count == QUERIES) run_as<true>(found, log_buffer, given, log_share);
        else run_as<false>(found, log_buffer, given, log_share);
    }
    template <bool ALL>
    void run_as(const Estimates& found, const float* log_buffer, const float* given, float log_share) {
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
            if (here == SPAN) take<ALL, true>(found, first, here, score_cut);
            else take_rest(found, first, here, score_cut);
            if (span % REFRESH == REFRESH - 1)
                for (int q = 0; q < queries; q++)
                    score_cut[q] = std::max(score_cut[q], log_sum(log_buffer[q], log_mass(q)) + log_share - ROUNDING);
        }
    }

    // As `take`, of the last span alone: one function for any number of queries.
    __attribute__((noinline)) void take_rest(const Estimates& found, int64_t first, int here, const float* score_cut) {
        take<false, false>(found, first, here, score_cut);
    }

    // Scores and weighs a span, and keeps the selected tokens.
    template <bool ALL, bool WHOLE>
    INLINED void take(const Estimates& found, int64_t first, int here, const float* score_cut) {
        const int queries = ALL ? QUERIES : found.count;
        Singles scores[QUERIES][VECTORS];
        if constexpr (WHOLE) found.template compute<ALL, WHOLE>(first, here, scores);
        else found.compute_some(first, here, scores);
        Marks selected[VECTORS] = {};
        for (int q = 0; q < queries; q++)
            for (int v = 0; v < VECTORS; v++) selected[v] |= at_least(scores[q][v], score_cut[q]);
        for (int q = 0; q < queries; q++) weigh<WHOLE>(q, scores[q], selected, here);
        keep(scores, selected, queries, first, here);
    }

    // Adds up what a span's tokens weigh for a query, and those of them that are not selected.
    template <bool WHOLE>
    INLINED void weigh(int q, const Singles* scores, const Marks* selected, int here) {
        Singles weights[VECTORS], added = weights_of(q, scores, weights);
        if (bits_of(at_least(added, MAX_WEIGHT))) added = raise(q, scores, weights);
        Singles unread = {}, lift = {}, total = {}, total_squares = {};
        for (int v = 0; v < VECTORS; v++) {
            Singles above = scores[v] - middle[q], left = without(weights[v], selected[v]);
            if (!WHOLE) above = numbered + v * TOKENS < here ? above : Singles{};
            unread += left;
            lift += left * above;
            total += above;
            total_squares += above * above;
        }
        mass[q] += added;
        unread_mass[q] += unread;
        lifted[q] += lift;
        sum[q] += total;
        squares[q] += total_squares;
    }

    // The weights of a span, and their sum.
    INLINED Singles weights_of(int q, const Singles* scores, Singles* weights) const {
        Singles sum = {};
        const float offset = highest[q] * LOG2_E;
        for (int v = 0; v < VECTORS; v++) sum += weights[v] = power_of_two(scores[v] * LOG2_E - offset);
        return sum;
    }

    // As `weights_of`, when a query's highest score is one of this span.
    __attribute__((noinline)) Singles raise(int q, const Singles* scores, Singles* weights) {
        float peak = highest[q];
        for (int v = 0; v < VECTORS; v++) peak = std::max(peak, largest(scores[v]));
        float shrunk = ::exponential(highest[q] - peak);
        for (Singles* part : {mass, unread_mass, lifted}) part[q] *= shrunk;
        highest[q] = peak;
        return weights_of(q, scores, weights);
    }

    // Writes down the selected ones of `here` tokens from `first` on.
    INLINED void keep(const Singles (*scores)[VECTORS], const Marks* selected, int queries, int64_t first, int here) {
        if (count + SPAN > (int64_t)tokens.size()) {
            tokens.resize(2 * tokens.size() + 4 * SPAN);
            for (auto& scores : estimates) scores.resize(tokens.size());
        }
        int64_t kept = count;
        for (int v = 0; v < VECTORS; v++) {
            uint64_t bits = bits_of(selected[v] & first_marks(here - v * TOKENS));
            if (!bits) continue;
            compress(numbered + (int32_t)(first + v * TOKENS), bits, &tokens[kept]);
            for (int q = 0; q < queries; q++) compress(scores[q][v], bits, &estimates[q][kept]);
            kept += __builtin_popcountll(bits);
        }
        count = kept;
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
