/* y = x W^T + b in bfloat16 with AMX, whose instruction multiplies 16 rows of 16 pairs by 16 features.
 *
 * A panel of the packed weight (linear.h) is a column of weight tiles. x is repacked in tiles as well: rows far apart
 * would compete for the same lines of the first cache. Calls of many rows multiply two tiles of rows by two panels at a
 * time, calls of at most 16 rows one tile by four panels. Every output is one accumulator over the depth in order, with
 * any other rows in the call: a row's bits never depend on its neighbours. */
#include <omp.h>

#include "simd/cpu_class.h"
#include "simd/tiles.h"
#include "linear.h"

#define TILE_ROWS 16
#define TILE (TILE_ROWS * TILE_WORDS) /* words of a tile, of x and of weights alike */
#define BLOCK 32                      /* most tiles of rows that pass by the same weights in the first cache */
#define BLOCK_TILES 1024              /* most tiles of x in them, 1 MiB: they stay in the second cache */
#define PART 8                        /* tiles of the depth of these weights */
#define THIN_PART 4                   /* and of a quantised weight that meets at most 16 rows */
#define AHEAD 8                       /* lines prefetched for each step along the depth */

/* Tile `tile` of rows of x as [words / 16] tiles; rows and elements that x lacks are zero. */
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
 * Prefetches `ahead`, AHEAD lines a step. */
static void multiply_two(const uint32_t *x, const uint32_t *more_x, const uint32_t *w, const uint32_t *more_w,
                         int64_t steps, int is_first, const char *ahead, float *sums) {
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
        for (int i = 0; i < AHEAD && ahead; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + PANEL, 128);
    _tile_stored(2, sums + 2 * TILE, 128);
    _tile_stored(3, sums + 2 * TILE + PANEL, 128);
}

