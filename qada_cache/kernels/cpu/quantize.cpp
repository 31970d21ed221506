// Codes of keys: `quantize_segments` of sketch/codec.py. Means are computed on vectors of channels, codes on vectors of
// `TOKENS` tokens of one channel. So a segment's sums depend neither on threads nor on other segments.

#include "sketch.h"

namespace {

// The arguments, as `Quantizing` of quantizing.py. The last segment has all tokens after the others'.
struct Quantizing {
    View<const Element> keys;  // [tokens, DIM]
    const float* energies;  // [rows, heads, DIM]
    const float *half_steps, *levels;  // [DIM]
    uint32_t* codes;  // [rows, heads, words, tokens]
    uint8_t* scales;  // [rows, heads, tokens]
    float* units;  // [rows, heads, segments]; the next ones [rows, heads, segments, DIM]
    uint16_t* centres;
    Channel* order;
    uint16_t* weights;
    float* mean_squares;  // [rows, heads, segments]
    float* exact;  // [rows, heads, tokens], scales before they are rounded
    int64_t rows, heads, tokens, segment_tokens, segments, token_stride, threads;
    Words words;
};

constexpr int VECTORS = DIM / WIDTH;  // of a key
constexpr int SUMMED = 16;  // keys that are summed by themselves: long sums lose more to rounding
constexpr float TINY = std::numeric_limits<float>::min();

// Raises `values` [DIM] to at least `share` of their mean; to 1 if that is at most MIN_MEAN.
void set_floor(float* values, float share) {
    float sum = 0;
    for (int d = 0; d < DIM; d++) sum += values[d];
    const float mean = sum / DIM, least = share * mean;
    for (int d = 0; d < DIM; d++) values[d] = !(mean > (float)MIN_MEAN) ? 1.0f : values[d] > least ? values[d] : least;
}

// `x` rounded down. The conversion to integers rounds towards zero, so negative `x` may end one too high. `x` is small
// enough for an integer, or not a number.
INLINED Singles round_down(Singles x) {
    const Singles whole = __builtin_convertvector(__builtin_convertvector(x, Integers), Singles);
    return whole > x ? whole - 1.0f : whole;
}

// One segment of one head; `job` counts segments of all heads of all rows.
struct Segment {
    const Quantizing& call;
    const int64_t head, start, tokens;  // number among all rows' heads; its first token; number of its tokens
    const Element* const keys;
    uint16_t *const centres, *const weights;
    Channel* const order;
    float importance[DIM];

    Segment(const Quantizing& call, int64_t job)
        : call(call), head(job / call.segments), start(job % call.segments * call.segment_tokens),
          tokens((job + 1) % call.segments ? call.segment_tokens : call.tokens - start),
          keys(call.keys.at(head / call.heads, head % call.heads) + start * call.token_stride),
          centres(call.centres + job * DIM), weights(call.weights + job * DIM), order(call.order + job * DIM) {}

    // The mean over tokens, by channel, of `find(key vector number v, v)`.
    template <typename Find>
    void average(float* means, Find find) const {
        Floats total[VECTORS] = {};
        for (int64_t first = 0; first < tokens; first += SUMMED) {
            Floats sum[VECTORS] = {}, key[VECTORS];
            for (int64_t t = first; t < std::min(first + SUMMED, tokens); t++) {
                unpack<DIM>(keys + t * call.token_stride, key);
                for (int v = 0; v < VECTORS; v++) sum[v] += find(key[v], v);
            }
            for (int v = 0; v < VECTORS; v++) total[v] += sum[v];
        }
        for (int d = 0; d < DIM; d++) means[d] = unpack_at<DIM>(total, d) / tokens;
    }

