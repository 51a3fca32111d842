/* Paged attention in vectors, read from a KV cache of any kind in place.
 *
 * The rows of one (sequence, KV head) are its queries' heads: row r is head r % group of query r / group. A work item
 * is up to ROWS of them. It walks the keys in chunks of CHUNK at absolute positions: each chunk of K and V is packed
 * once and used by every row of the item, in tiles of up to TILE rows. A row's sums run in the same order with any other
 * rows in the item, so a result is the same bits in decode, prefill, any chunking and any batch. Decodes are also spread
 * over the splits of a sequence.
 *
 * Where the class multiplies pairs of bfloat16, a word of a packed chunk is a pair (of dimensions for K, of keys for V),
 * and elements that are not bfloat16 are widened to it, which is exact for quantised elements. Elsewhere a word is a
 * float32. Elements are never multiplied by scales: a key's scale multiplies its scores, a value's scale its weights.
 */
#include "attention.h"

#include <stdlib.h>

#include "simd/cpu_class.h"
#include "simd/transpose.h"
#if HAS_DOT
#include "simd/widen_bf16.h"
#endif

#define ROWS 96      /* rows of one work item */
#define TILE 6       /* rows whose sums are in registers */
#define CHUNK 64     /* keys packed at once */
#define PART 16      /* keys that lie side by side in a packed chunk */
#define MAX_ROPE 64
#define MAX_DIM (512 + MAX_ROPE) /* of a key */
#define MAX_VALUE 512
#define PAIR (HAS_DOT ? 2 : 1) /* elements of a word */
#define LOG2E 1.44269504088896f

typedef struct {
    const Attention *a;
    int64_t seq, kv_head, seq_len, q_len, group;
    int64_t row, rows;             /* of q_len * group */
    int64_t split, splits;         /* which splits of the sequence this item sums */
    float *partial;                /* where a decode's split leaves [rows][value_dim + 2], or null */
} Item;

typedef struct {
    uint32_t q[ROWS * MAX_DIM / PAIR];   /* tiles of [words][m] */
    uint32_t k[CHUNK * MAX_DIM / PAIR];  /* [4 parts][words][16 keys] */
    uint32_t v[CHUNK / PAIR * MAX_VALUE]; /* [words][value_dim] */
    uint32_t p[TILE * CHUNK / PAIR];     /* the weights, [m][words] */
    float score[TILE * CHUNK], rope_score[TILE * CHUNK];
    float o[ROWS * MAX_VALUE], all[ROWS * MAX_VALUE];
    Floats sum[ROWS];
    float peak[ROWS], all_sum[ROWS], all_peak[ROWS];
    float k_scales[CHUNK], v_scales[CHUNK], rope_scales[CHUNK];
    uint32_t wide_k[CHUNK * MAX_VALUE / PAIR], wide_rope[CHUNK * MAX_ROPE / PAIR];
    uint32_t wide_v[HAS_DOT ? CHUNK * MAX_VALUE / PAIR : 1]; /* floats go to v at once */
} Scratch;

static const uint32_t zeros[MAX_DIM]; /* a key that is not there */

#if HAS_DOT
/* 2^x for x <= 0, to 4e-6: the fraction by vreduceps, a polynomial, and vscalefps, which takes floor(x) by itself.
 * The weights are rounded to bfloat16 at once, so more terms would be lost. 2^-inf is exactly 0. */
INLINE Floats weight_of(Floats x) {
    Floats f = (Floats)_mm512_reduce_ps((__m512)x, 1), y = f * 1.342668550e-2f + 5.224247146e-2f;
    y = y * f + 2.412802067e-1f;
    y = y * f + 6.930448445e-1f;
    y = y * f + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
}

static const uint32_t *widened(uint32_t *to, const uint8_t *row, int64_t dim, int64_t kind) {
    if (kind == BF16) return (const uint32_t *)row;
    widen_row((uint16_t *)to, row, dim, kind);
    return to;
}
#else
INLINE Floats weight_of(Floats x) { return exp2_of(x); }

INLINE void widen_as(float *to, const void *row, int64_t dim, int kind) {
    if (kind == INT4) {
        const uint8_t *x = row;
        dim /= 2;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) to[i] = (float)((x[i] & 15) - 8), to[i + dim] = (float)((x[i] >> 4) - 8);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) to[i] = element(row, i, kind);
}

