/* Elements and elementary functions written so that the compiler turns loops over them into vectors. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Element types of tensors (the first two) and of KV caches (all), numbered as in kernels/native.py. */
enum { BF16 = 0, F32 = 1, F16 = 2, FP8 = 3, INT8 = 4, INT4 = 5 };

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF;
    uint32_t normal = (rest << 13) + ((rest >= 0x7C00 ? 224u : 112u) << 23);
    return from_bits(sign | (rest < 0x400 ? to_bits((float)(int32_t)rest * 0x1p-24f) : normal));
}

/* float8 e4m3fn, which has no infinities. Its NaN is not handled: no finite row is stored as NaN. */
INLINE float from_e4m3(uint8_t x) {
    uint32_t sign = (uint32_t)(x & 0x80) << 24, rest = x & 0x7F;
    return from_bits(sign | (rest < 8 ? to_bits((float)(int32_t)rest * 0x1p-9f) : (rest << 20) + (120u << 23)));
}

INLINE float get(const void *p, int64_t i, int type) {
    return type == BF16  ? from_bits((uint32_t)((const uint16_t *)p)[i] << 16)
           : type == F16 ? from_f16(((const uint16_t *)p)[i])
                         : ((const float *)p)[i];
}

/* Rounds to nearest, ties to even. NaN gives NaN. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits = to_bits(x), rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

/* As to_bf16, for float16. Values that are too large become infinite. */
INLINE uint16_t to_f16(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    uint32_t normal = (rest + 0xFFF + (rest >> 13 & 1)) - (112u << 23);
    uint32_t small = (uint32_t)(int32_t)rintf((rest < 113u << 23 ? from_bits(rest) : 0.0f) * 0x1p24f);
    uint32_t found = rest < 113u << 23 ? small : rest >= 0x477FF000 ? (rest > 0x7F800000 ? 0x7E00 : 0x7C00) : normal >> 13;
    return (uint16_t)(sign | found);
}

/* As to_bf16, for e4m3. |x| must be at most 448. */
INLINE uint8_t to_e4m3(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 24 & 0x80, rest = bits & 0x7FFFFFFF;
    uint32_t normal = (rest + 0x7FFFF + (rest >> 20 & 1) - (120u << 23)) >> 20;
    uint32_t small = (uint32_t)(int32_t)rintf((rest < 121u << 23 ? from_bits(rest) : 0.0f) * 0x1p9f);
    return (uint8_t)(sign | (rest < 121u << 23 ? small : normal));
}

INLINE float clamped(float x, float max_value) { return x > max_value ? max_value : x < -max_value ? -max_value : x; }

INLINE void put(void *p, int64_t i, float x, int type) {
    if (type == BF16) ((uint16_t *)p)[i] = to_bf16(x);
    else if (type == F16) ((uint16_t *)p)[i] = to_f16(x);
    else ((float *)p)[i] = x;
}

INLINE float rounded(float x, int type) { return type == BF16 ? from_bits((uint32_t)to_bf16(x) << 16) : x; }

/* log(1 + e^x); above 20 that is x, as torch has it. */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE void *at(const void *p, int64_t i, int type) { return (char *)p + i * (type == BF16 ? 2 : 4); }

/* e^x, to 2 ulp. Below -87 it is 0, above 88 infinite. */
INLINE float exp_(float x) {
    float t = x * 1.44269504f;
    float clamped = t < -127.0f ? -127.0f : t > 128.0f ? 128.0f : t;
    float whole = (clamped + 12582912.0f) - 12582912.0f;
    /* Reducing x itself, not x * log2(e), keeps large arguments exact. */
    float f = x - whole * 0.693359375f;
    f = f + whole * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    y *= from_bits((uint32_t)((int32_t)whole + 127) << 23);
    return t <= -126.0f ? 0.0f : t >= 128.0f ? INFINITY : y;
}

/* (log(1 + x) - x + x^2 / 2) / x^3 for x from sqrt(1/2) - 1 to sqrt(2) - 1: the polynomial of the Cephes library.
 * `x`: a variable, a float or a vector of floats. */
#define LOG_POLYNOMIAL(x)                                                                                \
    ((((((((x * 7.0376836292e-2f - 1.1514610310e-1f) * x + 1.1676998740e-1f) * x - 1.2420140846e-1f) * x \
         + 1.4249322787e-1f) * x - 1.6668057665e-1f) * x + 2.0000714765e-1f) * x - 2.4999993993e-1f) * x \
     + 3.3333331174e-1f)

/* log(x) for positive normal x. */
INLINE float log_(float x) {
    uint32_t bits = to_bits(x) - 0x3F3504F3; /* sqrt(1/2) */
    float exponent = (float)((int32_t)bits >> 23);
    float f = from_bits((bits & 0x7FFFFF) + 0x3F3504F3) - 1.0f, z = f * f;
    float y = LOG_POLYNOMIAL(f) * f * z + exponent * -2.12194440e-4f;
    return f + (y - 0.5f * z) + exponent * 0.693359375f;
}
