// Latent attention of many queries over few tokens at a time: all queries share one key, whose first channels are
// the value (`VALUES_IN_KEYS`).
//
// A vector has one number of each of LANES queries. It is multiplied by a tile's numbers one by one, so these are read
// in any order, and nothing is transposed. While a tile lies in the second cache, two products are computed with it:
// scores, and sums of channels times weights.
//
// Queries, tiles and weights are words: pairs of bfloat16 if the processor multiplies these, else floats.

#pragma once

#include "vectors.h"

namespace {

constexpr int LANES = TOKENS;  // queries of a vector
constexpr int TILE = 64;       // tokens
constexpr int SUMS = REGISTERS / 3 * 2;  // vectors of sums in registers
// Channels of the value, and those that are summed: a multiple of SUMS.
constexpr int RANK = VALUE_DIM, SUMMED_CHANNELS = (RANK + SUMS - 1) / SUMS * SUMS;
constexpr int SUMMED = 96;     // words of a partial sum: long sums lose more to rounding

#if defined(BFLOAT16) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRS 1
using Word = uint32_t;
using Numbers = Integers;
INLINED Singles added(Singles sum, Word word, Numbers lanes) {
    return (Singles)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Integers{} + (int32_t)word), (__m512bh)lanes);
}
INLINED __m256i narrow(Singles wide) { return (__m256i)_mm512_cvtneps_pbh((__m512)wide); }
// Pairs of bfloat16: numbers of `low` in the lower halves of words, of `high` in the upper ones.
INLINED Numbers paired(Singles low, Singles high) {
    return (Numbers)_mm512_cvtepu16_epi32(narrow(low)) | (Numbers)_mm512_cvtepu16_epi32(narrow(high)) << 16;
}
#else
#define PAIRS 0
using Word = float;
using Numbers = Singles;
INLINED Singles added(Singles sum, Word word, Numbers lanes) { return sum + word * lanes; }
#endif
constexpr int IN_WORD = PAIRS ? 2 : 1;
constexpr int WORDS = DIM / IN_WORD, TOKEN_WORDS = TILE / IN_WORD;
static_assert(SUMMED_CHANNELS <= DIM && DIM % IN_WORD == 0 && TILE % SUMS == 0);

template <typename Lanes>
INLINED void store(void* to, Lanes lanes) {
    std::memcpy(to, &lanes, sizeof lanes);
}

// `LANES` queries, and their state after some tiles: the largest score, and sums of weights and of channels times
// weights.
struct alignas(CACHE_LINE) Block {
    Word words[WORDS][LANES];
    float sums[SUMMED_CHANNELS][LANES];
    float peak[LANES], total[LANES];

    // Loads `count` queries [*, DIM], zeros behind them, and clears the state.
    void begin(const Element* queries, int64_t count) {
        std::memset(this, 0, sizeof *this);
        std::fill_n(peak, LANES, -INFINITY);
        for (int q = 0; q < std::min<int64_t>(LANES, count); q++)
            for (int w = 0; w < WORDS; w++) {
                if (PAIRS) std::memcpy(&words[w][q], queries + q * DIM + w * IN_WORD, sizeof(Word));
                else words[w][q] = (Word)widen(queries[q * DIM + w]);
            }
    }

    // Merges the state of the same queries over other tokens.
    void merge(const Block& other) {
        for (int q = 0; q < LANES; q++) {
            const float most = std::max(peak[q], other.peak[q]), base = most == -INFINITY ? 0 : most;
            const float scale = expf(peak[q] - base), other_scale = expf(other.peak[q] - base);
            peak[q] = most;
            total[q] = total[q] * scale + other.total[q] * other_scale;
            for (int d = 0; d < RANK; d++) sums[d][q] = sums[d][q] * scale + other.sums[d][q] * other_scale;
        }
    }

    // Writes `out` [*, RANK] and `lse` [*] of `count` queries; 0 and -inf if they saw no token.
    void finish(int64_t count, float* out, float* lse) const {
        for (int q = 0; q < std::min<int64_t>(LANES, count); q++) {
            const float scale = total[q] == 0 ? 0 : 1 / total[q];
            lse[q] = peak[q] + logf(total[q]);
            for (int d = 0; d < RANK; d++) out[q * RANK + d] = sums[d][q] * scale;
        }
    }
};

// The words of a tile, twice: `keys` for scores, each of IN_WORD channels of a token, and `values` for sums, each of
// IN_WORD tokens of a channel. The parameters are strides in words: TOKEN and CHANNEL (words of channels) of `keys`,
// SUM_TOKEN (words of tokens) and SUM_CHANNEL of `values`.
template <int TOKEN, int CHANNEL, int SUM_TOKEN, int SUM_CHANNEL>
struct Tile {
    const Word *keys, *values;
    const char* next;  // the next tile's TILE_BYTES, to prefetch; null: none
};

constexpr int TILE_BYTES = TILE * DIM * (int)sizeof(Element);