static const uint32_t *widened(uint32_t *to, const uint8_t *row, int64_t dim, int64_t kind) {
    switch (kind) {
    case F32: return (const uint32_t *)row;
    case BF16: widen_as((float *)to, row, dim, BF16); break;
    case F16: widen_as((float *)to, row, dim, F16); break;
    case FP8: widen_as((float *)to, row, dim, FP8); break;
    case INT8: widen_as((float *)to, row, dim, INT8); break;
    default: widen_as((float *)to, row, dim, INT4);
    }
    return to;
}
#endif

/* cap * tanh(x / cap), then in units of log2. */
INLINE Floats capped(Floats x, float cap) {
    const Floats most = (Floats){} + 60.0f, scaled = x * (2 * LOG2E / cap);
    const Floats e = weight_of(-larger_of(-scaled, -most));
    return (e - 1.0f) / (e + 1.0f) * (cap * LOG2E);
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
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    const int32_t *table = a->tables + it->seq * a->table_stride;
    while (from < to) {
        int64_t block = from / cache->block_size, offset = from % cache->block_size;
        int64_t run = min_i64(cache->block_size - offset, to - from), row = row_of(cache, it->kv_head, offset);
        const uint8_t *k = cache->k + table[block] * cache->k_block + row * cache->row_bytes;
        const uint8_t *v = cache->v + table[block] * cache->v_block + row * cache->row_bytes;
        for (int64_t byte = 0; byte < run * cache->row_bytes; byte += 64) {
            __builtin_prefetch(k + byte, 0, 2);
            if (!a->values_are_keys) __builtin_prefetch(v + byte, 0, 2);
        }
        if (a->rope_dim) {
            const uint8_t *rope = a->rope + table[block] * a->rope_block + offset * a->rope_row_bytes;
            for (int64_t byte = 0; byte < run * a->rope_row_bytes; byte += 64) __builtin_prefetch(rope + byte, 0, 2);
        }
        if (cache->k_scales) {
            __builtin_prefetch(cache->k_scales + table[block] * cache->k_scales_block + row, 0, 2);
            __builtin_prefetch(cache->v_scales + table[block] * cache->v_scales_block + row, 0, 2);
        }
        from += run;
    }
}

/* Values of PAIR neighbouring keys side by side. */
INLINE void pack_values(const uint32_t *const *values, int64_t dim, uint32_t *to) {
#if HAS_DOT
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t d = 0; d < dim; d += 32) {
        __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0x0000FFFF;
        __m512i x = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)values[0] + d);
        __m512i y = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)values[1] + d);
        _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(x, low, y));
        if (dim - d >= 32) _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(x, high, y));
    }
#else
    if (values[0] != to) memcpy(to, values[0], dim * 4);
#endif
}

/* to [words][PART] = the same words of PART keys side by side. */
INLINE void pack_keys(const uint32_t *const *keys, int64_t words, uint32_t *to) {
    for (int64_t w = 0; w < words; w += LANES)
        for (int64_t j = 0; j < PART; j += LANES) {
            const uint32_t *rows[LANES];
            for (int64_t i = 0; i < LANES; i++) rows[i] = keys[j + i] + w;
            transpose(rows, min_i64(LANES, words - w), to + w * PART + j, PART);
        }
}

