/* y = x W^T + b for a weight packed in panels of 16 output features. AVX-512 only; other processors use oneDNN.
 *
 * A panel is [K][16] of words; a word is one float, or a pair of bfloat16 neighbours along K, which vdpbf16ps
 * multiplies and adds at once. x is repacked per tile of m rows as [K][m] words, so that the inner loop is one load of
 * 16 weights and m broadcasts. Every output is one accumulator running over K in order, in every tile: a row's
 * result never depends on how many rows share the call.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS 24 /* accumulators of one tile: 24 of the 32 registers */
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const uint32_t *packed; /* [panels][words][16] */
    const void *bias;       /* [features] or null */
    void *y;                /* [rows][ldy] */
    int64_t words, features, ldy;
} Product;

INLINE __m512 step_bf16(__m512 acc, __m512i weights, const uint32_t *x) {
    return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)*x));
}

INLINE __m512 step_f32(__m512 acc, __m512i weights, const uint32_t *x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(_mm512_set1_epi32((int)*x)), acc);
}

INLINE void put(const Product *p, __m512 acc, int64_t row, int64_t column, int is_bf16) {
    int64_t left = p->features - column;
    __mmask16 mask = left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);
    int64_t at = row * p->ldy + column;
    if (is_bf16) {
        if (p->bias) {
            __m256i b = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)p->bias + column);
            acc = _mm512_add_ps(acc, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
        }
        _mm256_mask_storeu_epi16((uint16_t *)p->y + at, mask, (__m256i)_mm512_cvtneps_pbh(acc));
    } else {
        if (p->bias) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, (const float *)p->bias + column));
        _mm512_mask_storeu_ps((float *)p->y + at, mask, acc);
    }
}

/* m rows by n panels; both are constants at every call, so that the loops unroll into registers. */
INLINE void tile(const int m, const int n, const int is_bf16, const Product *p, const uint32_t *x, int64_t row,
                 int64_t panel) {
    __m512 acc[MAX_ROWS];
    const uint32_t *w = p->packed + panel * p->words * 16;
    const int64_t stride = p->words * 16;
#pragma GCC unroll 32
    for (int i = 0; i < m * n; i++) acc[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->words; k++, w += 16, x += m) {
        __m512i weights[4];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            weights[j] = _mm512_loadu_si512(w + j * stride);
            _mm_prefetch((const char *)(w + j * stride + 16 * 48), _MM_HINT_T0);
        }
#pragma GCC unroll 32
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++)
                acc[i * n + j] = is_bf16 ? step_bf16(acc[i * n + j], weights[j], x + i)
                                         : step_f32(acc[i * n + j], weights[j], x + i);
    }
#pragma GCC unroll 32
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) put(p, acc[i * n + j], row + i, (panel + j) * 16, is_bf16);
}

/* How many panels a tile of m rows takes at once: enough independent chains to hide the latency of the sum. */
static int panels_at_once(int64_t m) { return m <= 6 ? 4 : m <= 12 ? 2 : 1; }

#define CASE(M, N)                                         \
    case M:                                                \
        if (n == N) tile(M, N, is_bf16, p, x, row, panel); \
        else tile(M, 1, is_bf16, p, x, row, panel);        \
        break;

INLINE void any_tile(int64_t m, int n, const int is_bf16, const Product *p, const uint32_t *x, int64_t row,
                     int64_t panel) {
    switch (m) {
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4)
        CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
        CASE(13, 1) CASE(14, 1) CASE(15, 1) CASE(16, 1) CASE(17, 1) CASE(18, 1)
        CASE(19, 1) CASE(20, 1) CASE(21, 1) CASE(22, 1) CASE(23, 1) CASE(24, 1)
    }
}

static void tiles_bf16(int64_t m, int n, const Product *p, const uint32_t *x, int64_t row, int64_t panel) {
    any_tile(m, n, 1, p, x, row, panel);
}
static void tiles_f32(int64_t m, int n, const Product *p, const uint32_t *x, int64_t row, int64_t panel) {
    any_tile(m, n, 0, p, x, row, panel);
}

