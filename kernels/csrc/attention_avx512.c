/* Paged attention in bfloat16 with vdpbf16ps, read from a KV cache of any kind in place.
 *
 * The rows of one (sequence, KV head) are its queries' heads: row r is head r % group of query r / group. A work item
 * is up to ROWS of them. It walks the keys in chunks of CHUNK at absolute positions: each chunk of K and V is packed
 * once into pairs (of dimensions for K, of keys for V) and used by every row of the item, in tiles of up to 6 rows by
 * 64 keys or dimensions. A row's sums run in the same order with any other rows in the item, so a result is the same
 * bits in decode, prefill, any chunking and any batch. Decodes are also spread over the splits of a sequence.
 *
 * Elements that are not bfloat16 are widened row by row before they are packed; this is exact for quantised elements.
 * Elements are never multiplied by scales: a key's scale multiplies its scores, a value's scale its weights.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "widen_avx512.h"

#define ROWS 96      /* rows of one work item */
#define TILE 6       /* rows of one register tile: 6 x 4 accumulators */
#define CHUNK 64     /* keys packed at once */
#define MAX_DIM 256
#define LOG2E 1.44269504088896f

typedef struct {
    const Attention *a;
    int64_t seq, kv_head, seq_len, q_len, group;
    int64_t row, rows;             /* of q_len * group */
    int64_t split, splits;         /* which splits of the sequence this item sums */
    float *partial;                /* where a decode's split leaves [rows][dim + 2], or null */
} Item;

typedef struct {
    uint32_t q[ROWS * MAX_DIM / 2];      /* tiles of [dim / 2][m] pairs */
    uint32_t k[CHUNK * MAX_DIM / 2];     /* [4][dim / 2][16 keys] pairs of dimensions */
    uint32_t v[CHUNK / 2 * MAX_DIM];     /* [32][dim] pairs of keys */
    uint32_t p[TILE * CHUNK / 2];        /* [m][32] pairs of keys */
    float o[ROWS * MAX_DIM], all[ROWS * MAX_DIM];
    float sum[ROWS * 16], peak[ROWS], all_sum[ROWS], all_peak[ROWS];
    float k_scales[CHUNK], v_scales[CHUNK];
    uint16_t wide_k[CHUNK * MAX_DIM], wide_v[CHUNK * MAX_DIM];
} Scratch;

/* 2^x for x <= 0, to 4e-6: the fraction by vreduceps, a polynomial, and vscalefps, which takes floor(x) by itself.
 * The weights are rounded to bfloat16 at once, so more terms would be lost. 2^-inf is exactly 0. */
INLINE __m512 exp2_16(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, 1), y = _mm512_set1_ps(1.342668550e-2f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.224247146e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.412802067e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.930448445e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

/* cap * tanh(x / cap), then in units of log2. */
INLINE __m512 capped(__m512 x, float cap) {
    __m512 e = exp2_16(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2E / cap)), _mm512_set1_ps(60.0f)));
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 t = _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
    return _mm512_mul_ps(t, _mm512_set1_ps(cap * LOG2E));
}

/* Transposes 16 rows of 16 words of 32 bits. */
INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* The keys that some row of an item sees, within its splits: [first_key, end_key). */
INLINE int64_t first_key(const Item *it) {
    int64_t position = it->seq_len - it->q_len + it->row / it->group;
    return max_i64(it->a->window ? position - it->a->window + 1 : 0, it->split * SPLIT);
}

INLINE int64_t end_key(const Item *it) {
    int64_t position = it->seq_len - it->q_len + (it->row + it->rows - 1) / it->group;
    return min_i64(position + 1, (it->split + it->splits) * SPLIT);
}

/* Prefetches keys [from, to): the blocks of a sequence lie anywhere, so the hardware cannot guess the next one. */
static void prefetch(const Item *it, int64_t from, int64_t to) {
    const KvCache *cache = it->a->cache;
    const int32_t *table = it->a->tables + it->seq * it->a->table_stride;
    while (from < to) {
        int64_t block = from / cache->block_size, offset = from % cache->block_size;
        int64_t run = min_i64(cache->block_size - offset, to - from), row = row_of(cache, it->kv_head, offset);
        const uint8_t *k = cache->k + table[block] * cache->k_block + row * cache->row_bytes;
        const uint8_t *v = cache->v + table[block] * cache->v_block + row * cache->row_bytes;
        for (int64_t byte = 0; byte < run * cache->row_bytes; byte += 64) {
            _mm_prefetch(k + byte, _MM_HINT_T1);
            _mm_prefetch(v + byte, _MM_HINT_T1);
        }
        if (cache->k_scales) {
            _mm_prefetch(cache->k_scales + table[block] * cache->k_scales_block + row, _MM_HINT_T1);
            _mm_prefetch(cache->v_scales + table[block] * cache->v_scales_block + row, _MM_HINT_T1);
        }
        from += run;
    }
}

