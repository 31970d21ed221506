// Latents out of records of few bits (sketch/coded.py), a tile at a time, as `score` and `add` of latent.h read them.
// Each vector has one channel of `TOKENS` tokens. What codes are rotated by has entries of 1 and -1, so that it is
// exact in whole numbers; their scales come last.

#pragma once

#include "coded.h"
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

// By what a head's tokens are decoded: what `Sketch` (sketch/codec.py) has of it, `m` of its records, and these.
struct Decoding {
    const uint32_t* codes;
    int64_t room;  // tokens between two words
    const uint8_t* scales;
    const float* units;
    const uint16_t *centres, *weights;
    const Channel* order;
    const float* record_weights;
    int64_t segment_tokens, segments;
    Words words;
    RecordPlaces records;

    int64_t segment_of(int64_t token) const { return std::min(token / segment_tokens, segments - 1); }
    // Where the segment of a token ends.
    int64_t end_of(int64_t token) const {
        const int64_t segment = segment_of(token);
        return segment + 1 < segments ? (segment + 1) * segment_tokens : std::numeric_limits<int64_t>::max();
    }
};

// How tokens of one segment are decoded, of each channel.
struct Fit {
    const uint16_t* found = nullptr;  // whose weights
    float unit, centres[DIM], inverse[DIM], inverse_m[DIM];  // of sketch and record, with the factors of rotations
    int32_t places[DIM];  // among the sketch's

    void find(const Decoding& by, int64_t segment) {
        const int64_t from = segment * DIM;
        const uint16_t* weights = by.weights + from;
        if (found == weights) return;
        found = weights;
        unit = by.units[segment];
        const Channel* order = by.order + from;
        for (int i = 0; i < DIM; i++) {
            const int channel = order[i];
            places[channel] = i;
            inverse[channel] = i < by.words.coded() ? (float)HADAMARD / widen(weights[i]) : 0;
        }
        for (int d = 0; d < DIM; d++) {
            centres[d] = widen(by.centres[from + d]);
            inverse_m[d] = 1 / (sqrtf(KEY_BLOCK) * by.record_weights[d]);
        }
    }
};

// What `count` tokens have of `from`, a number each, and zeros.
template <typename Lanes, typename Number>
INLINED Lanes gathered(const Number* from, ContiguousPlaces, int64_t first, int count) {
    Lanes found = {};
    if (count == TOKENS) return loaded<Lanes>(from + first);
    std::memcpy(&found, from + first, count * sizeof *from);
    return found;
}
template <typename Lanes, typename Number>
INLINED Lanes gathered(const Number* from, IndexedPlaces places, int64_t first, int count) {
    Lanes found = {};
    for (int t = 0; t < count; t++) found[t] = from[places[first + t]];
    return found;
}

// The token that is wanted a tile after this one.
INLINED int64_t find_next(ContiguousPlaces, int64_t t) { return t + TILE; }
INLINED int64_t find_next(IndexedPlaces places, int64_t t) { return places[std::min(t + TILE, places.count - 1)]; }

// Tiles of latents that lie in records.
struct Recorded {
#if PAIRS
    using Found = Tile<1, TILE, 1, TOKEN_WORDS>;
    alignas(CACHE_LINE) Word keys[WORDS][TILE], values[SUMMED_CHANNELS][TOKEN_WORDS];
#else
    using Found = Tile<1, TILE, 1, TILE>;
    alignas(CACHE_LINE) Word keys[WORDS][TILE];
#endif
    alignas(CACHE_LINE) Singles predicted[DIM] = {};  // by the sketch, in its order
    Residuals residuals;
    Fit fit;

    // `count` tokens of one segment, which lie at `places` from number `first` on.
    template <typename Places>
    Found load(const Decoding& by, Places places, int64_t first, int count) {
        fit.find(by, by.segment_of(places[first]));
        for (int start = 0; start < count; start += TOKENS)
            decode(by, places, first + start, std::min(count - start, TOKENS), start);
#if PAIRS
        return {keys[0], (const Word*)values, nullptr};
#else
        return {keys[0], keys[0], nullptr};
#endif
    }

    // Up to `TOKENS` of them, as the tile's from `start` on; behind these are centres.
    template <typename Places>
    INLINED void decode(const Decoding& by, Places places, int64_t first, int count, int start) {
        alignas(CACHE_LINE) float scales[TOKENS] = {};
        for (int t = 0; t < count; t++) {
            const uint8_t* record = by.records.of(places[first + t]);
            const uint8_t* next = by.records.of(find_next(places, first + t));
            for (int byte = 0; byte < RECORD_SIZE; byte += CACHE_LINE) __builtin_prefetch(next + byte, 0, TO_L2);
            scales[t] = widen(loaded<uint16_t>(record));
            expand<KEY_BITS, DIM>(record + KEYS_FROM, residuals.rows[t]);
        }
        residuals.transpose();
        unpack(by, places, first, count);
        const Singles scale = loaded<Singles>(scales);
        for (int block = 0; block < DIM; block += KEY_BLOCK) {
            Residuals::Wholes turned[KEY_BLOCK];
            residuals.turn(block, turned);
            const auto find = [&](int d) {
                const Singles rest = scale * __builtin_convertvector(turned[d - block], Singles);
                return predicted[fit.places[d]] * fit.inverse[d] + fit.centres[d] + rest * fit.inverse_m[d];
            };
#pragma GCC unroll 8
            for (int d = block; d < block + KEY_BLOCK; d += IN_WORD) {
#if PAIRS
                const Singles one = find(d), other = find(d + 1);
                store(keys[d / 2] + start, paired(one, other));
                if (d < SUMMED_CHANNELS) {
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
    template <typename Places>
    INLINED void unpack(const Decoding& by, Places places, int64_t first, int count) {
        const Singles scale = widen(gathered<Octets>(by.scales, places, first, count)) * fit.unit;
        const uint32_t* codes = by.codes;
        Singles* next = predicted;
        for (int word = 0; word < by.words.of_four; word++, codes += by.room)
            unpack_word<4>(gathered<Integers>(codes, places, first, count), scale, next);
        for (int word = 0; word < by.words.of_two; word++, codes += by.room)
            unpack_word<2>(gathered<Integers>(codes, places, first, count), scale, next);
        for (int word = 0; word < by.words.of_one; word++, codes += by.room)
            unpack_word<1>(gathered<Integers>(codes, places, first, count), scale, next);
    }

    template <int BITS>
    static INLINED void unpack_word(Integers packed, Singles scale, Singles*& next) {
        constexpr int MOST = (1 << BITS) - 1;
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
};

}  // namespace
