/* Rows of quantised and of float16 caches as classes with AVX2 but without dot products read them: elements become
 * float32 in registers, unscaled and exact. Those of FP8 become 2^-8 times their value, and their scales are multiplied
 * by FP8_SCALE for that. */
#pragma once
#include "attention/item.h"
#include "simd/transpose.h"

#if CONVERTS_IN_PLACE

/* The sign, exponent and mantissa of e4m3 within float16, whose exponent's bias is larger by 8. F16C converts subnormal
 * numbers in any state of the processor's flags, but a multiplication of float32 may take them for 0. */
#define FP8_FIELDS 0xBF80

#if LANES == 16
INLINE Floats from_halves(__m256i halves) { return (Floats)_mm512_cvtph_ps(halves); }
#else
INLINE Floats from_halves(__m128i halves) { return (Floats)_mm256_cvtph_ps(halves); }
#endif

/* Elements [d, d + LANES) of a row. For INT4 and INT4_HIGH: of its first and of its second half. */
INLINE Floats load_converted(const uint8_t *row, int64_t d, const int type) {
#if LANES == 16
    if (type == F16) return from_halves(_mm256_loadu_si256((const __m256i *)(row + 2 * d)));
    const __m128i x = _mm_loadu_si128((const __m128i *)(row + d));
    if (type == FP8)
        return from_halves(_mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7),
                                            _mm256_set1_epi16((int16_t)FP8_FIELDS)));
    const Ints codes = type == INT8 ? (Ints)_mm512_cvtepi8_epi32(x) : (Ints)_mm512_cvtepu8_epi32(x);
#else
    if (type == F16) return from_halves(_mm_loadu_si128((const __m128i *)(row + 2 * d)));
    const __m128i x = _mm_loadl_epi64((const __m128i *)(row + d));
    if (type == FP8)
        return from_halves(
            _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(x), 7), _mm_set1_epi16((int16_t)FP8_FIELDS)));
    const Ints codes = type == INT8 ? (Ints)_mm256_cvtepi8_epi32(x) : (Ints)_mm256_cvtepu8_epi32(x);
#endif
    if (type == INT8) return __builtin_convertvector(codes, Floats);
    return __builtin_convertvector(type == INT4 ? codes & 15 : codes >> 4, Floats) - 8.0f;
}

/* Converts a row. For INT4 half of it must be whole vectors. */
INLINE void convert_row(float *to, const uint8_t *row, int64_t dim, const int type) {
    const int64_t end = type == INT4 ? dim / 2 : dim;
    for (int64_t d = 0; d < end; d += LANES) {
        store_floats(to + d, load_converted(row, d, type));
        if (type == INT4) store_floats(to + end + d, load_converted(row, d, INT4_HIGH));
    }
}

#if LANES == 8
/* pack_converted for F16 and FP8. F16C needs the halves of the 16 keys side by side, in order. */
INLINE void pack_halves(const uint8_t *rows, int64_t stride, int64_t dim, const int type, uint32_t *to) {
    const __m256i fields = _mm256_set1_epi16((int16_t)FP8_FIELDS);
    const int elements = type == F16 ? 1 : 2;
    for (int64_t byte = 0, bytes = type == F16 ? 2 * dim : dim; byte < bytes; byte += 16) {
        Words even[LANES], odd[LANES]; /* four words of keys 0, 2, 4, ... and of keys 1, 3, 5, ... */
        transpose(rows + byte, 2 * stride, 4, even);
        transpose(rows + stride + byte, 2 * stride, 4, odd);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            /* Of each of the 16 keys one element of F16, or two of FP8. */
            const __m256i a = (__m256i)even[i / 2], b = (__m256i)odd[i / 2];
            const __m256i x = i % 2 ? _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA)
                                    : _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA);
#pragma GCC unroll 2
            for (int e = 0; e < elements; e++, to += PART) {
                const __m256i top = e ? x : _mm256_slli_epi16(x, 8);
                const __m256i halves = type == F16 ? x : _mm256_and_si256(_mm256_srai_epi16(top, 1), fields);
                store_floats(to, from_halves(_mm256_castsi256_si128(halves)));
                store_floats(to + LANES, from_halves(_mm256_extracti128_si256(halves, 1)));
            }
        }
    }
}
#endif

/* Element e of each word. For INT4: nibble e, less 8, which turns its upper bit. */
INLINE Floats element_of(Words words, const int e, const int type) {
#if LANES == 16
    if (type == F16) return from_halves(_mm512_cvtepi32_epi16((__m512i)(words >> 16 * e)));
    if (type == FP8) {
        const Words halves = (Words)((Ints)(words << (24 - 8 * e)) >> 17) & FP8_FIELDS;
        return from_halves(_mm512_cvtepi32_epi16((__m512i)halves));
    }
#endif
    const Ints codes = type == INT4 ? (Ints)((words ^ 0x88888888u) << (28 - 4 * e)) >> 28
                                    : (Ints)(words << (24 - 8 * e)) >> 24;
    return __builtin_convertvector(codes, Floats);
}

/* Transposes a part of keys to words [dim][PART]. A row's bytes are a multiple of 16. */
INLINE void pack_converted(const uint8_t *rows, int64_t stride, int64_t dim, const int type, uint32_t *to) {
#if LANES == 8
    if (type == F16 || type == FP8) {
        pack_halves(rows, stride, dim, type, to);
        return;
    }
#endif
    const int elements = type == F16 ? 2 : type == INT4 ? 8 : 4; /* of a word */
    const int64_t words = dim / elements, step = LANES == 8 ? 4 : LANES;
    for (int64_t w = 0; w < words; w += step)
        for (int64_t j = 0; j < PART; j += LANES) {
            const int64_t count = LANES == 8 ? step : min_i64(step, words - w);
            Words columns[LANES];
            transpose(rows + j * stride + w * 4, stride, count, columns);
#pragma GCC unroll 16
            for (int64_t i = 0; i < step; i++) {
                if (i % 4 == 0 && i >= count) break;
                uint32_t *first = to + (w + i) * (type == F16 ? 2 : 4) * PART + j;
#pragma GCC unroll 8
                for (int e = 0; e < elements; e++) {
                    const int64_t d = type == INT4 ? e / 2 + e % 2 * (dim / 2) : e;
                    store_floats(first + d * PART, element_of(columns[i], e, type));
                }
            }
        }
}
#endif
