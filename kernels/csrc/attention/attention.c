/* Paged attention with SIMD, for a KV cache of any dtype, which is read in place.
 *
 * The rows of one (sequence, KV head) are its query heads: row r is head r % group of query r / group. A work item has
 * at most ROWS of them. It reads the keys in chunks of CHUNK, which begin at multiples of CHUNK. Each chunk of K and V
 * is packed once and used by all rows of the item, in tiles of at most TILE rows. The order of a row's sums does not
 * depend on the other rows, so a result has the same bits in decode, in prefill, in any chunks and in any batch. A
 * decode has one item for each split of its sequence (flash decoding).
 *
 * If the instruction class has dot products of bfloat16 pairs, a word of a packed chunk is a pair (of dimensions for K,
 * of keys for V). Other elements are converted to bfloat16, which is exact for quantised ones. Otherwise a word is a
 * float32. Elements are never multiplied by scales: a key's scale multiplies its scores, a value's scale its weights.
 */
#include "attention/item.h"

#include <math.h>

#include "simd/cpu_class.h"
#include "simd/transpose.h"
#include "team.h"
#if HAS_DOT
#include "simd/widen_bf16.h"
#endif
#if HAS_TILES
#include "attention/tiles.h"
#else
#include "attention/vectors.h"
#endif

static const uint32_t zeros[MAX_WORDS]; /* stands for a missing key */

#if HAS_DOT
static const uint32_t *widened(uint32_t *to, const uint8_t *row, int64_t dim, int64_t kind) {
    if (kind == BF16) return (const uint32_t *)row;
    widen_row((uint16_t *)to, row, dim, kind);
    return to;
}
#else
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

/* The keys that any row of an item attends to, within its splits: [first_key, end_key). */
INLINE int64_t first_key(const Item *it) {
    int64_t position = it->seq_len - it->q_len + it->row / it->group;
    return max_i64(it->a->window ? position - it->a->window + 1 : 0, it->split * SPLIT);
}

INLINE int64_t end_key(const Item *it) {
    int64_t position = it->seq_len - it->q_len + (it->row + it->rows - 1) / it->group;
    return min_i64(position + 1, (it->split + it->splits) * SPLIT);
}

/* Prefetches keys [from, to). The hardware cannot, because the blocks of a sequence are not contiguous in memory. */
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

/* The keys that are read after a chunk: keys of the same item or of the next one. `item` null: none. */
typedef struct {
    const Item *item;
    int64_t from, to;
} Behind;

#define AHEAD 4 /* keys prefetched at once: more of them would hold up the reads of the chunk that is being packed */

static void prefetch_some(const Behind *b, int64_t done) {
    if (b->item) prefetch(b->item, b->from + done, min_i64(b->from + done + AHEAD, b->to));
}

/* The index of dimension d of a packed value, or pair of values, of a chunk. d: a multiple of LANES. */
INLINE int64_t value_at(int64_t dim, int64_t pair, int64_t d) {
    return HAS_TILES ? d * (CHUNK / PAIR) + pair * LANES : pair * dim + d;
}

/* Interleaves the values of PAIR consecutive keys. */
INLINE void pack_values(const uint32_t *const *values, int64_t dim, int64_t pair, uint32_t *to) {
#if HAS_DOT
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t d = 0; d < dim; d += 32) {
        __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0x0000FFFF;
        __m512i x = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)values[0] + d);
        __m512i y = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)values[1] + d);
        _mm512_storeu_si512(to + value_at(dim, pair, d), _mm512_permutex2var_epi16(x, low, y));
        if (dim - d >= 32) _mm512_storeu_si512(to + value_at(dim, pair, d + 16), _mm512_permutex2var_epi16(x, high, y));
    }
#else
    if (values[0] != to + pair * dim) memcpy(to + pair * dim, values[0], dim * 4);
#endif
}

/* Transposes PART keys of `dim` elements to `to` [words][PART]. */
INLINE void pack_keys(const uint32_t *const *keys, int64_t dim, uint32_t *to) {
    const int64_t words = dim / PAIR;
    memset(to + words * PART, 0, (row_words(dim) - words) * PART * 4);
    for (int64_t w = 0; w < words; w += LANES)
        for (int64_t j = 0; j < PART; j += LANES) {
            const uint32_t *rows[LANES];
            for (int64_t i = 0; i < LANES; i++) rows[i] = keys[j + i] + w;
            transpose(rows, min_i64(LANES, words - w), to + w * PART + j, PART);
        }
}

