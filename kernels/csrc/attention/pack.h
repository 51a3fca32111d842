/* Finds, prefetches and packs the keys, values and queries of an item. The inner loops read the packed forms. */
#pragma once
#include "attention/convert.h"
#if HAS_DOT
#include "simd/widen_bf16.h"
#endif

/* Finds the parts of the chunk that begins at key `from`, up to key `to`. A part lies in one block, except if the block
 * size is no multiple of PART: then its pointers are only good for prefetches, and pack copies the rows. */
static void find_parts(const Item *it, int64_t from, int64_t to, Parts *parts) {
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    const int32_t *table = a->tables + it->seq * a->table_stride;
    parts->count = min_i64(CHUNK, to - from);
    parts->k_stride = parts->v_stride = cache->row_bytes, parts->rope_stride = a->rope_row_bytes;
    parts->k_type = parts->v_type = cache->kind;
    for (int64_t p = 0; p < CHUNK / PART; p++) {
        /* The last part of a chunk stands for those that it lacks. */
        const int64_t key = from + min_i64(p * PART, parts->count - 1) / PART * PART;
        const int64_t id = table[key / cache->block_size], offset = key % cache->block_size;
        const int64_t row = row_of(cache, it->kv_head, offset);
        parts->k[p] = cache->k + id * cache->k_block + row * cache->row_bytes;
        parts->v[p] = a->values_are_keys ? parts->k[p] : cache->v + id * cache->v_block + row * cache->row_bytes;
        if (a->rope_dim) parts->rope[p] = a->rope + id * a->rope_block + offset * a->rope_row_bytes;
        if (!cache->k_scales) continue;
        parts->k_scales[p] = cache->k_scales + id * cache->k_scales_block + row;
        parts->v_scales[p] =
            a->values_are_keys ? parts->k_scales[p] : cache->v_scales + id * cache->v_scales_block + row;
        if (a->rope_dim) parts->rope_scales[p] = a->rope_scales + id * a->rope_scales_block + offset;
    }
}

/* Blocks of a sequence are not contiguous in memory, so that the hardware cannot prefetch the next chunk. With AMX that
 * is done here, AHEAD keys at a time between the packing of others. In vectors.h the inner loops prefetch. */
#define AHEAD 4

INLINE void prefetch_lines(const uint8_t *from, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

/* Prefetches keys [key, key + AHEAD) of a chunk, and their values. `next` null: none. */
INLINE void prefetch_keys(const Attention *a, const Parts *next, int64_t key) {
    if (!HAS_TILES || !next || key >= next->count) return;
    const int64_t bytes = a->cache->row_bytes, at = key % PART * bytes;
    prefetch_lines(next->k[key / PART] + at, AHEAD * bytes);
    if (!a->values_are_keys) prefetch_lines(next->v[key / PART] + at, AHEAD * bytes);
}

/* Prefetches the rotary rows and the scales of part p. */
INLINE void prefetch_rest(const Attention *a, const Parts *next, int64_t p) {
    if (!next || p * PART >= next->count) return;
    if (a->rope_dim) prefetch_lines(next->rope[p], PART * a->rope_row_bytes);
    if (!a->cache->k_scales) return;
    __builtin_prefetch(next->k_scales[p], 0, 2);
    __builtin_prefetch(next->v_scales[p], 0, 2);
    if (a->rope_dim) __builtin_prefetch(next->rope_scales[p], 0, 2);
}

#if !HAS_DOT
INLINE void widen_as(float *to, const uint8_t *row, int64_t dim, int kind) {
#if CONVERTS_IN_PLACE
    if (kind != INT4 || dim % 32 == 0) {
        convert_row(to, row, dim, kind);
        return;
    }
#endif
    if (kind == INT4) {
        dim /= 2;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) to[i] = (float)((row[i] & 15) - 8), to[i + dim] = (float)((row[i] >> 4) - 8);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) to[i] = element(row, i, kind);
}

