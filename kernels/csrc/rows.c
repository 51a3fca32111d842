/* The row-wise operations: RMSNorm, SiLU-mul, rotary, storing keys and values, copying blocks. Formulas and shapes are
 * in the Python file of each. */
#include "rows.h"

#include "simd/activation.h"
#include "simd/cpu_class.h"
#include "team.h"

#define PARALLEL_FROM 16384 /* a call with this many elements uses several threads */
#define MAX_DIM 512         /* the largest row that is stored in another dtype */

INLINE void norm_row(const Norm *n, int64_t row, int type) {
    const int64_t outer = row / n->inner, inner = row % n->inner, width = n->width, whole = width / LANES * LANES;
    const void *x = at(n->x, outer * n->x_outer + inner * n->x_inner, type);
    void *out = at(n->out, row * width, type);
    if (n->residual) {
        const void *residual = at(n->residual, outer * n->r_outer + inner * n->r_inner, type);
        void *sum = at(n->sum, row * width, type);
        for (int64_t i = 0; i < whole; i += LANES)
            store_vector(sum, i, load_vector(x, i, type) + load_vector(residual, i, type), type);
        for (int64_t i = whole; i < width; i++) put(sum, i, get(x, i, type) + get(residual, i, type), type);
        x = sum;
    }
    Floats squares[4] = {{0}};
    for (int64_t i = 0; i < whole; i += LANES) {
        const Floats one = load_vector(x, i, type);
        squares[i / LANES % 4] += one * one;
    }
    float total = sum_of_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (int64_t i = whole; i < width; i++) total += get(x, i, type) * get(x, i, type);
    const float scale = 1.0f / sqrtf(total / (float)width + n->eps);
    if (n->cast_first) {
        for (int64_t i = 0; i < whole; i += LANES)
            store_vector(out, i, rounded_vector(load_vector(x, i, type) * scale, type) *
                                     rounded_vector(load_vector(n->weight, i, type) + n->offset, type), type);
        for (int64_t i = whole; i < width; i++)
            put(out, i, rounded(get(x, i, type) * scale, type) * rounded(get(n->weight, i, type) + n->offset, type),
                type);
    } else {
        for (int64_t i = 0; i < whole; i += LANES)
            store_vector(out, i, load_vector(x, i, type) * scale * (load_vector(n->weight, i, type) + n->offset), type);
        for (int64_t i = whole; i < width; i++)
            put(out, i, get(x, i, type) * scale * (get(n->weight, i, type) + n->offset), type);
    }
}

static void norm_rows(const Norm *n, int64_t from, int64_t to) {
    if (n->type == BF16)
        for (int64_t row = from; row < to; row++) norm_row(n, row, BF16);
    else
        for (int64_t row = from; row < to; row++) norm_row(n, row, F32);
}

static int64_t norm_parts(const Norm *n) { return parts_of(n->outer * n->inner * n->width); }

static void norm_items(const void *context, int64_t from, int64_t to) {
    const Norm *n = context;
    const int64_t rows = n->outer * n->inner, parts = norm_parts(n);
    norm_rows(n, rows * from / parts, rows * to / parts);
}

static void norm_work(const void *n) { share_items(norm_parts(n), 4, norm_items, n); }

void FOR_CLASS(rms_norm)(const Norm *n) { run_team_if(n->outer * n->inner * n->width >= PARALLEL_FROM, norm_work, n); }

INLINE void gated(const void *gate_up, int64_t stride, void *out, int64_t width, int gelu, int type, int64_t row,
                  int64_t from, int64_t to) {
    const void *gate = at(gate_up, row * stride, type), *up = at(gate, width, type);
    void *y = at(out, row * width, type);
    int64_t i = from;
    for (; i + LANES <= to; i += LANES)
        store_vector(y, i, activation(load_vector(gate, i, type), gelu) * load_vector(up, i, type), type);
    for (; i < to; i++) put(y, i, activation((Floats){} + get(gate, i, type), gelu)[0] * get(up, i, type), type);
}

static void gated_rows(const void *gate_up, int64_t stride, void *out, int64_t width, int64_t gelu, int64_t type,
                              int64_t row, int64_t from, int64_t to) {
    if (type == BF16) {
        if (gelu) gated(gate_up, stride, out, width, 1, BF16, row, from, to);
        else gated(gate_up, stride, out, width, 0, BF16, row, from, to);
    } else {
        if (gelu) gated(gate_up, stride, out, width, 1, F32, row, from, to);
        else gated(gate_up, stride, out, width, 0, F32, row, from, to);
    }
}

