/* y = x W^T + b with SIMD. How a weight is multiplied depends on the instruction class:
 *
 * bfloat16, if the class has a dot product of bfloat16 pairs: as pairs. Otherwise it is widened to float32, in
 * registers, so that a call costs one read of the weight. With AVX2 the tiles of many rows are low, which leaves
 * registers for the widening. In the other classes calls of many rows widen each part of the weight once for all rows.
 *
 * Quantised: in the classes from avx2 to avx512_bf16 x is quantised to 16 bits and multiplied with codes of INT8, INT4
 * and FP4 as integers (integer_rows.h). Otherwise a part of the weight is unpacked to the L1 cache, once for all rows
 * of an item. If codes are multiplied instead of weights (quantised.h), calls of few rows unpack them to registers.
 *
 * x is repacked in tiles of at most ROWS rows, [depth][rows of the tile] words, so that the inner loop loads weights
 * and broadcasts each row. An output is always one accumulator over the depth, in order. So the bits of a row do not
 * depend on the other rows of the call. */
#include "simd/cpu_class.h"
#include "simd/transpose.h"
#include "integer_rows.h"
#include "team.h"

#define WIDE MOST_VECTORS                   /* vectors of features that a tile of few rows takes */
#define NARROW (VECTORS > 2 ? VECTORS : 2)  /* vectors of features that a tile of many rows takes */
#define ROWS (ACCUMULATORS / NARROW)        /* most rows of a tile */
#define IS_AVX2 (LANES == 8)                /* 16 registers of 8 floats; its special cases were chosen by measurement */
#define LOW_ROWS 4                          /* rows of a tile that widens in registers, with AVX2 */
#define TILES 16                            /* most tiles that share a part of the weight */
#define BLOCK (384 << 10)                   /* with AVX2 or a quantised x: most bytes of their x, for the L2 cache */
#define DEPTH 256                           /* floats of a row of x for a part: L1 then holds a tile's x */
#define DEPTH_OF_TWO 64                     /* words of a part of two tiles: while one rereads it, no weights come */
#define MOST_WIDENING 4                     /* most tiles that widen in registers, without AVX2 */
#define FEW_ROWS (LANES == 16 ? 8 : 3)      /* most rows that multiply codes in registers */
#define UNPACKED 128                        /* depth of a part of a quantised weight */
#define AHEAD 48                            /* words prefetched ahead where one tile reads all of the depth */
#define AHEAD_WIDE (LANES == 16 ? 16 : 48)  /* the same for tiles of few rows (n == WIDE) */

/* What a word of weights is, and what is done with it. */
enum { ONE_FLOAT, WIDENED_PAIR, DOT_PAIR };

typedef struct {
    const uint32_t *w;    /* the first panel's words */
    int64_t panel_stride; /* words from one panel to the next */
    int64_t words;        /* words of the depth */
    int64_t ahead;        /* how many words after the one that is read the prefetch is */
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
            if (j % VECTORS == 0) prefetch_to_l2(at + weights->ahead);
            if (kind == WIDENED_PAIR) loaded[j] = (Words)low_of(loaded[j]);
        }
#pragma GCC unroll 32
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) {
                Floats *to = sum + i * n + j;
                if (kind == DOT_PAIR) *to = add_dot(*to, loaded[j], (Words){} + to_bits(x[i]));
                else *to += (Floats)loaded[j] * x[i];
            }
        if (kind != WIDENED_PAIR) continue;
        /* With AVX2 this makes the compiler read the weights again. Otherwise it would keep the pairs in registers that
         * the sums need. */
        const uint32_t *again = w;
        if (IS_AVX2 && n == NARROW) __asm__("" : "+r"(again));
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            loaded[j] = (Words)high_of(load_words(again + j / VECTORS * weights->panel_stride + j % VECTORS * LANES));
#pragma GCC unroll 32
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) sum[i * n + j] += (Floats)loaded[j] * x[m + i];
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

