/* y = x W^T + b in bfloat16 with AMX, whose instruction multiplies 16 rows of 16 pairs by 16 features.
 *
 * A panel of the packed weight (linear.h) is a column of weight tiles. x is repacked in tiles too, because rows that
 * are far apart would compete for the same lines of the L1 cache. Calls of many rows multiply two tiles of rows by two
 * panels at a time, calls of at most 16 rows one tile by four panels. An output is always one accumulator over the
 * depth, in order. So the bits of a row do not depend on the other rows of the call.
 *
 * A gated linear multiplies the panels of gate and up that have the same features. It stores activation(gate) * up,
 * half as many elements, as the repacked x of the next linear. */
#include "simd/activation.h"
#include "simd/cpu_class.h"
#include "simd/tiles.h"
#include "linear.h"
#include "team.h"

#define TILE_ROWS 16
#define TILE (TILE_ROWS * TILE_WORDS) /* words of a tile of x or of weights */
#define BLOCK 32                      /* most tiles of rows that are multiplied with the same weights in the L1 cache */
#define BLOCK_TILES 1024              /* most tiles of x in these rows: 1 MiB, which stays in the L2 cache */
#define PART 8                        /* tiles along the depth of these weights */
#define THIN_PART 2                   /* the same for a quantised weight and at most 16 rows */
#define STEP_LINES (2 * TILE * 4 / 64) /* cache lines of two panels' tiles */

/* What follows the product: nothing, or activation(first half of the features) * second half. */
enum { PLAIN_PRODUCT, SILU_GATED, GELU_GATED };

/* Packs tile `tile` of the rows of x as [words / 16] tiles, padded with zeros. */
static void pack_tile(const Linear *l, int64_t tile, int64_t words, uint32_t *packed) {
    const int32_t *order = l->weight.order;
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        const int64_t row = tile * TILE_ROWS + i;
        const uint16_t *from = row < l->rows ? source_row(l, row, BF16) : NULL;
        for (int64_t k = 0; k < words; k += TILE_WORDS) {
            uint16_t *to = (uint16_t *)(packed + k * TILE_ROWS + i * TILE_WORDS);
            const int64_t count = row < l->rows ? min_i64(l->weight.depth - 2 * k, 2 * TILE_WORDS) : 0;
            if (count == 2 * TILE_WORDS && !order) {
                memcpy(to, from + 2 * k, 4 * TILE_WORDS);
                continue;
            }
            memset(to, 0, 4 * TILE_WORDS);
            if (order)
                for (int64_t j = 0; j < count; j++) to[j] = from[order[2 * k + j]];
            else if (count > 0) memcpy(to, from + 2 * k, 2 * count);
        }
    }
}

/* sums [32 rows][32 features] (+)= two tiles of rows, x and more_x, by two panels, over `steps` tiles of the depth.
 * Prefetches `ahead`, `lines` lines a step. */
