// Selects the tokens of a sketched bulk that a head reads: `select_tokens` of sketch/selection.py, in one pass over the
// sketch, a span of tokens at a time.
//
// The least weight of a selected token depends on the weight of all tokens, which is known only at the end. So a sample
// of spans estimates it beforehand, rather too low, and few tokens are kept to be judged again at the end. If the
// estimate was too high, which takes tokens very unlike the sample's, the pass is made again.

#pragma once

#include "sketch.h"

namespace {

constexpr int VECTORS = SPAN / TOKENS;  // of a span
constexpr int SAMPLED_SPANS = 15;  // at most these are sampled
constexpr int MIN_SAMPLED_SPANS = 64;  // a bulk of fewer spans is not sampled
constexpr float MARGIN = 0.5f;  // subtracted from the sample's estimate of the log-sum-exp
constexpr int REFRESH = 16;  // spans after which `score_cut` is raised by the weight so far
constexpr float LOWEST = -1e30f;  // a finite stand-in for -inf
constexpr float MAX_WEIGHT = 1e9;  // weights are relative to `highest`; above this, `highest` is raised

// Estimates scores of a head's queries by its sketch: `codes` [words, *], `room` words apart, and `scales` [tokens].
// Queries were rounded anew for each segment of `segment_tokens` tokens; the last segment has all tokens that are left.
struct Estimates {
    const int count;  // number of queries
    const Rounded* segments;
    const int64_t segment_count, segment_tokens;
    const uint32_t* codes;
    const int64_t room;
    const Words words;
    const uint8_t* scales;

    // Scores of `tokens` tokens from `first` on, all of one segment, a whole span if `WHOLE`; -inf behind the last one.
    // `ALL` if all `QUERIES` ask.
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
            const Singles widest = Singles{} + queries.widest[q];
            for (int v = 0; v < VECTORS; v++) {
                Integers whole = loaded<Integers>(&exact[q][v * TOKENS]);
                Singles along = step * __builtin_convertvector(whole, Singles) - offset;
                const Singles counted = scale[v] < widest ? scale[v] : widest;
                scores[q][v] = middle + scale[v] * along + spread * counted * counted;
            }
        }
        for (int t = WHOLE ? SPAN : tokens; t < SPAN; t++)
            for (int q = 0; q < count; q++) scores[q][t / TOKENS][t % TOKENS] = -INFINITY;
    }

    // As `compute`, not inlined, for callers that need it seldom: inlined code takes long to compile.
    __attribute__((noinline)) void compute_some(int64_t first, int tokens, Singles (*scores)[VECTORS]) const {
        compute(first, tokens, scores);
    }

    // Scores of `keys` keys, a span at most, all of one segment, words of codes `stride` apart. Unlike `compute`, it
    // also multiplies by the queries' remainders (`lows`), so rounding queries costs almost nothing.
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

    // The number of sampled spans, and the first token of sampled span `i`.
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

    // Estimates the log-sum-exp of each query's scores over `tokens` tokens, seldom too high; -inf if these are few.
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
                sampled[q][i] = log_span > -INFINITY ? log_span : -INFINITY;  // NaN cannot be sorted
            }
        }
        for (int q = 0; q < count; q++) {  // the median, which a few heavy tokens cannot raise
            std::nth_element(sampled[q], sampled[q] + many / 2, sampled[q] + many);
            log_mass[q] = sampled[q][many / 2] + logf((float)spans) - MARGIN;
        }
    }
};

// One scan over tokens `start..stop` of a head's sketched bulk: tokens kept, and sums over all and over unread tokens.
struct Scan {
    int64_t head, start, stop;
    float highest[QUERIES];  // weights are exp(score - highest): about the highest score so far, at least `log_buffer`
    Singles mass[QUERIES];  // sums of weights
    Singles unread_mass[QUERIES];  // of tokens not kept; summed, as `mass` less the kept ones' would be rounding error
    Singles lifted[QUERIES];  // sums of unread weights times (score - middle)
    Singles sum[QUERIES], squares[QUERIES];  // sums of (score - middle), and of its square, over all tokens
    float log_unread_mass[QUERIES];  // logarithm of `unread_mass`, once `apply_cut` has run
    const float* middle;  // about the mean score of each query; near it, sums of squares lose little to rounding
    int64_t count = 0;  // number of tokens kept; the vectors have room for more
    std::vector<int32_t> tokens;
    std::vector<float> estimates[QUERIES];  // their scores, by flagged query

