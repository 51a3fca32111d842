/* The arguments of one linear, y = x W^T + b, and the packed form of a weight, which is the same for all classes. A
 * call computes one linear, or a group of linears whose rows come from one x: the experts of a layer. */
#pragma once
#include "quantised.h"

/* A packed plain weight is [panels][words][PANEL]. A panel has 16 output features. A word is one float32, or two
 * bfloat16 that are consecutive along the depth. Zeros pad the pairs to whole tiles of AMX, and the features to whole
 * GROUPs of panels. quantised.h explains the form of quantised weights. */
#define GROUP 4
#define MAX_LINEARS 256 /* the most linears of a group */

typedef struct {
    Weight weight;
    const void *x; /* [rows][ldx]; null: a gated linear has written it to `scratch`, repacked */
    int64_t ldx, rows;
    void *y; /* [rows][ldy]; for a gated linear the scratch of the next linear */
    int64_t ldy;
    void *scratch; /* for x repacked: (rows + 15) * (depth + 31) floats, aligned to 64 bytes */
    const int32_t *source; /* the row of x for each row; null: row r is row r of x */
} Linear;

INLINE int64_t words_of(int64_t depth, int type) {
    return type == BF16 ? (depth + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * TILE_WORDS : depth;
}
INLINE int64_t panels_of(int64_t features) { return (features + GROUP * PANEL - 1) / (GROUP * PANEL) * GROUP; }

INLINE const void *source_row(const Linear *l, int64_t row, int type) {
    return at(l->x, (l->source ? l->source[row] : row) * l->ldx, type);
}

/* Adds the bias to rows of sums, `stride` floats apart, and stores them to y[row + i][feature ... feature + width). */
INLINE void put_rows(const Linear *l, int64_t row, int64_t rows, int64_t feature, int64_t width, const float *sums,
                     int64_t stride, const int type) {
    float bias[GROUP * PANEL] = {0};
    width = min_i64(width, l->weight.features - feature);
    if (l->weight.bias)
        for (int64_t j = 0; j < width; j++) bias[j] = get(l->weight.bias, feature + j, type);
    for (int64_t i = 0; i < rows; i++, sums += stride) {
        void *to = at(l->y, (row + i) * l->ldy + feature, type);
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) {
            const Floats y = load_floats(sums + j) + load_floats(bias + j);
            if (type == BF16) store_bf16(at(to, j, BF16), y);
            else store_floats(at(to, j, F32), y);
        }
        for (; j < width; j++) put(to, j, sums[j] + bias[j], type);
    }
}
