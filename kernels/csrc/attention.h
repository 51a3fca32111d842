/* The arguments of one call of paged attention. kernels/attention/paged_attention.py packs them and has the formula. */
#pragma once
#include "kv_cache.h"

typedef struct {
    const void *q;          /* [tokens][heads][dim], tokens q_stride elements apart */
    int64_t q_stride;
    const KvCache *cache;
    const int32_t *tables;  /* [seqs][table_stride] */
    int64_t table_stride;
    const int32_t *seq_lens, *cu_seqlens;
    int64_t seqs, heads;
    float scale, softcap;
    int64_t window;         /* 0: off */
    int64_t type;           /* of q and out: BF16 or F32 */
    const float *sinks;     /* [heads] or null */
    void *out;              /* [tokens][heads][dim], dense */
} Attention;

/* Keys per split. Splits begin at absolute positions and are combined in order: the same order in
 * decode and in prefill, with any other sequences in the batch. */
#define SPLIT 1024
