// Functions of vectors of floats, which have one float of each token or channel.

#pragma once

#include "elements.h"

namespace {

template <typename Lanes>
inline float sum_of(Lanes lanes) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < int(sizeof lanes / sizeof lanes[0]); i++) total += lanes[i];
    return total;
}

// The sums of four vectors [4], in half as many instructions as one by one.
template <typename Lanes>
inline void sum_of_each(const Lanes (&lanes)[4], float* to) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Lanes) == 64) {
        const __m512 a = (__m512)lanes[0], b = (__m512)lanes[1], c = (__m512)lanes[2], d = (__m512)lanes[3];
        const __m512 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
        const __m512 cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
        const __m512 quarters = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
        const __m256 upper = (__m256)_mm512_extractf64x4_pd((__m512d)quarters, 1);
        const __m256 halves = _mm512_castps512_ps256(quarters) + upper;
        _mm_storeu_ps(to, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
        return;
    }
#endif
#if defined(__AVX__)
    if constexpr (sizeof(Lanes) == 32) {
        const __m256 a = (__m256)lanes[0], b = (__m256)lanes[1], c = (__m256)lanes[2], d = (__m256)lanes[3];
        const __m256 ab = _mm256_hadd_ps(a, b), cd = _mm256_hadd_ps(c, d), halves = _mm256_hadd_ps(ab, cd);
        _mm_storeu_ps(to, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
        return;
    }
#endif
#if defined(__aarch64__)
    if constexpr (sizeof(Lanes) == 16) {
        const float32x4_t ab = vpaddq_f32(lanes[0], lanes[1]), cd = vpaddq_f32(lanes[2], lanes[3]);
        vst1q_f32(to, vpaddq_f32(ab, cd));
        return;
    }
#endif
    for (int i = 0; i < 4; i++) to[i] = sum_of(lanes[i]);
}

// exp(x) for x <= 0 to float32 rounding: 2^n times the series of e^r, |r| <= ln(2)/2.
inline float exponential(float x) {
    x = std::max(x, NEGLIGIBLE);
    float n = floorf(x * LOG2_E + 0.5f), r = x - n * 0.693147181f;
    float p = (((1.0f / 5040 * r + 1.0f / 720) * r + 1.0f / 120) * r + 1.0f / 24) * r + 1.0f / 6;
    p = ((p * r + 0.5f) * r + 1) * r + 1;
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

inline float log_sum(float a, float b) {  // nan if one is, which may not be the peak
    float peak = std::max(a, b);
    return peak == -INFINITY ? a + b : peak + logf(expf(a - peak) + expf(b - peak));
}

// Bytes as floats, by intrinsics, as compilers would convert them one by one.
inline Singles widen(Octets octets) {
#if defined(__AVX512F__)
    return (Singles)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)octets));
#elif defined(__AVX2__)
    return (Singles)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(loaded<int64_t>(&octets))));
#elif defined(__aarch64__)
    const uint16x8_t shorts = vmovl_u8(vcreate_u8(loaded<uint32_t>(&octets)));
    return (Singles)vcvtq_f32_u32(vmovl_u16(vget_low_u16(shorts)));
#else
    return __builtin_convertvector(octets, Singles);
#endif
}

constexpr int32_t NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
const Integers numbered = loaded<Integers>(NUMBERS);

// 2^x with a relative error of 3e-6: 2 to the whole part of x, times a polynomial of the fraction. For x above 125,
// large or infinite.
inline Singles power_of_two(Singles x) {
#if defined(__AVX512DQ__)
    Singles r = (Singles)_mm512_reduce_ps((__m512)x, 1);  // above the next lower whole number
#else
    const Integers negligible = x < -125.0f;  // 0, not the smallest power: estimates may lie far above others
    x = x > -125.0f ? x : Singles{} - 125.0f;
    x = x < 125.0f ? x : Singles{} + 125.0f;
    Integers whole = __builtin_convertvector(x + 1023, Integers) - 1023;  // as it rounds towards zero
    Singles r = x - __builtin_convertvector(whole, Singles);
#endif
    Singles p = (((r * 1.35341678e-2f + 5.20114601e-2f) * r + 2.41442755e-1f) * r + 6.93003833e-1f) * r + 1.00000262f;
#if defined(__AVX512DQ__)
    return (Singles)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return (Singles)(((Integers)p + (whole << 23)) & ~negligible);
#endif
}

// One bit for each token whose lane of `mask` is set. A lane has all bits set or none.
inline uint64_t bits_of(Integers mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
    return (uint64_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__aarch64__)
    return vaddvq_u32(vandq_u32((uint32x4_t)mask, (uint32x4_t)((Integers{} + 1) << numbered)));
#else
    uint64_t bits = 0;
    for (int i = 0; i < TOKENS; i++) bits |= (uint64_t)(mask[i] & 1) << i;
    return bits;
#endif
}

// Writes the lanes that `bits` marks one after the other. Up to a whole vector may be written: behind them is garbage.
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

// Marked tokens of a vector: a bit each where the processor has masks, else all bits or none of its lane.
#if defined(__AVX512F__)
typedef __mmask16 Marks;
inline Marks at_least(Singles lanes, float least) {
    return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(least), _CMP_GE_OQ);
}
inline Singles without(Singles lanes, Marks off) { return (Singles)_mm512_maskz_mov_ps((Marks)~off, (__m512)lanes); }
inline Marks first_marks(int count) { return (Marks)((1u << std::clamp(count, 0, TOKENS)) - 1); }
inline uint64_t bits_of(Marks marks) { return marks; }
#else
typedef Integers Marks;
inline Marks at_least(Singles lanes, float least) { return lanes >= least; }
inline Singles without(Singles lanes, Marks off) { return off ? Singles{} : lanes; }
inline Marks first_marks(int count) { return numbered < count; }
#endif

inline float largest(Singles lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)lanes);
#elif defined(__aarch64__)
    return vmaxnmvq_f32(lanes);
#endif
    float found = lanes[0];
    for (int i = 1; i < TOKENS; i++) found = std::max(found, lanes[i]);
    return found;
}

}  // namespace
