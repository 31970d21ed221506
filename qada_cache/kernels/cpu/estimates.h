// Estimates of the scores of a sketched bulk, a span of tokens at a time, and what a few spans say of the weight of all.

#pragma once

#include "sketch.h"

namespace {

// As wide as the processor's vectors: one float of each of so many tokens.
#if defined(__AVX512F__)
constexpr int TOKENS = 16;
#elif defined(__AVX__)
constexpr int TOKENS = 8;
#else
constexpr int TOKENS = 4;
#endif
typedef float Singles __attribute__((vector_size(4 * TOKENS)));
typedef int32_t Integers __attribute__((vector_size(4 * TOKENS)));
typedef uint8_t Octets __attribute__((vector_size(TOKENS)));

constexpr int VECTORS = SPAN / TOKENS;
constexpr int SAMPLED_SPANS = 15;      // spans of which a sample is made, at most
constexpr int MIN_SAMPLED_SPANS = 64;  // spans from which on there is one
constexpr float MARGIN = 0.5f;         // by which the logarithm of all weight may be below what the sample says

template <typename Lanes>
inline Lanes loaded(const void* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

constexpr int32_t NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
const Integers numbered = loaded<Integers>(NUMBERS);

// 2^x but for an error of 3e-6: a whole power times a polynomial for what is left. Far above 1, large or infinite.
inline Singles power_of_two(Singles x) {
#if defined(__AVX512DQ__)
    Singles r = (Singles)_mm512_reduce_ps((__m512)x, 1);  // above the next lower whole number
#else
    x = x > -125.0f ? x : Singles{} - 125.0f;
    x = x < 125.0f ? x : Singles{} + 125.0f;
    Integers whole = __builtin_convertvector(x + 1023, Integers) - 1023;  // as it rounds towards zero
    Singles r = x - __builtin_convertvector(whole, Singles);
#endif
    Singles p = r * 1.35341678e-2f + 5.20114601e-2f;
    p = p * r + 2.41442755e-1f;
    p = p * r + 6.93003833e-1f;
    p = p * r + 1.00000262f;
#if defined(__AVX512DQ__)
    return (Singles)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return (Singles)((Integers)p + (whole << 23));
#endif
}

// One bit for each token where `mask` is set, which is in all bits or none.
inline uint64_t bits_of(Integers mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
    return (uint64_t)_mm256_movemask_ps((__m256)mask);
#else
    uint64_t bits = 0;
    for (int i = 0; i < TOKENS; i++) bits |= (uint64_t)(mask[i] & 1) << i;
    return bits;
#endif
}

// Writes the marked ones of `lanes` one after the other, and anything behind them, as many as a vector has in all.
template <typename Lanes>
inline void compress(Lanes lanes, uint64_t bits, void* to) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)lanes));
#else
    for (Integers values = (Integers)lanes; bits; bits &= bits - 1, to = (int32_t*)to + 1) {
        int32_t value = values[__builtin_ctzll(bits)];
        std::memcpy(to, &value, sizeof value);
    }
#endif
}

inline float sum_of(Singles lanes) {
    float total = 0;
    for (int i = 0; i < TOKENS; i++) total += lanes[i];
    return total;
}

inline float largest(Singles lanes) {
    float found = lanes[0];
    for (int i = 1; i < TOKENS; i++) found = std::max(found, lanes[i]);
    return found;
}

// Estimates of a head's queries over its sketch: `codes` [words, *], `room` words apart, and `scales` [tokens], in
// segments of `segment_tokens`, for each of which the queries were rounded; the last one has what is left.
struct Estimates {
    const std::vector<Rounded>& segments;
    const int64_t segment_tokens;
    const uint32_t* codes;
    const int64_t room;
    const Words words;
    const uint8_t* scales;
    const int count = segments[0].count;  // of queries
    Singles scores[QUERIES][VECTORS];  // of the span that was computed last, -inf where there is no token