/* Packs keys [chunk, to) of one chunk; the rest of the chunk is zero, so that what lies in unused slots cannot leak. */
static void pack(const Item *it, Scratch *s, int64_t chunk, int64_t to, const Item *next) {
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    const int64_t value_dim = a->value_dim, size = cache->block_size;
    const int64_t row_words = cache->dim / PAIR, rope_words = a->rope_dim / PAIR, words = row_words + rope_words;
    const int32_t *table = a->tables + it->seq * a->table_stride;
    const int64_t next_from = next ? first_key(next) / CHUNK * CHUNK : 0, next_to = next ? end_key(next) : 0;
    const uint32_t *k[CHUNK], *v[CHUNK], *rope[CHUNK];
    const int64_t count = min_i64(CHUNK, to - chunk);
    for (int64_t j = 0, block = chunk / size, offset = chunk % size; j < count; block++, offset = 0) {
        int64_t run = min_i64(size - offset, count - j), row = row_of(cache, it->kv_head, offset);
        const uint8_t *one_k = cache->k + table[block] * cache->k_block + row * cache->row_bytes;
        const uint8_t *one_v = cache->v + table[block] * cache->v_block + row * cache->row_bytes;
        for (int64_t i = j; i < j + run; i++, one_k += cache->row_bytes, one_v += cache->row_bytes) {
            k[i] = widened(s->wide_k + i * row_words, one_k, cache->dim, cache->kind);
            if (a->values_are_keys) v[i] = k[i];
            else v[i] = widened(HAS_DOT ? s->wide_v + i * value_dim / PAIR : s->v + i * value_dim, one_v, value_dim, cache->kind);
        }
        const uint8_t *one_rope = a->rope + table[block] * a->rope_block + offset * a->rope_row_bytes;
        if (a->rope_dim)
            for (int64_t i = j; i < j + run; i++, one_rope += a->rope_row_bytes)
                rope[i] = widened(s->wide_rope + i * rope_words, one_rope, a->rope_dim, cache->kind);
        if (cache->k_scales) {
            const uint16_t *one = cache->k_scales + table[block] * cache->k_scales_block + row;
            const uint16_t *two = a->values_are_keys ? one : cache->v_scales + table[block] * cache->v_scales_block + row;
            for (int64_t i = 0; i < run; i++) s->k_scales[j + i] = from_f16(one[i]), s->v_scales[j + i] = from_f16(two[i]);
            const uint16_t *three = a->rope_scales + table[block] * a->rope_scales_block + offset;
            if (a->rope_dim)
                for (int64_t i = 0; i < run; i++) s->rope_scales[j + i] = from_f16(three[i]);
        }
        j += run;
    }
    for (int64_t j = count; j < CHUNK; j++)
        k[j] = v[j] = rope[j] = zeros, s->k_scales[j] = s->v_scales[j] = s->rope_scales[j] = 0;
    for (int64_t part = 0; part < CHUNK / PART; part++) {
        uint32_t *to_k = s->k + part * words * PART, *to_v = s->v + part * PART / PAIR * value_dim;
        if (part * PART >= count) {
            memset(to_k, 0, words * PART * 4);
            memset(to_v, 0, value_dim * PART / PAIR * 4);
            continue;
        }
        const int64_t ahead = chunk + CHUNK + part * PART;
        if (ahead < to) prefetch(it, ahead, min_i64(ahead + PART, to));
        else if (next) prefetch(next, next_from + part * PART, min_i64(next_from + part * PART + PART, next_to));
        pack_keys(k + part * PART, row_words, to_k);
        pack_keys(rope + part * PART, rope_words, to_k + row_words * PART);
        for (int64_t j = 0; j < PART; j += PAIR) pack_values(v + part * PART + j, value_dim, to_v + j / PAIR * value_dim);
    }
}

INLINE Floats add_product(Floats sum, Words a, uint32_t b) {
    return HAS_DOT ? add_dot(sum, a, (Words){} + b) : sum + (Floats)a * from_bits(b);
}

/* acc[m][n] += a [count][n vectors, `stride` words apart] times b, m of them b_row words apart in steps of b_step. */
INLINE void multiply(const int m, const int n, Floats *acc, const uint32_t *const *a, int64_t stride, const uint32_t *b,
                     int64_t b_row, int64_t b_step, int64_t count) {
    const uint32_t *at[4];
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) at[j] = a[j];
    for (int64_t t = 0; t < count; t++, b += b_step) {
        Words loaded[4];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) loaded[j] = load_words(at[j] + t * stride);
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) acc[i * n + j] = add_product(acc[i * n + j], loaded[j], b[i * b_row]);
    }
}

/* Scores of m rows and the chunk's keys by `count` words from `first` on, [m][CHUNK], n vectors of keys at a time. */
INLINE void score(const int m, const int n, const Scratch *s, const uint32_t *q, int64_t words, int64_t first,
                  int64_t count, float *to) {
    for (int64_t key = 0; key < CHUNK; key += n * LANES) {
        Floats acc[ACCUMULATORS];
        const uint32_t *keys[4];
#pragma GCC unroll 24
        for (int i = 0; i < m * n; i++) acc[i] = (Floats){};
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            keys[j] = s->k + ((key + j * LANES) / PART * words + first) * PART + (key + j * LANES) % PART;
        multiply(m, n, acc, keys, PART, q + first * m, 1, m, count);
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) store_floats(to + i * CHUNK + key + j * LANES, acc[i * n + j]);
    }
}

/* o [m][dim] = o * decay + the chunk's weights times its values, for n vectors of dimensions from d on. `dim`: of a value. */
INLINE void add_values(const int m, const int n, Scratch *s, int64_t row, int64_t dim, int64_t d, int64_t count,
                       const float *decay) {
    Floats acc[ACCUMULATORS];
    const uint32_t *values[4];
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) values[j] = s->v + d + j * LANES;
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) acc[i * n + j] = load_floats(s->o + (row + i) * dim + d + j * LANES) * decay[i];
    multiply(m, n, acc, values, dim, s->p, CHUNK / PAIR, 1, count);
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) store_floats(s->o + (row + i) * dim + d + j * LANES, acc[i * n + j]);
}

