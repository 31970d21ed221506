// What the Gaussian model of a bulk's keys says of its attention: `gaussian_log_bulk` of criterion.py.

#pragma once

#include "vectors.h"

namespace {

// `log T + scaling q . (mean + scaling / 2 q covariance)` of each query of a KV head, equation 7.
inline void estimate_log_bulk(const float (*queries)[DIM], const float* mean, const float* covariance, float log_tokens,
                              float scaling, float* found) {
    // Vectors side by side, so that few queries' sums do not wait for each other.
    constexpr int COLUMNS = 2 * QUERIES <= REGISTERS ? 2 : 1;
    static_assert(DIM % (COLUMNS * WIDTH) == 0);
    Floats totals[QUERIES] = {};
    for (int c = 0; c < DIM; c += COLUMNS * WIDTH) {
        Floats sums[QUERIES][COLUMNS] = {};
        for (int d = 0; d < DIM; d++)
            for (int i = 0; i < COLUMNS; i++) {
                const Floats part = loaded<Floats>(covariance + d * DIM + c + i * WIDTH);
                for (int q = 0; q < QUERIES; q++) sums[q][i] += queries[q][d] * part;
            }
        for (int q = 0; q < QUERIES; q++)
            for (int i = 0; i < COLUMNS; i++)
                totals[q] += (loaded<Floats>(mean + c + i * WIDTH) + 0.5f * scaling * sums[q][i]) *
                             loaded<Floats>(&queries[q][c + i * WIDTH]);
    }
    for (int q = 0; q < QUERIES; q++) found[q] = log_tokens + scaling * sum_of(totals[q]);
}

}  // namespace
