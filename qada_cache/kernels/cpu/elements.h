// Vectors of floats: a head's dimensions, or one number of each of several tokens.
//
// The sizes are macros, so that the compiler can keep the sums in registers:
//
//   DIM, VALUE_DIM   of a head
//   VALUES_IN_KEYS   1 where values are the first channels of the keys, and are not stored
//   QUERIES          that share a head's keys, the query heads of a group
//   BFLOAT16, FLOAT16 or FLOAT32   the type of queries, keys and values; sums are float32
//
//   KEY_BITS, VALUE_BITS, RECORD_SIZE   bits of a record's codes, and its bytes; 0, and a placeholder, without records
//
// So are the constants of a sketch, which Python defines (`CONSTANTS` of __init__.py).
//
// Vectors are an extension of the compilers (GCC, Clang), so hardly anything here is for one processor alone.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(BFLOAT16)
using Element = uint16_t;
#elif defined(FLOAT16) && defined(__aarch64__)
using Element = __fp16;  // the older name, which more compilers know
#elif defined(FLOAT16) && defined(__F16C__)
// GCC before 12 and Clang before 15 have no type of such numbers here.
struct Element {
    uint16_t bits;
    Element() = default;
    Element(float wide) : bits(_cvtss_sh(wide, _MM_FROUND_TO_NEAREST_INT)) {}
    operator float() const { return _cvtsh_ss(bits); }
};
#elif defined(FLOAT16)
using Element = _Float16;
#else
using Element = float;
#endif

// Rows and heads of a tensor. Strides are in elements; 0 where all rows, or heads, share the same memory. In a call of
// several tokens of one row, each token is a row, and all share the row's memory.
template <typename T>
struct View {
    T* data;
    int64_t row_stride, head_stride;
    T* at(int64_t row, int64_t head = 0) const { return data + row * row_stride + head * head_stride; }
};

constexpr int VALUE_STRIDE = VALUES_IN_KEYS ? DIM : VALUE_DIM;  // elements from one token's value to the next one's

using Channel = std::conditional_t<DIM <= 256, uint8_t, int16_t>;  // of codec.py's `choose_order_dtype`

// The floats of a processor's vector: one of each of TOKENS tokens.
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

// Floats in a vector of dimensions: TOKENS, or fewer, so that twice as many divide both dimensions. Two vectors are the
// least that `unpack` makes of bfloat16.
constexpr int fitting(int width) {
    return DIM % (2 * width) == 0 && VALUE_DIM % (2 * width) == 0 ? width : fitting(width / 2);
}
constexpr int WIDTH = fitting(TOKENS);
typedef float Floats __attribute__((vector_size(4 * WIDTH)));

constexpr int CACHE_LINE = 64;     // bytes
constexpr int TO_L2 = 2;           // where prefetches go: more of them are under way at once than to the first level
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 24;      // vectors of sums that stay in registers while values stream by, of 32
#else
constexpr int REGISTERS = 12;      // of 16
#endif
constexpr float LOG2_E = 1.44269504f;
constexpr float ROUNDING = 1e-3f;  // the largest rounding error of logarithms of sums
constexpr float NEGLIGIBLE = -87;  // the exponential of less is less than float32's smallest normal number

template <typename To>
inline To loaded(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline float from_bits(uint32_t bits) { return loaded<float>(&bits); }
inline float widen(uint16_t bfloat16) { return from_bits((uint32_t)bfloat16 << 16); }
inline float widen(float same) { return same; }
// To the nearest bfloat16, ties to even.
inline uint16_t narrow(float wide) {
    const uint32_t bits = loaded<uint32_t>(&wide);
    return wide != wide ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#if defined(FLOAT16)
inline float widen(Element half) { return half; }
#endif
inline Element to_element(float wide) {
#if defined(BFLOAT16)
    return narrow(wide);
#else
    return wide;
#endif
}

// The index at which `unpack` puts dimension `d` of `SIZE`: bfloat16 pairs are split into all even and all odd
// dimensions, which takes one instruction each and no shuffling. Sums do not depend on that order; only code that reads
// or writes single dimensions does.
template <int SIZE>
constexpr int unpacked_index(int d) {
#if defined(BFLOAT16)
    return d % 2 * (SIZE / 2) + d / 2;
#else
    return d;
#endif
}

#if defined(FLOAT16)
// `N` = WIDTH numbers. By itself, GCC uses the processor's instruction for single numbers only.
template <int N>
inline Floats widen(const Element* numbers) {
#if defined(__F16C__)
    if constexpr (N == 16) {
        __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)numbers));
        return loaded<Floats>(&wide);
    } else if constexpr (N == 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)numbers));
        return loaded<Floats>(&wide);
    } else {
        __m128 wide = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)numbers));
        return loaded<Floats>(&wide);
    }
#elif defined(__aarch64__)
    static_assert(N == 4);
    return (Floats)vcvt_f32_f16(vld1_f16(numbers));
#else
    Floats out;
    for (int i = 0; i < N; i++) out[i] = numbers[i];
    return out;
#endif
}
#endif

template <int SIZE>
inline void unpack(const Element* row, Floats* out) {
#if defined(BFLOAT16)
    typedef uint32_t Pairs __attribute__((vector_size(4 * WIDTH)));
    for (int c = 0; c < SIZE / 2 / WIDTH; c++) {
        Pairs pairs = loaded<Pairs>(row + 2 * WIDTH * c);
        out[c] = (Floats)(pairs << 16);
        out[SIZE / 2 / WIDTH + c] = (Floats)(pairs & 0xffff0000u);
    }
#elif defined(FLOAT16)
    for (int c = 0; c < SIZE / WIDTH; c++) out[c] = widen<WIDTH>(row + c * WIDTH);
#else
    for (int c = 0; c < SIZE / WIDTH; c++) out[c] = loaded<Floats>(row + c * WIDTH);
#endif
}

// Always inlined: GCC takes a function that only prefetches for one without effect, and drops calls of it.
#define INLINED inline __attribute__((always_inline))

template <int SIZE>
INLINED void prefetch(const Element* row) {
    for (int byte = 0; byte < int(SIZE * sizeof(Element)); byte += CACHE_LINE)
        __builtin_prefetch((const char*)row + byte, 0, TO_L2);
}

// Dimension `d` of what `unpack` put there. Not by a pointer to float: compilers may assume that it points to something
// else.
template <int SIZE>
inline float unpack_at(const Floats* parts, int d) {
    return parts[unpacked_index<SIZE>(d) / WIDTH][unpacked_index<SIZE>(d) % WIDTH];
}

}  // namespace