/* sums += m rows of x (at most FEW_ROWS) times the codes of a quantised weight, which are unpacked in registers. */
static void tile_of_codes(int64_t m, const Weight *w, int64_t panel, const float *x, Floats *sums) {
#define TILE_OF(M, KIND, HAS_ZEROS) \
    code_tile(M, M <= ACCUMULATORS / WIDE ? WIDE : NARROW, KIND, HAS_ZEROS, w, panel, x, sums)
#define ROWS_OF(M) \
    case M: /* with integer products only FP8 comes here */ \
        if (HAS_INTEGER_PRODUCTS || w->kind == CODES_FP8) TILE_OF(M, CODES_FP8, 0); \
        else if (w->kind == CODES_FP4) TILE_OF(M, CODES_FP4, 0); \
        else if (w->kind == CODES_INT8 && w->zeros) TILE_OF(M, CODES_INT8, 1); \
        else if (w->kind == CODES_INT8) TILE_OF(M, CODES_INT8, 0); \
        else if (w->zeros) TILE_OF(M, CODES_INT4, 1); \
        else TILE_OF(M, CODES_INT4, 0); \
        break;
    switch (m) {
        ROWS_OF(1) ROWS_OF(2) ROWS_OF(3)
#if LANES == 16
        ROWS_OF(4) ROWS_OF(5) ROWS_OF(6) ROWS_OF(7) ROWS_OF(8)
#endif
    }
#undef ROWS_OF
#undef TILE_OF
}

/* Writes LANES words of at most LANES rows, [row][LANES] in `square`, as [LANES][m]. A store writes LANES words, of
 * which m are right; the next one overwrites the rest. */
INLINE void repack_square(const float *square, int64_t m, float *packed) {
    float lines[LANES * LANES + LANES];
    Words columns[LANES];
    transpose((const uint8_t *)square, VECTOR_BYTES, LANES, columns);
    for (int64_t c = 0; c < LANES; c++) store_floats(lines + c * m, (Floats)columns[c]);
    memcpy(packed, lines, LANES * m * sizeof(float));
}

/* Packs elements [from, to) of m rows of x as floats, [to - from][m]. Elements past the depth are zero. */
static void pack_floats(const Linear *l, int64_t first, int64_t m, int64_t from, int64_t to, int type, float *packed) {
    const int64_t depth = l->weight.depth;
    const int32_t *order = l->weight.order;
    const void *rows[ACCUMULATORS];
    for (int64_t i = 0; i < m; i++) rows[i] = source_row(l, first + i, type);
    int64_t k = from;
    for (; m <= LANES && !order && k + LANES <= min_i64(to, depth); k += LANES, packed += LANES * m) {
        float square[LANES * LANES];
        for (int64_t i = 0; i < LANES; i++) store_floats(square + i * LANES, load_vector(rows[min_i64(i, m - 1)], k, type));
        repack_square(square, m, packed);
    }
    for (; k < to; k++, packed += m)
        for (int64_t i = 0; i < m; i++) packed[i] = k < depth ? get(rows[i], order ? order[k] : k, type) : 0;
}

/* Puts bfloat16 elements in the order of part_codes: the second and third of four change places. */
INLINE Words in_order_of_codes(Words x) {
#if HAS_CODE_PAIRS
    return (Words)_mm512_shufflehi_epi16(_mm512_shufflelo_epi16((__m512i)x, _MM_PERM_DBCA), _MM_PERM_DBCA);
#else
    return x;
#endif
}

/* Packs words [from, to) of m rows of bfloat16 x as pairs, [to - from][m]. Elements past the depth are zero. */
static void pack_row_pairs(const Linear *l, int64_t first, int64_t m, int64_t from, int64_t to, float *packed) {
    const int64_t depth = l->weight.depth;
    const int has_code_pairs = HAS_CODE_PAIRS && l->weight.kind == CODES_FP8;
    const int32_t *order = l->weight.order;
    const uint16_t *rows[ACCUMULATORS];
    for (int64_t i = 0; i < m; i++) rows[i] = source_row(l, first + i, BF16);
    int64_t k = from;
    for (; m <= LANES && !order && k + LANES <= min_i64(to, depth / 2); k += LANES, packed += LANES * m) {
        float square[LANES * LANES];
        for (int64_t i = 0; i < LANES; i++) {
            const Words x = load_words(rows[min_i64(i, m - 1)] + 2 * k);
            store_floats(square + i * LANES, (Floats)(has_code_pairs ? in_order_of_codes(x) : x));
        }
        repack_square(square, m, packed);
    }
    for (; k < to; k++, packed += m)
        for (int64_t i = 0; i < m; i++) {
            const int64_t a = has_code_pairs ? k / 2 * 4 + k % 2 : 2 * k, b = has_code_pairs ? a + 2 : a + 1;
            const uint32_t low = a < depth ? rows[i][order ? order[a] : a] : 0;
            const uint32_t high = b < depth ? rows[i][order ? order[b] : b] : 0;
            packed[i] = from_bits(low | high << 16);
        }
}

