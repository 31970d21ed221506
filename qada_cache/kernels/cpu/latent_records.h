// Latents out of records of few bits (sketch/coded.py), a tile at a time, as `score` and `add` of latent.h read them.
// Each vector has one channel of `TOKENS` tokens. What codes are rotated by has entries of 1 and -1, so that it is
// exact in whole numbers; their scales come last.

#pragma once

#include "coding.h"
#include "latent.h"

namespace {

// Bytes of two vectors in turn: of the first halves of each 16, or of the second ones.
typedef uint8_t Row __attribute__((vector_size(sizeof(Singles))));
template <bool SECOND>
INLINED Row interleaved(Row one, Row other) {
#if defined(__AVX512BW__)
    const __m512i a = (__m512i)one, b = (__m512i)other;
    return (Row)(SECOND ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i a = (__m256i)one, b = (__m256i)other;
    return (Row)(SECOND ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b));
#else
    Row found;
    for (int lane = 0; lane < int(sizeof found); lane += 16)
        for (int i = 0; i < 8; i++) {
            found[lane + 2 * i] = one[lane + SECOND * 8 + i];
            found[lane + 2 * i + 1] = other[lane + SECOND * 8 + i];
        }
    return found;
#endif
}

// Sums and differences of neighbours, of pairs, of fours, and so on: Hadamard blocks, in steps that stay in registers.
template <int SIZE, int APART = 1, typename Lanes>
INLINED void add_and_subtract(Lanes* block) {
    if constexpr (APART < SIZE) {
        constexpr int TOGETHER = std::min(8, SIZE / APART);
        for (int outer = 0; outer < SIZE; outer += APART * TOGETHER)
            for (int first = outer; first < outer + APART; first++) {
                Lanes held[TOGETHER];
#pragma GCC unroll 8
                for (int i = 0; i < TOGETHER; i++) held[i] = block[first + i * APART];
#pragma GCC unroll 8
                for (int apart = 1; apart < TOGETHER; apart *= 2)
#pragma GCC unroll 8
                    for (int i = 0; i < TOGETHER; i++)
                        if (!(i & apart)) {
                            const Lanes one = held[i], other = held[i + apart];
                            held[i] = one + other;
                            held[i + apart] = one - other;
                        }
#pragma GCC unroll 8
                for (int i = 0; i < TOGETHER; i++) block[first + i * APART] = held[i];
            }
        add_and_subtract<SIZE, APART * TOGETHER>(block);
    }
}

// The codes of the records of `TOKENS` tokens.
struct Residuals {
    static constexpr int CHUNK = sizeof(Row), CHUNKS = (DIM + CHUNK - 1) / CHUNK;  // channels
    static constexpr int MOST = (1 << KEY_BITS) - 1;
    // What holds a sum of a block's codes, twice.
    using Whole = std::conditional_t < 2 * MOST* KEY_BLOCK<1 << 15, int16_t, int32_t>;
    typedef Whole Wholes __attribute__((vector_size(sizeof(Whole) * TOKENS)));

    alignas(CACHE_LINE) uint8_t rows[TOKENS][CHUNKS * CHUNK] = {}, columns[CHUNKS * CHUNK * TOKENS];

    // Has the codes of a channel lie together.
    INLINED void transpose() {
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            Row held[TOKENS];
#pragma GCC unroll 16
            for (int t = 0; t < TOKENS; t++) held[t] = loaded<Row>(rows[t] + chunk * CHUNK);
#pragma GCC unroll 4
            for (int step = 1; step < TOKENS; step *= 2) {
                Row next[TOKENS];
#pragma GCC unroll 8
                for (int i = 0; i < TOKENS / 2; i++) {
                    next[2 * i] = interleaved<false>(held[i], held[i + TOKENS / 2]);
                    next[2 * i + 1] = interleaved<true>(held[i], held[i + TOKENS / 2]);
                }
#pragma GCC unroll 16
                for (int t = 0; t < TOKENS; t++) held[t] = next[t];
            }
            std::memcpy(columns + chunk * CHUNK * TOKENS, held, sizeof held);
        }
    }

    // Where they lie: a vector has, of each 16 channels, as many as there is room for.
    static constexpr int find_place(int channel) {
        constexpr int FITTING = 16 / TOKENS;
        return channel / CHUNK * CHUNK * TOKENS + channel % 16 / FITTING * CHUNK + channel % CHUNK / 16 * 16 +
               channel % FITTING * TOKENS;
    }

    // The rotated odd integers of a block of `KEY_BLOCK` channels. What they are less than twice their codes is the
    // same for all of them, of which a rotation leaves something in the first channel alone.
    INLINED void turn(int first, Wholes* found) const {
        for (int d = 0; d < KEY_BLOCK; d++)
            found[d] = 2 * __builtin_convertvector(loaded<Octets>(columns + find_place(first + d)), Wholes);
        add_and_subtract<KEY_BLOCK>(found);
        found[0] -= (Whole)(MOST * KEY_BLOCK);
    }
};

// How tokens of one segment are decoded, of each channel.
struct Fit {
    int64_t row = -1, segment = -1;
    float centres[DIM], inverse[DIM], inverse_m[DIM];  // of sketch and record, with the factors of rotations
    int32_t places[DIM];  // among the sketch's

