// Functions for attention of many queries: in bfloat16 if the processor multiplies pairs of it, else in float32
// (operations.h). Files that include this are built for the macros DIM, VALUE_DIM and NUMBER.
//
// A strip of queries attends to a tile of keys at a time. Scores, weights and sums stay in the first caches and in
// registers, or in the processor's own tiles (tiles.h). Keys and values are packed first, once for a head, so that one
// load has the operand of a vector of sums:
//
//   keys     [chunk][WORDS][CHUNK]                                neighbouring dimensions, of CHUNK keys
//   values   [VALUE_DIM / CHANNELS][tokens / IN_WORD][CHANNELS]   neighbouring tokens
//
// words of 32 bits, each a float or a pair of bfloat16.

#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "products.h"

extern "C" int omp_get_thread_num() noexcept;  // no header of OpenMP's comes with Xcode's compiler

namespace {

constexpr int STRIP = TILED ? 2 * SIDE : ROWS;  // queries
constexpr int CHUNK = VECTORS * LANES;  // keys whose scores a strip sums at once
constexpr int TILE = 256;  // keys: after each tile a strip's sums of values are scaled and added to
constexpr int round_to_tiles(int words) { return TILED ? (words + SIDE - 1) / SIDE * SIDE : words; }
constexpr int WORDS = round_to_tiles(DIM / IN_WORD);  // of a query or a key, zeros behind
// Channels of values that are summed at once, in registers or by tiles. They lie together for all tokens: pieces of
// rows of all channels would share few sets of the first cache.
constexpr int CHANNELS = TILED ? VALUE_DIM : find_slab(VALUE_DIM / LANES) * LANES;
static_assert(DIM % IN_WORD == 0 && VALUE_DIM % LANES == 0 && TILE % CHUNK == 0);
constexpr int SUMMED = 64;  // words of a partial sum of scores: long sums round more
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
constexpr float FAR = 1 << 24;  // from this peak on, scores are scaled and rounded before the peak is subtracted

// Room for so many words, from the start of a cache line on: no vector of them lies in two.
class Aligned {
    struct alignas(64) Line {
        uint32_t words[16];
    };
    std::unique_ptr<Line[]> lines;

public:
    explicit Aligned(int64_t words) : lines(new Line[(words + 15) / 16]) {}
    uint32_t* get() const { return (uint32_t*)lines.get(); }
};

// Packs a query's DIM channels into words.
INLINED void pack_query(const Number* query, uint32_t* words) {
    if constexpr (IN_WORD * sizeof(Number) == 4) {
        // By vectors: GCC calls memcpy for so many bytes.
        constexpr int PACKED = DIM / IN_WORD, WHOLE = PACKED / LANES * LANES;
        for (int word = 0; word < WHOLE; word += LANES) store(words + word, loaded<Words>(query + word * IN_WORD));
        std::memcpy(words + WHOLE, query + WHOLE * IN_WORD, (PACKED - WHOLE) * sizeof(uint32_t));
    } else
        for (int d = 0; d < DIM; d++) {
            const float wide = widen(query[d]);
            std::memcpy(words + d, &wide, sizeof wide);
        }
}

// Packs a chunk of keys: those of tokens `token(0)`, `token(1)` and so on, and zeros behind `count`.
template <typename Token>
INLINED void pack_keys(const Number* key, int64_t stride, int64_t count, Token token, uint32_t* keys) {
    for (int each = 0; each < CHUNK; each += 4) {
        uint32_t words[4][WORDS] = {};
        for (int next = 0; next < 4; next++)
            if (each + next < count) pack_query(key + token(each + next) * stride, words[next]);
        for (int word = 0; word + 4 <= WORDS; word += 4)
            turn(words[0] + word, WORDS, keys + word * CHUNK + each, CHUNK);
        for (int word = WORDS / 4 * 4; word < WORDS; word++)
            for (int next = 0; next < 4; next++) keys[word * CHUNK + each + next] = words[next][word];
    }
}

// Packs values, as `pack_keys` packs keys. A token's groups of CHANNELS lie `apart` words apart.
template <typename Token>
INLINED void pack_values(const Number* value, int64_t stride, int64_t count, Token token, uint32_t* values,
                         int64_t apart) {
    static const Number zeros[VALUE_DIM] = {};
    for (int64_t each = 0; each < CHUNK; each += IN_WORD, values += CHANNELS) {
        const Number* rows[IN_WORD];
        for (int64_t next = 0; next < IN_WORD; next++)
            rows[next] = each + next < count ? value + token(each + next) * stride : zeros;
        for (int first = 0; first < VALUE_DIM; first += CHANNELS)
            for (int d = first; d < first + CHANNELS; d++) {
                uint32_t* to = values + first / CHANNELS * apart + d - first;
                if constexpr (IN_WORD == 2)
                    *to = loaded<uint16_t>(rows[0] + d) | (uint32_t)loaded<uint16_t>(rows[IN_WORD - 1] + d) << 16;
                else {
                    const float wide = widen(rows[0][d]);
                    std::memcpy(to, &wide, sizeof wide);
                }
            }
    }
}

// Packs keys and values of all tokens, in `chunks` chunks.
inline void pack(const Number* key, int64_t key_stride, const Number* value, int64_t value_stride, int64_t tokens,
                 int64_t chunks, int64_t threads, uint32_t* keys, uint32_t* values) {
#pragma omp parallel for num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const auto token = [&](int64_t each) { return chunk * CHUNK + each; };
        pack_keys(key, key_stride, tokens - chunk * CHUNK, token, keys + chunk * CHUNK * WORDS);
        pack_values(value, value_stride, tokens - chunk * CHUNK, token, values + chunk * CHUNK / IN_WORD * CHANNELS,
                    chunks * CHUNK / IN_WORD * CHANNELS);
    }
}

