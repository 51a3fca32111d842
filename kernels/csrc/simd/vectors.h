/* Vectors as wide as the registers of the class, as vector types of GCC and clang. The compiler provides +, *,
 * comparisons and shifts, and fuses a * b + c if the class can. So one source serves AVX-512, AVX2, SSE2 and NEON. */
#pragma once
#include "simd/scalar.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / 4)

/* How many accumulators a tile may have: all registers except some for the operands. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ACCUMULATORS 24
#else
#define ACCUMULATORS 12
#endif

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef int16_t Shorts __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

/* Prefetches a line of a weight into the L2 cache, which has more outstanding misses than the L1 cache. On a Zen 4 linears
 * of one row, which are bound by the memory's bandwidth, take 0.82 to 0.92 of the time (bench/LOG.md). */
#define prefetch_to_l2(line) __builtin_prefetch(line, 0, 2)

INLINE Floats load_floats(const void *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE Words load_words(const void *from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_floats(void *to, Floats x) { memcpy(to, &x, sizeof x); }

/* bfloat16 is the upper half of a float32. */
INLINE Floats load_bf16(const void *from) {
#if VECTOR_BYTES == 32 /* for which GCC would split the load in two */
    return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(from)) << 16);
#else
    Halves x;
    memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

/* Element i of a row of `type` and the LANES - 1 after it. */
INLINE Floats load_vector(const void *row, int64_t i, int type) {
    return type == BF16 ? load_bf16((const uint16_t *)row + i) : load_floats((const float *)row + i);
}

/* The elements of each pair of bfloat16: low_of gives the one at the lower address, high_of the other. */
INLINE Floats low_of(Words pairs) { return (Floats)(pairs << 16); }
INLINE Floats high_of(Words pairs) { return (Floats)(pairs & 0xFFFF0000u); }

#ifdef __AVX512BF16__
#define HAS_DOT 1
/* Rounds to nearest, ties to even, as to_bf16 does; numbers below 2^-126 become 0. */
INLINE void store_bf16(void *to, Floats x) { _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }

/* sum + the product of the low elements + the product of the high ones: half as many instructions as widening. */
INLINE Floats add_dot(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#define HAS_DOT 1
/* Rounds to nearest, ties to even, as to_bf16 does. */
INLINE void store_bf16(void *to, Floats x) { vst1_bf16(to, vcvt_bf16_f32((float32x4_t)x)); }

/* sum + the product of the low elements + the product of the high ones, in one instruction. */
INLINE Floats add_dot(Floats sum, Words a, Words b) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#else
#define HAS_DOT 0
/* Rounds to nearest, ties to even, as to_bf16 does. */
INLINE void store_bf16(void *to, Floats x) {
    Words bits = (Words)x, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    Words nan = (Words)((bits & 0x7FFFFFFF) > 0x7F800000);
    Halves y = __builtin_convertvector((nan & ((bits >> 16) | 0x40)) | (~nan & rounded), Halves);
    memcpy(to, &y, sizeof y);
}

INLINE Floats add_dot(Floats sum, Words a, Words b) {
    return sum + low_of(a) * low_of(b) + high_of(a) * high_of(b);
}
#endif

INLINE void store_vector(void *row, int64_t i, Floats x, int type) {
    if (type == BF16) store_bf16((uint16_t *)row + i, x);
    else store_floats((float *)row + i, x);
}

INLINE Floats rounded_vector(Floats x, int type) {
    if (type != BF16) return x;
    Halves y;
    store_bf16(&y, x);
    return load_bf16(&y);
}

/* 1 / x for finite normal x. */
INLINE Floats reciprocal_of(Floats x) {
#ifdef __AVX512F__
    const Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);
#else
    return 1.0f / x;
#endif
}

INLINE Floats larger_of(Floats a, Floats b) {
    Ints first = a > b;
    return (Floats)((first & (Ints)a) | (~first & (Ints)b));
}

INLINE float largest_lane(Floats x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

INLINE float sum_of_lanes(Floats x) {
    float sum = x[0];
    for (int i = 1; i < LANES; i++) sum += x[i];
    return sum;
}

/* 2^x for x <= 128, to 2 ulp. Below -126 it is exactly 0. The sum with the magic number has round(x) in its low bits; a
 * shift moves them to the exponent. */
INLINE Floats exp2_of(Floats x) {
    const Floats magic = (Floats){} + 12582912.0f;
    const Ints positive = x >= -126.0f;
    x = (Floats)((Ints)x & positive);
    Floats shifted = x + magic, f = x - (shifted - magic);
    Floats y = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
    return (Floats)(((Ints)y + ((Ints)shifted << 23)) & positive);
}

/* e^x for x of -87 to 88, as exp_ of scalar.h computes it. */
INLINE Floats exp_of(Floats x) {
    const Floats magic = (Floats){} + 12582912.0f, shifted = x * 1.44269504f + magic, whole = shifted - magic;
    Floats f = x - whole * 0.693359375f;
    f = f + whole * 2.12194440e-4f;
    Floats y = f * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    return (Floats)((Ints)y + ((Ints)shifted << 23));
}
