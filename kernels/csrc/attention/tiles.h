/* The inner loops of attention with AMX: scores, softmax and sums of 16 rows at once. A row's result does not depend on the
 * other rows of its tile. */
#pragma once
#include "attention/item.h"
#include "simd/tiles.h"

#define TILE_WORDS 16 /* words of a row of a tile */

/* Tile registers 0 to 3 hold sums of at most 16 rows, 4 holds a part of these rows, 5 to 7 hold keys or values. */
INLINE void configure_tiles(int64_t rows) {
    TileConfig config = whole_tiles;
    for (int i = 0; i < 5; i++) config.rows[i] = (uint8_t)min_i64(rows, TILE);
    _tile_loadconfig(&config);
}

/* scores [16][CHUNK]: the products of 16 rows and the chunk's keys over words [from, to). */
INLINE void score(const Scratch *s, const uint32_t *q, int64_t words, int64_t from, int64_t to, float *scores) {
    const int64_t part = words * PART;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t w = from; w < to; w += TILE_WORDS) {
        const uint32_t *k = s->k + w * PART;
        _tile_loadd(4, q + w, words * 4);
        _tile_loadd(5, k, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, k + part, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, k + 2 * part, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, k + 3 * part, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, scores, 4 * CHUNK);
    _tile_stored(1, scores + PART, 4 * CHUNK);
    _tile_stored(2, scores + 2 * PART, 4 * CHUNK);
    _tile_stored(3, scores + 3 * PART, 4 * CHUNK);
}