typedef struct {
    const void *gate_up;
    int64_t stride;
    void *out;
    int64_t rows, width, gelu, type;
} Gated;

/* Parts of 1024 elements, so that even one long row gives work to every thread. */
static int64_t gated_parts(const Gated *g) { return (g->width + 1023) / 1024; }

static void gated_items(const void *context, int64_t from, int64_t to) {
    const Gated *g = context;
    for (int64_t i = from, parts = gated_parts(g); i < to; i++)
        gated_rows(g->gate_up, g->stride, g->out, g->width, g->gelu, g->type, i / parts, i % parts * 1024,
                   min_i64(g->width, (i % parts + 1) * 1024));
}

static void gated_work(const void *g) { share_items(((const Gated *)g)->rows * gated_parts(g), 8, gated_items, g); }

void FOR_CLASS(silu_mul)(const void *gate_up, int64_t stride, void *out, int64_t rows, int64_t width, int64_t gelu, int64_t type) {
    run_team_if(rows * width >= PARALLEL_FROM, gated_work, &(Gated){gate_up, stride, out, rows, width, gelu, type});
}

/* Rotates `dim` elements; cos and sin have `dim` elements too (see kernels/attention/rotary.py). x may be y. */
INLINE void rotate(const void *x, void *y, const void *cos, const void *sin, int64_t dim, int type, int table) {
    int64_t half = dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = get(x, i, type), b = get(x, i + half, type);
        put(y, i, a * get(cos, i, table) - b * get(sin, i, table), type);
        put(y, i + half, b * get(cos, i + half, table) + a * get(sin, i + half, table), type);
    }
}

/* Rotates one head of a token. x may be y. */
INLINE void rotate_head(const void *x, void *y, const Rotary *r, int64_t token, int type, int table) {
    rotate(x, y, at(r->cos, token * r->rot_dim, table), at(r->sin, token * r->rot_dim, table), r->rot_dim, type, table);
    if (x != y) memcpy(at(y, r->rot_dim, type), at(x, r->rot_dim, type), (r->dim - r->rot_dim) * (type == BF16 ? 2 : 4));
}

/* Stores one row of `type` in a cache of any dtype. */
INLINE void store_row(const KvCache *cache, void *row, uint16_t *scale, const void *x, int64_t dim, int type) {
    float wide[MAX_DIM];
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) wide[i] = get(x, i, type);
    switch (cache->kind) {
    case BF16: put_row(row, scale, wide, dim, BF16); break;
    case F32: put_row(row, scale, wide, dim, F32); break;
    case F16: put_row(row, scale, wide, dim, F16); break;
    case FP8: put_row(row, scale, wide, dim, FP8); break;
    case INT8: put_row(row, scale, wide, dim, INT8); break;
    default: put_row(row, scale, wide, dim, INT4);
    }
}

/* Rotates q and k of a token, and stores k and v in its slot. */
INLINE void rotate_token(const Rotary *r, int64_t token, int type, int table) {
    int64_t dim = r->dim, slot = r->slots[token];
    const void *q = at(r->q, token * r->q_stride, type), *k = at(r->k, token * r->k_stride, type);
    void *q_out = at(r->q_out, token * r->q_out_stride, type);
    if (r->q)
        for (int64_t h = 0; h < r->heads; h++)
            rotate_head(at(q, h * dim, type), at(q_out, h * dim, type), r, token, type, table);
    if (slot < 0) return;
    const void *v = at(r->v, token * r->v_stride, type);
    const KvCache *cache = r->cache;
    const int64_t block = slot / cache->block_size, offset = slot % cache->block_size;
    for (int64_t h = 0; h < r->kv_heads; h++) {
        const int64_t row = row_of(cache, h, offset);
        uint8_t *to_k = cache->k + block * cache->k_block + row * cache->row_bytes;
        uint8_t *to_v = cache->v + block * cache->v_block + row * cache->row_bytes;
        const void *head_k = at(k, h * dim, type), *head_v = at(v, h * dim, type);
        if (cache->kind == type) {
            if (r->cos) rotate_head(head_k, to_k, r, token, type, table);
            else memcpy(to_k, head_k, cache->row_bytes);
            memcpy(to_v, head_v, cache->row_bytes);
            continue;
        }
        /* The cache has another dtype than the model. Rotate, round to the model's dtype, widen to float, store. */
        float rotated[MAX_DIM];
        if (r->cos) rotate_head(head_k, rotated, r, token, type, table), head_k = rotated;
        store_row(cache, to_k, cache->k_scales + block * cache->k_scales_block + row, head_k, dim, type);
        store_row(cache, to_v, cache->v_scales + block * cache->v_scales_block + row, head_v, dim, type);
    }
}