/* The running softmax of one row: its scores of the chunk become weights. `position` is the row's own key. Returns what
 * the row's sums so far are multiplied by. */
INLINE float soften(const Item *it, Scratch *s, int64_t row, int64_t position, int64_t chunk, const float *scores,
                    const float *rope_scores, void *weights) {
    const Attention *a = it->a;
    /* Scores become powers of two: one multiplication, fused with the subtraction of the peak. */
    const float unit = a->softcap > 0 ? 1.0f : a->scale * LOG2E;
    const int scaled = a->cache->k_scales != NULL;
    const int64_t end = position - chunk + 1, from = a->window ? max_i64(end - a->window, 0) : 0;
    Floats top = (Floats){} - INFINITY, x[CHUNK / LANES];
    for (int j = 0; j < CHUNK / LANES; j++) {
        x[j] = load_floats(scores + j * LANES);
        if (scaled) x[j] *= load_floats(s->k_scales + j * LANES);
        if (scaled && a->rope_dim)
            x[j] += load_floats(rope_scores + j * LANES) * load_floats(s->rope_scales + j * LANES);
        if (a->softcap > 0) x[j] = capped(x[j] * a->scale, a->softcap);
        if (from > 0 || end < CHUNK) {
            Ints key;
            for (int i = 0; i < LANES; i++) key[i] = j * LANES + i;
            const Ints seen = (key >= (int32_t)from) & (key < (int32_t)min_i64(end, CHUNK));
            x[j] = (Floats)((seen & (Ints)x[j]) | (~seen & (Ints)((Floats){} - INFINITY)));
        }
        top = larger_of(top, x[j]);
    }
    const float before = s->peak[row];
    float peak = largest_lane(top) * unit;
    peak = peak > before ? peak : before;
    s->peak[row] = peak;
    /* A row that has seen nothing yet keeps the peak -inf; 0 stands in, so that -inf - -inf never arises. */
    const float base = peak == -INFINITY ? 0.0f : peak, decay = weight_of((Floats){} + (before - base))[0];
    Floats sum = s->sum[row] * decay;
    for (int j = 0; j < CHUNK / LANES; j++) {
        x[j] = weight_of(x[j] * unit - base);
        sum += x[j];
        if (scaled) x[j] *= load_floats(s->v_scales + j * LANES);
        if (HAS_DOT) store_bf16((uint16_t *)weights + j * LANES, x[j]);
        else store_floats((float *)weights + j * LANES, x[j]);
    }
    s->sum[row] = sum;
    return decay;
}

/* One chunk for m rows, the first of which is `row` of the item: scores, running softmax, weighted values. */
INLINE void attend(const int m, const Item *it, Scratch *s, int64_t row, int64_t chunk) {
    const int n = m * 4 <= ACCUMULATORS ? 4 : 2;
    const Attention *a = it->a;
    const int64_t dim = a->value_dim, row_words = a->cache->dim / PAIR, words = row_words + a->rope_dim / PAIR;
    const int64_t shift = it->seq_len - it->q_len;
    const int64_t first = shift + (it->row + row) / it->group, last = shift + (it->row + row + m - 1) / it->group;
    if (chunk > last || (a->window && chunk + CHUNK <= first - a->window + 1)) return;
    float decay[TILE];
    /* With scales, a key's two rows have one each: their scores are added later. */
    const int64_t together = a->rope_dim && a->cache->k_scales ? row_words : words;
    score(m, n, s, s->q + row * words, words, 0, together, s->score);
    if (together < words) score(m, n, s, s->q + row * words, words, together, words - together, s->rope_score);
    for (int i = 0; i < m; i++)
        decay[i] = soften(it, s, row + i, shift + (it->row + row + i) / it->group, chunk, s->score + i * CHUNK,
                          s->rope_score + i * CHUNK, s->p + i * (CHUNK / PAIR));
    const int64_t count = min_i64(CHUNK, last - chunk + PAIR) / PAIR;
    int64_t d = 0;
    for (; d + n * LANES <= dim; d += n * LANES) add_values(m, n, s, row, dim, d, count, decay);
    for (; d < dim; d += LANES) add_values(m, 1, s, row, dim, d, count, decay);
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
    const float top = *peak > more_peak ? *peak : more_peak, base = top == -INFINITY ? 0.0f : top;
    const float keep = weight_of((Floats){} + (*peak - base))[0], add = weight_of((Floats){} + (more_peak - base))[0];
    for (int64_t d = 0; d < dim; d += LANES)
        store_floats(o + d, load_floats(o + d) * keep + load_floats(more + d) * add);
    *sum = *sum * keep + more_sum * add;
    *peak = top;
}

