// The estimate of `log A_bulk` by a Gaussian model of the bulk's keys: `gaussian_log_bulk` of criterion.py.

#pragma once

#include "vectors.h"

namespace {

// The moments of one prompt: mean [DIM] and covariance [DIM][DIM] of each KV head, and the logarithm of each row's bulk
// tokens.
struct Moments {
    View<const float> mean, covariance, log_tokens;

    // Raises `log_bulk` [QUERIES] to `log T + scaling q . (mean + scaling / 2 q covariance)`, equation 7, for the
    // queries [QUERIES, DIM] of a KV head. A number replaces a nan.
    void estimate(const Element* query, int64_t row, int64_t head, float scaling, float* log_bulk) const {
        // With few queries, two vectors at once, so that sums do not wait for each other.
        constexpr int COLUMNS = 2 * QUERIES <= REGISTERS ? 2 : 1;
        static_assert(DIM % (COLUMNS * WIDTH) == 0);
        alignas(CACHE_LINE) float queries[QUERIES][DIM];
        for (int q = 0; q < QUERIES; q++)
            for (int d = 0; d < DIM; d++) queries[q][d] = widen(query[q * DIM + d]);
        const float *means = mean.at(row, head), *rows = covariance.at(row, head);
        Floats totals[QUERIES] = {};
        for (int c = 0; c < DIM; c += COLUMNS * WIDTH) {
            Floats sums[QUERIES][COLUMNS] = {};
            for (int d = 0; d < DIM; d++)
                for (int i = 0; i < COLUMNS; i++) {
                    const Floats part = loaded<Floats>(rows + d * DIM + c + i * WIDTH);
                    for (int q = 0; q < QUERIES; q++) sums[q][i] += queries[q][d] * part;
                }
            for (int q = 0; q < QUERIES; q++)
                for (int i = 0; i < COLUMNS; i++)
                    totals[q] += (loaded<Floats>(means + c + i * WIDTH) + 0.5f * scaling * sums[q][i]) *
                                 loaded<Floats>(&queries[q][c + i * WIDTH]);
        }
        for (int q = 0; q < QUERIES; q++)
            log_bulk[q] = fmaxf(log_bulk[q], *log_tokens.at(row) + scaling * sum_of(totals[q]));
    }
};

}  // namespace
