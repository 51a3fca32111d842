/* The arguments of each row-wise operation, as its launcher packs them (formulas and shapes: the Python files). */
#pragma once
#include "kv_cache.h"

typedef struct {
    const void *x, *residual, *weight; /* residual may be null */
    void *out, *sum;                   /* sum: the new residual, contiguous */
    int64_t outer, inner, width;       /* x is [outer][inner][width], a row has `width` elements */
    int64_t x_outer, x_inner, r_outer, r_inner;
    float eps, offset;
    int64_t cast_first, type;
} Norm;

typedef struct {
    const void *q, *k, *v, *cos, *sin; /* q, cos and sin are null if nothing is rotated */
    void *q_out;
    const KvCache *cache;
    const int64_t *slots; /* the cache slot of each token; negative: not stored */
    int64_t tokens, heads, kv_heads, dim, rot_dim;
    int64_t q_stride, k_stride, v_stride, q_out_stride;
    int64_t type, table_type;
} Rotary;

/* kernels/layers/latent_rotary.py */
typedef struct {
    const void *q; /* the rotated part of each query head, heads q_head elements apart */
    void *q_out;   /* may be q */
    const void *kv; /* [tokens][latent, rotary key] */
    const void *norm; /* weight of the latent's norm */
    const void *cos, *sin;
    const KvCache *cache; /* k: latents; v: rotary keys, rope_row_bytes each */
    const int64_t *slots;
    int64_t tokens, heads, rope_dim, rope_row_bytes;
    int64_t q_stride, q_head, out_stride, out_head, kv_stride;
    int64_t type, table_type;
    float eps, unused;
} LatentRotary;