    // Keeps a token if, for one of the queries, its score is at least `given`, and at least `log_share` plus the
    // log-sum-exp of the near buffer (`log_buffer`) and of the tokens scanned so far.
    void run(const Estimates& found, const float* log_buffer, const float* given, float log_share) {
        // If all queries ask, as with the group rule "any", the compiler knows their number.
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

    // As `take`, for the last, shorter span: not inlined, and for any number of queries.
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

    // Adds a span's `here` tokens to the sums of query `q`: all of them, and those not selected.
    template <bool WHOLE>
    INLINED void weigh(int q, const Singles* scores, const Marks* selected, int here) {
        Singles weights[VECTORS], added = weights_of(q, scores, weights);
        if (bits_of(at_least(added, MAX_WEIGHT))) added = raise(q, scores, weights);
        Singles unread = {}, lift = {}, total = {}, total_squares = {};
        for (int v = 0; v < VECTORS; v++) {
            Singles above = scores[v] - middle[q], unread_weights = without(weights[v], selected[v]);
            if (!WHOLE) above = numbered + v * TOKENS < here ? above : Singles{};  // else -inf would be summed
            unread += unread_weights;
            lift += unread_weights * above;
            total += above;
            total_squares += above * above;
        }
        mass[q] += added;
        unread_mass[q] += unread;
        lifted[q] += lift;
        sum[q] += total;
        squares[q] += total_squares;
    }

    // Writes the weights of a span's tokens, and returns their sum.
    INLINED Singles weights_of(int q, const Singles* scores, Singles* weights) const {
        Singles sum = {};
        const float offset = highest[q] * LOG2_E;
        for (int v = 0; v < VECTORS; v++) sum += weights[v] = power_of_two(scores[v] * LOG2_E - offset);
        return sum;
    }

    // As `weights_of`, after it has raised `highest` to this span's highest score and shrunk the sums so far to match.
    __attribute__((noinline)) Singles raise(int q, const Singles* scores, Singles* weights) {
        float peak = highest[q];
        for (int v = 0; v < VECTORS; v++) peak = std::max(peak, largest(scores[v]));
        float shrunk = ::exponential(highest[q] - peak);
        for (Singles* part : {mass, unread_mass, lifted}) part[q] *= shrunk;
        highest[q] = peak;
        return weights_of(q, scores, weights);
    }

    // Appends the selected tokens, of `here` from `first` on, and their scores.
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

    // Drops kept tokens whose score is below `score_cut` for every query, and adds them to the unread ones.
    void apply_cut(const float* score_cut, int queries) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i += TOKENS) {  // the last vector may pass `count`, but not the vectors' room
            Integers selected = {}, token = loaded<Integers>(&tokens[i]);
            for (int q = 0; q < queries; q++) selected |= loaded<Singles>(&estimates[q][i]) >= score_cut[q];
            Integers held = numbered + (int32_t)i < (int32_t)count, dropped = held & ~selected;
            selected &= held;
            for (int q = 0; q < queries && bits_of(dropped); q++) {
                Singles scores = loaded<Singles>(&estimates[q][i]);
                Singles weights = dropped ? power_of_two((scores - highest[q]) * LOG2_E) : Singles{};
                unread_mass[q] += weights;
                lifted[q] += dropped ? weights * (scores - middle[q]) : Singles{};
            }
            compress(token, bits_of(selected), &tokens[kept]);
            kept += __builtin_popcountll(bits_of(selected));
        }
        count = kept;
        for (int q = 0; q < queries; q++)
            log_unread_mass[q] = count == stop - start ? -INFINITY : highest[q] + logf(sum_of(unread_mass[q]));
    }
};

}  // namespace