// Scores of the queries of `ACROSS` blocks with the first `count` tokens, unscaled.
template <int ACROSS, int TOKEN, int CHANNEL, int SUM_TOKEN, int SUM_CHANNEL>
INLINED void score(const Tile<TOKEN, CHANNEL, SUM_TOKEN, SUM_CHANNEL>& tile, int count, const Block* blocks,
                   float (*scores)[ACROSS][LANES]) {
    constexpr int DOWN = SUMS / ACROSS, BYTES = TILE_BYTES / TILE * DOWN;
    for (int first = 0; first < WORDS; first += SUMMED) {
        for (int t = 0; t < count; t += DOWN) {
            Singles sums[DOWN][ACROSS] = {};
            for (int w = first; w < std::min(first + SUMMED, WORDS); w++) {
                if (tile.next && w * CACHE_LINE < BYTES)
                    __builtin_prefetch(tile.next + t * (TILE_BYTES / TILE) + w * CACHE_LINE, 0, TO_L2);
                Numbers queries[ACROSS];
#pragma GCC unroll 2
                for (int a = 0; a < ACROSS; a++) queries[a] = loaded<Numbers>(blocks[a].words[w]);
#pragma GCC unroll 16
                for (int i = 0; i < DOWN; i++) {
                    const Word word = loaded<Word>(tile.keys + (t + i) * TOKEN + w * CHANNEL);
#pragma GCC unroll 2
                    for (int a = 0; a < ACROSS; a++) sums[i][a] = added(sums[i][a], word, queries[a]);
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 2
                for (int a = 0; a < ACROSS; a++) {
                    float* to = scores[t + i][a];
                    store(to, first ? loaded<Singles>(to) + sums[i][a] : sums[i][a]);
                }
        }
    }
}

// Turns scores of a block into weights, as words of `count` tokens. Returns the factors [LANES] that earlier sums have
// to be multiplied by, as the largest score may have grown.
template <int ACROSS>
INLINED Singles weigh(Block& block, int a, float scaling, int count, float (*scores)[ACROSS][LANES],
                      Word (*weights)[ACROSS][LANES]) {
    Singles most = loaded<Singles>(scores[0][a]);
    for (int t = 1; t < count; t++) {
        const Singles other = loaded<Singles>(scores[t][a]);
        most = other > most ? other : most;
    }
    most *= scaling;
    const Singles before = loaded<Singles>(block.peak), peak = most > before ? most : before;
    const Singles base = peak > -INFINITY ? peak : Singles{};  // infinite latents are no reason for nan
    alignas(CACHE_LINE) float peaks[LANES], kept[LANES], mass[LANES] = {};
    store(peaks, base);
    store(kept, before - base);
#pragma omp simd
    for (int q = 0; q < LANES; q++) kept[q] = exponential(kept[q]);
    for (int t = 0; t < count; t++) {
        float* row = scores[t][a];
#pragma omp simd
        for (int q = 0; q < LANES; q++) {
            row[q] = exponential(row[q] * scaling - peaks[q]);  // a weight
            mass[q] += row[q];
        }
    }
    if (count < TILE) store(scores[count][a], Singles{});  // if `count` is odd, the other half of the last word
    for (int t = 0; t < count; t += IN_WORD) {
#if PAIRS
        store(weights[t / IN_WORD][a], paired(loaded<Singles>(scores[t][a]), loaded<Singles>(scores[t + 1][a])));
#else
        store(weights[t][a], loaded<Singles>(scores[t][a]));
#endif
    }
    const Singles factors = loaded<Singles>(kept);
    store(block.total, loaded<Singles>(block.total) * factors + loaded<Singles>(mass));
    store(block.peak, peak);
    return factors;
}

// Adds channels of a tile's first `count` tokens times weights to the sums of `ACROSS` blocks, which are multiplied by
// `kept` first. If `count` is odd, the other half of the last word must be finite; its weight is 0.
template <int ACROSS, int TOKEN, int CHANNEL, int SUM_TOKEN, int SUM_CHANNEL>
INLINED void add(const Tile<TOKEN, CHANNEL, SUM_TOKEN, SUM_CHANNEL>& tile, int count,
                 const Word (*weights)[ACROSS][LANES], const Singles* kept, Block* blocks) {
    constexpr int DOWN = SUMS / ACROSS;
    for (int d = 0; d < SUMMED_CHANNELS; d += DOWN) {
        Singles sums[DOWN][ACROSS] = {};
        for (int t = 0; t * IN_WORD < count; t++) {
            Numbers token_weights[ACROSS];
#pragma GCC unroll 2
            for (int a = 0; a < ACROSS; a++) token_weights[a] = loaded<Numbers>(weights[t][a]);
#pragma GCC unroll 16
            for (int i = 0; i < DOWN; i++) {
                const Word word = tile.values[t * SUM_TOKEN + (d + i) * SUM_CHANNEL];
#pragma GCC unroll 2
                for (int a = 0; a < ACROSS; a++) sums[i][a] = added(sums[i][a], word, token_weights[a]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 2
            for (int a = 0; a < ACROSS; a++) {
                float* to = blocks[a].sums[d + i];
                store(to, loaded<Singles>(to) * kept[a] + sums[i][a]);
            }
    }
}

// Attention of `ACROSS` blocks over the first `count` tokens of a tile.
template <int ACROSS, typename AnyTile>
void meet(const AnyTile& tile, int count, float scaling, Block* blocks) {
    alignas(CACHE_LINE) float scores[TILE][ACROSS][LANES];
    alignas(CACHE_LINE) Word weights[TOKEN_WORDS][ACROSS][LANES];
    Singles kept[ACROSS];
    score<ACROSS>(tile, count, blocks, scores);
    for (int a = 0; a < ACROSS; a++) kept[a] = weigh<ACROSS>(blocks[a], a, scaling, count, scores, weights);
    add<ACROSS>(tile, count, weights, kept, blocks);
}

// Attention of all `number` blocks over a tile, two at once.
template <typename AnyTile>
void meet_all(AnyTile tile, int count, float scaling, Block* blocks, int64_t number) {
    int64_t done = 0;
    for (; done + 2 <= number; done += 2, tile.next = nullptr) meet<2>(tile, count, scaling, blocks + done);
    if (done < number) meet<1>(tile, count, scaling, blocks + done);
}

}  // namespace