/* The tile registers 0 to 3 += one tile of rows by four panels that lie `stride` words apart. */
INLINE void multiply_one(const uint32_t *x, const uint32_t *w, int64_t stride, int64_t steps) {
    for (int64_t k = 0; k < steps * TILE; k += TILE, w += TILE) {
        _tile_loadd(4, x + k, 64);
        _tile_loadd(5, w, 64);
        _tile_loadd(6, w + stride, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(7, w + 2 * stride, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, w + 3 * stride, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
}

/* Up to 16 rows by four panels, of all the depth. */
static void multiply_thin(const Linear *l, const uint32_t *x, int64_t panel) {
    const Weight *w = &l->weight;
    const int64_t steps = words_of(w->depth, BF16) / TILE_WORDS;
    float sums[4 * TILE] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (w->kind == PLAIN) {
        multiply_one(x, (const uint32_t *)w->packed + panel * steps * TILE, steps * TILE, steps);
    } else {
        uint32_t unpacked[GROUP * THIN_PART * TILE] __attribute__((aligned(64)));
        for (int64_t k = 0; k < steps; k += THIN_PART) {
            const int64_t count = min_i64(THIN_PART, steps - k);
            unpack(w, panel, GROUP, k * 2 * TILE_WORDS, (k + count) * 2 * TILE_WORDS, 1, unpacked);
            multiply_one(x + k * TILE, unpacked, count * TILE, count);
        }
    }
    _tile_stored(0, sums, 256);
    _tile_stored(1, sums + PANEL, 256);
    _tile_stored(2, sums + 2 * PANEL, 256);
    _tile_stored(3, sums + 3 * PANEL, 256);
    put_rows(l, 0, l->rows, panel * PANEL, GROUP * PANEL, sums, GROUP * PANEL, BF16);
}

/* Rows of the tiles [from, to), two tiles at a time, by two panels. The panels are read in parts of the depth that stay in
 * the first cache while all rows pass. Prefetches the next panels, which lie behind. */
static void multiply_block(const Linear *l, const uint32_t *x, int64_t from, int64_t to, int64_t panel, int has_next) {
    const int64_t steps = words_of(l->weight.depth, BF16) / TILE_WORDS, parts = (steps + PART - 1) / PART;
    const uint32_t *w = (const uint32_t *)l->weight.packed + panel * steps * TILE;
    const int is_plain = l->weight.kind == PLAIN;
    const char *ahead = has_next && is_plain ? (const char *)(w + 2 * steps * TILE) : NULL;
    uint32_t unpacked[2 * PART * TILE] __attribute__((aligned(64)));
    float sums[BLOCK / 2][4 * TILE] __attribute__((aligned(64)));
    for (int64_t part = 0; part < parts; part++) {
        const int64_t k = steps * part / parts, count = steps * (part + 1) / parts - k;
        const uint32_t *part_w = is_plain ? w + k * TILE : unpacked, *more_w = part_w + (is_plain ? steps : count) * TILE;
        if (!is_plain) unpack(&l->weight, panel, 2, k * 2 * TILE_WORDS, (k + count) * 2 * TILE_WORDS, 1, unpacked);
        for (int64_t tile = from; tile < to; tile += 2) {
            const uint32_t *tile_x = x + (tile * steps + k) * TILE;
            multiply_two(tile_x, tile_x + steps * TILE, part_w, more_w, count, part == 0, ahead,
                         sums[(tile - from) / 2]);
            if (ahead) ahead += count * AHEAD * 64;
        }
    }
    for (int64_t tile = from; tile < to; tile += 2)
        put_rows(l, tile * TILE_ROWS, min_i64(2 * TILE_ROWS, l->rows - tile * TILE_ROWS), panel * PANEL, 2 * PANEL,
                 sums[(tile - from) / 2], 2 * PANEL, BF16);
}

/* How a linear is cut: into tiles of rows to repack, and into items, each GROUP panels by a block of tiles of rows, which
 * stays in the second cache while all panels pass. `first_tile` and `first_item` count over all linears of a call. */
typedef struct {
    int64_t steps, tiles, groups, block, is_thin;
    int64_t first_tile, first_item;
} Cut;

static Cut cut(const Linear *l) {
    const int64_t steps = words_of(l->weight.depth, BF16) / TILE_WORDS, is_thin = l->rows <= TILE_ROWS;
    const int64_t tiles = is_thin ? l->rows > 0 : (l->rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * 2;
    return (Cut){steps, tiles, panels_of(l->weight.features) / GROUP,
                 max_i64(2, min_i64(BLOCK, BLOCK_TILES / steps / 2 * 2)), is_thin, 0, 0};
}

static void multiply(const Linear *l, const Cut *c, int64_t item, int has_next) {
    const int64_t panel = item % c->groups * GROUP, from = item / c->groups * c->block;
    const uint32_t *x = l->scratch;
    if (c->is_thin) {
        multiply_thin(l, x, panel);
        return;
    }
    multiply_block(l, x, from, min_i64(from + c->block, c->tiles), panel, 1);
    multiply_block(l, x, from, min_i64(from + c->block, c->tiles), panel + 2, has_next);
}

void FOR_CLASS(linears_bf16)(const Linear *all, int64_t count) {
    Cut cuts[MAX_LINEARS];
    int64_t tiles = 0, items = 0;
    for (int64_t i = 0; i < count; i++) {
        cuts[i] = cut(all + i);
        cuts[i].first_tile = tiles, cuts[i].first_item = items;
        tiles += cuts[i].tiles;
        items += cuts[i].groups * ((cuts[i].tiles + cuts[i].block - 1) / cuts[i].block);
    }
    if (!items) return;
    /* A thread takes consecutive panels, so that it can prefetch the next ones. */
    const int64_t chunk = max_i64(1, min_i64(4, items / (4 * omp_get_max_threads())));
#pragma omp parallel
    {
        int64_t i = 0;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            while (i + 1 < count && cuts[i + 1].first_tile <= t) i++;
            const int64_t tile = t - cuts[i].first_tile, size = cuts[i].steps * TILE;
            pack_tile(all + i, tile, cuts[i].steps * TILE_WORDS, (uint32_t *)all[i].scratch + tile * size);
        }
        _tile_loadconfig(&whole_tiles);
        i = 0;
#pragma omp for schedule(monotonic : dynamic, chunk) nowait
        for (int64_t item = 0; item < items; item++) {
            while (i + 1 < count && cuts[i + 1].first_item <= item) i++;
            multiply(all + i, cuts + i, item - cuts[i].first_item, (item + 1) % chunk != 0);
        }
        _tile_release();
    }
}

void FOR_CLASS(linear_bf16)(const Linear *l) { FOR_CLASS(linears_bf16)(l, 1); }
