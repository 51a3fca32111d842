/* Paged attention with SIMD, for a KV cache of any dtype, which is read in place.
 *
 * The rows of one (sequence, KV head) are its query heads: row r is head r % group of query r / group. A work item has
 * at most ROWS of them. It reads the keys in chunks of CHUNK, which begin at multiples of CHUNK. Each chunk of K is
 * packed once and used by all rows of the item, in tiles of at most TILE rows. The order of a row's sums does not depend
 * on the other rows, so a result has the same bits in decode, in prefill, in any chunks and in any batch. A decode has
 * one item for each split of its sequence (flash decoding).
 *
 * If the instruction class has dot products of bfloat16 pairs, a word of a packed chunk is a pair (of dimensions for K,
 * of keys for V). Other elements are converted to bfloat16, which is exact for quantised ones. Otherwise a word is a
 * float32, and values are not packed: bfloat16 is widened where it is multiplied. With AVX2 quantised and float16
 * elements are converted where they are packed or multiplied (convert.h); values of items with many rows are copied as
 * float32. Other classes copy both. Elements are never multiplied by scales: a key's scale multiplies its scores, a
 * value's its weights.
 */
#include <math.h>

#include "attention/pack.h"
#include "simd/cpu_class.h"
#include "team.h"
#if HAS_TILES
#include "attention/tiles.h"
#else
#include "attention/vectors.h"
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

/* Merges one more split, an online softmax's (more_peak, more_sum, more), into (peak, sum, o). */
ONE_COPY void combine(int64_t dim, float *peak, float *sum, float *o, float more_peak, float more_sum,
                      const float *more) {
    const float top = *peak > more_peak ? *peak : more_peak, base = top == -INFINITY ? 0.0f : top;
    const float keep = weight_of((Floats){} + (*peak - base))[0], add = weight_of((Floats){} + (more_peak - base))[0];
    for (int64_t d = 0; d < dim; d += LANES)
        store_floats(o + d, load_floats(o + d) * keep + load_floats(more + d) * add);
    *sum = *sum * keep + more_sum * add;
    *peak = top;
}

ONE_COPY void finish(const Item *it, int64_t row, float peak, float sum, const float *o) {
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
            s->now = s->parts + chunk / CHUNK % 2, s->next = s->parts + 1 - chunk / CHUNK % 2;
            if (chunk == start) find_parts(it, chunk, to, s->now);
            if (chunk + CHUNK < to) find_parts(it, chunk + CHUNK, to, s->next);
            else if (next) find_parts(next, first_key(next) / CHUNK * CHUNK, end_key(next), s->next);
            else s->next = NULL;
            pack(it, s, chunk);
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
