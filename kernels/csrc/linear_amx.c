/* y = x W^T + b in bfloat16 with AMX, whose instruction multiplies 16 rows of 16 pairs by 16 features.
 *
 * A panel of the packed weight (linear.h) is a column of weight tiles. x is repacked in tiles as well: rows far apart
 * would compete for the same lines of the first cache. Calls of many rows multiply two tiles of rows by two panels at a
 * time, calls of at most 16 rows one tile by four panels. Every output is one accumulator over the depth in order, with
 * any other rows in the call: a row's bits never depend on its neighbours. */
#include <immintrin.h>

#include "simd/cpu_class.h"
#include "linear.h"

#define TILE_ROWS 16
#define TILE (TILE_ROWS * TILE_WORDS) /* words of a tile, of x and of weights alike */
#define AHEAD 8
#define BLOCK 16                      /* tiles of rows that share panels in an item of work */

/* The layout that ldtilecfg reads: eight tiles of 16 rows of 64 bytes. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

static const TileConfig whole_tiles = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* Tile `tile` of rows of x as [words / 16] tiles; rows and elements that x lacks are zero. */
static void pack_tile(const Linear *l, int64_t tile, int64_t words, uint32_t *packed) {
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        const int64_t row = tile * TILE_ROWS + i;
        const uint16_t *from = (const uint16_t *)l->x + row * l->ldx;
        for (int64_t k = 0; k < words; k += TILE_WORDS) {
            uint16_t *to = (uint16_t *)(packed + k * TILE_ROWS + i * TILE_WORDS);
            const int64_t count = row < l->rows ? min_i64(l->depth - 2 * k, 2 * TILE_WORDS) : 0;
            if (count == 2 * TILE_WORDS) memcpy(to, from + 2 * k, 4 * TILE_WORDS);
            else {
                memset(to, 0, 4 * TILE_WORDS);
                if (count > 0) memcpy(to, from + 2 * k, 2 * count);
            }
        }
    }
}

/* Two tiles of rows, x and x + words * 16, by two panels: sums [32 rows][32 features]. Prefetches `ahead`, one line for
 * each line of x. */
static void multiply_two(const uint32_t *x, const uint32_t *w, int64_t words, const char *ahead, float *sums) {
    const uint32_t *more_x = x + words * TILE_ROWS, *more_w = w + words * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < words * TILE_ROWS; k += TILE) {
        _tile_loadd(6, w + k, 64);
        _tile_loadd(4, x + k, 64);
        _tile_loadd(7, more_w + k, 64);
        _tile_loadd(5, more_x + k, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (ahead)
            for (int i = 0; i < AHEAD; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + PANEL, 128);
    _tile_stored(2, sums + 2 * TILE, 128);
    _tile_stored(3, sums + 2 * TILE + PANEL, 128);
}

/* One tile of rows by four panels: sums [16 rows][64 features]. */
static void multiply_one(const uint32_t *x, const uint32_t *w, int64_t words, float *sums) {
    const int64_t panel = words * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < words * TILE_ROWS; k += TILE, w += TILE) {
        _tile_loadd(4, x + k, 64);
        _tile_loadd(5, w, 64);
        _tile_loadd(6, w + panel, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(7, w + 2 * panel, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, w + 3 * panel, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 256);
    _tile_stored(1, sums + PANEL, 256);
    _tile_stored(2, sums + 2 * PANEL, 256);
    _tile_stored(3, sums + 3 * PANEL, 256);
}

void FOR_CLASS(linear_bf16)(const Linear *l) {
    const int64_t words = words_of(l->depth, BF16), rows = l->rows, step = rows <= TILE_ROWS ? 1 : 2, group = 4 / step;
    const int64_t tiles = (rows + step * TILE_ROWS - 1) / (step * TILE_ROWS) * step;
    const int64_t groups = panels_of(l->features) / group, blocks = (tiles + BLOCK - 1) / BLOCK;
    uint32_t *x = l->scratch;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++) pack_tile(l, tile, words, x + tile * words * TILE_ROWS);
        _tile_loadconfig(&whole_tiles);
#pragma omp for schedule(dynamic, 4) nowait
        for (int64_t item = 0; item < groups * blocks; item++) {
            const int64_t panel = item / blocks * group, block = item % blocks * BLOCK;
            const uint32_t *w = l->packed + panel * words * PANEL;
            const char *ahead = (const char *)(w + group * words * PANEL);
            if (item % 4 == 3) ahead = NULL;
            for (int64_t tile = block; tile < min_i64(block + BLOCK, tiles); tile += step) {
                float sums[4 * TILE] __attribute__((aligned(64)));
                if (step == 1) multiply_one(x + tile * words * TILE_ROWS, w, words, sums);
                else multiply_two(x + tile * words * TILE_ROWS, w, words, ahead, sums);
                ahead = ahead ? ahead + words / 16 * 64 * AHEAD : NULL;
                put_rows(l, tile * TILE_ROWS, min_i64(step * TILE_ROWS, rows - tile * TILE_ROWS), panel * PANEL,
                         group * PANEL, sums, group * PANEL, BF16);
            }
        }
        _tile_release();
    }
}