/* Packs keys [chunk, to) of one chunk; the rest of the chunk is zero, so that what lies in unused slots cannot leak. */
static void pack(const Item *it, Scratch *s, int64_t chunk, int64_t to, const Item *next) {
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    const int64_t dim = cache->dim, words = dim / 2, size = cache->block_size;
    const int32_t *table = a->tables + it->seq * a->table_stride;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int64_t next_from = next ? first_key(next) / CHUNK * CHUNK : 0, next_to = next ? end_key(next) : 0;
    const uint16_t *k[CHUNK], *v[CHUNK];
    const int64_t count = min_i64(CHUNK, to - chunk);
    for (int64_t j = 0, block = chunk / size, offset = chunk % size; j < count; block++, offset = 0) {
        int64_t run = min_i64(size - offset, count - j), row = row_of(cache, it->kv_head, offset);
        const uint8_t *one_k = cache->k + table[block] * cache->k_block + row * cache->row_bytes;
        const uint8_t *one_v = cache->v + table[block] * cache->v_block + row * cache->row_bytes;
        if (cache->kind == BF16) {
            for (int64_t i = j; i < j + run; i++, one_k += cache->row_bytes, one_v += cache->row_bytes)
                k[i] = (const uint16_t *)one_k, v[i] = (const uint16_t *)one_v;
        } else {
            for (int64_t i = j; i < j + run; i++, one_k += cache->row_bytes, one_v += cache->row_bytes) {
                widen_row(s->wide_k + i * dim, one_k, dim, cache->kind);
                widen_row(s->wide_v + i * dim, one_v, dim, cache->kind);
                k[i] = s->wide_k + i * dim, v[i] = s->wide_v + i * dim;
            }
        }
        if (cache->k_scales) {
            const uint16_t *one = cache->k_scales + table[block] * cache->k_scales_block + row;
            const uint16_t *two = cache->v_scales + table[block] * cache->v_scales_block + row;
            for (int64_t i = 0; i < run; i += 16) {
                __mmask16 mask = run - i >= 16 ? 0xFFFF : (__mmask16)((1u << (run - i)) - 1);
                _mm512_mask_storeu_ps(s->k_scales + j + i, mask,
                                      _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, one + i)));
                _mm512_mask_storeu_ps(s->v_scales + j + i, mask,
                                      _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, two + i)));
            }
        }
        j += run;
    }
    for (int64_t j = count; j < CHUNK; j++) k[j] = v[j] = NULL, s->k_scales[j] = s->v_scales[j] = 0;
    for (int64_t part = 0; part < CHUNK / 16; part++) {
        uint32_t *to_k = s->k + part * words * 16;
        const uint16_t *const *keys = k + part * 16, *const *values = v + part * 16;
        if (chunk + part * 16 >= to) {
            memset(to_k, 0, words * 64);
            memset(s->v + part * 8 * dim, 0, dim * 32);
            continue;
        }
        const int all = chunk + part * 16 + 16 <= to;
        int64_t ahead = chunk + CHUNK + part * 16;
        if (ahead < to) prefetch(it, ahead, min_i64(ahead + 16, to));
        else if (next) prefetch(next, next_from + part * 16, min_i64(next_from + part * 16 + 16, next_to));
        for (int64_t w = 0; w < words; w += 16) {
            __m512i r[16];
            __mmask16 mask = words - w >= 16 ? 0xFFFF : 0x00FF;
            if (all) {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) r[j] = _mm512_maskz_loadu_epi32(mask, keys[j] + 2 * w);
            } else {
                for (int j = 0; j < 16; j++)
                    r[j] = keys[j] ? _mm512_maskz_loadu_epi32(mask, keys[j] + 2 * w) : _mm512_setzero_si512();
            }
            transpose_16x16(r);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                if (j < 8 || words - w >= 16) _mm512_store_si512(to_k + (w + j) * 16, r[j]);
        }
        for (int64_t j = 0; j < 16; j += 2) {
            uint32_t *to_v = s->v + (part * 8 + j / 2) * dim;
            const uint16_t *one = values[j], *two = values[j + 1];
            for (int64_t d = 0; d < dim; d += 32) {
                __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0x0000FFFF;
                __m512i x = one ? _mm512_maskz_loadu_epi16(mask, one + d) : _mm512_setzero_si512();
                __m512i y = two ? _mm512_maskz_loadu_epi16(mask, two + d) : _mm512_setzero_si512();
                _mm512_storeu_si512(to_v + d, _mm512_permutex2var_epi16(x, low, y));
                if (dim - d >= 32) _mm512_storeu_si512(to_v + d + 16, _mm512_permutex2var_epi16(x, high, y));
            }
        }
    }
}

