// Products of matrices, ROWS rows by a slab of columns at a time, so that sums stay in registers.

#pragma once

#include <algorithm>

#include "operations.h"
#include "tiles.h"

namespace {

constexpr int ROWS = TILED ? 4 : 6;  // of the left matrix
// The vectors of a slab: the largest divisor of a row's, up to `vectors`.
constexpr int find_slab(int row, int vectors = VECTORS) {
    return row % vectors ? find_slab(row, vectors - 1) : vectors;
}

// Sums over `words` words: `sums` = `rows` [ROWS, words] times `matrix` [words, SLAB vectors]. Strides in words: `rows`
// have `stride` from row to row and `step` from word to word, `matrix` has `width`. PACKED: words are as for `added`,
// else floats.
template <int SLAB, bool PACKED = true>
INLINED void multiply(const void* rows, int stride, const void* matrix, int width, int words, Singles (*sums)[SLAB],
                      int step = 1) {
    UNROLLED for (int q = 0; q < ROWS; q++) UNROLLED for (int c = 0; c < SLAB; c++) sums[q][c] = Singles{};
    for (int word = 0; word < words; word++) {
        Words column[SLAB];
        UNROLLED for (int c = 0; c < SLAB; c++) column[c] =
            loaded<Words>((const uint32_t*)matrix + word * width + c * LANES);
        UNROLLED for (int q = 0; q < ROWS; q++) {
            const Words row = Words{} + loaded<uint32_t>((const uint32_t*)rows + q * stride + word * step);
            UNROLLED for (int c = 0; c < SLAB; c++) sums[q][c] =
                PACKED ? added(sums[q][c], column[c], row) : fused((Singles)column[c], (Singles)row, sums[q][c]);
        }
    }
}

// Adds to `sums` [rows, WIDTH] the products of `left` and `right` summed over COUNT tokens: `left`[t][row] times
// `right`[t]. `rows` is a multiple of ROWS.
template <int COUNT, int LEFT, int WIDTH>
INLINED void add_products(const float (*left)[LEFT], int rows, const float (*right)[WIDTH], float (*sums)[WIDTH]) {
    constexpr int SLAB = find_slab(WIDTH / LANES);
    for (int row = 0; row < rows; row += ROWS)
        for (int first = 0; first < WIDTH; first += SLAB * LANES) {
            Singles added[ROWS][SLAB];
            multiply<SLAB, false>(left[0] + row, 1, right[0] + first, WIDTH, COUNT, added, LEFT);
            UNROLLED for (int q = 0; q < ROWS; q++) UNROLLED for (int c = 0; c < SLAB; c++) {
                float* sum = sums[row + q] + first + c * LANES;
                store(sum, loaded<Singles>(sum) + added[q][c]);
            }
        }
}

}  // namespace
