// Decodes latents from records of few bits (sketch/coded.py), a tile at a time, as `score` and `add` of latent.h read
// them. Each vector has one channel of `TOKENS` tokens. Codes are rotated by a matrix of 1 and -1, which is exact in
// integers, and multiplied by their scales last.

#pragma once

#include "coded.h"
#include "latent.h"

namespace {

// Interleaves bytes of two vectors: of the first 8 of each 16, or of the second 8 if `SECOND`.
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
    Row bytes;
    for (int lane = 0; lane < int(sizeof bytes); lane += 16)
        for (int i = 0; i < 8; i++) {
            bytes[lane + 2 * i] = one[lane + SECOND * 8 + i];
            bytes[lane + 2 * i + 1] = other[lane + SECOND * 8 + i];
        }
    return bytes;
#endif
}

// Multiplies vectors of `SIZE` channels by a Hadamard matrix, unnormalized: sums and differences of channels that are
// 1, 2, 4 and so on apart. Up to three such steps are computed in registers at once.
template <int SIZE, int APART = 1, typename Lanes>
INLINED void add_and_subtract(Lanes* block) {
    if constexpr (APART < SIZE) {
        constexpr int TOGETHER = std::min(8, SIZE / APART);
        for (int outer = 0; outer < SIZE; outer += APART * TOGETHER)
            for (int first = outer; first < outer + APART; first++) {
                Lanes channels[TOGETHER];
#pragma GCC unroll 8
                for (int i = 0; i < TOGETHER; i++) channels[i] = block[first + i * APART];
#pragma GCC unroll 8
                for (int apart = 1; apart < TOGETHER; apart *= 2)
#pragma GCC unroll 8
                    for (int i = 0; i < TOGETHER; i++)
                        if (!(i & apart)) {
                            const Lanes one = channels[i], other = channels[i + apart];
                            channels[i] = one + other;
                            channels[i + apart] = one - other;
                        }
#pragma GCC unroll 8
                for (int i = 0; i < TOGETHER; i++) block[first + i * APART] = channels[i];
            }
        add_and_subtract<SIZE, APART * TOGETHER>(block);
    }
}

// The keys' codes of `TOKENS` records, by token (`rows`) and by channel (`columns`).
struct Residuals {
    static constexpr int CHUNK = sizeof(Row), CHUNKS = (DIM + CHUNK - 1) / CHUNK;  // channels
    static constexpr int MOST = (1 << KEY_BITS) - 1;
    // Integers wide enough for a sum of a block's odd integers, `2 * code - MOST`.
    using Whole = std::conditional_t < 2 * MOST* KEY_BLOCK<1 << 15, int16_t, int32_t>;
    typedef Whole Wholes __attribute__((vector_size(sizeof(Whole) * TOKENS)));

    alignas(CACHE_LINE) uint8_t rows[TOKENS][CHUNKS * CHUNK] = {}, columns[CHUNKS * CHUNK * TOKENS];

    // Writes `rows` into `columns`, where the codes of a channel are neighbours.
    INLINED void transpose() {
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            Row bytes[TOKENS];
#pragma GCC unroll 16
            for (int t = 0; t < TOKENS; t++) bytes[t] = loaded<Row>(rows[t] + chunk * CHUNK);
#pragma GCC unroll 4
            for (int step = 1; step < TOKENS; step *= 2) {
                Row next[TOKENS];
#pragma GCC unroll 8
                for (int i = 0; i < TOKENS / 2; i++) {
                    next[2 * i] = interleaved<false>(bytes[i], bytes[i + TOKENS / 2]);
                    next[2 * i + 1] = interleaved<true>(bytes[i], bytes[i + TOKENS / 2]);
                }
#pragma GCC unroll 16
                for (int t = 0; t < TOKENS; t++) bytes[t] = next[t];
            }
            std::memcpy(columns + chunk * CHUNK * TOKENS, bytes, sizeof bytes);
        }
    }

    // The index in `columns` of a channel's codes: a vector has `FITTING` channels of each 16.
    static constexpr int find_place(int channel) {
        constexpr int FITTING = 16 / TOKENS;
        return channel / CHUNK * CHUNK * TOKENS + channel % 16 / FITTING * CHUNK + channel % CHUNK / 16 * 16 +
               channel % FITTING * TOKENS;
    }

    // Rotates the odd integers `2 * code - MOST` of the `KEY_BLOCK` channels from `first` on. `MOST` is the same for
    // all channels, so rotating it changes the first one alone.
    INLINED void turn(int first, Wholes* rotated) const {
        for (int d = 0; d < KEY_BLOCK; d++)
            rotated[d] = 2 * __builtin_convertvector(loaded<Octets>(columns + find_place(first + d)), Wholes);
        add_and_subtract<KEY_BLOCK>(rotated);
        rotated[0] -= (Whole)(MOST * KEY_BLOCK);
    }
};