/* Packs keys [chunk, to) of one chunk. The rest of the chunk is zero, so that data of unused slots cannot leak. */
static void pack(const Item *it, Scratch *s, int64_t chunk, int64_t to, const Item *next) {
    const Attention *a = it->a;
    const KvCache *cache = a->cache;
    const int64_t value_dim = a->value_dim, size = cache->block_size;
    const int64_t dim = cache->dim, rope_dim = a->rope_dim, words = key_words(a);
    const int32_t *table = a->tables + it->seq * a->table_stride;
    const Behind behind = chunk + CHUNK < to ? (Behind){it, chunk + CHUNK, to}
                          : next             ? (Behind){next, first_key(next) / CHUNK * CHUNK, end_key(next)}
                                             : (Behind){0};
    const uint32_t *k[CHUNK], *v[CHUNK], *rope[CHUNK];
    const int64_t count = min_i64(CHUNK, to - chunk);
    for (int64_t j = 0, block = chunk / size, offset = chunk % size; j < count; block++, offset = 0) {
        int64_t run = min_i64(size - offset, count - j), row = row_of(cache, it->kv_head, offset);
        const uint8_t *one_k = cache->k + table[block] * cache->k_block + row * cache->row_bytes;
        const uint8_t *one_v = cache->v + table[block] * cache->v_block + row * cache->row_bytes;
        for (int64_t i = j; i < j + run; i++, one_k += cache->row_bytes, one_v += cache->row_bytes) {
            k[i] = widened(s->wide_k + i * dim / PAIR, one_k, dim, cache->kind);
            if (a->values_are_keys) v[i] = k[i];
            else v[i] = widened(HAS_DOT ? s->wide_v + i * value_dim / PAIR : s->v + i * value_dim, one_v, value_dim, cache->kind);
        }
        const uint8_t *one_rope = a->rope + table[block] * a->rope_block + offset * a->rope_row_bytes;
        if (a->rope_dim)
            for (int64_t i = j; i < j + run; i++, one_rope += a->rope_row_bytes)
                rope[i] = widened(s->wide_rope + i * rope_dim / PAIR, one_rope, rope_dim, cache->kind);
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
        uint32_t *to_k = s->k + part * words * PART;
        if (part * PART >= count) {
            memset(to_k, 0, words * PART * 4);
            for (int64_t d = 0; d < value_dim; d += HAS_TILES ? LANES : value_dim)
                memset(s->v + value_at(value_dim, part * PART / PAIR, d), 0, (HAS_TILES ? LANES : value_dim) * PART / PAIR * 4);
            continue;
        }
        prefetch_some(&behind, part * PART);
        pack_keys(k + part * PART, dim, to_k);
        prefetch_some(&behind, part * PART + AHEAD);
        if (rope_dim) pack_keys(rope + part * PART, rope_dim, to_k + row_words(dim) * PART);
        for (int64_t j = 0; j < PART; j += PAIR) {
            if (j % (2 * AHEAD) == AHEAD) prefetch_some(&behind, part * PART + 2 * AHEAD + j / (2 * AHEAD) * AHEAD);
            pack_values(v + part * PART + j, value_dim, (part * PART + j) / PAIR, s->v);
        }
    }
}

/* Merges one more split, an online softmax's (more_peak, more_sum, more), into (peak, sum, o). */
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
    if (a->lse) a->lse[token * a->heads + head] = sum > 0 ? (peak + log2f(sum)) / LOG2E : -INFINITY;
    scale = sum > 0 ? scale / sum : 0.0f;
    void *out = at(a->out, (token * a->heads + head) * dim, (int)a->type);
    for (int64_t d = 0; d < dim; d += LANES) {
        if (a->type == BF16) store_bf16(at(out, d, BF16), load_floats(o + d) * scale);
        else store_floats(at(out, d, F32), load_floats(o + d) * scale);
    }
}

/* The queries of an item in the form that the inner loops read. */
static void pack_queries(const Item *it, Scratch *s) {
    const Attention *a = it->a;
    const int64_t dim = a->cache->dim, all_words = key_words(a);
    if (HAS_TILES) memset(s->q, 0, (it->rows + TILE - 1) / TILE * TILE * all_words * 4);
    for (int64_t r = 0; r < it->rows; r++) {
        const int64_t at_row = it->row + r, token = a->cu_seqlens[it->seq] + at_row / it->group;
        const int64_t head = it->kv_head * it->group + at_row % it->group;
        const void *q = at(a->q, token * a->q_stride + head * (dim + a->rope_dim), (int)a->type);
        if (HAS_TILES) {
            memcpy(s->q + r * all_words, q, dim * 2);
            memcpy(s->q + r * all_words + row_words(dim), (const uint16_t *)q + dim, a->rope_dim * 2);
            continue;
        }
        const int64_t m = min_i64(TILE, it->rows - r / TILE * TILE);
        uint32_t *to = s->q + r / TILE * TILE * all_words + r % TILE;
        for (int64_t w = 0; w < all_words; w++)
            if (HAS_DOT) memcpy(to + w * m, (const uint32_t *)q + w, 4);
            else to[w * m] = to_bits(get(q, w, (int)a->type));
    }
}

