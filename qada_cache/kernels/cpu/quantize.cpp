// Codes of keys: `round_keys` of sketch/codec.py. Each vector has one channel of `TOKENS` tokens, so that no sum
// depends on how wide vectors are.

#include "sketch.h"

namespace {

// The arguments, `Quantizing` of quantizing.py: segments one after the other.
struct Quantizing {
    const float *keys, *centres;           // [segments, tokens, DIM], [segments, DIM]
    const int64_t* order;                  // these and the next ones: [segments, channels that have bits]
    const float *weights, *importance;
    const float* most;                     // [segments], or null
    const float *half_steps, *half_levels;  // of a channel that has bits
    uint32_t* codes;                       // [segments, words, tokens]
    float* scales;                         // [segments, tokens]
    int64_t segments, tokens, threads;
    Words words;
};

// Whole numbers of levels as floats, by rounding towards zero: `x` is small, or no number.
INLINED Singles round_down(Singles x) {
    const Singles whole = __builtin_convertvector(__builtin_convertvector(x, Integers), Singles);
    return whole > x ? whole - 1.0f : whole;
}

// `count` tokens of a segment, from `start` on.
void quantize(const Quantizing& call, int64_t segment, int64_t start, int count) {
    const int coded = call.words.coded();
    const float* keys = call.keys + (segment * call.tokens + start) * DIM;
    const float* centres = call.centres + segment * DIM;
    const int64_t* order = call.order + segment * coded;
    const float *weights = call.weights + segment * coded, *importance = call.importance + segment * coded;
    Singles rotated[DIM], levels[DIM];
    for (int c = 0; c < coded; c++) {
        Singles channel = {};
        for (int t = 0; t < count; t++) channel[t] = keys[t * DIM + order[c]];
        rotated[c] = (channel - centres[order[c]]) * weights[c];
    }
    rotate<8>(rotated, coded, (float)HADAMARD);
    Singles scale, square = {};
    for (int c = 0; c < coded; c++) {
        const Singles value = rotated[c] * call.half_steps[c];
        square += value * value;
    }
    for (int t = 0; t < TOKENS; t++) scale[t] = std::sqrt(square[t] / coded);
    for (int rounding = 0; rounding < ROUNDINGS; rounding++) {
        if (call.most) scale = scale > call.most[segment] ? Singles{} + call.most[segment] : scale;
        const Singles step =
            2 * scale < std::numeric_limits<float>::min() ? Singles{} + std::numeric_limits<float>::min() : 2 * scale;
        Singles product = {}, energy = {};
        for (int c = 0; c < coded; c++) {
            const float half = call.half_levels[c];
            Singles level = rotated[c] / step;
            level = level < -half ? Singles{} - half : level;
            level = level > half - 1 ? Singles{} + (half - 1) : level;
            levels[c] = level = round_down(level);
            const Singles odd = 2 * level + 1;
            product += importance[c] * rotated[c] * odd;
            energy += importance[c] * (odd * odd);
        }
        scale = product / energy;
    }
    for (int t = 0; t < count; t++) call.scales[segment * call.tokens + start + t] = scale[t];
    uint32_t* codes = call.codes + segment * call.words.count() * call.tokens + start;
    const Singles* next = levels;
    for (const auto& [bits, words] :
         {std::pair(4, call.words.of_four), std::pair(2, call.words.of_two), std::pair(1, call.words.of_one)})
        for (int word = 0; word < words; word++, codes += call.tokens, next += WORD_BITS / bits) {
            Integers packed = {};
            for (int place = 0; place < WORD_BITS / bits; place++) {
                const Integers index = __builtin_convertvector(next[place] + (float)(1 << (bits - 1)), Integers);
                packed |= (index & ((1 << bits) - 1)) << (place % 4 * 8 + place / 4 * bits);
            }
            std::memcpy(codes, &packed, count * sizeof(uint32_t));
        }
}

}  // namespace

// What quantizing.py says of the size of the arguments is compared with this before they are read.
extern "C" int64_t quantizing_size() { return sizeof(Quantizing); }

extern "C" void round_keys(const Quantizing* call) {
    const int64_t blocks = (call->tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for num_threads(call->threads)
    for (int64_t job = 0; job < call->segments * blocks; job++) {
        const int64_t start = job % blocks * TOKENS;
        quantize(*call, job / blocks, start, std::min<int64_t>(TOKENS, call->tokens - start));
    }
}