/* Converts a row to float32, unscaled; of FP8 to 1 / FP8_SCALE times that. */
static void widen_row(void *to, const uint8_t *row, int64_t dim, int64_t kind) {
    switch (kind) {
    case F16: widen_as(to, row, dim, F16); break;
    case FP8: widen_as(to, row, dim, FP8); break;
    case INT8: widen_as(to, row, dim, INT8); break;
    default: widen_as(to, row, dim, INT4);
    }
}
#endif

/* Copies `count` rows, `stride` bytes apart, as row_type. Returns the end of the copies. */
static uint8_t *copy_rows(const Attention *a, uint8_t *to, const uint8_t *rows, int64_t stride, int64_t count,
                          int64_t dim) {
    const int64_t kind = a->cache->kind, type = row_type(a), bytes = dim * (type == BF16 ? 2 : 4);
    for (int64_t j = 0; j < count; j++, rows += stride, to += bytes)
        if (kind == type) memcpy(to, rows, bytes);
        else widen_row((void *)to, rows, dim, kind);
    return to;
}

/* Converts scales to float32, for the elements as the class reads them. */
INLINE void load_scales(float *to, const uint16_t *from, int64_t count, int64_t kind) {
    const float factor = kind == FP8 ? FP8_SCALE : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = from_f16(from[i]) * factor;
}

/* Clears the scales of keys that the chunk lacks: a weight of 0 times a scale that was never written could be NaN. */
INLINE void clear_scales(Scratch *s, int64_t count) {
    for (int64_t j = count; j < CHUNK; j++) s->k_scales[j] = s->v_scales[j] = s->rope_scales[j] = 0;
}

/* Copies the rows of a chunk to the working memory. */
static void copy_chunk(const Item *it, Scratch *s, int64_t chunk, Parts *parts) {
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    const int32_t *table = a->tables + it->seq * a->table_stride;
    const int64_t size = cache->block_size, bytes = cache->row_bytes, element_bytes = row_type(a) == BF16 ? 2 : 4;
    uint8_t *k = (uint8_t *)s->wide_k, *v = (uint8_t *)s->wide_v, *rope = (uint8_t *)s->wide_rope;
    parts->k_stride = cache->dim * element_bytes, parts->v_stride = a->value_dim * element_bytes;
    parts->rope_stride = a->rope_dim * element_bytes;
    parts->k_type = parts->v_type = row_type(a);
    for (int64_t p = 0; p < CHUNK / PART; p++) {
        parts->k[p] = k + p * PART * parts->k_stride, parts->rope[p] = rope + p * PART * parts->rope_stride;
        parts->v[p] = a->values_are_keys ? parts->k[p] : v + p * PART * parts->v_stride;
    }
    for (int64_t j = 0, block = chunk / size, offset = chunk % size; j < parts->count; block++, offset = 0) {
        const int64_t id = table[block], run = min_i64(size - offset, parts->count - j);
        const int64_t row = row_of(cache, it->kv_head, offset);
        k = copy_rows(a, k, cache->k + id * cache->k_block + row * bytes, bytes, run, cache->dim);
        if (!a->values_are_keys)
            v = copy_rows(a, v, cache->v + id * cache->v_block + row * bytes, bytes, run, a->value_dim);
        if (a->rope_dim)
            rope = copy_rows(a, rope, a->rope + id * a->rope_block + offset * a->rope_row_bytes, a->rope_row_bytes, run,
                             a->rope_dim);
        if (cache->k_scales) {
            const uint16_t *k_scales = cache->k_scales + id * cache->k_scales_block + row;
            const uint16_t *v_scales =
                a->values_are_keys ? k_scales : cache->v_scales + id * cache->v_scales_block + row;
            load_scales(s->k_scales + j, k_scales, run, cache->kind);
            load_scales(s->v_scales + j, v_scales, run, cache->kind);
            if (a->rope_dim)
                load_scales(s->rope_scales + j, a->rope_scales + id * a->rope_scales_block + offset, run, cache->kind);
        }
        j += run;
    }
    clear_scales(s, parts->count);
}

