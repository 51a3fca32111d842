/* y = x W^T + b in vectors. bfloat16 weights are multiplied as pairs where the class has an instruction for their dot
 * product. Elsewhere they are widened to float32 in registers, so that a call of few rows costs one read of the weight;
 * a call of many rows widens each part of the weight once for all of them.
 *
 * x is repacked in tiles of up to ROWS rows, [depth][rows of the tile] words: the inner loop is a load of weights and a
 * broadcast of each row. Every output is one accumulator over the depth in order, in every tile and with any other rows
 * in the call, so that a row's bits never depend on its neighbours. */
#include "simd/cpu_class.h"
#include "linear.h"

#define VECTORS (PANEL / LANES)             /* of a panel */
#define WIDE 4                              /* vectors of features that a tile of few rows takes */
#define NARROW (VECTORS > 2 ? VECTORS : 2)  /* and one of many rows */
#define ROWS (ACCUMULATORS / NARROW)        /* of a tile */
#define TILES 16                            /* that share a part of the weight */
#define DEPTH 256                           /* of that part: a tile's x of this depth stays in the first cache */

/* What a word of weights is, and what is done with it. */
enum { ONE_FLOAT, WIDENED_PAIR, DOT_PAIR };

typedef struct {
    const uint32_t *w;    /* the first panel's words */
    int64_t panel_stride; /* words from one panel to the next */
    int64_t words;        /* of the depth */
} Weights;

/* sums[m][n] += x [words][m] times n vectors of features. m, n and kind are constants at every call, so that the sums
 * stay in registers. */
INLINE void tile(const int m, const int n, const int kind, const Weights *weights, const float *x, Floats *sums) {
    Floats sum[ACCUMULATORS];
#pragma GCC unroll 32
    for (int i = 0; i < m * n; i++) sum[i] = sums[i];
    const uint32_t *w = weights->w;
    for (int64_t k = 0; k < weights->words; k++, w += PANEL, x += kind == WIDENED_PAIR ? 2 * m : m) {
        Words loaded[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            const uint32_t *at = w + j / VECTORS * weights->panel_stride + j % VECTORS * LANES;
            loaded[j] = load_words(at);
            if (j % VECTORS == 0) __builtin_prefetch(at + PANEL * 48);
        }
#pragma GCC unroll 32
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) {
                Floats *to = sum + i * n + j;
                if (kind == DOT_PAIR) *to = add_dot(*to, loaded[j], (Words){} + to_bits(x[i]));
                else *to += (kind == ONE_FLOAT ? (Floats)loaded[j] : low_of(loaded[j])) * x[i];
            }
        if (kind != WIDENED_PAIR) continue;
#pragma GCC unroll 32
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) sum[i * n + j] += high_of(loaded[j]) * x[m + i];
    }
#pragma GCC unroll 32
    for (int i = 0; i < m * n; i++) sums[i] = sum[i];
}

INLINE void tile_of_height(const int m, int64_t n, const int kind, const Weights *w, const float *x, Floats *sums) {
    if (m > ROWS) return;
    if (m <= ACCUMULATORS / WIDE && n == WIDE) tile(m, WIDE, kind, w, x, sums);
    else tile(m, NARROW, kind, w, x, sums);
}

#define CASE(M) \
    case M: tile_of_height(M, n, kind, w, x, sums); break;

INLINE void any_tile(int64_t m, int64_t n, const int kind, const Weights *w, const float *x, Floats *sums) {
    switch (m) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
}

static void tile_of_pairs(int64_t m, int64_t n, const Weights *w, const float *x, Floats *sums) {
    any_tile(m, n, HAS_DOT ? DOT_PAIR : WIDENED_PAIR, w, x, sums);
}
static void tile_of_floats(int64_t m, int64_t n, const Weights *w, const float *x, Floats *sums) {
    any_tile(m, n, ONE_FLOAT, w, x, sums);
}

