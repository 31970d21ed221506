// Tokens of records as the model made them, but for rounding: `decode_keys` and `decode_values` of sketch/coded.py, for
// calls that read whole bulks. Each vector has one channel of `TOKENS` tokens.

#include "decide.h"

namespace {

// The arguments, `Decoding` of decoding.py.
struct Decoding {
    View<const uint8_t> records;
    View<const uint32_t> codes;  // these and the next ones as in `Sketch` (sketch/codec.py)
    View<const uint8_t> scales;
    View<const float> units;
    View<const uint16_t> centres, weights;
    View<const Channel> order;
    View<const float> record_weights;  // [DIM], `m` of sketch/coded.py
    View<float> keys, values;  // [tokens, DIM] and [tokens, VALUE_DIM]
    int64_t batch, heads, tokens, first;  // of the bulk's tokens, the first one
    int64_t room, segment_tokens, segments, threads;  // of codes, the tokens between two words
    Words words;
};

// `count` tokens of one segment.
struct Block {
    const Decoding& call;
    const int64_t row, head, start, count;
    const int64_t token = call.first + start, segment = std::min(token / call.segment_tokens, call.segments - 1);
    const uint8_t* const records = call.records.at(row, head) + start * RECORD_SIZE;

    // What the sketch says of the keys.
    void predict(Singles* keys) const {
        const uint16_t* centres = call.centres.at(row, head) + segment * DIM;
        const uint16_t* weights = call.weights.at(row, head) + segment * DIM;
        const Channel* order = call.order.at(row, head) + segment * DIM;
        Singles scales = {}, rotated[DIM] = {};
        for (int t = 0; t < count; t++)
            scales[t] = call.scales.at(row, head)[token + t] * call.units.at(row, head)[segment];
        Singles* next = rotated;
        const uint32_t* codes = call.codes.at(row, head) + token;
        for (const auto& [bits, words] :
             {std::pair(4, call.words.of_four), std::pair(2, call.words.of_two), std::pair(1, call.words.of_one)})
            for (int word = 0; word < words; word++, codes += call.room, next += WORD_BITS / bits) {
                Integers packed = {};
                std::memcpy(&packed, codes, count * sizeof(uint32_t));
                for (int place = 0; place < WORD_BITS / bits; place++) {
                    const Integers code = packed >> (place % 4 * 8 + place / 4 * bits) & ((1 << bits) - 1);
                    next[place] = scales * __builtin_convertvector(2 * code - ((1 << bits) - 1), Singles);
                }
            }
        rotate<8>(rotated, call.words.coded(), (float)HADAMARD);
        for (int d = 0; d < DIM; d++) keys[d] = Singles{} + widen(centres[d]);
        for (int d = 0; d < DIM; d++) keys[order[d]] += rotated[d] / widen(weights[d]);
    }

    // What records hold: `SIZE` channels from byte `from` on, by their scale number `of`.
    template <int BITS, int SIZE>
    void decode(int from, int of, Singles* found) const {
        alignas(CACHE_LINE) uint8_t codes[TOKENS][SIZE] = {};
        Singles scales = {};
        for (int t = 0; t < count; t++) {
            const uint8_t* record = records + t * RECORD_SIZE;
            scales[t] = widen(loaded<uint16_t>(record + of * SCALE_BYTES));
            expand<BITS, SIZE>(record + from, codes[t]);
        }
        constexpr int TURNED = SIZE & -SIZE;
        for (int d = 0; d < SIZE; d++) {
            Singles wide;
            for (int t = 0; t < TOKENS; t++) wide[t] = codes[t][d];
            found[d] = scales * (2 * wide - (float)((1 << BITS) - 1));
        }
        rotate<TURNED>(found, SIZE, 1 / sqrtf(TURNED));
    }

    template <int SIZE>
    void write(const Singles* found, float* out) const {
        for (int t = 0; t < count; t++)
            for (int d = 0; d < SIZE; d++) out[(start + t) * SIZE + d] = found[d][t];
    }

    void run() const {
        Singles keys[DIM], found[std::max(DIM, VALUE_DIM)];
        predict(keys);
        decode<KEY_BITS, DIM>(KEYS_FROM, 0, found);
        const float* weights = call.record_weights.at(row, head);
        for (int d = 0; d < DIM; d++) keys[d] += found[d] / weights[d];
        write<DIM>(keys, call.keys.at(row, head));
        decode<VALUE_BITS, VALUE_DIM>(VALUES_FROM, 1, found);
        write<VALUE_DIM>(found, call.values.at(row, head));
    }
};

}  // namespace

// What decoding.py says of the size of the arguments is compared with this before they are read.
extern "C" int64_t decoding_size() { return sizeof(Decoding); }

extern "C" void decode_records(const Decoding* given) {
    const Decoding& call = *given;
    const int64_t blocks = (call.tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for num_threads(call.threads)
    for (int64_t job = 0; job < call.batch * call.heads * blocks; job++) {
        const int64_t row = job / blocks / call.heads, head = job / blocks % call.heads;
        const int64_t stop = std::min((job % blocks + 1) * TOKENS, call.tokens);
        for (int64_t start = job % blocks * TOKENS; start < stop;) {  // a segment may end within
            const int64_t left = call.segment_tokens - (call.first + start) % call.segment_tokens;
            const int64_t count = std::min(stop - start, left);
            Block{call, row, head, start, count}.run();
            start += count;
        }
    }
}