INLINE __m512 dot(__m512 acc, __m512i packed, const uint32_t *pair) {
    return _mm512_dpbf16_ps(acc, (__m512bh)packed, (__m512bh)_mm512_set1_epi32((int)*pair));
}

/* One chunk for m rows, the first of which is `row` of the item: scores, running softmax, weighted values. */
INLINE void attend(const int m, const Item *it, Scratch *s, int64_t row, int64_t chunk) {
    const Attention *a = it->a;
    const int64_t dim = a->cache->dim, words = dim / 2;
    const int64_t shift = it->seq_len - it->q_len;
    const int64_t first = shift + (it->row + row) / it->group, last = shift + (it->row + row + m - 1) / it->group;
    if (chunk > last || (a->window && chunk + CHUNK <= first - a->window + 1)) return;

    __m512 score[TILE * 4];
#pragma GCC unroll 24
    for (int i = 0; i < m * 4; i++) score[i] = _mm512_setzero_ps();
    const uint32_t *q = s->q + row * words, *k = s->k;
    for (int64_t w = 0; w < words; w++, q += m, k += 16) {
        __m512i keys[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) keys[j] = _mm512_load_si512(k + j * words * 16);
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) score[i * 4 + j] = dot(score[i * 4 + j], keys[j], q + i);
    }

    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const int inside = chunk + CHUNK - 1 <= first && (!a->window || chunk > last - a->window);
    /* Scores become powers of two: one multiplication, fused with the subtraction of the peak. */
    const float unit = a->softcap > 0 ? 1.0f : a->scale * LOG2E;
    const int scaled = a->cache->k_scales != NULL;
    __m512 decay[TILE];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
        __m512 *x = score + i * 4;
        if (scaled)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) x[j] = _mm512_mul_ps(x[j], _mm512_loadu_ps(s->k_scales + j * 16));
        if (a->softcap > 0)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) x[j] = capped(_mm512_mul_ps(x[j], _mm512_set1_ps(a->scale)), a->softcap);
        if (!inside) {
            int64_t position = shift + (it->row + row + i) / it->group;
            int64_t to = position - chunk + 1, from = a->window ? max_i64(to - a->window, 0) : 0;
            uint64_t seen = (to >= 64 ? ~0ull : to <= 0 ? 0 : (1ull << to) - 1) & (from >= 64 ? 0 : ~0ull << from);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) x[j] = _mm512_mask_mov_ps(nothing, (__mmask16)(seen >> (16 * j)), x[j]);
        }
        const float before = s->peak[row + i];
        float peak = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
        peak *= unit;
        peak = peak > before ? peak : before;
        s->peak[row + i] = peak;
        /* A row that has seen nothing yet keeps the peak -inf; 0 stands in, so that -inf - -inf never arises. */
        __m512 base = _mm512_set1_ps(peak == -INFINITY ? 0.0f : peak);
        decay[i] = exp2_16(_mm512_sub_ps(_mm512_set1_ps(before), base));
        __m512 sum = _mm512_mul_ps(_mm512_load_ps(s->sum + (row + i) * 16), decay[i]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            x[j] = exp2_16(_mm512_fmsub_ps(x[j], _mm512_set1_ps(unit), base));
            sum = _mm512_add_ps(sum, x[j]);
        }
        if (scaled)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) x[j] = _mm512_mul_ps(x[j], _mm512_loadu_ps(s->v_scales + j * 16));
        _mm512_store_si512(s->p + i * (CHUNK / 2), (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
        _mm512_store_si512(s->p + i * (CHUNK / 2) + 16, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
        _mm512_store_ps(s->sum + (row + i) * 16, sum);
    }

    const int64_t pairs = min_i64(CHUNK / 2, (last - chunk) / 2 + 1);
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
        __m512 acc[TILE * 4];
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                acc[i * 4 + j] = _mm512_mul_ps(_mm512_load_ps(s->o + (row + i) * dim + d + j * 16), decay[i]);
        const uint32_t *v = s->v + d;
        for (int64_t t = 0; t < pairs; t++, v += dim) {
            __m512i values[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) values[j] = _mm512_load_si512(v + j * 16);
#pragma GCC unroll 6
            for (int i = 0; i < m; i++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    acc[i * 4 + j] = dot(acc[i * 4 + j], values[j], s->p + i * (CHUNK / 2) + t);
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) _mm512_store_ps(s->o + (row + i) * dim + d + j * 16, acc[i * 4 + j]);
    }
    for (; d < dim; d += 16) {
        __m512 acc[TILE];
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) acc[i] = _mm512_mul_ps(_mm512_load_ps(s->o + (row + i) * dim + d), decay[i]);
        const uint32_t *v = s->v + d;
        for (int64_t t = 0; t < pairs; t++, v += dim) {
            __m512i values = _mm512_load_si512(v);
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) acc[i] = dot(acc[i], values, s->p + i * (CHUNK / 2) + t);
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) _mm512_store_ps(s->o + (row + i) * dim + d, acc[i]);
    }
}