#if CONVERTS_IN_PLACE
/* For rows that are converted in place: widens their scales, and copies values of items with many rows as float32. */
static void prepare_chunk(const Item *it, Scratch *s, Parts *parts) {
    const Attention *a = it->a;
    if (a->cache->k_scales) {
        for (int64_t p = 0; p < CHUNK / PART; p++) {
            load_scales(s->k_scales + p * PART, parts->k_scales[p], PART, a->cache->kind);
            load_scales(s->v_scales + p * PART, parts->v_scales[p], PART, a->cache->kind);
            if (a->rope_dim) load_scales(s->rope_scales + p * PART, parts->rope_scales[p], PART, a->cache->kind);
        }
        clear_scales(s, parts->count);
    }
    if (it->rows <= IN_PLACE_ROWS) return;
    uint8_t *to = (uint8_t *)s->wide_v;
    for (int64_t j = 0; j < parts->count; j += PART) {
        const uint8_t *rows = parts->v[j / PART];
        parts->v[j / PART] = to;
        to = copy_rows(a, to, rows, parts->v_stride, min_i64(PART, parts->count - j), a->value_dim);
    }
    parts->v_type = F32, parts->v_stride = a->value_dim * 4;
}
#endif

/* Transposes a part of keys to words [dim / PAIR][PART], and fills up the last step of words with zeros. */
INLINE void pack_keys(const uint8_t *rows, int64_t stride, int64_t dim, const int type, uint32_t *to) {
#if CONVERTS_IN_PLACE
    if (type != BF16 && type != F32) {
        pack_converted(rows, stride, dim, type, to);
        return;
    }
#endif
    const int64_t words = type == BF16 ? dim / 2 : dim; /* of 32 bits in a row */
    const int widens = type == BF16 && !HAS_DOT;        /* each pair to two words */
    for (int64_t w = 0; w < words; w += LANES)
        for (int64_t j = 0; j < PART; j += LANES) {
            const int64_t count = LANES <= 8 ? LANES : min_i64(LANES, words - w);
            Words columns[LANES];
            transpose(rows + j * stride + w * 4, stride, count, columns);
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) {
                if (i == LANES / 2 && i >= count) break;
                uint32_t *word = to + (w + i) * (widens ? 2 : 1) * PART + j;
                if (widens) store_floats(word, low_of(columns[i])), store_floats(word + PART, high_of(columns[i]));
                else memcpy(word, columns + i, VECTOR_BYTES);
            }
        }
    memset(to + dim / PAIR * PART, 0, (row_words(dim) - dim / PAIR) * PART * 4);
}

#if HAS_DOT
/* The index of dimension d of a packed pair of values of a chunk. d: a multiple of LANES. */
INLINE int64_t value_at(int64_t dim, int64_t pair, int64_t d) {
    return HAS_TILES ? d * (CHUNK / 2) + pair * LANES : pair * dim + d;
}

/* Interleaves the values of two consecutive keys; of one if `second` is null. */
INLINE void pack_values(const void *first, const void *second, int64_t dim, int64_t pair, uint32_t *to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t d = 0; d < dim; d += 32) {
        __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0x0000FFFF;
        __m512i x = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)first + d);
        __m512i y = _mm512_maskz_loadu_epi16(second ? mask : 0, (const uint16_t *)(second ? second : first) + d);
        _mm512_storeu_si512(to + value_at(dim, pair, d), _mm512_permutex2var_epi16(x, low, y));
        if (dim - d >= 32) _mm512_storeu_si512(to + value_at(dim, pair, d + 16), _mm512_permutex2var_epi16(x, high, y));
    }
}