/* Repacks rows [first, first + m) of x, words [from, to) of each: x is multiplied in the form that the weights have. */
static void pack_rows(const Linear *l, int64_t first, int64_t m, int64_t from, int64_t to, int type, float *packed) {
    for (int64_t i = 0; i < m; i++) {
        if (type == F32) {
            const float *row = (const float *)l->x + (first + i) * l->ldx;
            for (int64_t k = from; k < to; k++) packed[k * m + i] = row[k];
            continue;
        }
        const uint16_t *row = (const uint16_t *)l->x + (first + i) * l->ldx;
        for (int64_t k = from; k < to; k++) {
            const uint32_t low = 2 * k < l->depth ? row[2 * k] : 0, high = 2 * k + 1 < l->depth ? row[2 * k + 1] : 0;
            if (HAS_DOT) {
                packed[k * m + i] = from_bits(low | high << 16);
            } else {
                packed[2 * k * m + i] = from_bits(low << 16);
                packed[(2 * k + 1) * m + i] = from_bits(high << 16);
            }
        }
    }
}

/* Pairs as floats: [2 * words][PANEL] for each of `panels`. */
static void widen(const Weights *pairs, int64_t panels, float *to) {
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < pairs->words; k++, to += 2 * PANEL)
            for (int64_t j = 0; j < PANEL; j += LANES) {
                Words w = load_words(pairs->w + panel * pairs->panel_stride + k * PANEL + j);
                store_floats(to + j, low_of(w));
                store_floats(to + PANEL + j, high_of(w));
            }
}

INLINE void linear(const Linear *l, const int type) {
    const int64_t words = words_of(l->depth, type), rows = l->rows;
    /* Tiles of almost equal height: a thin last tile would wait for its own sums. */
    const int64_t tiles = (rows + ROWS - 1) / ROWS, height = rows ? (rows + tiles - 1) / tiles : 0;
    const int64_t n = height <= ACCUMULATORS / WIDE ? WIDE : NARROW, group = n / VECTORS;
    const int64_t groups = panels_of(l->features) / group, blocks = (tiles + TILES - 1) / TILES;
    const int widened = type == BF16 && !HAS_DOT && tiles > 1, in_place = rows == 1 && type == F32;
    const int64_t width = type == BF16 && !HAS_DOT ? 2 : 1; /* of a word of x, in floats */
    const int64_t step = tiles == 1 ? words : DEPTH / width;
    const float *x = in_place ? l->x : l->scratch;
#pragma omp parallel
    {
        if (!in_place) {
#pragma omp for schedule(static)
            for (int64_t slice = 0; slice < tiles * 8; slice++) {
                const int64_t first = slice / 8 * height, m = min_i64(height, rows - first);
                pack_rows(l, first, m, words * (slice % 8) / 8, words * (slice % 8 + 1) / 8, type,
                          (float *)l->scratch + first * words * width);
            }
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < groups * blocks; item++) {
            const int64_t panel = item / blocks * group, block = item % blocks * TILES;
            const int64_t last = min_i64(block + TILES, tiles);
            Floats sums[TILES][ACCUMULATORS];
            float wide[NARROW / VECTORS * DEPTH * PANEL] __attribute__((aligned(64)));
            memset(sums, 0, (last - block) * sizeof sums[0]);
            for (int64_t k = 0; k < words; k += step) {
                Weights part = {l->packed + (panel * words + k) * PANEL, words * PANEL, min_i64(step, words - k)};
                if (widened) {
                    widen(&part, group, wide);
                    part = (Weights){(const uint32_t *)wide, 2 * part.words * PANEL, 2 * part.words};
                }
                for (int64_t t = block; t < last; t++) {
                    const int64_t first = t * height, m = min_i64(height, rows - first);
                    const float *tile_x = x + (first * words + k * m) * width;
                    (type == F32 || widened ? tile_of_floats : tile_of_pairs)(m, n, &part, tile_x, sums[t - block]);
                }
            }
            for (int64_t t = block; t < last; t++)
                put_rows(l, t * height, min_i64(height, rows - t * height), panel * PANEL, group * PANEL,
                         (const float *)sums[t - block], group * PANEL, type);
        }
    }
}

void FOR_CLASS(linear_bf16)(const Linear *l) { linear(l, BF16); }

/* With the dot products of bfloat16 float32 is multiplied as without them. */
#if !HAS_DOT
void FOR_CLASS(linear_f32)(const Linear *l) { linear(l, F32); }
#endif