static void run(const Item *it, Scratch *s, const Item *next) {
    const int64_t dim = it->a->value_dim;
    pack_queries(it, s);
#if HAS_TILES
    configure_tiles(it->rows);
#endif
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
            for (int64_t r = 0; r < it->rows; r += TILE) attend(it, s, r, min_i64(TILE, it->rows - r), chunk);
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

/* Merges the splits of a decode, in order, and stores the result. */
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

#define MOST_ITEMS 8 /* items that a thread takes at once: each can then prefetch the keys of the next one */

typedef struct {
    const Attention *a;
    int64_t count, partials; /* how many items there are, and rows of partial results of decodes' splits */
} Call;

static Item *items_of_team(void) { return team_memory(); }

/* Writes the list of items, and behind it room for partial results, to the team's memory. One thread does that. */
static void plan(const void *context, int64_t from, int64_t to) {
    const Call *call = context;
    const Attention *a = call->a;
    const int64_t kv_heads = a->cache->kv_heads, dim = a->value_dim, group = a->heads / kv_heads;
    (void)from, (void)to;
    resize_team_memory(call->count * sizeof(Item) + call->partials * (dim + 2) * sizeof(float));
    Item *it = items_of_team();
    if (!it) return;
    float *next = (float *)(it + call->count);
    for (int64_t seq = 0; seq < a->seqs; seq++) {
        int64_t seq_len = a->seq_lens[seq], q_len = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq];
        int64_t splits = (seq_len + SPLIT - 1) / SPLIT, apart = q_len == 1 && splits > 1 ? splits : 1;
        /* The longest items of a sequence first: the last queries of a prefill attend to the most keys. */
        for (int64_t tile = (q_len * group + ROWS - 1) / ROWS - 1; tile >= 0; tile--)
            for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
                for (int64_t split = 0; split < apart; split++) {
                    int64_t row = tile * ROWS, rows = min_i64(ROWS, q_len * group - row);
                    *it++ = (Item){a,   seq,  kv_head, seq_len, q_len, group,
                                   row, rows, split,   apart > 1 ? 1 : splits, apart > 1 ? next : NULL};
                    if (apart > 1) next += rows * (dim + 2);
                }
    }
}

static void run_items(const void *context, int64_t from, int64_t to) {
    (void)context;
    Scratch s __attribute__((aligned(64)));
    const Item *items = items_of_team();
    for (int64_t i = from; items && i < to; i++) run(items + i, &s, i + 1 < to ? items + i + 1 : NULL);
#if HAS_TILES
    _tile_release();
#endif
}

static void join_items(const void *context, int64_t from, int64_t to) {
    (void)context;
    const Item *items = items_of_team();
    for (int64_t i = from; items && i < to; i++)
        if (items[i].partial && items[i].split == 0) join(items + i, (items[i].seq_len + SPLIT - 1) / SPLIT);
}

static void attend_all(const void *context) {
    Call call = {context, 0, 0};
    const Attention *a = call.a;
    const int64_t kv_heads = a->cache->kv_heads, group = a->heads / kv_heads;
    for (int64_t seq = 0; seq < a->seqs; seq++) {
        int64_t q_len = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq], splits = (a->seq_lens[seq] + SPLIT - 1) / SPLIT;
        call.count += kv_heads * ((q_len * group + ROWS - 1) / ROWS) * (q_len == 1 && splits > 1 ? splits : 1);
        if (q_len == 1 && splits > 1) call.partials += splits * a->heads;
    }
    share_items(call.count > 0, 1, plan, &call);
    share_items(call.count, min_i64(MOST_ITEMS, max_i64(1, call.count / 32)), run_items, &call);
    if (call.partials) share_items(call.count, MOST_ITEMS, join_items, &call);
}

/* Returns 0, or -1 if the list of work items cannot be allocated. */
int FOR_CLASS(attention_bf16)(const Attention *a) { return run_team(attend_all, a); }

/* Classes with dot products of bfloat16 leave float32 to a lower class (kernels/native.py picks it). */
#if !HAS_DOT
int FOR_CLASS(attention_f32)(const Attention *a) { return FOR_CLASS(attention_bf16)(a); }
#endif
