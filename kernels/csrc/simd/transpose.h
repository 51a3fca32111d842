/* Transposes a square of 32-bit words, one vector wide. */
#pragma once
#include "simd/vectors.h"

/* columns[c][row] = word c of the row that begins `row * stride` bytes behind `rows`, for LANES rows and the first
 * `count` columns: a multiple of 4. */
INLINE void transpose(const uint8_t *rows, int64_t stride, int64_t count, Words columns[LANES]) {
#if defined(__AVX512F__)
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        columns[i] = (Words)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        columns[i + 4] = (Words)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        columns[i + 8] = (Words)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        columns[i + 12] = (Words)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
#elif defined(__AVX2__)
#pragma GCC unroll 2
    for (int c = 0; c < 8; c += 4) {
        if (c >= count) break;
        __m256 r[4], t[4];
        /* Rows i and i + 4 side by side: the rest then stays within the halves of a register. */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(rows + i * stride) + c));
            r[i] = _mm256_insertf128_ps(low, _mm_loadu_ps((const float *)(rows + (i + 4) * stride) + c), 1);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        columns[c] = (Words)_mm256_shuffle_ps(t[0], t[2], 0x44);
        columns[c + 1] = (Words)_mm256_shuffle_ps(t[0], t[2], 0xee);
        columns[c + 2] = (Words)_mm256_shuffle_ps(t[1], t[3], 0x44);
        columns[c + 3] = (Words)_mm256_shuffle_ps(t[1], t[3], 0xee);
    }
#else
    for (int64_t c = 0; c < LANES; c++) {
        uint32_t column[LANES];
        for (int64_t row = 0; row < LANES; row++)
            if (c < count) memcpy(column + row, rows + row * stride + c * 4, 4);
            else column[row] = 0;
        memcpy(columns + c, column, sizeof column);
    }
#endif
}
