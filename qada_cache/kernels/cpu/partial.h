// Attention of one head's few queries over many keys on the CPU, in one pass that reads every key and value once.

#pragma once

#include "vectors.h"

namespace {

constexpr int BLOCK = 32;          // keys whose scores are held at once: few, so that reading never pauses for long
constexpr int PREFETCH_BYTES = 2048;        // bytes that are asked for before they are needed

// Which rows of keys and values are read: one after the other,
struct ContiguousPlaces {
    int64_t operator[](int64_t t) const { return t; }
    template <int SIZE, int STRIDE>
    INLINED void prefetch_after(const Element* rows, int64_t t) const {
        prefetch<SIZE>(rows + t * STRIDE + PREFETCH_BYTES / sizeof(Element));
    }
};

// or those of a list, whose tokens are counted from `start` on.
struct IndexedPlaces {
    const int32_t* tokens;
    int64_t count, start;
    int64_t operator[](int64_t t) const { return tokens[t] - start; }
    template <int SIZE, int STRIDE>
    INLINED void prefetch_after(const Element* rows, int64_t t) const {
        prefetch<SIZE>(rows + (*this)[std::min(t + BLOCK, count - 1)] * STRIDE);
    }
};

constexpr int PARTS = DIM / WIDTH, VALUE_PARTS = VALUE_DIM / WIDTH;

// Tokens as the model made them: `key` [*, DIM] and `value` [*, VALUE_DIM], `VALUE_STRIDE` apart.
template <typename Places>
struct Elements {
    const Element *key, *value;
    Places places;

    // Scores of `count` keys from number `first` on; `scaled` are queries times the scaling.
    INLINED void score(const Floats (*scaled)[PARTS], int64_t first, int count, float (*scores)[BLOCK]) const {
        for (int t = 0; t < count; t += 4) {
            Floats unpacked[4][PARTS];
            for (int i = 0; i < 4; i++) {
                const int64_t token = first + std::min(t + i, count - 1);
                places.template prefetch_after<DIM, DIM>(key, token);
                unpack<DIM>(key + places[token] * DIM, unpacked[i]);
            }
            for (int q = 0; q < QUERIES; q++) {
                Floats products[4];
                for (int i = 0; i < 4; i++) {
                    products[i] = scaled[q][0] * unpacked[i][0];
                    for (int c = 1; c < PARTS; c++) products[i] += scaled[q][c] * unpacked[i][c];
                }
                sum_of_each(products, &scores[q][t]);
            }
        }
    }

    // Multiplies weights by the scales of values in few bits: these are not.
    INLINED void scale(int64_t, int, float (*)[BLOCK]) const {}
    INLINED void unpack_value(int64_t t, Floats* out) const {
        unpack<VALUE_DIM>(value + places[t] * VALUE_STRIDE, out);
    }
    INLINED void prefetch_value_after(int64_t t) const {
        places.template prefetch_after<VALUE_DIM, VALUE_STRIDE>(value, t);
    }
};

// Adds values times weights to `sums`, `COUNT` vectors of channels at a time, from vector `FIRST` on: so few that the
// sums of all queries stay in registers.
template <int FIRST, int COUNT, typename Tokens>
inline void average(const Tokens& all, int64_t first, const float (*weights)[BLOCK], int tokens,
                    Floats (*sums)[VALUE_PARTS]) {
    Floats held[QUERIES][COUNT] = {};  // of these tokens alone: one long sum would lose more to rounding
    for (int t = 0; t < tokens; t++) {
        if (FIRST == 0) all.prefetch_value_after(first + t);
        Floats unpacked[VALUE_PARTS];
        all.unpack_value(first + t, unpacked);  // the compiler drops what is not used
        for (int q = 0; q < QUERIES; q++)
            for (int c = 0; c < COUNT; c++) held[q][c] += weights[q][t] * unpacked[FIRST + c];
    }
    for (int q = 0; q < QUERIES; q++)
        for (int c = 0; c < COUNT; c++) sums[q][FIRST + c] += held[q][c];
    constexpr int NEXT = FIRST + COUNT;
    if constexpr (NEXT < VALUE_PARTS)
        average<NEXT, std::min(COUNT, VALUE_PARTS - NEXT)>(all, first, weights, tokens, sums);
}

// Attention of a head's queries over the keys added so far.
struct Attention {
    Floats scaled[QUERIES][PARTS], sums[QUERIES][VALUE_PARTS] = {};
    float highest[QUERIES], total[QUERIES];

    Attention() {
        std::fill(highest, highest + QUERIES, -INFINITY);
        std::fill(total, total + QUERIES, 0);
    }