/* o [16][dim] += the chunk's weights times its values, for one tile of dimensions. */
INLINE void add_tile(const Scratch *s, float *o, int64_t dim, const uint32_t *v) {
    _tile_loadd(0, o, dim * 4);
    _tile_loadd(4, s->p, 2 * CHUNK);
    _tile_loadd(5, v, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(4, s->p + TILE_WORDS, 2 * CHUNK);
    _tile_loadd(6, v + TILE_WORDS * LANES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stored(0, o, dim * 4);
}

/* As add_tile, for four tiles of dimensions. */
INLINE void add_four(const Scratch *s, float *o, int64_t dim, const uint32_t *v) {
    const int64_t next = CHUNK / 2 * LANES;
    _tile_loadd(0, o, dim * 4);
    _tile_loadd(1, o + LANES, dim * 4);
    _tile_loadd(2, o + 2 * LANES, dim * 4);
    _tile_loadd(3, o + 3 * LANES, dim * 4);
#pragma GCC unroll 2
    for (int64_t w = 0; w < CHUNK / 2; w += TILE_WORDS, v += TILE_WORDS * LANES) {
        _tile_loadd(4, s->p + w, 2 * CHUNK);
        _tile_loadd(5, v, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, v + next, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, v + 2 * next, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, v + 3 * next, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, o, dim * 4);
    _tile_stored(1, o + LANES, dim * 4);
    _tile_stored(2, o + 2 * LANES, dim * 4);
    _tile_stored(3, o + 3 * LANES, dim * 4);
}

/* The largest lane of each of 16 vectors. */
INLINE __m512 largest_of_each(const Floats *x) {
    __m512 two[8], four[4], part[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
        two[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d a = (__m512d)two[2 * i], b = (__m512d)two[2 * i + 1];
        four[i] = _mm512_max_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        part[i] = _mm512_max_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
    return _mm512_max_ps(_mm512_shuffle_f32x4(part[0], part[1], 0x88), _mm512_shuffle_f32x4(part[0], part[1], 0xdd));
}

/* Applies scales and soft-cap to scores [m][CHUNK], in place, and sets -inf if the row may not attend to the key. */
static void finish_scores(const Item *it, Scratch *s, int64_t row, int64_t m, int64_t chunk) {
    const Attention *a = it->a;
    const int scaled = a->cache->k_scales != NULL;
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t i = 0; i < m; i++) {
        const int64_t end = it->seq_len - it->q_len + (it->row + row + i) / it->group - chunk + 1;
        const int64_t from = a->window ? max_i64(end - a->window, 0) : 0;
        for (int64_t j = 0; j < CHUNK; j += LANES) {
            float *at = s->score + i * CHUNK + j;
            Floats x = load_floats(at);
            if (scaled) x *= load_floats(s->k_scales + j);
            if (scaled && a->rope_dim)
                x += load_floats(s->rope_score + i * CHUNK + j) * load_floats(s->rope_scales + j);
            if (a->softcap > 0) x = capped(x * a->scale, a->softcap);
            const __mmask16 seen =
                _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32((int32_t)(min_i64(from, CHUNK) - j))) &
                _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32((int32_t)(max_i64(min_i64(end, CHUNK), 0) - j)));
            store_floats(at, (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, (__m512)x));
        }
    }
}

/* Online softmax: turns scores [m][CHUNK] into weights, and rescales the sums so far. */
static void soften(const Attention *a, Scratch *s, int64_t row, int64_t m) {
    /* Scores become powers of two: one multiplication, fused with the subtraction of the peak. */
    const float unit = a->softcap > 0 ? 1.0f : a->scale * LOG2E;
    const int64_t dim = a->value_dim;
    Floats top[TILE];
    float bases[TILE], decays[TILE];
    for (int64_t i = 0; i < TILE; i++) top[i] = (Floats){} - INFINITY;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < CHUNK; j += LANES)
            top[i] = (Floats)_mm512_max_ps((__m512)top[i], (__m512)load_floats(s->score + i * CHUNK + j));
    const __m512 before = _mm512_loadu_ps(s->peak + row);
    const __m512 peak = _mm512_max_ps((__m512)((Floats)largest_of_each(top) * unit), before);
    _mm512_storeu_ps(s->peak + row, peak);
    /* A row that has attended to no key yet has the peak -inf. 0 replaces it, to avoid -inf - -inf. */
    const __mmask16 has_seen = _mm512_cmp_ps_mask(peak, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
    const Floats base = (Floats)_mm512_maskz_mov_ps(has_seen, peak), decay = weight_of((Floats)before - base);
    store_floats(bases, base);
    store_floats(decays, decay);
    for (int64_t i = 0; i < m; i++) {
        Floats sum = s->sum[row + i] * decays[i], x[CHUNK / LANES];
#pragma GCC unroll 4
        for (int j = 0; j < CHUNK / LANES; j++) {
            x[j] = weight_of(load_floats(s->score + i * CHUNK + j * LANES) * unit - bases[i]);
            sum += x[j];
        }
        s->sum[row + i] = sum;
        if (a->cache->k_scales)
            for (int j = 0; j < CHUNK / LANES; j++) x[j] *= load_floats(s->v_scales + j * LANES);
#pragma GCC unroll 2
        for (int j = 0; j < CHUNK / LANES; j += 2)
            _mm512_storeu_si512(s->p + (i * CHUNK + j * LANES) / 2,
                                (__m512i)_mm512_cvtne2ps_pbh((__m512)x[j + 1], (__m512)x[j]));
        if (decays[i] == 1.0f) continue;
        float *o = s->o + (row + i) * dim;
        for (int64_t d = 0; d < dim; d += LANES) store_floats(o + d, load_floats(o + d) * decays[i]);
    }
}

/* One chunk for rows [row, row + m) of the item: scores, online softmax, weighted values. */
static void attend(const Item *it, Scratch *s, int64_t row, int64_t m, int64_t chunk) {
    const Attention *a = it->a;
    const int64_t dim = a->value_dim, words = key_words(a), shift = it->seq_len - it->q_len;
    const int64_t first = shift + (it->row + row) / it->group, last = shift + (it->row + row + m - 1) / it->group;
    if (chunk > last || (a->window && chunk + CHUNK <= first - a->window + 1)) return;
    /* With scales, a key's cache row and rotary row have one each: their scores are scaled and then added. */
    const int64_t together = a->rope_dim && a->cache->k_scales ? row_words(a->cache->dim) : words;
    const int sees_all = chunk + CHUNK - 1 <= first && (!a->window || chunk > last - a->window);
    const uint32_t *q = s->q + row * words;
    score(s, q, words, 0, together, s->score);
    if (together < words) score(s, q, words, together, words, s->rope_score);
    if (!sees_all || a->cache->k_scales || a->softcap > 0) finish_scores(it, s, row, m, chunk);
    soften(a, s, row, m);
    float *o = s->o + row * dim;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_four(s, o + d, dim, s->v + d * (CHUNK / 2));
    for (; d < dim; d += LANES) add_tile(s, o + d, dim, s->v + d * (CHUNK / 2));
}