/* Repacks words [from, to) of rows [first, first + m) of x, in the form of the weights that they are multiplied
 * with. */
static void pack_rows(const Linear *l, int64_t first, int64_t m, int64_t from, int64_t to, int type, float *packed) {
    if (type == F32 || !HAS_DOT) {
        const int64_t values = type == BF16 ? 2 : 1;
        const float factor = type == BF16 ? factor_of_x(l->weight.kind) : 1.0f;
        float *at = packed + from * values * m;
        pack_floats(l, first, m, from * values, to * values, type, at);
        for (int64_t i = 0; i < (to - from) * values * m && factor != 1.0f; i++) at[i] *= factor;
        return;
    }
    pack_row_pairs(l, first, m, from, to, packed + from * m);
}

/* Widens pairs of bfloat16 to floats, [2 * words][PANEL] for each of `panels` panels. */
static void widen(const Weights *pairs, int64_t panels, float *to) {
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < pairs->words; k++, to += 2 * PANEL)
            for (int64_t j = 0; j < PANEL; j += LANES) {
                Words w = load_words(pairs->w + panel * pairs->panel_stride + k * PANEL + j);
                store_floats(to + j, low_of(w));
                store_floats(to + PANEL + j, high_of(w));
            }
}

/* How the work of a linear is divided: into slices of x to repack, and into items. An item is a group of panels times a
 * block of `most` tiles of rows. All panels are multiplied with one block of rows, then with the next. `first_slice`
 * and `first_item` are numbered over all linears of a call. */
typedef struct {
    const float *x;
    int64_t words, tiles, height; /* of almost equal height: a low last tile would be bound by latency */
    int64_t n, group, columns;    /* vectors of features in a tile, panels in an item, items per block of rows */
    int64_t most, blocks;         /* most tiles of a block; number of blocks */
    int64_t step;                 /* words of the depth that are multiplied at a time */
    int64_t ahead;                /* words prefetched ahead if there is one tile */
    int64_t width;                /* floats in a word of x */
    int64_t values;               /* elements in a word of the weight */
    int widened, in_place;        /* widened: bfloat16 is multiplied as floats; in_place: x is not repacked */
    int64_t chunks;               /* chunks of the weight if x is quantised (integer_rows.h), otherwise 0 */
    int64_t first_slice, first_item;
} Cut;

INLINE Cut cut(const Linear *l, const int type) {
    const int in_place = l->rows == 1 && type == F32 && !l->weight.order, is_plain = l->weight.kind == PLAIN;
    const int is_wide = type == BF16 && !HAS_DOT, as_integers = type == BF16 && uses_integer_products(&l->weight);
    const int is_low = IS_AVX2 && is_wide && is_plain && l->rows > ROWS;
    const int64_t words = words_of(l->weight.depth, type), rows = as_integers ? INTEGER_ROWS : is_low ? LOW_ROWS : ROWS;
    const int64_t tiles = (l->rows + rows - 1) / rows, height = l->rows ? (l->rows + tiles - 1) / tiles : 0;
    const int64_t chunks = as_integers ? chunks_of(&l->weight) : 0;
    const int64_t most_wide = as_integers ? 1 : ACCUMULATORS / WIDE;
    const int64_t n = height <= most_wide ? WIDE : NARROW, width = is_wide ? 2 : 1;
    const int64_t values = type == BF16 ? 2 : 1;
    const int64_t ahead = n == WIDE ? AHEAD_WIDE : AHEAD;
    const int64_t shared_step = tiles == 2 && !IS_AVX2 ? DEPTH_OF_TWO : DEPTH / width;
    const int64_t step = tiles > 1 ? shared_step : words > 2 * ahead ? words - ahead : words;
    const int64_t row_bytes = as_integers ? integer_row_bytes(&l->weight, chunks) : words * width * 4;
    const int64_t most = is_low || as_integers ? max_i64(1, min_i64(TILES, BLOCK / max_i64(1, height * row_bytes))) : TILES;
    return (Cut){in_place ? source_row(l, 0, type) : l->scratch, words, tiles, height, n, n / VECTORS,
                 panels_of(l->weight.features) / (n / VECTORS), most, (tiles + most - 1) / most,
                 is_plain ? step : UNPACKED / values, ahead, width, values,
                 is_wide && (!is_plain || (tiles > MOST_WIDENING && !is_low)), in_place, chunks, 0, 0};
}