static void finish(const Item *it, int64_t row, float peak, float sum, const float *o) {
    const Attention *a = it->a;
    const int64_t at_row = it->row + row, token = a->cu_seqlens[it->seq] + at_row / it->group;
    const int64_t head = it->kv_head * it->group + at_row % it->group, dim = a->value_dim;
    float scale = 1.0f;
    if (a->sinks) {
        const float sink = a->sinks[head] * LOG2E, top = peak > sink ? peak : sink;
        scale = weight_of((Floats){} + (peak - top))[0];
        sum = sum * scale + weight_of((Floats){} + (sink - top))[0];
    }
    scale = sum > 0 ? scale / sum : 0.0f;
    void *out = at(a->out, (token * a->heads + head) * dim, (int)a->type);
    for (int64_t d = 0; d < dim; d += LANES) {
        if (a->type == BF16) store_bf16(at(out, d, BF16), load_floats(o + d) * scale);
        else store_floats(at(out, d, F32), load_floats(o + d) * scale);
    }
}

/* The queries of an item as tiles of [words][m]. */
static void pack_queries(const Item *it, Scratch *s) {
    const Attention *a = it->a;
    const int64_t dim = a->cache->dim + a->rope_dim, words = dim / PAIR;
    for (int64_t r = 0; r < it->rows; r += TILE) {
        const int64_t m = min_i64(TILE, it->rows - r);
        for (int64_t i = 0; i < m; i++) {
            const int64_t at_row = it->row + r + i, token = a->cu_seqlens[it->seq] + at_row / it->group;
            const int64_t head = it->kv_head * it->group + at_row % it->group;
            const void *q = at(a->q, token * a->q_stride + head * dim, (int)a->type);
            uint32_t *to = s->q + r * words + i;
            for (int64_t w = 0; w < words; w++)
                if (HAS_DOT) memcpy(to + w * m, (const uint32_t *)q + w, 4);
                else to[w * m] = to_bits(get(q, w, (int)a->type));
        }
    }
}

static void run(const Item *it, Scratch *s, const Item *next) {
    const int64_t dim = it->a->value_dim;
    pack_queries(it, s);
    const int64_t from = first_key(it), to = end_key(it);
    for (int64_t r = 0; r < it->rows; r++) s->all_peak[r] = -INFINITY, s->all_sum[r] = 0;
    memset(s->all, 0, it->rows * dim * 4);
    for (int64_t split = it->split; split < it->split + it->splits; split++) {
        for (int64_t r = 0; r < it->rows; r++) s->peak[r] = -INFINITY;
        memset(s->o, 0, it->rows * dim * 4);
        memset(s->sum, 0, it->rows * sizeof(Floats));
        int64_t start = max_i64(from / CHUNK * CHUNK, split * SPLIT), end = min_i64(to, (split + 1) * SPLIT);
        for (int64_t chunk = start; chunk < end; chunk += CHUNK) {
            pack(it, s, chunk, to, chunk + CHUNK >= to ? next : NULL);
            for (int64_t r = 0; r < it->rows; r += TILE) attend_rows[min_i64(TILE, it->rows - r)](it, s, r, chunk);
        }
        for (int64_t r = 0; r < it->rows; r++) {
            float sum = sum_of_lanes(s->sum[r]);
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
    const int64_t dim = it->a->value_dim;
    for (int64_t r = 0; r < it->rows; r++) {
        float o[MAX_VALUE] = {0}, peak = -INFINITY, sum = 0;
        for (int64_t split = 0; split < splits; split++) {
            const float *left = it[split].partial + r * (dim + 2);
            combine(dim, &peak, &sum, o, left[dim], left[dim + 1], left);
        }
        finish(it, r, peak, sum, o);
    }
}

/* Returns 0, or -1 if the list of work items cannot be allocated. */
int FOR_CLASS(attention_bf16)(const Attention *a) {
    const int64_t kv_heads = a->cache->kv_heads, dim = a->value_dim, group = a->heads / kv_heads;
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

/* With the dot products of bfloat16 float32 is multiplied as without them. */
#if !HAS_DOT
int FOR_CLASS(attention_f32)(const Attention *a) { return FOR_CLASS(attention_bf16)(a); }
#endif
