/* The arguments of each row-wise operation, as its launcher packs them (formulas and shapes: the Python files). */
#pragma once
#include "kv_cache.h"

typedef struct {
    const void *x, *residual, *weight; /* residual may be null */
    void *out, *sum;                   /* sum: the new residual, dense */
    int64_t outer, inner, width;       /* [outer][inner][width], rows of `width` */
    int64_t x_outer, x_inner, r_outer, r_inner;
    float eps, offset;
    int64_t cast_first, type;
} Norm;

typedef struct {
    const void *q, *k, *v, *cos, *sin; /* q, cos and sin are null where nothing is rotated */
    void *q_out;
    const KvCache *cache;
    const int64_t *slots; /* of each token in the cache; negative: not stored */
    int64_t tokens, heads, kv_heads, dim, rot_dim;
    int64_t q_stride, k_stride, v_stride, q_out_stride;
    int64_t type, table_type;
} Rotary;