// Scores of a strip with a chunk of keys, unscaled, in rows of TILE floats.
INLINED void score(const uint32_t (*query)[WORDS], const uint32_t* keys, float (*scores)[TILE]) {
    if constexpr (TILED) {
        for (int column = 0; column < CHUNK; column += 2 * SIDE)
            multiply_by_tiles<2>(query, WORDS, keys + column, CHUNK, WORDS, nullptr, 0, scores[0] + column, TILE);
    } else
        for (int first = 0; first < WORDS; first += SUMMED) {
            Singles sums[ROWS][VECTORS];
            multiply(query[0] + first, WORDS, keys + first * CHUNK, CHUNK, std::min(SUMMED, WORDS - first), sums);
            UNROLLED for (int q = 0; q < ROWS; q++) UNROLLED for (int c = 0; c < VECTORS; c++) {
                float* to = scores[q] + c * LANES;
                store(to, first ? loaded<Singles>(to) + sums[q][c] : sums[q][c]);
            }
        }
}

// The state of a strip's queries after some tiles: sums of weighted values, sums of weights, and the largest score,
// scaled and times log2(e).
struct Strip {
    float sums[STRIP][VALUE_DIM];
    float total[STRIP], peak[STRIP];
};

// Writes the weights of a query's scores in a tile to `weights`, 0 from column `visible` on. Returns the factor for the
// query's earlier sums of values, as its peak may have grown.
INLINED float weigh(Strip& strip, int q, float* scores, int columns, int64_t visible, float scaling, Packed* weights) {
    for (int64_t column = std::max<int64_t>(visible, 0); column < columns; column++)
        scores[column] = -std::numeric_limits<float>::infinity();
    Singles most = loaded<Singles>(scores);
    for (int column = LANES; column < columns; column += LANES) most = larger(most, loaded<Singles>(scores + column));
    const float peak = std::max(strip.peak[q], scaling * largest(most));
    if (std::abs(peak) > FAR) {
        for (int column = 0; column < columns; column += LANES)
            store(scores + column, scaling * loaded<Singles>(scores + column));
        scaling = 1;
    }
    const Singles scale = all(scaling), less = all(-peak);
    Singles total = {};
    for (int column = 0; column < columns; column += LANES) {
        const Singles weight = power_of_two(fused(loaded<Singles>(scores + column), scale, less));
        total += weight;
        if constexpr (IN_WORD == 1) store(weights + column, weight);
        else store_bfloat16(weights + column, weight);
    }
    const float kept = peak == strip.peak[q] ? 1 : std::exp2(strip.peak[q] - peak);
    strip.total[q] = strip.total[q] * kept + sum_of(total);
    strip.peak[q] = peak;
    return kept;
}

// Multiplies a strip's sums by `kept`, and adds a tile's weighted values. Without the processor's tiles, these are
// summed in registers first. GCC 12 may move them to memory and back where it inlines this.
APART void add(Strip& strip, const float* kept, const Packed (*weights)[TILE], const uint32_t* values, int64_t apart,
               int columns) {
    const auto multiply_sums = [&](auto width, int first) {
        multiply_by_tiles<width>(weights, TILE / IN_WORD, values + first, VALUE_DIM, columns / IN_WORD,
                                 strip.sums[0] + first, VALUE_DIM, strip.sums[0] + first, VALUE_DIM);
    };
    if constexpr (TILED) {
        for (int q = 0; q < STRIP; q++)
            for (int d = 0; d < VALUE_DIM && kept[q] != 1; d += LANES)
                store(strip.sums[q] + d, kept[q] * loaded<Singles>(strip.sums[q] + d));
        for (int first = 0; first + SIDE < VALUE_DIM; first += 2 * SIDE)
            multiply_sums(std::integral_constant<int, 2>(), first);
        if (VALUE_DIM % (2 * SIDE)) multiply_sums(std::integral_constant<int, 1>(), VALUE_DIM - SIDE);
    } else {
        for (int first = 0; first < VALUE_DIM; first += CHANNELS, values += apart) {
            Singles sums[ROWS][CHANNELS / LANES];
            multiply(weights, TILE / IN_WORD, values, CHANNELS, columns / IN_WORD, sums);
            UNROLLED for (int q = 0; q < ROWS; q++) UNROLLED for (int c = 0; c < CHANNELS / LANES; c++) {
                float* sum = strip.sums[q] + first + c * LANES;
                store(sum, fused(all(kept[q]), loaded<Singles>(sum), sums[q][c]));
            }
        }
    }
}

void begin(Strip& strip) {
    std::memset(strip.sums, 0, sizeof strip.sums);
    std::fill_n(strip.total, STRIP, 0.0f);
    std::fill_n(strip.peak, STRIP, -std::numeric_limits<float>::infinity());
}

// Attention of a strip's queries over the first `columns`, whole chunks, of a tile of packed keys and values. Query `q`
// sees the first `visible(q)` of them. `scaling` is that of scores times log2(e).
template <typename Visible>
INLINED void meet(Strip& strip, const uint32_t (*query)[WORDS], const uint32_t* keys, const uint32_t* values,
                  int64_t apart, int columns, Visible visible, float scaling) {
    alignas(64) float scores[STRIP][TILE], kept[STRIP];
    alignas(64) Packed weights[STRIP][TILE];
    for (int column = 0; column < columns; column += CHUNK)
        score(query, keys + column * WORDS, (float (*)[TILE])(scores[0] + column));
    for (int q = 0; q < STRIP; q++) kept[q] = weigh(strip, q, scores[q], columns, visible(q), scaling, weights[q]);
    add(strip, kept, weights, values, apart, columns);
}

}  // namespace
