/* The inner loops of attention with vector registers, which hold the sums of at most TILE rows. */
#pragma once
#include "attention/item.h"

INLINE Floats add_product(Floats sum, Words a, Words b) {
    return HAS_DOT ? add_dot(sum, a, b) : sum + (Floats)a * (Floats)b;
}

/* acc [m][n] += the words scalar(0 to m - 1), each times the vectors vector(0 to n - 1). The fewer operands are loaded
 * first and stay in registers, so that there is a register for each of the others and for each sum. */
#define ADD_PRODUCTS(vector, scalar) \
    if (m <= n) { \
        Words held[6]; \
        _Pragma("GCC unroll 6") for (int i = 0; i < m; i++) held[i] = (Words){} + scalar(i); \
        _Pragma("GCC unroll 8") for (int j = 0; j < n; j++) { \
            const Words loaded = vector(j); \
            _Pragma("GCC unroll 6") for (int i = 0; i < m; i++) \
                acc[i * n + j] = add_product(acc[i * n + j], loaded, held[i]); \
        } \
    } else { \
        Words held[8]; \
        _Pragma("GCC unroll 8") for (int j = 0; j < n; j++) held[j] = vector(j); \
        _Pragma("GCC unroll 6") for (int i = 0; i < m; i++) { \
            const Words loaded = (Words){} + scalar(i); \
            _Pragma("GCC unroll 8") for (int j = 0; j < n; j++) \
                acc[i * n + j] = add_product(acc[i * n + j], held[j], loaded); \
        } \
    }

/* scores [m][CHUNK]: the products of m rows and the chunk's first `end` keys over words [first, first + count), for n
 * vectors of keys at a time. Prefetches the keys of the next chunk, `ahead` bytes of each part for a word; 0: none. */
INLINE void score(const int m, const int n, const Scratch *s, const uint32_t *q, int64_t words, int64_t first,
                  int64_t count, int64_t end, float *to, int64_t ahead) {
    for (int64_t key = 0; key < end; key += n * LANES) {
        Floats acc[ACCUMULATORS];
        const uint32_t *keys[8];
        const uint8_t *next[4];
        const int parts = (n * LANES + PART - 1) / PART;
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) next[i] = ahead ? s->next->k[key / PART + i] : (const uint8_t *)s->q;
#pragma GCC unroll 24
        for (int i = 0; i < m * n; i++) acc[i] = (Floats){};
#pragma GCC unroll 8
        for (int j = 0; j < n; j++)
            keys[j] = s->k + ((key + j * LANES) / PART * words + first) * PART + (key + j * LANES) % PART;
        for (int64_t w = 0; w < count; w++) {
#pragma GCC unroll 4
            for (int i = 0; i < parts; i++) __builtin_prefetch(next[i] + w * ahead, 0, 2);
#define QUERY(i) q[(first + w) * m + i]
#define KEYS(j) load_words(keys[j] + w * PART)
            ADD_PRODUCTS(KEYS, QUERY)
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++)
#pragma GCC unroll 8
            for (int j = 0; j < n; j++) store_floats(to + i * CHUNK + key + j * LANES, acc[i * n + j]);
    }
}

INLINE Floats load_values(const uint8_t *row, int64_t d, const int type) {
#if CONVERTS_IN_PLACE
    if (type != BF16 && type != F32) return load_converted(row, d, type);
#endif
    return load_vector(row, d, type);
}

/* o [m][dim] = o * decay + the chunk's weights times its first `count` values, for n vectors of dimensions from d on.
 * Prefetches the same part of the next chunk's values, which are `ahead` bytes apart; 0: none. */
INLINE void add_values(const int m, const int n, const int type, Scratch *s, int64_t row, int64_t dim, int64_t d,
                       int64_t count, const float *decay, int64_t ahead) {
    Floats acc[ACCUMULATORS];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) acc[i * n + j] = load_floats(s->o + (row + i) * dim + d + j * LANES) * decay[i];
#define WEIGHT(i) s->p[i * (CHUNK / PAIR) + t]
#if HAS_DOT
    (void)type; /* the values were packed in pairs, as bfloat16 */
#define VALUES(j) load_words(s->v + t * dim + d + j * LANES)
#else
    const int64_t first_of_row = type == INT4_HIGH ? d - dim / 2 : d; /* or of the second half of a row */