/* `count` words of the depth from `k` on, of the item's panels from `panel` on, in the form that tiles multiply. */
INLINE Weights part_of(const Linear *l, const Cut *c, int64_t panel, int64_t k, int64_t count, const int type, uint32_t *wide) {
    const Weight *w = &l->weight;
    if (w->kind != PLAIN) {
        const int form = type == F32 ? WEIGHT_FLOATS : HAS_CODE_PAIRS ? CODE_PAIRS : HAS_DOT ? WEIGHT_PAIRS : NUMBERS;
        const int64_t to = min_i64((k + c->step) * c->values, padded_depth(w->depth));
        const int64_t words = c->values / values_of_form(form);
        unpack(w, panel, c->group, k * c->values, to, form, wide);
        return (Weights){wide, (to / c->values - k) * words * PANEL, count * words, 0};
    }
    /* Prefetches the words that follow in memory; with AVX2 and several tiles the next part. After the last words of an
     * item come the first words of the next one, which lie after this item's panels. */
    const int64_t next = c->tiles == 1 && k + count == c->words ? (c->group - 1) * c->words : 0;
    const int64_t ahead = (c->tiles == 1 ? c->ahead + next : IS_AVX2 ? c->step : AHEAD) * PANEL;
    const Weights part = {(const uint32_t *)w->packed + (panel * c->words + k) * PANEL, c->words * PANEL, count, ahead};
    if (!c->widened) return part;
    widen(&part, c->group, (float *)wide);
    return (Weights){wide, 2 * count * PANEL, 2 * count, 0};
}

/* sums[t] += tile t of x times a part of the weight, from word k of the depth on, for tiles [from, to). */
INLINE void multiply_part(const Linear *l, const Cut *c, const Weights *part, int64_t k, int64_t from, int64_t to,
                          const int type, Floats sums[TILES][ACCUMULATORS]) {
    for (int64_t t = from; t < to; t++) {
        const int64_t first = t * c->height, m = min_i64(c->height, l->rows - first);
        const float *tile_x = c->x + (first * c->words + k * m) * c->width;
        (type == F32 || c->widened ? tile_of_floats : tile_of_pairs)(m, c->n, part, tile_x, sums[t - from]);
    }
}

/* As multiply_part, for a part that holds codes less zero points, or pairs of FP8 codes. `group_sums`: the unscaled sums
 * of the group in which the part begins. */
