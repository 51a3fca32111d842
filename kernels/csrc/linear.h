/* The arguments of one linear, y = x W^T + b, and the packed form of a weight that all classes share. A call computes one
 * linear, or a group of linears over rows of the same x: the experts of a layer. */
#pragma once
#include "quantised.h"

/* A packed plain weight is [panels][words][PANEL]: panels of 16 output features; a word is one float32, or a pair of
 * bfloat16 neighbours along the depth. Zeros fill up the pairs to whole tiles of AMX, and the features to whole GROUPs of
 * panels. quantised.h has the form of the other weights. */
#define GROUP 4
#define MAX_LINEARS 256 /* of a group */

typedef struct {
    Weight weight;
    const void *x; /* [rows][ldx]; null: `scratch` has it repacked, by a gated linear */
    int64_t ldx, rows;
    void *y; /* [rows][ldy]; of a gated linear the scratch of the next one */
    int64_t ldy;
    void *scratch; /* for x repacked: (rows + 15) * (depth + 31) floats, aligned to 64 bytes */
    const int32_t *source; /* the row of x that each row is; null: all rows in order */
} Linear;

INLINE int64_t words_of(int64_t depth, int type) {
    return type == BF16 ? (depth + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * TILE_WORDS : depth;
}
INLINE int64_t panels_of(int64_t features) { return (features + GROUP * PANEL - 1) / (GROUP * PANEL) * GROUP; }

INLINE const void *source_row(const Linear *l, int64_t row, int type) {
    return at(l->x, (l->source ? l->source[row] : row) * l->ldx, type);
}

/* Adds the bias to rows of sums, `stride` floats apart, and stores them as y[row + i][feature ... feature + width). */
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