static void multiply_two(const uint32_t *x, const uint32_t *more_x, const uint32_t *w, const uint32_t *more_w,
                         int64_t steps, int is_first, const char *ahead, int64_t lines, float *sums) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 128);
        _tile_loadd(1, sums + PANEL, 128);
        _tile_loadd(2, sums + 2 * TILE, 128);
        _tile_loadd(3, sums + 2 * TILE + PANEL, 128);
    }
    for (int64_t k = 0; k < steps * TILE; k += TILE) {
        _tile_loadd(6, w + k, 64);
        _tile_loadd(4, x + k, 64);
        _tile_loadd(7, more_w + k, 64);
        _tile_loadd(5, more_x + k, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (int64_t i = 0; i < lines; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + PANEL, 128);
    _tile_stored(2, sums + 2 * TILE, 128);
    _tile_stored(3, sums + 2 * TILE + PANEL, 128);
}

/* The tile registers 0 to 3 += one tile of rows by two panels at w and two at more_w; a panel takes `stride` words. */
INLINE void multiply_one(const uint32_t *x, const uint32_t *w, const uint32_t *more_w, int64_t stride, int64_t steps) {
    for (int64_t k = 0; k < steps * TILE; k += TILE, w += TILE, more_w += TILE) {
        _tile_loadd(4, x + k, 64);
        _tile_loadd(5, w, 64);
        _tile_loadd(6, w + stride, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(7, more_w, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, more_w + stride, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
}

/* Stores one tile of activation(gate) * up as a tile [rows][16 words] of the repacked x of the next linear. The bias is
 * added to gate and up, and both are rounded first. `feature`: the tile's first feature of gate. Rows of the sums are
 * `stride` floats apart. */
INLINE void put_gated(const Linear *l, int64_t tile, int64_t feature, const float *gate, const float *up, int64_t stride,
                      const int gelu) {
    const int64_t inner = l->weight.features / 2;
    uint16_t *to = (uint16_t *)((uint32_t *)l->y + (tile * (inner / (2 * TILE_WORDS)) + feature / (2 * TILE_WORDS)) * TILE);
    Floats bias[2] = {{0}}, up_bias[2] = {{0}};
    for (int j = 0; j < 2 && l->weight.bias; j++) {
        bias[j] = load_vector(l->weight.bias, feature + j * LANES, BF16);
        up_bias[j] = load_vector(l->weight.bias, inner + feature + j * LANES, BF16);
    }
    for (int64_t i = 0; i < TILE_ROWS; i++, gate += stride, up += stride)
        for (int j = 0; j < 2; j++, to += LANES) {
            const Floats x = rounded_vector(load_floats(gate + j * LANES) + bias[j], BF16);
            store_bf16(to, activation(x, gelu) * rounded_vector(load_floats(up + j * LANES) + up_bias[j], BF16));
        }
}

/* At most 16 rows by two panels from `panel` on and two from `other` on, over the whole depth. */
static void multiply_thin(const Linear *l, const uint32_t *x, int64_t panel, int64_t other, const int follows) {
    const Weight *w = &l->weight;
    const int64_t steps = words_of(w->depth, BF16) / TILE_WORDS, size = steps * TILE;
    float sums[4 * TILE] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (w->kind == PLAIN) {
        const uint32_t *packed = w->packed;
        multiply_one(x, packed + panel * size, packed + other * size, size, steps);
    } else {
        uint32_t unpacked[GROUP * THIN_PART * TILE] __attribute__((aligned(64)));
        for (int64_t k = 0; k < steps; k += THIN_PART) {
            const int64_t count = min_i64(THIN_PART, steps - k), from = k * 2 * TILE_WORDS, to = from + count * 2 * TILE_WORDS;
            uint32_t *more = unpacked + 2 * count * TILE;
            unpack(w, panel, 2, from, to, WEIGHT_PAIRS, unpacked);
            unpack(w, other, 2, from, to, WEIGHT_PAIRS, more);
            multiply_one(x + k * TILE, unpacked, more, count * TILE, count);
        }
    }
    _tile_stored(0, sums, 256);
    _tile_stored(1, sums + PANEL, 256);
    _tile_stored(2, sums + 2 * PANEL, 256);
    _tile_stored(3, sums + 3 * PANEL, 256);
    const float *up = sums + 2 * PANEL;
    if (follows == PLAIN_PRODUCT) put_rows(l, 0, l->rows, panel * PANEL, GROUP * PANEL, sums, GROUP * PANEL, BF16);
    else if (follows == SILU_GATED) put_gated(l, 0, panel * PANEL, sums, up, GROUP * PANEL, 0);
    else put_gated(l, 0, panel * PANEL, sums, up, GROUP * PANEL, 1);
}

/* The sums of two tiles of rows by two panels, [32 rows][32 features], for each pair of tiles of a block. */
typedef float Sums[BLOCK / 2][4 * TILE] __attribute__((aligned(64)));

/* Tiles of rows [from, to) by two panels, two tiles at a time. A part of the panels' depth stays in the L1 cache while
 * all rows are multiplied with it. Meanwhile the panels from `next` on are prefetched (negative: none), evenly, because
 * the reads of x use the same buffers. */
static void multiply_block(const Linear *l, const uint32_t *x, int64_t from, int64_t to, int64_t panel, int64_t next, Sums sums) {
    const int64_t steps = words_of(l->weight.depth, BF16) / TILE_WORDS, parts = (steps + PART - 1) / PART;
    const uint32_t *packed = l->weight.packed, *w = packed + panel * steps * TILE;
    const int is_plain = l->weight.kind == PLAIN;
    const int64_t pairs = (to - from) / 2, lines = next >= 0 && is_plain ? (STEP_LINES + pairs - 1) / pairs : 0;
    const char *ahead = (const char *)(packed + (lines ? next : 0) * steps * TILE);
    uint32_t unpacked[2 * PART * TILE] __attribute__((aligned(64)));
    for (int64_t part = 0; part < parts; part++) {
        const int64_t k = steps * part / parts, count = steps * (part + 1) / parts - k;
        const uint32_t *part_w = is_plain ? w + k * TILE : unpacked, *more_w = part_w + (is_plain ? steps : count) * TILE;
        if (!is_plain) unpack(&l->weight, panel, 2, k * 2 * TILE_WORDS, (k + count) * 2 * TILE_WORDS, WEIGHT_PAIRS, unpacked);
        for (int64_t pair = 0; pair < pairs; pair++, ahead += count * lines * 64) {
            const uint32_t *pair_x = x + ((from + 2 * pair) * steps + k) * TILE;
            multiply_two(pair_x, pair_x + steps * TILE, part_w, more_w, count, part == 0, ahead, lines, sums[pair]);
        }
    }
}

INLINE void put_block(const Linear *l, int64_t from, int64_t to, int64_t panel, Sums sums) {
    for (int64_t tile = from; tile < to; tile += 2)
        put_rows(l, tile * TILE_ROWS, min_i64(2 * TILE_ROWS, l->rows - tile * TILE_ROWS), panel * PANEL, 2 * PANEL,
                 sums[(tile - from) / 2], 2 * PANEL, BF16);
}

INLINE void put_gated_block(const Linear *l, int64_t from, int64_t to, int64_t panel, Sums gate, Sums up, const int gelu) {
    for (int64_t i = 0; i < to - from; i++)
        put_gated(l, from + i, panel * PANEL, gate[i / 2] + i % 2 * 2 * TILE, up[i / 2] + i % 2 * 2 * TILE, 2 * PANEL, gelu);
}

/* How the work of a linear is divided: into tiles of rows to repack, and into items. An item is two pairs of panels,
 * `apart` panels apart, times a block of tiles of rows, which stays in the L2 cache while all panels are multiplied
 * with it. `columns`: items of a block. `first_tile` and `first_item` are numbered over all linears of a call. */
typedef struct {
    int64_t steps, tiles, columns, apart, block, is_thin;
    int64_t first_tile, first_item;
} Cut;

static Cut cut(const Linear *l, const int follows) {
    const int64_t steps = words_of(l->weight.depth, BF16) / TILE_WORDS, is_thin = l->rows <= TILE_ROWS;
    const int64_t tiles = is_thin ? l->rows > 0 : (l->rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * 2;
    const int64_t inner_panels = l->weight.features / 2 / PANEL, is_gated = follows != PLAIN_PRODUCT;
    return (Cut){steps, tiles, is_gated ? inner_panels / 2 : panels_of(l->weight.features) / GROUP, is_gated ? inner_panels : 2,
                 max_i64(2, min_i64(BLOCK, BLOCK_TILES / steps / 2 * 2)), is_thin, 0, 0};
}

static void multiply(const Linear *l, const Cut *c, int64_t item, int has_next, const int follows) {
    const int64_t width = follows == PLAIN_PRODUCT ? GROUP : 2; /* panels from one item to the next */
    const int64_t panel = item % c->columns * width, other = panel + c->apart;
    const int64_t from = item / c->columns * c->block, to = min_i64(from + c->block, c->tiles);
    const int64_t next = has_next && (item + 1) % c->columns ? panel + width : -1;
    const uint32_t *x = l->scratch;
    if (c->is_thin) {
        multiply_thin(l, x, panel, other, follows);
        return;
    }
    Sums sums, more;
    multiply_block(l, x, from, to, panel, other, sums);
    if (follows == PLAIN_PRODUCT) put_block(l, from, to, panel, sums);
    multiply_block(l, x, from, to, other, next, more);
    if (follows == PLAIN_PRODUCT) put_block(l, from, to, other, more);
    else if (follows == SILU_GATED) put_gated_block(l, from, to, panel, sums, more, 0);
    else put_gated_block(l, from, to, panel, sums, more, 1);
}

#define MOST_ITEMS 4 /* items that a thread takes at once: it can then prefetch the next item's panels */

typedef struct {
    const Linear *all;
    int64_t count, follows;
    const Cut *cuts;
} Call;

static void pack_items(const void *context, int64_t from, int64_t to) {
    const Call *call = context;
    for (int64_t t = from, i = 0; t < to; t++) {
        while (i + 1 < call->count && call->cuts[i + 1].first_tile <= t) i++;
        const int64_t tile = t - call->cuts[i].first_tile, words = call->cuts[i].steps * TILE_WORDS;
        pack_tile(call->all + i, tile, words, (uint32_t *)call->all[i].scratch + tile * words * TILE_ROWS);
    }
}

static void multiply_items(const void *context, int64_t from, int64_t to) {
    const Call *call = context;
    _tile_loadconfig(&whole_tiles);
    for (int64_t item = from, i = 0; item < to; item++) {
        while (i + 1 < call->count && call->cuts[i + 1].first_item <= item) i++;
        const Linear *l = call->all + i;
        const int64_t own = item - call->cuts[i].first_item;
        if (call->follows == PLAIN_PRODUCT) multiply(l, call->cuts + i, own, item + 1 < to, PLAIN_PRODUCT);
        else if (call->follows == SILU_GATED) multiply(l, call->cuts + i, own, item + 1 < to, SILU_GATED);
        else multiply(l, call->cuts + i, own, item + 1 < to, GELU_GATED);
    }
    _tile_release();
}

static void compute_linears(const void *context) {
    Call call = *(const Call *)context;
    Cut cuts[MAX_LINEARS];
    int64_t tiles = 0, items = 0;
    call.cuts = cuts;
    for (int64_t i = 0; i < call.count; i++) {
        cuts[i] = cut(call.all + i, (int)call.follows);
        cuts[i].first_tile = tiles, cuts[i].first_item = items;
        tiles += call.all[i].x ? cuts[i].tiles : 0;
        items += cuts[i].columns * ((cuts[i].tiles + cuts[i].block - 1) / cuts[i].block);
    }
    share_items(tiles, 8, pack_items, &call);
    share_items(items, MOST_ITEMS, multiply_items, &call);
}

void FOR_CLASS(linears_bf16)(const Linear *all, int64_t count) {
    run_team(compute_linears, &(Call){all, count, PLAIN_PRODUCT, 0});
}

void FOR_CLASS(linear_bf16)(const Linear *l) { run_team(compute_linears, &(Call){l, 1, PLAIN_PRODUCT, 0}); }

void FOR_CLASS(gated_linear_bf16)(const Linear *l, int64_t gelu) {
    run_team(compute_linears, &(Call){l, 1, gelu ? GELU_GATED : SILU_GATED, 0});
}
