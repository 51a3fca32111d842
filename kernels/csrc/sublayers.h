/* Types and functions that the calls of whole sublayers share: kernels, weights, and rows between operations. */
#pragma once
#include "attention/attention.h"
#include "experts.h"
#include "linear.h"

/* The operations of the class in use, for bfloat16 and float32. */
typedef struct {
    void (*linear[2])(const Linear *l);
    void (*linears[2])(const Linear *all, int64_t count);
    void (*gated_linear)(const Linear *l, int64_t gelu); /* bfloat16; null in classes that lack it */
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
    const void *weight; /* null: no norm */
    float eps, offset;
} Scale;

/* The input and output of a sublayer, [tokens][width]. The sum of x and `residual` is written to `sum`; in the first
 * layer `residual` is null, and both are unused. The sublayer's result is written to `out`. */
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

/* The weights of the experts that this rank holds. Each Weight is that of the first expert. The panels, scales, zero
 * points and biases of the other experts follow it in memory. */
typedef struct {
    Weight gate_up, down;
    int64_t first, count; /* the ids of this rank's experts */
    int64_t top_k, activation, type;
    float alpha, limit; /* parameters of CLAMPED_SWIGLU */
    int64_t *chosen;    /* how many pairs chose each expert of all ranks; null: not counted */
} Experts;

/* A sublayer of experts. `shared`: the expert of every token, with its gate; their weights are null if there is
 * none. */
typedef struct {
    Scale norm;
    Weight router; /* its bias may be null */
    int64_t router_type;
    Routing routing;
    Experts experts;
    Weight shared_gate_up, shared_down, shared_gate;
} Sparse;

void sparse_sublayer(const Kernels *f, const Sparse *m, const Stream *s);

INLINE int64_t bytes(int64_t type) { return type == 0 ? 2 : 4; }

/* Takes `size` bytes of scratch, aligned to a cache line. */
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

/* The most rows of a linear's repacked x, with padding: whole pairs of tiles. */
INLINE int64_t padded_rows(int64_t rows) { return (rows + 31) / 32 * 32; }

/* gate_up has gate's features, then up's. A gated linear needs whole tiles of each; `down` reads them in that order. */
INLINE void mlp_rows(const Kernels *f, const Weight *gate_up, const Weight *down, int64_t gelu, int64_t type, const void *x,
                     int64_t tokens, void *out, char *scratch) {
    const int64_t inner = down->depth, size = bytes(type);
    if (f->gated_linear && type == BF16 && inner % (2 * TILE_WORDS) == 0 && !down->order) {
        void *gated = allocate(&scratch, padded_rows(tokens) * inner * size);
        f->gated_linear(&(Linear){*gate_up, x, gate_up->depth, tokens, gated, 0, scratch, 0}, gelu);
        f->linear[type](&(Linear){*down, 0, 0, tokens, out, down->features, gated, 0});
        return;
    }
    void *wide = allocate(&scratch, tokens * 2 * inner * size), *gated = allocate(&scratch, tokens * inner * size);
    product(f, gate_up, x, tokens, type, wide, scratch);
    f->silu_mul(wide, 2 * inner, gated, tokens, inner, gelu, type);
    product(f, down, gated, tokens, type, out, scratch);
}