/* Packs the values of part p. Values that the chunk lacks are zero, so that data of unused slots cannot leak. */
INLINE void pack_part(const Attention *a, Scratch *s, const Parts *parts, int64_t p, const Parts *next) {
    const int64_t dim = a->value_dim;
    for (int64_t j = 0; j < PART; j += 2) {
        const int64_t key = p * PART + j;
        const uint8_t *row = parts->v[p] + j * parts->v_stride;
        if (j % (2 * AHEAD) == AHEAD) prefetch_keys(a, next, p * PART + 2 * AHEAD + j / (2 * AHEAD) * AHEAD);
        if (key < parts->count) {
            pack_values(row, key + 1 < parts->count ? row + parts->v_stride : NULL, dim, key / 2, s->v);
        } else {
            for (int64_t d = 0; d < dim; d += LANES) memset(s->v + value_at(dim, key / 2, d), 0, LANES * 4);
        }
    }
}
#endif

/* Packs the cache rows and the rotary rows of part p's keys. */
INLINE void pack_rows(const Attention *a, const Parts *parts, int64_t p, const int type, uint32_t *to,
                      uint32_t *to_rope) {
    pack_keys(parts->k[p], parts->k_stride, a->cache->dim, type, to);
    if (a->rope_dim) pack_keys(parts->rope[p], parts->rope_stride, a->rope_dim, type, to_rope);
}

/* Packs the keys and values of the chunk that begins at key `chunk`. */
static void pack(const Item *it, Scratch *s, int64_t chunk) {
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    Parts *parts = s->now;
    const Parts *next = s->next;
    const int64_t dim = cache->dim, words = key_words(a);
    if (!reads_in_place(a)) copy_chunk(it, s, chunk, parts);
#if CONVERTS_IN_PLACE
    else if (cache->kind != row_type(a)) prepare_chunk(it, s, parts);
#endif
    for (int64_t p = 0; p < CHUNK / PART; p++) {
        uint32_t *to = s->k + p * PART * words, *to_rope = to + row_words(dim) * PART;
        prefetch_rest(a, next, p);
        prefetch_keys(a, next, p * PART);
        if (p * PART >= parts->count) {
            memset(to, 0, words * PART * 4);
        } else {
            switch (HAS_DOT ? BF16 : parts->k_type) {
            case BF16: pack_rows(a, parts, p, BF16, to, to_rope); break;
            case F32: pack_rows(a, parts, p, F32, to, to_rope); break;
#if CONVERTS_IN_PLACE
            case F16: pack_rows(a, parts, p, F16, to, to_rope); break;
            case FP8: pack_rows(a, parts, p, FP8, to, to_rope); break;
            case INT8: pack_rows(a, parts, p, INT8, to, to_rope); break;
            default: pack_rows(a, parts, p, INT4, to, to_rope);
#endif
            }
        }
        prefetch_keys(a, next, p * PART + AHEAD);
#if HAS_DOT
        pack_part(a, s, parts, p, next);
#endif
    }
}

/* The queries of an item in the form that the inner loops read. */
static void pack_queries(const Item *it, Scratch *s) {
    const Attention *a = it->a;
    const int64_t dim = a->cache->dim, words = key_words(a);
    if (HAS_TILES) memset(s->q, 0, (it->rows + TILE - 1) / TILE * TILE * words * 4);
    for (int64_t r = 0; r < it->rows; r++) {
        const int64_t at_row = it->row + r, token = a->cu_seqlens[it->seq] + at_row / it->group;
        const int64_t head = it->kv_head * it->group + at_row % it->group;
        const void *q = at(a->q, token * a->q_stride + head * (dim + a->rope_dim), (int)a->type);
        if (HAS_TILES) {
            memcpy(s->q + r * words, q, dim * 2);
            memcpy(s->q + r * words + row_words(dim), (const uint16_t *)q + dim, a->rope_dim * 2);
            continue;
        }
        const int64_t m = min_i64(TILE, it->rows - r / TILE * TILE);
        uint32_t *to = s->q + r / TILE * TILE * words + r % TILE;
        for (int64_t w = 0; w < words; w++)
            if (HAS_DOT) memcpy(to + w * m, (const uint32_t *)q + w, 4);
            else to[w * m] = to_bits(get(q, w, (int)a->type));
    }
}