static void attend_1(const Item *it, Scratch *s, int64_t row, int64_t chunk) { attend(1, it, s, row, chunk); }
static void attend_2(const Item *it, Scratch *s, int64_t row, int64_t chunk) { attend(2, it, s, row, chunk); }
static void attend_3(const Item *it, Scratch *s, int64_t row, int64_t chunk) { attend(3, it, s, row, chunk); }
static void attend_4(const Item *it, Scratch *s, int64_t row, int64_t chunk) { attend(4, it, s, row, chunk); }
static void attend_5(const Item *it, Scratch *s, int64_t row, int64_t chunk) { attend(5, it, s, row, chunk); }
static void attend_6(const Item *it, Scratch *s, int64_t row, int64_t chunk) { attend(6, it, s, row, chunk); }
static void (*const attend_rows[])(const Item *, Scratch *, int64_t, int64_t) = {
    0, attend_1, attend_2, attend_3, attend_4, attend_5, attend_6};

/* Combines one more split into (peak, sum, o). */
static void combine(int64_t dim, float *peak, float *sum, float *o, float more_peak, float more_sum, const float *more) {
    float top = *peak > more_peak ? *peak : more_peak, base = top == -INFINITY ? 0.0f : top;
    float keep = _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(*peak - base)));
    float add = _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(more_peak - base)));
    for (int64_t d = 0; d < dim; d += 16) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(o + d), _mm512_set1_ps(keep));
        _mm512_storeu_ps(o + d, _mm512_fmadd_ps(_mm512_loadu_ps(more + d), _mm512_set1_ps(add), y));
    }
    *sum = *sum * keep + more_sum * add;
    *peak = top;
}

static void finish(const Item *it, int64_t row, float peak, float sum, const float *o) {
    const Attention *a = it->a;
    int64_t at = it->row + row, token = a->cu_seqlens[it->seq] + at / it->group;
    int64_t head = it->kv_head * it->group + at % it->group;
    float scale = 1.0f;
    if (a->sinks) {
        float sink = a->sinks[head] * LOG2E, top = peak > sink ? peak : sink;
        scale = _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(peak - top)));
        sum = sum * scale + _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(sink - top)));
    }
    scale = sum > 0 ? scale / sum : 0.0f;
    const int64_t dim = a->cache->dim;
    uint16_t *out = (uint16_t *)a->out + (token * a->heads + head) * dim;
    for (int64_t d = 0; d < dim; d += 16)
        _mm256_storeu_si256((__m256i *)(out + d), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(
                                                      _mm512_loadu_ps(o + d), _mm512_set1_ps(scale))));
}

