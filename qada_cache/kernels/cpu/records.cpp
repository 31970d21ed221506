// Codes tokens as records, and decodes them: `code_tokens`, `decode_keys` and `decode_values` of sketch/coded.py. Each
// vector has one channel of `TOKENS` tokens.

#include "coding.h"

namespace {

// `count` tokens of one segment, at most `TOKENS`; `start` is the first one's number among the call's tokens.
struct CodedTokens {
    const Coding& call;
    const int64_t row, head, start, count;
    const int64_t token = call.first + start, segment = std::min(token / call.segment_tokens, call.segments - 1);
    uint8_t* const records = call.records.at(row, head) + start * RECORD_SIZE;

    // The sketch's estimates of the keys.
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

    // Decodes the `SIZE` channels of keys (`which` 0) or values (`which` 1). Their codes begin at byte `from` of a
    // record, and their scale is its scale number `which`.
    template <int BITS, int SIZE>
    void decode(int from, int which, Singles* found) const {
        alignas(CACHE_LINE) uint8_t codes[TOKENS][SIZE] = {};
        Singles scales = {};
        for (int t = 0; t < count; t++) {
            const uint8_t* record = records + t * RECORD_SIZE;
            scales[t] = widen(loaded<uint16_t>(record + which * SCALE_BYTES));
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

    // The inverse of `decode`, as `quantize_evenly`; `wide` is rotated in place.
    template <int BITS, int SIZE>
    void code(int from, int which, Singles* wide) const {
        constexpr int TURNED = SIZE & -SIZE, MOST = (1 << BITS) - 1, HALF = 1 << (BITS - 1);
        rotate<TURNED>(wide, SIZE, 1 / sqrtf(TURNED));
        Singles highest = {};
        for (int d = 0; d < SIZE; d++) {
            const Singles size = wide[d] < 0.0f ? -wide[d] : wide[d];
            highest = ((size > highest) | (size != size)) ? size : highest;  // NaN stays
        }
        Singles inverse;
        uint16_t scales[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            scales[t] = narrow(highest[t] / (1 << BITS));
            inverse[t] = 0.5f / std::max(widen(scales[t]), std::numeric_limits<float>::min());
        }
        alignas(CACHE_LINE) uint8_t codes[TOKENS][SIZE];
        for (int d = 0; d < SIZE; d++) {
            Singles level = wide[d] * inverse + (float)HALF;
            level = level > 0.0f ? level : Singles{};
            level = level < (float)MOST ? level : Singles{} + (float)MOST;
            const Octets code = __builtin_convertvector(__builtin_convertvector(level, Integers), Octets);
            for (int t = 0; t < TOKENS; t++) codes[t][d] = code[t];
        }
        for (int t = 0; t < count; t++) {
            uint8_t* record = records + t * RECORD_SIZE;
            std::memcpy(record + which * SCALE_BYTES, &scales[t], SCALE_BYTES);
            collect<BITS, SIZE>(codes[t], record + from);
        }
    }

    // The inverse of `expand`, for eight codes at once: bits of neighbours are joined, then of pairs, then of fours.
    template <int BITS, int SIZE>
    static void collect(const uint8_t* codes, uint8_t* planes) {
        static_assert(SIZE % 8 == 0);
        int done = 0;
        for (int plane : {4, 2, 1}) {
            if (!(BITS & plane)) continue;
            for (int first = 0; first < SIZE; first += 8, planes += plane) {
                uint64_t bits = loaded<uint64_t>(codes + first) >> done & 0x0101010101010101u * ((1u << plane) - 1);
                bits = (bits | bits >> (8 - plane)) & 0x0001000100010001u * ((1u << 2 * plane) - 1);
                bits = (bits | bits >> (16 - 2 * plane)) & 0x0000000100000001u * ((1u << 4 * plane) - 1);
                bits |= bits >> (32 - 4 * plane);
                std::memcpy(planes, &bits, plane);
            }
            done += plane;
        }
    }

    template <int SIZE>
    void read(const float* from, int64_t stride, Singles* found) const {
        for (int d = 0; d < SIZE; d++) found[d] = Singles{};
        for (int t = 0; t < count; t++)
            for (int d = 0; d < SIZE; d++) found[d][t] = from[(start + t) * stride + d];
    }

    template <int SIZE>
    void write(const Singles* found, float* out, int64_t stride) const {
        for (int t = 0; t < count; t++)
            for (int d = 0; d < SIZE; d++) out[(start + t) * stride + d] = found[d][t];
    }

    void code() const {
        Singles keys[DIM], found[std::max(DIM, VALUE_DIM)];
        for (int t = 0; t < count; t++) std::memset(records + t * RECORD_SIZE, 0, RECORD_SIZE);
        predict(keys);
        read<DIM>(call.keys.at(row, head), call.key_stride, found);
        const float* weights = call.record_weights.at(row, head);
        for (int d = 0; d < DIM; d++) found[d] = (found[d] - keys[d]) * weights[d];
        code<KEY_BITS, DIM>(KEYS_FROM, 0, found);
        if constexpr (VALUE_DIM > 0) {
            read<VALUE_DIM>(call.values.at(row, head), call.value_stride, found);
            code<VALUE_BITS, VALUE_DIM>(VALUES_FROM, 1, found);
        }
    }

    void decode() const {
        Singles keys[DIM], found[std::max(DIM, VALUE_DIM)];
        predict(keys);
        decode<KEY_BITS, DIM>(KEYS_FROM, 0, found);
        const float* weights = call.record_weights.at(row, head);
        for (int d = 0; d < DIM; d++) keys[d] += found[d] / weights[d];
        write<DIM>(keys, call.keys.at(row, head), call.key_stride);
        if constexpr (VALUE_DIM > 0) {
            decode<VALUE_BITS, VALUE_DIM>(VALUES_FROM, 1, found);
            write<VALUE_DIM>(found, call.values.at(row, head), call.value_stride);
        }
    }
};

// The call's tokens, in blocks.
template <typename Work>
void for_blocks(const Coding& call, Work work) {
    const int64_t blocks = (call.tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for num_threads(call.threads)
    for (int64_t job = 0; job < call.batch * call.heads * blocks; job++) {
        const int64_t row = job / blocks / call.heads, head = job / blocks % call.heads;
        const int64_t stop = std::min((job % blocks + 1) * TOKENS, call.tokens);
        for (int64_t start = job % blocks * TOKENS; start < stop;) {  // a segment may end within
            const int64_t left = call.segment_tokens - (call.first + start) % call.segment_tokens;
            const int64_t count = std::min(stop - start, left);
            work(CodedTokens{call, row, head, start, count});
            start += count;
        }
    }
}

}  // namespace

// recording.py compares this with the size of its `Coding` before the first call.
extern "C" int64_t coding_size() { return sizeof(Coding); }

extern "C" void code_records(const Coding* call) {
    for_blocks(*call, [](const CodedTokens& tokens) { tokens.code(); });
}

extern "C" void decode_records(const Coding* call) {
    for_blocks(*call, [](const CodedTokens& tokens) { tokens.decode(); });
}