/* Word k of a row of x; the last pair of an odd K is filled up with zero. */
INLINE uint32_t word(const void *row, int64_t k, int64_t depth, int is_bf16) {
    uint32_t bits;
    if (!is_bf16) return ((const uint32_t *)row)[k];
    if (2 * k + 1 < depth) {
        memcpy(&bits, (const uint16_t *)row + 2 * k, 4);
        return bits;
    }
    return ((const uint16_t *)row)[2 * k];
}

static void linear(const void *x, int64_t ldx, int64_t rows, const void *packed, const void *bias, int64_t features,
                   int64_t depth, void *y, int64_t ldy, uint32_t *scratch, int is_bf16) {
    if (rows == 0) return;
    const int64_t words = is_bf16 ? (depth + 1) / 2 : depth, panels = (features + 15) / 16;
    const int64_t width = is_bf16 ? 2 : 4;
    const Product p = {packed, bias, y, words, features, ldy};
    /* Tiles of almost equal height: a thin last tile would wait for its own sums. */
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, height = (rows + tiles - 1) / tiles;
    const int n = panels_at_once(height);
    const int64_t groups = (panels + n - 1) / n;
    const int in_place = rows == 1 && (!is_bf16 || depth % 2 == 0);
    const uint32_t *packed_x = in_place ? x : scratch;
#pragma omp parallel
    {
        if (!in_place) {
#pragma omp for schedule(static)
            for (int64_t slice = 0; slice < tiles * 8; slice++) {
                int64_t first = slice / 8 * height, m = rows - first < height ? rows - first : height;
                int64_t from = words * (slice % 8) / 8, to = words * (slice % 8 + 1) / 8;
                uint32_t *to_x = scratch + first * words;
                for (int64_t i = 0; i < m; i++) {
                    const char *row = (const char *)x + (first + i) * ldx * width;
                    for (int64_t k = from; k < to; k++) to_x[k * m + i] = word(row, k, depth, is_bf16);
                }
            }
        }
#pragma omp for schedule(dynamic, 2) nowait
        for (int64_t group = 0; group < groups; group++) {
            int64_t panel = group * n, last = panel + n < panels ? panel + n : panels;
            for (int64_t t = 0; t < tiles; t++) {
                int64_t row = t * height, m = rows - row < height ? rows - row : height;
                int wide = n == panels_at_once(m) && last - panel == n;
                for (int64_t at = panel; at < last; at += wide ? n : 1)
                    (is_bf16 ? tiles_bf16 : tiles_f32)(m, wide ? n : 1, &p, packed_x + row * words, row, at);
            }
        }
    }
}

void linear_bf16(const void *x, int64_t ldx, int64_t rows, const void *packed, const void *bias, int64_t features,
                 int64_t depth, void *y, int64_t ldy, void *scratch) {
    linear(x, ldx, rows, packed, bias, features, depth, y, ldy, scratch, 1);
}

void linear_f32(const void *x, int64_t ldx, int64_t rows, const void *packed, const void *bias, int64_t features,
                int64_t depth, void *y, int64_t ldy, void *scratch) {
    linear(x, ldx, rows, packed, bias, features, depth, y, ldy, scratch, 0);
}

/* weight [features][depth] into panels; the features that fill up the last panel are zero. */
static void pack(const void *weight, int64_t features, int64_t depth, uint32_t *packed, int is_bf16) {
    const int64_t words = is_bf16 ? (depth + 1) / 2 : depth, panels = (features + 15) / 16;
    const int64_t width = is_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < words; k++)
            for (int64_t j = 0; j < 16; j++) {
                int64_t feature = panel * 16 + j;
                packed[(panel * words + k) * 16 + j] =
                    feature < features ? word((const char *)weight + feature * depth * width, k, depth, is_bf16) : 0;
            }
}

void pack_bf16(const void *weight, int64_t features, int64_t depth, void *packed) {
    pack(weight, features, depth, packed, 1);
}
void pack_f32(const void *weight, int64_t features, int64_t depth, void *packed) {
    pack(weight, features, depth, packed, 0);
}
#endif
