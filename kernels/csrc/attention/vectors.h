/* The inner loops of attention with vector registers, which hold the sums of at most TILE rows. */
#pragma once
#include "attention/item.h"

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

/* scores [m][CHUNK]: the products of m rows and the chunk's keys over `count` words from `first` on, computed n vectors
 * of keys at a time. */
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

/* o [m][dim] = o * decay + the chunk's weights times its values, for n vectors of dimensions from d on. */
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

/* Online softmax of one row: turns its scores of the chunk into weights. `position`: the row's position in its
 * sequence. Returns the factor by which the row's sums so far must be multiplied. */
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

/* One chunk for rows [row, row + m) of the item: scores, online softmax, weighted values. */
INLINE void attend_rows(const int m, const Item *it, Scratch *s, int64_t row, int64_t chunk) {
    const int n = m * 4 <= ACCUMULATORS ? 4 : 2;
    const Attention *a = it->a;
    const int64_t dim = a->value_dim, words = key_words(a);
    const int64_t shift = it->seq_len - it->q_len;
    const int64_t first = shift + (it->row + row) / it->group, last = shift + (it->row + row + m - 1) / it->group;
    if (chunk > last || (a->window && chunk + CHUNK <= first - a->window + 1)) return;
    float decay[TILE];
    /* With scales, a key's cache row and rotary row have one each: their scores are scaled and then added. */
    const int64_t together = a->rope_dim && a->cache->k_scales ? row_words(a->cache->dim) : words;
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

#define CASE(M) \
    case M: attend_rows(M, it, s, row, chunk); break;

static void attend(const Item *it, Scratch *s, int64_t row, int64_t m, int64_t chunk) {
    switch (m) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}