static void run(const Item *it, Scratch *s, const Item *next) {
    const Attention *a = it->a;
    const int64_t dim = a->cache->dim, words = dim / 2;
    for (int64_t r = 0; r < it->rows; r += TILE) {
        int64_t m = min_i64(TILE, it->rows - r);
        for (int64_t i = 0; i < m; i++) {
            int64_t at = it->row + r + i, token = a->cu_seqlens[it->seq] + at / it->group;
            const uint32_t *q = (const uint32_t *)((const uint16_t *)a->q + token * a->q_stride +
                                                   (it->kv_head * it->group + at % it->group) * dim);
            for (int64_t w = 0; w < words; w++) memcpy(s->q + r * words + w * m + i, q + w, 4);
        }
    }
    const int64_t from = first_key(it), to = end_key(it);
    for (int64_t r = 0; r < it->rows; r++) s->all_peak[r] = -INFINITY, s->all_sum[r] = 0;
    memset(s->all, 0, it->rows * dim * 4);
    for (int64_t split = it->split; split < it->split + it->splits; split++) {
        for (int64_t r = 0; r < it->rows; r++) s->peak[r] = -INFINITY;
        memset(s->o, 0, it->rows * dim * 4);
        memset(s->sum, 0, it->rows * 64);
        int64_t start = max_i64(from / CHUNK * CHUNK, split * SPLIT), end = min_i64(to, (split + 1) * SPLIT);
        for (int64_t chunk = start; chunk < end; chunk += CHUNK) {
            pack(it, s, chunk, to, chunk + CHUNK >= to ? next : NULL);
            for (int64_t r = 0; r < it->rows; r += TILE) attend_rows[min_i64(TILE, it->rows - r)](it, s, r, chunk);
        }
        for (int64_t r = 0; r < it->rows; r++) {
            float sum = _mm512_reduce_add_ps(_mm512_load_ps(s->sum + r * 16));
            if (it->partial) {
                float *left = it->partial + r * (dim + 2);
                memcpy(left, s->o + r * dim, dim * 4);
                left[dim] = s->peak[r], left[dim + 1] = sum;
            } else {
                combine(dim, s->all_peak + r, s->all_sum + r, s->all + r * dim, s->peak[r], sum, s->o + r * dim);
            }
        }
    }
    if (!it->partial)
        for (int64_t r = 0; r < it->rows; r++) finish(it, r, s->all_peak[r], s->all_sum[r], s->all + r * dim);
}

/* Combines the splits of a decode in order. */
static void join(const Item *it, int64_t splits) {
    const int64_t dim = it->a->cache->dim;
    for (int64_t r = 0; r < it->rows; r++) {
        float o[MAX_DIM] = {0}, peak = -INFINITY, sum = 0;
        for (int64_t split = 0; split < splits; split++) {
            const float *left = it[split].partial + r * (dim + 2);
            combine(dim, &peak, &sum, o, left[dim], left[dim + 1], left);
        }
        finish(it, r, peak, sum, o);
    }
}

/* Returns 0, or -1 if the list of work items cannot be allocated. */
int attention_bf16_avx512(const Attention *a) {
    const int64_t kv_heads = a->cache->kv_heads, dim = a->cache->dim, group = a->heads / kv_heads;
    int64_t count = 0, partials = 0;
    for (int64_t seq = 0; seq < a->seqs; seq++) {
        int64_t q_len = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq], splits = (a->seq_lens[seq] + SPLIT - 1) / SPLIT;
        count += kv_heads * ((q_len * group + ROWS - 1) / ROWS) * (q_len == 1 && splits > 1 ? splits : 1);
        if (q_len == 1 && splits > 1) partials += splits * a->heads;
    }
    if (count == 0) return 0;
    Item *items = malloc(count * sizeof(Item));
    float *left = partials ? malloc(partials * (dim + 2) * sizeof(float)) : NULL;
    if (!items || (partials && !left)) {
        free(items);
        free(left);
        return -1;
    }
    float *next = left;
    Item *it = items;
    for (int64_t seq = 0; seq < a->seqs; seq++) {
        int64_t seq_len = a->seq_lens[seq], q_len = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq];
        int64_t splits = (seq_len + SPLIT - 1) / SPLIT, apart = q_len == 1 && splits > 1 ? splits : 1;
        /* Long rows first within a sequence: the last tiles of a prefill see the most keys. */
        for (int64_t tile = (q_len * group + ROWS - 1) / ROWS - 1; tile >= 0; tile--)
            for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
                for (int64_t split = 0; split < apart; split++) {
                    int64_t row = tile * ROWS, rows = min_i64(ROWS, q_len * group - row);
                    *it++ = (Item){a,   seq,  kv_head, seq_len, q_len, group,
                                   row, rows, split,   apart > 1 ? 1 : splits, apart > 1 ? next : NULL};
                    if (apart > 1) next += rows * (dim + 2);
                }
    }
    /* A thread takes consecutive items, so that an item can prefetch the keys of the next one. */
    const int64_t chunk = max_i64(1, min_i64(8, count / 32));
#pragma omp parallel if (count > 1)
    {
        Scratch s __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < count; i++) run(items + i, &s, i + 1 < count && (i + 1) % chunk ? items + i + 1 : NULL);
        if (partials) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; i++)
                if (items[i].partial && items[i].split == 0) join(items + i, (items[i].seq_len + SPLIT - 1) / SPLIT);
        }
    }
    free(items);
    free(left);
    return 0;
}
#endif
