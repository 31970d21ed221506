// The far keys of a head, for selected attention: codes for estimates of scores, and moments of keys and values for
// lines of regression.

#pragma once

#include "selecting.h"

namespace {

constexpr int WORDS_TOGETHER = QUERY_SIGNED ? 1 : TOGETHER;  // words whose products are summed in 16 bits
constexpr int MOMENTS = DIM + 1;  // rows of moments: one for each channel of keys, and the sums themselves

struct FarKeys {
    explicit FarKeys(int64_t count)
        : centres(new Number[count * DIM]), codes(count * CODE_WORDS * SEGMENT),
          corrections(new int32_t[count * SEGMENT]), steps(new float[count * SEGMENT]), sizes(new float[count]),
          moments(new float[count * MOMENTS * WIDTH]) {}

    std::unique_ptr<Number[]> centres;  // [segments, DIM]: means of a segment's keys
    // [segments, CODE_WORDS, SEGMENT]: of keys less their centre, weighed and rotated; signed.
    Aligned codes;
    std::unique_ptr<int32_t[]> corrections;  // [segments, SEGMENT]: -ZERO times a code's sum
    std::unique_ptr<float[]> steps;  // [segments, SEGMENT]: of codes
    std::unique_ptr<float[]> sizes;  // [segments]: root mean squares of lengths of coded keys
    // [segments, MOMENTS, WIDTH]: sums over a segment and all before it. Rows 0 to DIM - 1 are of keys' channels times
    // keys and values, the last row of keys and values themselves. The first centre is subtracted from keys: products
    // of large means would lose precision.
    std::unique_ptr<float[]> moments;
};

// Codes rotated keys `states`, as integers from -LEVELS to LEVELS. If several words are summed at once, steps are large
// enough that sums of their products with queries' codes fit into 16 bits.
void encode_keys(FarKeys& far, int64_t segment, const float (*states)[SEGMENT]) {
    alignas(64) float steps[SEGMENT], most[SEGMENT];
    std::fill_n(most, SEGMENT, std::numeric_limits<float>::min());
    for (int d = 0; d < DIM; d++)
        for (int t = 0; t < SEGMENT; t++) most[t] = std::max(most[t], std::abs(states[d][t]));
    for (int t = 0; t < SEGMENT; t++) steps[t] = most[t] / LEVELS;
    for (int first = 0; first < DIM && WORDS_TOGETHER > 1; first += 2) {
        if (first % (4 * WORDS_TOGETHER) > 2) continue;
        alignas(64) float sizes[SEGMENT] = {}, sums[SEGMENT] = {};  // over the channels that are summed in 16 bits
        for (int pair = first; pair < std::min(DIM, first / 4 * 4 + 4 * WORDS_TOGETHER); pair += 4)
            for (int d = pair; d < pair + 2; d++)
                for (int t = 0; t < SEGMENT; t++) sizes[t] += std::abs(states[d][t]), sums[t] += states[d][t];
        // The largest sum of channels of one sign; rounding may add half a step to each.
        for (int t = 0; t < SEGMENT; t++)
            steps[t] =
                std::max(steps[t], (sizes[t] + std::abs(sums[t])) / 2 / (MOST_SUM / (2 * LEVELS) - WORDS_TOGETHER));
    }
    uint32_t sums[SEGMENT] = {};  // of a nan any number, which may overflow
    for (int word = 0; word < CODE_WORDS; word++)
        for (int t = 0; t < SEGMENT; t++) {
            uint32_t packed = 0;
            for (int each = 0; each < 4; each++) {
                const int code = (int)std::nearbyint(states[4 * word + each][t] / steps[t]);
                sums[t] += code, packed |= uint32_t(uint8_t(code)) << 8 * each;
            }
            far.codes.get()[(segment * CODE_WORDS + word) * SEGMENT + t] = packed;
        }
    for (int t = 0; t < SEGMENT; t++) far.corrections[segment * SEGMENT + t] = uint32_t(-ZERO) * sums[t];
    std::copy_n(steps, SEGMENT, far.steps.get() + segment * SEGMENT);
}

// Sets a segment's centre and codes.
void encode_segment(FarKeys& far, const Call& call, int64_t segment) {
    const Number* key = call.key + (call.first + segment * SEGMENT) * call.key_token;
    alignas(64) float states[DIM][SEGMENT], means[PADDED] = {};
    alignas(64) Number centre[PADDED];
    for (int t = 0; t < SEGMENT; t++)
        for (int d = 0; d < DIM; d++) {
            const float number = widen(key[t * call.key_token + d]);
            states[d][t] = number, means[d] += number / SEGMENT;
        }
    for (int d = 0; d < PADDED; d += LANES) {
        const Singles mean = loaded<Singles>(means + d);
        if constexpr (sizeof(Number) == sizeof(float)) store(centre + d, mean);
        else store_bfloat16(centre + d, mean);
    }
    std::copy_n(centre, DIM, far.centres.get() + segment * DIM);
    for (int d = 0; d < DIM; d++)
        for (int t = 0; t < SEGMENT; t++) states[d][t] = (states[d][t] - widen(centre[d])) * call.weights[d];
    rotate(states);
    encode_keys(far, segment, states);
    float squares = 0;
    for (int d = 0; d < DIM; d++)
        for (int t = 0; t < SEGMENT; t++) squares += states[d][t] * states[d][t];
    far.sizes[segment] = std::sqrt(squares / SEGMENT);
}

// Sets the moments of a segment alone.
void sum_segment(FarKeys& far, const Call& call, int64_t segment) {
    constexpr int KEY_ROWS = (DIM + ROWS - 1) / ROWS * ROWS;  // the last ones are padding
    const int64_t token = call.first + segment * SEGMENT;
    alignas(64) float both[SEGMENT][WIDTH] = {}, sums[std::max(KEY_ROWS, MOMENTS)][WIDTH] = {};
    for (int t = 0; t < SEGMENT; t++) {
        const Number *key = call.key + (token + t) * call.key_token,
                     *value = call.value + (token + t) * call.value_token;
        for (int d = 0; d < DIM; d++) both[t][d] = widen(key[d]) - widen(far.centres[d]);
        for (int d = 0; d < VALUE_DIM; d++) both[t][DIM + d] = widen(value[d]);
    }
    add_products<SEGMENT>(both, KEY_ROWS, both, sums);
    std::fill_n(sums[DIM], WIDTH, 0.0f);
    for (int t = 0; t < SEGMENT; t++)
        for (int c = 0; c < WIDTH; c++) sums[DIM][c] += both[t][c];
    std::copy_n(sums[0], MOMENTS * WIDTH, far.moments.get() + segment * MOMENTS * WIDTH);
}

// The `FarKeys` of so many segments from token `call.first` on. Sums do not depend on the number of threads.
FarKeys describe(const Call& call, int64_t segments) {
    FarKeys far(segments);
#pragma omp parallel num_threads(call.threads)
    {
#pragma omp for
        for (int64_t segment = 0; segment < segments; segment++) encode_segment(far, call, segment);
#pragma omp for
        for (int64_t segment = 0; segment < segments; segment++) sum_segment(far, call, segment);
#pragma omp for
        for (int row = 0; row < MOMENTS; row++)
            for (int64_t segment = 1; segment < segments; segment++) {
                float* sums = far.moments.get() + (segment * MOMENTS + row) * WIDTH;
                for (int c = 0; c < WIDTH; c++) sums[c] += sums[c - MOMENTS * WIDTH];
            }
    }
    return far;
}

// Writes means [WIDTH] over the first `segments`: of keys less the first centre, of their values, and zeros.
inline void average(const FarKeys& far, int64_t segments, float* means) {
    const float* sums = far.moments.get() + (segments * MOMENTS - 1) * WIDTH;
    for (int c = 0; c < WIDTH; c++) means[c] = sums[c] / (segments * SEGMENT);
}

// Sets slopes and mean scores of a strip's queries `states`, over the first `segments`, whose means are
// `block.means`. A slope is the covariance of values with scores over the variance of scores.
void regress(Block& block, int strip, const float (*states)[DIM], const FarKeys& far, int64_t segments, float scaling) {
    const float* means = block.means;
    alignas(64) float along[STRIP][WIDTH];
    project(states, far.moments.get() + (segments - 1) * MOMENTS * WIDTH, along);
    for (int q = 0; q < STRIP; q++) {
        float centre = 0, score = 0, variance = 0;
        for (int d = 0; d < DIM; d++) centre += widen(far.centres[d]) * states[q][d], score += means[d] * states[q][d];
        for (int c = 0; c < WIDTH; c++) along[q][c] = along[q][c] / (segments * SEGMENT) - score * means[c];
        for (int d = 0; d < DIM; d++) variance += along[q][d] * states[q][d];
        const float slope = scaling * scaling * variance > FLAT ? 1 / (scaling * variance) : 0;
        for (int d = 0; d < VALUE_DIM; d++) block.slopes[strip * STRIP + q][d] = along[q][DIM + d] * slope;
        block.mean_scores[strip * STRIP + q] = scaling * (centre + score);
    }
}

}  // namespace