    void find(const Coding& call, int64_t of_row, int64_t of_segment) {
        if (row == of_row && segment == of_segment) return;
        row = of_row, segment = of_segment;
        const int64_t from = segment * DIM;
        const Channel* order = call.order.at(row) + from;
        for (int i = 0; i < DIM; i++) {
            const int channel = order[i];
            places[channel] = i;
            inverse[channel] = i < call.words.coded() ? (float)HADAMARD / widen(call.weights.at(row)[from + i]) : 0;
        }
        for (int d = 0; d < DIM; d++) {
            centres[d] = widen(call.centres.at(row)[from + d]);
            inverse_m[d] = 1 / (sqrtf(KEY_BLOCK) * call.record_weights.at(row)[d]);
        }
    }
};

// Tiles of latents that lie in records.
struct Recorded {
#if PAIRS
    using Found = Tile<1, TILE, 1, TOKEN_WORDS>;
    alignas(CACHE_LINE) Word keys[WORDS][TILE], values[RANK][TOKEN_WORDS];
#else
    using Found = Tile<1, TILE, 1, TILE>;
    alignas(CACHE_LINE) Word keys[WORDS][TILE];
#endif
    alignas(CACHE_LINE) Singles told[DIM] = {};  // by the sketch, in its order
    Residuals residuals;
    Fit fit;

    // `count` tokens of a bulk from `first` on, which is a multiple of `TILE` as segments are.
    Found load(const Coding& call, int64_t row, int64_t first, int count) {
        for (int start = 0; start < TILE; start += TOKENS)
            decode(call, row, first + start, std::clamp(count - start, 0, TOKENS), start);
#if PAIRS
        return {keys[0], (const Word*)values, nullptr};
#else
        return {keys[0], keys[0], nullptr};
#endif
    }

    // `count` tokens from `token` on, or zeros, as the tile's from `start` on.
    void decode(const Coding& call, int64_t row, int64_t token, int count, int start) {
        if (count > 0) fit.find(call, row, std::min(token / call.segment_tokens, call.segments - 1));
        alignas(CACHE_LINE) float scales[TOKENS] = {};
        for (int t = 0; t < count; t++) {
            const uint8_t* record = call.records.at(row) + (token + t) * RECORD_SIZE;
            for (int byte = 0; byte < RECORD_SIZE; byte += CACHE_LINE)
                __builtin_prefetch(record + TILE * RECORD_SIZE + byte, 0, TO_L2);
            scales[t] = widen(loaded<uint16_t>(record));
            expand<KEY_BITS, DIM>(record + KEYS_FROM, residuals.rows[t]);
        }
        residuals.transpose();
        unpack(call, row, token, count);
        const Singles scale = loaded<Singles>(scales);
        for (int first = 0; first < DIM; first += KEY_BLOCK) {
            Residuals::Wholes turned[KEY_BLOCK];
            residuals.turn(first, turned);
            const auto find = [&](int d) {
                const Singles rest = scale * __builtin_convertvector(turned[d - first], Singles);
                return told[fit.places[d]] * fit.inverse[d] + fit.centres[d] + rest * fit.inverse_m[d];
            };
#pragma GCC unroll 8
            for (int d = first; d < first + KEY_BLOCK; d += IN_WORD) {
#if PAIRS
                const Singles one = find(d), other = find(d + 1);
                store(keys[d / 2] + start, paired(one, other));
                if (d < RANK) {
                    store(values[d] + start / 2, narrow(one));
                    store(values[d + 1] + start / 2, narrow(other));
                }
#else
                store(keys[d] + start, find(d));
#endif
            }
        }
    }

    // What the sketch says, but for the factors of `Fit`.
    INLINED void unpack(const Coding& call, int64_t row, int64_t token, int count) {
        Octets scales = {};
        std::memcpy(&scales, call.scales.at(row) + token, count);
        const Singles scale = widen(scales) * (count ? call.units.at(row)[fit.segment] : 0);
        const uint32_t* codes = call.codes.at(row) + token;
        Singles* next = told;
        unpack_words<4>(call.words.of_four, call.room, count, scale, codes, next);
        unpack_words<2>(call.words.of_two, call.room, count, scale, codes, next);
        unpack_words<1>(call.words.of_one, call.room, count, scale, codes, next);
    }

    template <int BITS>
    static INLINED void unpack_words(int words, int64_t room, int count, Singles scale, const uint32_t*& codes,
                                     Singles*& next) {
        constexpr int MOST = (1 << BITS) - 1;
        for (int word = 0; word < words; word++, codes += room) {
            Integers packed = {};
            if (count == TOKENS) packed = loaded<Integers>(codes);
            else std::memcpy(&packed, codes, count * sizeof *codes);
#pragma GCC unroll 4
            for (int first = 0; first < WORD_BITS / BITS; first += 8, next += 8) {
                Integers block[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) block[i] = packed >> (i % 4 * 8 + (first + i) / 4 * BITS) & MOST;
                add_and_subtract<8>(block);
                block[0] -= 4 * MOST;
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) next[i] = scale * __builtin_convertvector(2 * block[i], Singles);
            }
        }
    }
};

}  // namespace
