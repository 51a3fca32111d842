/* Paged attention in plain C: float32 everywhere, and bfloat16 on processors without vdpbf16ps, over a KV cache of any
 * kind. One row after the other, keys in chunks of 64 at absolute positions: a row's result never depends on the other
 * rows of the call. */
#include "attention.h"

#include <stdlib.h>

#define CHUNK 64
#define MAX_DIM 512

INLINE void attend(const Attention *a, int64_t seq, int64_t kv_head, int64_t row, int kind) {
    const KvCache *cache = a->cache;
    const int64_t dim = cache->dim, group = a->heads / cache->kv_heads, size = cache->block_size;
    const int type = (int)a->type, scaled = kind == FP8 || kind == INT8 || kind == INT4;
    const int32_t *table = a->tables + seq * a->table_stride;
    const int64_t start = a->cu_seqlens[seq], q_len = a->cu_seqlens[seq + 1] - start;
    const int64_t position = a->seq_lens[seq] - q_len + row / group, head = kv_head * group + row % group;
    const int64_t from = a->window ? max_i64(position - a->window + 1, 0) : 0;
    float q[MAX_DIM], o[MAX_DIM], peak = -INFINITY, sum = 0;
    const void *q_row = at(a->q, (start + row / group) * a->q_stride + head * dim, type);
    if (type == BF16) {
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) q[d] = get(q_row, d, BF16) * a->scale;
    } else {
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) q[d] = get(q_row, d, F32) * a->scale;
    }
    memset(o, 0, dim * sizeof(float));
    for (int64_t chunk = from / CHUNK * CHUNK; chunk <= position; chunk += CHUNK) {
        const int64_t first = max_i64(chunk, from), count = min_i64(chunk + CHUNK, position + 1) - first;
        float score[CHUNK], top = peak;
        for (int64_t j = 0; j < count; j++) {
            int64_t key = first + j;
            int64_t block = table[key / size], inside = row_of(cache, kv_head, key % size);
            float total = dot_row(q, cache->k + block * cache->k_block + inside * cache->row_bytes, dim, kind);
            if (scaled) total *= from_f16(cache->k_scales[block * cache->k_scales_block + inside]);
            score[j] = a->softcap > 0 ? a->softcap * tanhf(total / a->softcap) : total;
            top = score[j] > top ? score[j] : top;
        }
        float decay = exp_(peak - top);
        peak = top;
        sum *= decay;
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) o[d] *= decay;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) score[j] = exp_(score[j] - top);
        for (int64_t j = 0; j < count; j++) {
            int64_t key = first + j;
            int64_t block = table[key / size], inside = row_of(cache, kv_head, key % size);
            float weight = score[j];
            sum += weight;
            if (scaled) weight *= from_f16(cache->v_scales[block * cache->v_scales_block + inside]);
            add_row(o, cache->v + block * cache->v_block + inside * cache->row_bytes, weight, dim, kind);
        }
    }
    float scale = 1.0f;
    if (a->sinks) {
        float top = peak > a->sinks[head] ? peak : a->sinks[head];
        scale = exp_(peak - top);
        sum = sum * scale + exp_(a->sinks[head] - top);
    }
    scale = sum > 0 ? scale / sum : 0.0f;
    void *out = at(a->out, ((start + row / group) * a->heads + head) * dim, type);
    if (type == BF16) {
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) put(out, d, o[d] * scale, BF16);
    } else {
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) put(out, d, o[d] * scale, F32);
    }
}

#define ROWS(kind) \
    case kind: \
        for (int64_t row = from; row < to; row++) attend(a, seq, kv_head, row, kind); \
        break;

CLONES static void attend_rows(const Attention *a, int64_t seq, int64_t kv_head, int64_t from, int64_t to) {
    switch (a->cache->kind) {
        ROWS(BF16)
        ROWS(F32)
        ROWS(F16)
        ROWS(FP8)
        ROWS(INT8)
        ROWS(INT4)
    }
}

/* Rows are handed out in runs of a few queries of one KV head, so that its keys stay in the cache. */
int attention_plain(const Attention *a) {
    const int64_t kv_heads = a->cache->kv_heads, group = a->heads / kv_heads, step = 4 * group;
    int64_t *first = malloc((a->seqs + 1) * sizeof(int64_t));
    if (!first) return -1;
    first[0] = 0;
    for (int64_t seq = 0; seq < a->seqs; seq++) {
        int64_t rows = (a->cu_seqlens[seq + 1] - a->cu_seqlens[seq]) * group;
        first[seq + 1] = first[seq] + (rows + step - 1) / step * kv_heads;
    }
#pragma omp parallel for schedule(dynamic, 1) if (first[a->seqs] > 1)
    for (int64_t item = 0; item < first[a->seqs]; item++) {
        int64_t low = 0, high = a->seqs;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (first[middle] <= item) low = middle;
            else high = middle;
        }
        int64_t rows = (a->cu_seqlens[low + 1] - a->cu_seqlens[low]) * group;
        int64_t from = (item - first[low]) / kv_heads * step;
        attend_rows(a, low, (item - first[low]) % kv_heads, from, min_i64(from + step, rows));
    }
    free(first);
    return 0;
}
