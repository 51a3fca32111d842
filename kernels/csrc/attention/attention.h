/* The arguments of one call of paged attention. kernels/attention/paged_attention.py and latent_attention.py pack them
 * and state the formulas. A key has dim + rope_dim elements: its cache row, then its rotary row (latents only). */
#pragma once
#include "kv_cache.h"

typedef struct {
    const void *q;          /* [tokens][heads][dim + rope_dim], tokens q_stride elements apart */
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
    void *out;              /* [tokens][heads][value_dim], contiguous */
    int64_t value_dim;
    int64_t values_are_keys; /* with latents: a value is its key's row in the cache, and cache->v is not read */
    int64_t rope_dim;       /* 0: keys have no rotary row */
    const uint8_t *rope;    /* rotary rows, [block_size] in each block, shared by all heads */
    int64_t rope_block, rope_row_bytes;
    const uint16_t *rope_scales; /* as KvCache's */
    int64_t rope_scales_block;
    float *lse;             /* [tokens][heads] or null: the natural logarithm of each result's sum of exponentials */
} Attention;

/* Keys per split. Splits begin at multiples of SPLIT and are merged in order. So the order of the sums is the same in
 * decode and in prefill, and with any other sequences in the batch. */
#define SPLIT 1024