static void multiply_numbers(const Linear *l, const Cut *c, const Weights *part, int64_t panel, int64_t k, int64_t from,
                             int64_t to, Floats group_sums[TILES][ACCUMULATORS], Floats sums[TILES][ACCUMULATORS]) {
    const Weight *w = &l->weight;
    const int64_t values = HAS_CODE_PAIRS ? 2 : 1; /* of a word */
    const int64_t groups = groups_of(w), end = 2 * k + part->words * values;
    for (int64_t at = 2 * k; at < end;) {
        const int64_t group = min_i64(at / w->group, groups - 1);
        const int64_t last = group == groups - 1 ? padded_depth(w->depth) : (group + 1) * w->group, stop = min_i64(end, last);
        Floats scale[WIDE];
        for (int64_t j = 0; j < c->n && stop == last; j++) scale[j] = scale_of_sums(w, panel, group, j, (int)w->kind);
        const Weights numbers = {part->w + (at - 2 * k) / values * PANEL, part->panel_stride, (stop - at) / values, 0};
        for (int64_t t = from; t < to; t++) {
            const int64_t first = t * c->height, m = min_i64(c->height, l->rows - first);
            Floats *of_group = group_sums[t - from];
            const float *x = c->x + (first * c->words * 2 + at * m) / values;
            (HAS_CODE_PAIRS ? tile_of_pairs : tile_of_floats)(m, c->n, &numbers, x, of_group);
            for (int64_t i = 0; i < m * c->n && stop == last; i += c->n)
                for (int64_t j = 0; j < c->n; j++)
                    sums[t - from][i + j] += of_group[i + j] * scale[j], of_group[i + j] = (Floats){};
        }
        at = stop;
    }
}

#if HAS_INTEGER_PRODUCTS
/* sums[t] += tile t of x times the weight, as integers, for tiles [from, to). Several tiles share one copy of each span
 * of codes of 4 bits, unpacked to `halves`. For codes of 8 bits, which a tile unpacks in two instructions, a copy costs
 * as much as it saves. */
static void multiply_integers(const Linear *l, const Cut *c, int64_t panel, int64_t from, int64_t to, uint32_t *halves,
                              Floats sums[TILES][ACCUMULATORS]) {
    const Weight *w = &l->weight, whole = without_fractions(w);
    const int is_fractional = w->zeros && !whole.zeros;
    Floats scales[MOST_CHUNKS * MOST_VECTORS], zeros[MOST_CHUNKS * MOST_VECTORS];
    Span span;
    if (to - from < 2 || w->kind == CODES_INT8) halves = NULL;
    for (Chunk chunk = chunk_at(w, 0); chunk.index < c->chunks;) {
        take_span(w, c->group, &chunk, &span);
        load_span_scales(w, panel, c->n, &span, scales);
        if (is_fractional) load_span_zeros(w, panel, c->n, &span, scales, zeros);
        if (halves) unpack_span(&whole, panel, &span, halves);
        for (int64_t t = from; t < to; t++) {
            const int64_t first = t * c->height, m = min_i64(c->height, l->rows - first);
            const IntegerRows rows = integer_rows(l, c->chunks, first, m);
            if (is_fractional) subtract_zeros(m, c->n, &span, &rows, zeros, sums[t - from]);
            tile_of_integers(m, c->n, &whole, panel, &span, &rows, halves, scales, sums[t - from]);
        }
    }
}
#else
INLINE void multiply_integers(const Linear *l, const Cut *c, int64_t panel, int64_t from, int64_t to, uint32_t *halves,
                              Floats sums[TILES][ACCUMULATORS]) {
    (void)l, (void)c, (void)panel, (void)from, (void)to, (void)halves, (void)sums;
}
#endif

/* Computes one item of a linear. */
INLINE void multiply(const Linear *l, const Cut *c, int64_t item, const int type) {
    const int64_t words = c->words, height = c->height, rows = l->rows;
    const int64_t panel = item % c->columns * c->group, block = item / c->columns * c->most;
    const int64_t last = min_i64(block + c->most, c->tiles);
    const int as_numbers = type == BF16 && (!HAS_DOT || HAS_CODE_PAIRS) && l->weight.kind != PLAIN && !c->chunks;
    Floats sums[TILES][ACCUMULATORS], group_sums[TILES][ACCUMULATORS];
    uint32_t wide[GROUP * UNPACKED * PANEL] __attribute__((aligned(64)));
    memset(sums, 0, (last - block) * sizeof sums[0]);
    if (as_numbers && rows <= FEW_ROWS) {
        tile_of_codes(rows, &l->weight, panel, c->x, sums[0]);
        put_rows(l, 0, rows, panel * PANEL, c->group * PANEL, (const float *)sums[0], c->group * PANEL, type);
        return;
    }
    if (as_numbers) memset(group_sums, 0, (last - block) * sizeof group_sums[0]);
    if (c->chunks) multiply_integers(l, c, panel, block, last, wide, sums);
    for (int64_t k = 0; !c->chunks && k < words; k += c->step) {
        const Weights part = part_of(l, c, panel, k, min_i64(c->step, words - k), type, wide);
        if (as_numbers) multiply_numbers(l, c, &part, panel, k, block, last, group_sums, sums);
        else multiply_part(l, c, &part, k, block, last, type, sums);
    }
    for (int64_t t = block; t < last; t++)
        put_rows(l, t * height, min_i64(height, rows - t * height), panel * PANEL, c->group * PANEL,
                 (const float *)sums[t - block], c->group * PANEL, type);
}