    // `query` [QUERIES, DIM].
    Attention(const Element* query, float scaling) : Attention() {
        for (int q = 0; q < QUERIES; q++) {
            unpack<DIM>(query + q * DIM, scaled[q]);
            for (int c = 0; c < PARTS; c++) scaled[q][c] *= scaling;
        }
    }

    // `key` [*, DIM] and `value` [*, VALUE_DIM] as in `Elements`, of which `tokens` rows are read.
    template <typename Places = ContiguousPlaces>
    void add(const Element* key, const Element* value, int64_t tokens, Places places = {}) {
        if constexpr (std::is_same_v<Places, IndexedPlaces>)  // which no hardware foresees
            for (int64_t t = 0; t < std::min<int64_t>(BLOCK, tokens); t++) {
                prefetch<DIM>(key + places[t] * DIM);
                if (!VALUES_IN_KEYS) prefetch<VALUE_DIM>(value + places[t] * VALUE_STRIDE);
            }
        Elements<Places> all{key, value, places};
        add(all, tokens);
    }

    // Adds the first `tokens` tokens of `all`.
    template <typename Tokens>
    void add(Tokens& all, int64_t tokens) {
        float scores[QUERIES][BLOCK];
        for (int64_t first = 0; first < tokens; first += BLOCK) {
            int count = (int)std::min<int64_t>(BLOCK, tokens - first);
            all.score(scaled, first, count, scores);
            for (int q = 0; q < QUERIES; q++) weigh(q, scores[q], count);
            all.scale(first, count, scores);
            constexpr int HELD = std::min(VALUE_PARTS, std::max(1, REGISTERS / QUERIES));
            average<0, HELD>(all, first, scores, count, sums);
        }
    }

    // Turns scores of `count` keys into weights relative to the highest score so far; shrinks earlier sums to match.
    void weigh(int q, float* scores, int count) {
        for (int t = count; t < BLOCK; t++) scores[t] = -INFINITY;
        Singles peaks = loaded<Singles>(scores);
        for (int t = TOKENS; t < BLOCK; t += TOKENS) {
            const Singles others = loaded<Singles>(scores + t);
            peaks = others > peaks ? others : peaks;
        }
        float peak = std::max(highest[q], largest(peaks)), mass = 0;
        if (peak > highest[q]) {
            float shrunk = exponential(highest[q] - peak);
            highest[q] = peak;
            total[q] *= shrunk;
            for (int c = 0; c < VALUE_PARTS; c++) sums[q][c] *= shrunk;
        }
        const float base = peak == -INFINITY ? 0 : peak;  // infinite keys are no reason for nan
#pragma omp simd reduction(+ : mass)
        for (int t = 0; t < BLOCK; t++) {
            float weight = exponential(scores[t] - base);
            scores[t] = weight;
            mass += weight;
        }
        total[q] += mass;
    }

    float log_mass(int q) const { return highest[q] + logf(total[q]); }

    // Writes `out` [QUERIES, VALUE_DIM] and `lse` [QUERIES]; without keys 0 and -inf.
    void finish(float* out, float* lse) const {
        for (int q = 0; q < QUERIES; q++) {
            float scale = total[q] == 0 ? 0 : 1 / total[q];
            lse[q] = log_mass(q);
            for (int d = 0; d < VALUE_DIM; d++) out[q * VALUE_DIM + d] = unpack_at<VALUE_DIM>(sums[q], d) * scale;
        }
    }
};

constexpr int SIZE = QUERIES * VALUE_DIM;

// Merges `count` parts [count, QUERIES, VALUE_DIM], and their log-sum-exps [count, QUERIES], for query `q`; 0 and -inf,
// if all are empty.
inline void merge(const float* parts, const float* part_lse, int64_t count, int q, float* out, float* lse) {
    float peak = -INFINITY, total = 0, sums[VALUE_DIM] = {};
    for (int64_t part = 0; part < count; part++) peak = std::max(peak, part_lse[part * QUERIES + q]);
    if (peak == -INFINITY) peak = 0;
    for (int64_t part = 0; part < count; part++) {
        float weight = expf(part_lse[part * QUERIES + q] - peak);
        total += weight;
        for (int d = 0; d < VALUE_DIM; d++) sums[d] += weight * parts[part * SIZE + q * VALUE_DIM + d];
    }
    *lse = peak + logf(total);
    for (int d = 0; d < VALUE_DIM; d++) out[d] = total == 0 ? 0 : sums[d] / total;
}

}  // namespace
