// The operations of operations.h by NEON, DotProd and BF16.

#pragma once

#include <arm_neon.h>

namespace {

INLINED Singles fused(Singles a, Singles b, Singles c) { return (Singles)vfmaq_f32(c, a, b); }
INLINED Singles larger(Singles a, Singles b) { return (Singles)vmaxq_f32(a, b); }
INLINED float sum_of(Singles lanes) { return vaddvq_f32(lanes); }
INLINED float largest(Singles lanes) { return vmaxvq_f32(lanes); }
INLINED Integers to_nearest(Singles x) { return (Integers)vcvtnq_s32_f32(x); }
INLINED Integers not_negative(Integers x) { return (Integers)vmaxq_s32((int32x4_t)x, vdupq_n_s32(0)); }
INLINED Singles bounded(Singles power) { return larger(all(-127), power); }  // by that 1 becomes 0; a nan stays one
INLINED Singles whole(Singles x) { return (Singles)vrndmq_f32(x); }
INLINED Singles fraction(Singles x) { return bounded(x) - whole(bounded(x)); }
INLINED Singles scaled(Singles x, Singles power) {
    return (Singles)((Integers)x + (to_nearest(whole(bounded(power))) << 23));
}

#if defined(MULTIPLIES_PAIRS)
INLINED Singles added_pairs(Singles sum, Words left, Words right) {
    return (Singles)vbfdotq_f32(sum, (bfloat16x8_t)left, (bfloat16x8_t)right);
}
INLINED void narrowed(void* to, Singles row) { store(to, vcvt_bf16_f32(row)); }
#endif

constexpr bool QUERY_SIGNED = true;
constexpr int LEVELS = 127;
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int TOGETHER = 1;
template <int COUNT>
INLINED Singles added_codes(Singles sum, const Words* query, const Words* keys) {  // in assembly as in avx512.h
    asm("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(*query), "w"(*keys));
    return sum;
}
#else
// Sums have 16 bits first: of 2 products.
constexpr int TOGETHER = 2;
template <int COUNT>
INLINED Singles added_codes(Singles sum, const Words* query, const Words* keys) {
    int16x8_t low = {}, high = {};
    UNROLLED for (int word = 0; word < COUNT; word++) {
        const int8x16_t one = (int8x16_t)query[word], other = (int8x16_t)keys[word];
        low = vmlal_s8(low, vget_low_s8(one), vget_low_s8(other)), high = vmlal_high_s8(high, one, other);
    }
    return (Singles)vaddq_s32((int32x4_t)sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
#endif

// All bits of a lane, or none.
typedef Integers Marks;
INLINED Marks at_least(Singles a, Singles b) { return a >= b; }
INLINED Singles without(Singles lanes, Marks off) { return (Singles)((Integers)lanes & ~off); }
INLINED uint32_t bits_of(Marks marks) {
    constexpr uint32_t BITS[] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)marks, vld1q_u32(BITS)));
}

INLINED void turn(const uint32_t* rows, int apart, uint32_t* columns, int width) {
    const uint32x4_t a = vld1q_u32(rows), b = vld1q_u32(rows + apart);
    const uint32x4_t c = vld1q_u32(rows + 2 * apart), d = vld1q_u32(rows + 3 * apart);
    const uint64x2_t first = (uint64x2_t)vzip1q_u32(a, b), second = (uint64x2_t)vzip1q_u32(c, d);
    const uint64x2_t third = (uint64x2_t)vzip2q_u32(a, b), fourth = (uint64x2_t)vzip2q_u32(c, d);
    store(columns, vzip1q_u64(first, second)), store(columns + width, vzip2q_u64(first, second));
    store(columns + 2 * width, vzip1q_u64(third, fourth)), store(columns + 3 * width, vzip2q_u64(third, fourth));
}

}  // namespace
