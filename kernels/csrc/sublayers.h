/* What the calls of whole sublayers share: the kernels of the class in use, weights, and the rows between operations. */
#pragma once
#include "attention/attention.h"
#include "experts.h"
#include "linear.h"

/* The operations of the class in use, for bfloat16 and float32. */
typedef struct {
    void (*linear[2])(const Linear *l);
    void (*linears[2])(const Linear *all, int64_t count);
    int (*attention[2])(const Attention *a);
    void (*rms_norm)(const Norm *n);
    void (*rotary)(const Rotary *r);
    void (*silu_mul)(const void *gate_up, int64_t stride, void *out, int64_t rows, int64_t width, int64_t gelu,
                     int64_t type);
    void (*route)(const Route *call);
    void (*clamped_swiglu)(const ClampedSwiglu *c);
    void (*weighted_sum)(const WeightedSum *s);
} Kernels;

typedef struct {
    const void *weight; /* null: no norm here */
    float eps, offset;
} Scale;

/* The input and output of a sublayer, [tokens][width]. `residual` is added to x, and `sum` gets the sum; both are unused
 * in a first layer, where `residual` is null. `out` gets the sublayer's result. */
typedef struct {
    const void *x, *residual;
    void *sum, *out, *scratch;
    int64_t tokens;
} Stream;

typedef struct {
    Scale norm;
    Weight gate_up, down;
    int64_t gelu, type;
} Mlp;

/* The weights of all experts that this rank holds, one after the other. */
typedef struct {
    const uint32_t *packed;
    const void *bias; /* [count][features], or null */
    int64_t features, depth;
} ExpertWeight;

typedef struct {
    ExpertWeight gate_up, down;
    int64_t first, count; /* the ids of this rank's experts */
    int64_t top_k, activation, type;
    float alpha, limit; /* of CLAMPED_SWIGLU */
} Experts;

/* A sublayer of experts. `shared`: the expert that every token takes, with its gate; weights of null: none. */
typedef struct {
    Scale norm;
    Weight router; /* bias or null */
    int64_t router_type;
    Routing routing;
    Experts experts;
    Weight shared_gate_up, shared_down, shared_gate;
} Sparse;

void sparse_sublayer(const Kernels *f, const Sparse *m, const Stream *s);

INLINE int64_t bytes(int64_t type) { return type == 0 ? 2 : 4; }

/* The next `size` bytes of scratch, from the beginning of a cache line on. */
INLINE void *allocate(char **scratch, int64_t size) {
    void *allocated = *scratch;
    *scratch += (size + 63) / 64 * 64;
    return allocated;
}

INLINE void normed(const Kernels *f, const Scale *s, const Stream *stream, int64_t width, int64_t type, void *out) {
    f->rms_norm(&(Norm){stream->x, stream->residual, s->weight, out, stream->sum, stream->tokens, 1, width, width, 0,
                     width, 0, s->eps, s->offset, s->offset == 0.0f, type});
}

INLINE void product(const Kernels *f, const Weight *w, const void *x, int64_t rows, int64_t type, void *y, char *scratch) {
    f->linear[type](&(Linear){*w, x, w->depth, rows, y, w->features, scratch, 0});
}

INLINE void mlp_rows(const Kernels *f, const Weight *gate_up, const Weight *down, int64_t gelu, int64_t type, const void *x,
                     int64_t tokens, void *out, char *scratch) {
    const int64_t inner = down->depth, size = bytes(type);
    void *wide = allocate(&scratch, tokens * 2 * inner * size), *gated = allocate(&scratch, tokens * inner * size);
    product(f, gate_up, x, tokens, type, wide, scratch);
    f->silu_mul(wide, 2 * inner, gated, tokens, inner, gelu, type);
    product(f, down, gated, tokens, type, out, scratch);
}
