/* One layer's part of the KV pool, as KVCache packs it (formats: kernels/kv/quantise.py). Inside a block the rows are
 * [kv_heads][block_size], contiguous. Blocks are k_block and v_block bytes apart. */
#pragma once
#include "simd/scalar.h"

typedef struct {
    uint8_t *k, *v;
    int64_t k_block, v_block; /* bytes from one block to the next */
    uint16_t *k_scales, *v_scales; /* float16, one per row; null if elements are not quantised */
    int64_t k_scales_block, v_scales_block; /* scales from one block to the next */
    int64_t kv_heads, block_size, dim, row_bytes, kind;
} KvCache;

INLINE int64_t row_of(const KvCache *cache, int64_t kv_head, int64_t offset) {
    return kv_head * cache->block_size + offset;
}

/* Element i of a row, unscaled. INT4 has the first half of a row in the low nibbles, the second in the high ones. */
INLINE float element(const void *row, int64_t i, int kind) {
    switch (kind) {
    case INT8: return (float)((const int8_t *)row)[i];
    case FP8: return from_e4m3(((const uint8_t *)row)[i]);
    default: return get(row, i, kind);
    }
}

/* Stores one row of floats, and its scale if the cache is quantised. */
INLINE void put_row(void *row, uint16_t *scale, const float *x, int64_t dim, int kind) {
    if (kind == BF16 || kind == F16 || kind == F32) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) put(row, i, x[i], kind);
        return;
    }
    const float max_value = kind == INT8 ? 127.0f : kind == FP8 ? 448.0f : 7.0f;
    float top = 0;
    int32_t has_nan = 0;
#pragma omp simd reduction(max : top) reduction(| : has_nan)
    for (int64_t i = 0; i < dim; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top, has_nan |= x[i] != x[i];
    if (has_nan) { /* integers have no NaN, so the scale has it */
        *scale = 0x7E00;
        memset(row, kind == INT4 ? 0x88 : 0, kind == INT4 ? dim / 2 : dim);
        return;
    }
    const float exact_scale = top / max_value;
    *scale = to_f16(exact_scale > 65504.0f ? 65504.0f : exact_scale);
    const float stored_scale = from_f16(*scale);
    const float inverse_scale = stored_scale > 0 ? 1.0f / stored_scale : 0.0f;
    uint8_t *y = row;
    if (kind == INT4) {
        dim /= 2;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) {
            int low = (int)rintf(clamped(x[i] * inverse_scale, max_value));
            int high = (int)rintf(clamped(x[i + dim] * inverse_scale, max_value));
            y[i] = (uint8_t)((low + 8) | (high + 8) << 4);
        }
    } else if (kind == INT8) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) y[i] = (uint8_t)(int8_t)(int)rintf(clamped(x[i] * inverse_scale, max_value));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) y[i] = to_e4m3(clamped(x[i] * inverse_scale, max_value));
    }
}