static void rotate_tokens(const Rotary *r, int64_t from, int64_t to) {
    for (int64_t token = from; token < to; token++) {
        if (r->type == F32) rotate_token(r, token, F32, F32);
        else if (r->table_type == BF16) rotate_token(r, token, BF16, BF16);
        else rotate_token(r, token, BF16, F32);
    }
}

static int64_t rotary_size(const Rotary *r) { return r->tokens * (r->heads + 2 * r->kv_heads) * r->dim; }

static void rotary_items(const void *context, int64_t from, int64_t to) {
    const Rotary *r = context;
    const int64_t parts = parts_of(rotary_size(r));
    rotate_tokens(r, r->tokens * from / parts, r->tokens * to / parts);
}

static void rotary_work(const void *r) { share_items(parts_of(rotary_size(r)), 4, rotary_items, r); }

/* rotary_and_store of Python; store_kv if q and cos are null. */
void FOR_CLASS(rotary)(const Rotary *r) { run_team_if(rotary_size(r) >= PARALLEL_FROM, rotary_work, r); }

/* Rotates a token's query heads, and stores its normalised latent and its rotary key. */
INLINE void latent_token(const LatentRotary *r, int64_t token, int type, int table) {
    const KvCache *cache = r->cache;
    const int64_t slot = r->slots[token], rank = cache->dim, rope_dim = r->rope_dim;
    const void *cos = at(r->cos, token * rope_dim, table), *sin = at(r->sin, token * rope_dim, table);
    for (int64_t h = 0; h < r->heads; h++)
        rotate(at(r->q, token * r->q_stride + h * r->q_head, type),
               at(r->q_out, token * r->out_stride + h * r->out_head, type), cos, sin, rope_dim, type, table);
    if (slot < 0) return;
    const void *latent = at(r->kv, token * r->kv_stride, type);
    float normed[MAX_DIM], rotated[MAX_DIM]; /* of `type` */
    const Norm norm = {.x = latent, .weight = r->norm, .out = normed, .inner = 1, .width = rank, .eps = r->eps,
                       .cast_first = 1};
    norm_row(&norm, 0, type);
    rotate(at(latent, rank, type), rotated, cos, sin, rope_dim, type, table);
    const int64_t block = slot / cache->block_size, row = slot % cache->block_size;
    uint8_t *to_latent = cache->k + block * cache->k_block + row * cache->row_bytes;
    uint8_t *to_rope = cache->v + block * cache->v_block + row * r->rope_row_bytes;
    if (cache->kind == type) {
        memcpy(to_latent, normed, cache->row_bytes);
        memcpy(to_rope, rotated, r->rope_row_bytes);
        return;
    }
    store_row(cache, to_latent, cache->k_scales + block * cache->k_scales_block + row, normed, rank, type);
    store_row(cache, to_rope, cache->v_scales + block * cache->v_scales_block + row, rotated, rope_dim, type);
}

static void latent_tokens(const LatentRotary *r, int64_t from, int64_t to) {
    for (int64_t token = from; token < to; token++) {
        if (r->type == F32) latent_token(r, token, F32, F32);
        else if (r->table_type == BF16) latent_token(r, token, BF16, BF16);
        else latent_token(r, token, BF16, F32);
    }
}

void FOR_CLASS(latent_rotary)(const LatentRotary *r) {
#pragma omp parallel for schedule(static) if (r->tokens * (r->heads * r->rope_dim + r->cache->dim) >= PARALLEL_FROM)
    for (int64_t part = 0; part < 16; part++)
        latent_tokens(r, r->tokens * part / 16, r->tokens * (part + 1) / 16);
}

/* Copies block from[i] of a pool to block to[i]. */
void FOR_CLASS(copy_blocks)(char *pool, int64_t stride, const int64_t *from, const int64_t *to, int64_t bytes, int64_t count) {
#pragma omp parallel for schedule(static) if (count * bytes >= PARALLEL_FROM * 4)
    for (int64_t i = 0; i < count; i++)
        memcpy(pool + to[i] * stride, pool + from[i] * stride, bytes);
}