#define SLICES 8       /* slices of a tile of x */
#define MOST_ITEMS 4   /* items that a thread takes at once, so that it prefetches its own next item */

typedef struct {
    const Linear *all;
    int64_t count;
    Cut cuts[MAX_LINEARS];
} Linears;

INLINE void pack_items(const Linears *linears, int64_t from, int64_t to, const int type) {
    for (int64_t s = from, i = 0; s < to; s++) {
        while (i + 1 < linears->count && linears->cuts[i + 1].first_slice <= s) i++;
        const Linear *l = linears->all + i;
        const Cut *c = linears->cuts + i;
        const int64_t slice = s - c->first_slice, first = slice / SLICES * c->height, n = slice % SLICES;
        const int64_t m = min_i64(c->height, l->rows - first);
        if (c->chunks) quantise_rows(l, first, m, c->chunks * n / SLICES, c->chunks * (n + 1) / SLICES);
        else pack_rows(l, first, m, c->words * n / SLICES, c->words * (n + 1) / SLICES, type,
                       (float *)l->scratch + first * c->words * c->width);
    }
}

INLINE void multiply_items(const Linears *linears, int64_t from, int64_t to, const int type) {
    for (int64_t item = from, i = 0; item < to; item++) {
        while (i + 1 < linears->count && linears->cuts[i + 1].first_item <= item) i++;
        multiply(linears->all + i, linears->cuts + i, item - linears->cuts[i].first_item, type);
    }
}

static void pack_pairs(const void *linears, int64_t from, int64_t to) { pack_items(linears, from, to, BF16); }
static void pack_f32(const void *linears, int64_t from, int64_t to) { pack_items(linears, from, to, F32); }
static void multiply_pairs(const void *linears, int64_t from, int64_t to) { multiply_items(linears, from, to, BF16); }
static void multiply_f32(const void *linears, int64_t from, int64_t to) { multiply_items(linears, from, to, F32); }

typedef struct {
    const Linear *all;
    int64_t count, type;
} Call;

INLINE void compute(const Call *call, const int type) {
    Linears linears;
    int64_t slices = 0, items = 0;
    linears.all = call->all, linears.count = call->count;
    for (int64_t i = 0; i < call->count; i++) {
        Cut *c = linears.cuts + i;
        *c = cut(call->all + i, type);
        c->first_slice = slices, c->first_item = items;
        slices += c->in_place ? 0 : c->tiles * SLICES;
        items += c->columns * c->blocks;
    }
    share_items(slices, SLICES, type == BF16 ? pack_pairs : pack_f32, &linears);
    share_items(items, MOST_ITEMS, type == BF16 ? multiply_pairs : multiply_f32, &linears);
}

static void compute_linears(const void *context) {
    const Call *call = context;
    if (call->type == BF16) compute(call, BF16);
    else compute(call, F32);
}

void FOR_CLASS(linear_bf16)(const Linear *l) { run_team(compute_linears, &(Call){l, 1, BF16}); }
void FOR_CLASS(linears_bf16)(const Linear *all, int64_t count) { run_team(compute_linears, &(Call){all, count, BF16}); }

/* Classes with dot products of bfloat16 leave float32 to a lower class (kernels/native.py picks it). */
#if !HAS_DOT
void FOR_CLASS(linear_f32)(const Linear *l) { run_team(compute_linears, &(Call){l, 1, F32}); }
void FOR_CLASS(linears_f32)(const Linear *all, int64_t count) { run_team(compute_linears, &(Call){all, count, F32}); }
#endif
