/* Converts rows of a KV cache of any dtype to bfloat16, unscaled. That is exact for all but float16 and float32. */
#pragma once
#include <immintrin.h>

#include "kv_cache.h"

static void widen_row(uint16_t *to, const void *row, int64_t dim, int64_t kind) {
    if (kind == INT4) {
        /* Nibble n stands for n - 8. */
        const __m512i values = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(
            _mm512_set_epi32(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8))));
        for (int64_t half = dim / 2, d = 0; d < half; d += 32) {
            __mmask32 mask = half - d >= 32 ? 0xFFFFFFFF : (1u << (half - d)) - 1;
            __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, (const uint8_t *)row + d));
            __m512i low = _mm512_and_si512(x, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(x, 4);
            _mm512_mask_storeu_epi16(to + d, mask, _mm512_permutexvar_epi16(low, values));
            _mm512_mask_storeu_epi16(to + half + d, mask, _mm512_permutexvar_epi16(high, values));
        }
        return;
    }
    for (int64_t d = 0; d < dim; d += 32) {
        __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0x0000FFFF;
        __m512i y;
        if (kind == FP8) {
            /* A shift puts the fields into place, with another bias. The eight subnormal numbers are looked up. */
            const __m512i small = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(
                _mm512_set_ps(0, 0, 0, 0, 0, 0, 0, 0, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_ps(0x1p-9f))));
            __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, (const uint8_t *)row + d));
            __m512i rest = _mm512_and_si512(x, _mm512_set1_epi16(0x7F));
            y = _mm512_add_epi16(_mm512_slli_epi16(rest, 4), _mm512_set1_epi16(120 << 7));
            y = _mm512_mask_permutexvar_epi16(y, _mm512_cmplt_epu16_mask(rest, _mm512_set1_epi16(8)), rest, small);
            y = _mm512_or_si512(y, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
        } else {
            __m512 low, high;
            if (kind == INT8) {
                __m256i x = _mm256_maskz_loadu_epi8(mask, (const uint8_t *)row + d);
                low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
                high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
            } else if (kind == F16) {
                __m512i x = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)row + d);
                low = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
                high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
            } else {
                low = _mm512_loadu_ps((const float *)row + d);
                high = mask >> 16 ? _mm512_loadu_ps((const float *)row + d + 16) : _mm512_setzero_ps();
            }
            y = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        _mm512_mask_storeu_epi16(to + d, mask, y);
    }
}