    // Centres, order and weights, as `find_fit`, and `importance`: by what errors of channels are multiplied.
    void fit() {
        float means[DIM], variances[DIM], energies[DIM], needs[DIM];
        average(means, [](Floats key, int) { return key; });
        Floats centre[VECTORS];
        for (int d = 0; d < DIM; d++) {
            centres[d] = narrow(means[d]);
            centre[unpacked_index<DIM>(d) / WIDTH][unpacked_index<DIM>(d) % WIDTH] = widen(centres[d]);
        }
        average(variances, [&](Floats key, int v) { return (key - centre[v]) * (key - centre[v]); });
        set_floor(variances, (float)MIN_VARIANCE);
        std::memcpy(energies, call.energies + head * DIM, sizeof energies);
        set_floor(energies, (float)MIN_ENERGY);
        for (int d = 0; d < DIM; d++) needs[d] = energies[d] * variances[d];
        for (int d = 0; d < DIM; d++) order[d] = d;
        std::sort(order, order + DIM, [&](Channel one, Channel other) {
            return needs[one] > needs[other] || (needs[one] == needs[other] && one < other);
        });
        for (int d = 0; d < DIM; d++) weights[d] = narrow(1 / std::sqrt(variances[order[d]]) / call.half_steps[d]);
        for (int block = 0; block < DIM; block += ROTATED) {
            float sum = 0;
            for (int d = block; d < block + ROTATED; d++)
                sum += energies[order[d]] / (widen(weights[d]) * widen(weights[d]));
            for (int d = block; d < block + ROTATED; d++) importance[d] = sum / ROTATED;
        }
    }

    // Writes codes of `count` tokens from number `first` on and returns their scales, as `round_keys`.
    Singles round(int64_t first, int count) const {
        const int coded = call.words.coded();
        Singles rotated[DIM], levels[DIM];
        for (int c = 0; c < coded; c++) {
            Singles channel = {};
            for (int t = 0; t < count; t++) channel[t] = widen(keys[(first + t) * call.token_stride + order[c]]);
            rotated[c] = (channel - widen(centres[order[c]])) * widen(weights[c]);
        }
        rotate<ROTATED>(rotated, coded, (float)HADAMARD);
        Singles scale, square = {};
        for (int c = 0; c < coded; c++) {
            const Singles value = rotated[c] * call.half_steps[c];
            square += value * value;
        }
        for (int t = 0; t < TOKENS; t++) scale[t] = std::sqrt(square[t] / coded);
        for (int rounding = 0; rounding < ROUNDINGS; rounding++) {
            const Singles step = 2 * scale < TINY ? Singles{} + TINY : 2 * scale;
            Singles product = {}, energy = {};
            for (int c = 0; c < coded; c++) {
                const float half = call.levels[c] / 2;
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
        uint32_t* codes = call.codes + head * call.words.count() * call.tokens + start + first;
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
        return scale;
    }

    void quantize(int64_t job) {
        float *scales = call.exact + head * call.tokens + start, highest = 0;
        fit();
        for (int64_t first = 0; first < tokens; first += TOKENS) {
            const int count = (int)std::min<int64_t>(TOKENS, tokens - first);
            const Singles found = round(first, count);
            std::memcpy(scales + first, &found, count * sizeof(float));
        }
        for (int64_t t = 0; t < tokens; t++)
            highest = scales[t] > highest || scales[t] != scales[t] ? scales[t] : highest;  // NaN stays
        const float unit = highest / SCALE_LEVELS, step = unit > TINY ? unit : TINY;
        int64_t squares = 0;
        for (int64_t t = 0; t < tokens; t++) {
            const float scale = scales[t] / step;
            const int whole = scale > 0 ? (int)std::nearbyint(std::min(scale, (float)SCALE_LEVELS)) : 0;
            call.scales[head * call.tokens + start + t] = (uint8_t)whole;
            squares += whole * whole;
        }
        call.units[job] = unit;
        call.mean_squares[job] = unit * unit * ((float)squares / tokens);
    }
};

}  // namespace

// quantizing.py compares this with the size of its `Quantizing` before the first call.
extern "C" int64_t quantizing_size() { return sizeof(Quantizing); }

extern "C" void quantize_segments(const Quantizing* call) {
#pragma omp parallel for num_threads(call->threads)
    for (int64_t job = 0; job < call->rows * call->heads * call->segments; job++) Segment(*call, job).quantize(job);
}
