/* AMX's tiles: registers of at most 16 rows of 64 bytes. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

/* The layout that ldtilecfg reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Eight tiles of 16 rows of 64 bytes. */
static const TileConfig whole_tiles = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