// The inputs for decoding a head's tokens: fields of `Sketch` (sketch/codec.py), the records and their weights `m`.
struct Decoding {
    const uint32_t* codes;
    int64_t room;  // `codes` are [words, room]
    const uint8_t* scales;
    const float* units;
    const uint16_t *centres, *weights;
    const Channel* order;
    const float* record_weights;
    int64_t segment_tokens, segments;
    Words words;
    RecordPlaces records;

    int64_t segment_of(int64_t token) const { return std::min(token / segment_tokens, segments - 1); }
    // The end of a token's segment; the last one has none.
    int64_t end_of(int64_t token) const {
        const int64_t segment = segment_of(token);
        return segment + 1 < segments ? (segment + 1) * segment_tokens : std::numeric_limits<int64_t>::max();
    }
};

// Factors and places of channels, for decoding tokens of one segment.
struct Fit {
    const uint16_t* segment_weights = nullptr;  // of the segment that the other fields are for
    // `inverse` and `inverse_m` are reciprocals of the sketch's weights and the records', times factors of rotations.
    float unit, centres[DIM], inverse[DIM], inverse_m[DIM];
    int32_t places[DIM];  // of channels in the sketch's order

    void find(const Decoding& by, int64_t segment) {
        const int64_t from = segment * DIM;
        const uint16_t* weights = by.weights + from;
        if (segment_weights == weights) return;
        segment_weights = weights;
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

// A number of `from` for each of `count` tokens, those at `places` from index `first` on; zeros behind.
template <typename Lanes, typename Number>
INLINED Lanes gathered(const Number* from, ContiguousPlaces, int64_t first, int count) {
    Lanes numbers = {};
    if (count == TOKENS) return loaded<Lanes>(from + first);
    std::memcpy(&numbers, from + first, count * sizeof *from);
    return numbers;
}
template <typename Lanes, typename Number>
INLINED Lanes gathered(const Number* from, IndexedPlaces places, int64_t first, int count) {
    Lanes numbers = {};
    for (int t = 0; t < count; t++) numbers[t] = from[places[first + t]];
    return numbers;
}

// The token that is read a tile after token number `t`, to prefetch its record.
INLINED int64_t find_next(ContiguousPlaces, int64_t t) { return t + TILE; }
INLINED int64_t find_next(IndexedPlaces places, int64_t t) { return places[std::min(t + TILE, places.count - 1)]; }

// Room for a tile of latents decoded from records.
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

    // Decodes `count` tokens of one segment, those at `places` from index `first` on.
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

    // Decodes up to `TOKENS` of them, to tokens `start` and so on of the tile. Behind these the tile has centres.
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
            Residuals::Wholes rotated[KEY_BLOCK];
            residuals.turn(block, rotated);
            const auto find = [&](int d) {
                const Singles rest = scale * __builtin_convertvector(rotated[d - block], Singles);
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

    // Sets `predicted` to the sketch's estimate, without the factors of `Fit`.
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