#define VALUES(j) ((Words)load_values(values, first_of_row + j * LANES, type))
#endif
    for (int64_t first = 0; first < count; first += PART) {
        const uint8_t *next = ahead ? s->next->v[first / PART] + d * ahead / dim : (const uint8_t *)s->q;
        const uint8_t *values = s->now->v[first / PART];
        const int64_t end = min_i64(first + PART, count);
        for (int64_t t = first / PAIR; t < (end + PAIR - 1) / PAIR; t++) {
#pragma GCC unroll 2
            for (int i = 0; i < PAIR; i++, next += ahead) __builtin_prefetch(next, 0, 2);
            ADD_PRODUCTS(VALUES, WEIGHT)
            values += s->now->v_stride;
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) store_floats(s->o + (row + i) * dim + d + j * LANES, acc[i * n + j]);
}

/* Online softmax of one row: turns its scores of the chunk into weights. `position`: the row's position in its
 * sequence. Returns the factor by which the row's sums so far must be multiplied. */
ONE_COPY float soften(const Item *it, Scratch *s, int64_t row, int64_t position, int64_t chunk, const float *scores,
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
    /* A row that has attended to no key yet has the peak -inf. 0 replaces it, to avoid -inf - -inf. */
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

/* As add_values, for dimensions [d, end), n vectors of them at a time. */
INLINE void add_range(const int m, const int n, const int type, Scratch *s, int64_t row, int64_t dim, int64_t d,
                      int64_t end, int64_t count, const float *decay, int64_t ahead) {
    for (; d + n * LANES <= end; d += n * LANES) add_values(m, n, type, s, row, dim, d, count, decay, ahead);
    for (; d < end; d += LANES) add_values(m, 1, type, s, row, dim, d, count, decay, ahead);
}

/* One chunk for rows [row, row + m) of the item: scores, online softmax, weighted values. */
INLINE void attend_rows(const int m, const Item *it, Scratch *s, int64_t row, int64_t chunk) {
    const int n = m == 1 && LANES * 8 <= CHUNK ? 8 : m * 4 <= ACCUMULATORS ? 4 : 2;
    const Attention *a = it->a;
    const int64_t dim = a->value_dim, words = key_words(a);
    const int64_t shift = it->seq_len - it->q_len;
    const int64_t first = shift + (it->row + row) / it->group, last = shift + (it->row + row + m - 1) / it->group;
    if (chunk > last || (a->window && chunk + CHUNK <= first - a->window + 1)) return;
    const int64_t count = min_i64(CHUNK, last - chunk + 1);
    const int64_t ahead = row == 0 && s->next ? a->cache->row_bytes : 0;
    float decay[TILE];
    const uint32_t *q = s->q + row * words;
    /* With scales, a key's cache row and rotary row have one each: their scores are scaled and then added. */
    const int64_t together = a->rope_dim && a->cache->k_scales ? row_words(a->cache->dim) : words;
    const int64_t ahead_of_word = ahead * PART / row_words(a->cache->dim);
    score(m, n, s, q, words, 0, together, count, s->score, ahead_of_word);
    if (together < words) score(m, n, s, q, words, together, words - together, count, s->rope_score, 0);
    for (int i = 0; i < m; i++)
        decay[i] = soften(it, s, row + i, shift + (it->row + row + i) / it->group, chunk, s->score + i * CHUNK,
                          s->rope_score + i * CHUNK, s->p + i * (CHUNK / PAIR));
    const int64_t v_ahead = a->values_are_keys ? 0 : ahead;
#define ADD(type, from, to, n) add_range(m, n, type, s, row, dim, from, to, count, decay, v_ahead)
    switch (HAS_DOT ? BF16 : s->now->v_type) {
    case BF16: ADD(BF16, 0, dim, n); break;
    case F32: ADD(F32, 0, dim, n); break;
#if CONVERTS_IN_PLACE
    case F16: ADD(F16, 0, dim, n); break;
    case FP8: ADD(FP8, 0, dim, n); break;
    case INT8: ADD(INT8, 0, dim, n); break;
    default: {
        /* Half a row of 64 elements has 32 of them. */
        const int fewer = n * LANES > 32 ? 32 / LANES : n;
        ADD(INT4, 0, dim / 2, fewer);
        ADD(INT4_HIGH, dim / 2, dim, fewer);
    }
#endif
    }
}

#define CASE(M) \
    case M: attend_rows(M, it, s, row, chunk); break;

static void attend(const Item *it, Scratch *s, int64_t row, int64_t m, int64_t chunk) {
    switch (m) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}
