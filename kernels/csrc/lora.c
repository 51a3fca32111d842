/* What LoRA adapters add to a linear (formula and shapes: kernels/lora/lora_linear.py): shrink computes x A^T, expand
 * adds its product with B to y.
 *
 * The order of a row's sums does not depend on the other rows: vector by vector over x, then rank by rank. */
#include "simd/cpu_class.h"
#include "simd/vectors.h"
#include "team.h"

#define PARALLEL_FROM 65536 /* a call with this many multiplications uses several threads */
#define RANKS 4             /* rows of A in one tile */
#define COLUMNS 256         /* columns of y in one item of expand */

typedef struct {
    const float *a;              /* [rank][depth]: the rows of A of all parts */
    int64_t rank, first, end;    /* rank: the sum of the parts' ranks; the parts are [first, end) */
} LoraAdapter;

typedef struct {
    const float *b;              /* [rank][features] */
    int64_t offset, rank;        /* the part's A has rows [offset, offset + rank) of the adapter's `a` */
    int64_t column, features;    /* the part adds to columns [column, column + features) of y */
} LoraPart;

typedef struct {
    const void *x;
    void *y;
    const int64_t *rows, *adapter_of; /* [count]: a row number of x and y, and the index of its adapter */
    const LoraAdapter *adapters;
    const LoraPart *parts;
    float *shrunk;               /* [count][width]: x A^T */
    int64_t ldx, ldy, count, depth, features, width, type;
} Lora;

/* shrunk[i + m][j + n] for m < rows and n < ranks. All these rows have one adapter. */
INLINE void shrink_tile(const Lora *l, const LoraAdapter *adapter, int64_t i, int64_t j, int rows, int ranks,
                        int type) {
    const int64_t depth = l->depth, whole = depth / LANES * LANES;
    const void *x[2];
    Floats sums[2][RANKS] = {{{0}}};
    for (int m = 0; m < rows; m++) x[m] = (const char *)l->x + l->rows[i + m] * l->ldx * (type == BF16 ? 2 : 4);
    const float *a = adapter->a + j * depth;
    for (int64_t k = 0; k < whole; k += LANES) {
        Floats wide[2];
        for (int m = 0; m < rows; m++) wide[m] = load_vector(x[m], k, type);
        for (int n = 0; n < ranks; n++) {
            const Floats one = load_floats(a + n * depth + k);
            for (int m = 0; m < rows; m++) sums[m][n] += wide[m] * one;
        }
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < ranks; n++) {
            float sum = sum_of_lanes(sums[m][n]);
            for (int64_t k = whole; k < depth; k++) sum += get(x[m], k, type) * a[n * depth + k];
            l->shrunk[(i + m) * l->width + j + n] = sum;
        }
}

INLINE void shrink_rows(const Lora *l, int64_t i, int64_t j, int rows, int type) {
    const LoraAdapter *adapter = l->adapters + l->adapter_of[i];
    int64_t left = adapter->rank - j;
    if (left >= RANKS) shrink_tile(l, adapter, i, j, rows, RANKS, type);
    else
        for (; left > 0; left--, j++) shrink_tile(l, adapter, i, j, rows, 1, type);
}

/* An item is RANKS ranks of two rows. Consecutive items read the same rows of A. */
INLINE void shrink(const Lora *l, int64_t item, int type) {
    const int64_t pairs = (l->count + 1) / 2, j = item / pairs * RANKS, i = item % pairs * 2;
    if (i + 1 < l->count && l->adapter_of[i] == l->adapter_of[i + 1]) shrink_rows(l, i, j, 2, type);
    else {
        shrink_rows(l, i, j, 1, type);
        if (i + 1 < l->count) shrink_rows(l, i + 1, j, 1, type);
    }
}

/* y += shrunk B for `vectors` vectors of columns, from column `from` of the part on. `shrunk`: x A^T of one row and
 * part. */
INLINE void expand_tile(const float *shrunk, const LoraPart *part, void *y, int64_t from, int vectors, int type) {
    Floats sums[4] = {{0}};
    for (int64_t n = 0; n < part->rank; n++) {
        const float *b = part->b + n * part->features + from;
        for (int v = 0; v < vectors; v++) sums[v] += shrunk[n] * load_floats(b + v * LANES);
    }
    for (int v = 0; v < vectors; v++) {
        const int64_t at = part->column + from + v * LANES;
        store_vector(y, at, load_vector(y, at, type) + sums[v], type);
    }
}

INLINE void expand_part(const float *shrunk, const LoraPart *part, void *y, int64_t from, int64_t to, int type) {
    for (; from + 4 * LANES <= to; from += 4 * LANES) expand_tile(shrunk, part, y, from, 4, type);
    for (; from + LANES <= to; from += LANES) expand_tile(shrunk, part, y, from, 1, type);
    for (; from < to; from++) {
        float sum = 0;
        for (int64_t n = 0; n < part->rank; n++) sum += shrunk[n] * part->b[n * part->features + from];
        put(y, part->column + from, get(y, part->column + from, type) + sum, type);
    }
}

/* An item is COLUMNS columns of a row. Consecutive items read the same columns of B. */
INLINE void expand(const Lora *l, int64_t item, int type) {
    const int64_t i = item % l->count, first = item / l->count * COLUMNS, last = min_i64(first + COLUMNS, l->features);
    const LoraAdapter *adapter = l->adapters + l->adapter_of[i];
    void *y = (char *)l->y + l->rows[i] * l->ldy * (type == BF16 ? 2 : 4);
    for (const LoraPart *part = l->parts + adapter->first; part < l->parts + adapter->end; part++) {
        const int64_t from = max_i64(first - part->column, 0), to = min_i64(last - part->column, part->features);
        if (from < to) expand_part(l->shrunk + i * l->width + part->offset, part, y, from, to, type);
    }
}

static void shrink_items(const void *context, int64_t from, int64_t to) {
    const Lora *l = context;
    if (l->type == BF16)
        for (; from < to; from++) shrink(l, from, BF16);
    else
        for (; from < to; from++) shrink(l, from, F32);
}

static void expand_items(const void *context, int64_t from, int64_t to) {
    const Lora *l = context;
    if (l->type == BF16)
        for (; from < to; from++) expand(l, from, BF16);
    else
        for (; from < to; from++) expand(l, from, F32);
}

static void lora_work(const void *context) {
    const Lora *l = context;
    share_items((l->width + RANKS - 1) / RANKS * ((l->count + 1) / 2), 8, shrink_items, l);
    share_items((l->features + COLUMNS - 1) / COLUMNS * l->count, 8, expand_items, l);
}

void FOR_CLASS(lora)(const Lora *l) {
    run_team_if(l->count * l->width * (l->depth + l->features) >= PARALLEL_FROM, lora_work, l);
}