    // Of `tokens` tokens from `first` on, all of one segment.
    template <bool ALL = false>
    INLINED void compute(int64_t first, int tokens) {
        const int count = ALL ? QUERIES : this->count;
        const Rounded& queries = segments[std::min<int64_t>(first / segment_tokens, segments.size() - 1)];
        const uint32_t* block = codes + first;
        const uint8_t* block_scales = scales + first;
        int64_t stride = room;
        uint32_t padded[DIM / 8 * SPAN];  // no more words than blocks of channels
        uint8_t padded_scales[SPAN];
        if (tokens < SPAN) {
            std::memset(padded, 0, sizeof padded);
            std::memset(padded_scales, 0, sizeof padded_scales);
            for (int word = 0; word < words.count(); word++)
                std::memcpy(padded + word * SPAN, block + word * stride, tokens * sizeof *block);
            std::memcpy(padded_scales, block_scales, tokens);
            block = padded;
            block_scales = padded_scales;
            stride = SPAN;
        } else {
            prefetch_span(first + PREFETCH_SPANS * SPAN);
        }
        alignas(CACHE_LINE) int32_t exact[QUERIES][SPAN];
        multiply(block, stride, words, queries, exact);
        Singles scale[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            scale[v] = __builtin_convertvector(loaded<Octets>(block_scales + v * TOKENS), Singles);
        for (int q = 0; q < count; q++) {
            float step = queries.step[q], offset = queries.offset[q];
            float spread = queries.spread[q], middle = queries.middle[q];
            for (int v = 0; v < VECTORS; v++) {
                Integers whole = loaded<Integers>(&exact[q][v * TOKENS]);
                Singles along = step * __builtin_convertvector(whole, Singles) - offset;
                scores[q][v] = middle + scale[v] * (along + spread * scale[v]);
            }
        }
        for (int t = tokens; t < SPAN; t++)
            for (int q = 0; q < count; q++) scores[q][t / TOKENS][t % TOKENS] = -INFINITY;
    }

    INLINED void prefetch_span(int64_t first) const {
        for (int word = 0; word < words.count(); word++)
            for (int key = 0; key < SPAN; key += CACHE_LINE / 4)
                __builtin_prefetch(codes + word * room + first + key, 0, TO_L2);
    }

    // How many spans are sampled, and where the first token of one of them lies.
    static int sampled_spans(int64_t spans) {
        return spans < MIN_SAMPLED_SPANS ? 0 : (int)std::min<int64_t>(SAMPLED_SPANS, spans / 16 | 1);
    }
    static int64_t sampled_span(int i, int64_t spans) {
        return (2 * i + 1) * spans / (2 * sampled_spans(spans)) * SPAN;
    }
    INLINED void prefetch_sample(int64_t tokens) const {
        for (int i = 0; i < sampled_spans(tokens / SPAN); i++) prefetch_span(sampled_span(i, tokens / SPAN));
    }

    // About the log-sum-exp of each query's scores of `tokens` tokens, seldom above it; -inf where they are few.
    void sample_log_mass(int64_t tokens, float* log_mass) {
        float sampled[QUERIES][SAMPLED_SPANS];
        int64_t spans = tokens / SPAN;
        std::fill(log_mass, log_mass + QUERIES, -INFINITY);
        const int many = sampled_spans(spans);
        if (!many) return;
        for (int i = 0; i < many; i++) {
            compute(sampled_span(i, spans), SPAN);
            for (int q = 0; q < count; q++) {
                Singles peaks = scores[q][0], mass = {};
                for (int v = 1; v < VECTORS; v++) peaks = scores[q][v] > peaks ? scores[q][v] : peaks;
                const float peak = largest(peaks);
                for (int v = 0; v < VECTORS; v++) mass += power_of_two((scores[q][v] - peak) * LOG2_E);
                float log_span = peak + logf(sum_of(mass));
                sampled[q][i] = log_span > -INFINITY ? log_span : -INFINITY;  // no nan, which cannot be sorted
            }
        }
        for (int q = 0; q < count; q++) {  // the median, which a few heavy tokens cannot raise
            std::nth_element(sampled[q], sampled[q] + many / 2, sampled[q] + many);
            log_mass[q] = sampled[q][many / 2] + logf((float)spans) - MARGIN;
        }
    }
};

}  // namespace
