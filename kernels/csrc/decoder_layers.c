/* One call for a sublayer (attention or MLP), and one call for consecutive whole layers. They run the operations of the
 * other files in one team of threads. The rows between operations are in one scratch buffer, which stays in the cache.
 * The results have the same bits as separate calls. */
#include "sublayers.h"
#include "team.h"

typedef struct {
    Scale norm, q_norm, k_norm;
    Weight qkv, output;
    int64_t heads, kv_heads, dim, window;
    float scale, softcap;
    int64_t type;
} Attend;

/* The arguments of a step that all layers with the same rotary embedding share. */
typedef struct {
    const void *cos, *sin;
    int64_t rot_dim, table_type;
    const int64_t *slots;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *seq_lens, *cu_seqlens;
    int64_t seqs;
} Step;

/* Normalises `heads` heads of each token's row, to `out`. The rows are `stride` elements apart. */
static void norm_heads(const Kernels *f, const Scale *s, char *x, int64_t tokens, int64_t heads, int64_t dim,
                       int64_t stride, int64_t type, void *out) {
    f->rms_norm(&(Norm){x, 0, s->weight, out, 0, tokens, heads, dim, stride, dim, 0, 0, s->eps, s->offset,
                     s->offset == 0.0f, type});
}

static void mlp_part(const Kernels *f, const Mlp *m, const Stream *s) {
    char *scratch = s->scratch;
    void *x = allocate(&scratch, s->tokens * m->gate_up.depth * bytes(m->type));
    normed(f, &m->norm, s, m->gate_up.depth, m->type, x);
    mlp_rows(f, &m->gate_up, &m->down, m->gelu, m->type, x, s->tokens, s->out, scratch);
}

static void attention_part(const Kernels *f, const Attend *a, const KvCache *cache, const Step *step, const Stream *s) {
    char *scratch = s->scratch;
    const int64_t size = bytes(a->type), width = a->qkv.depth, all = a->qkv.features, tokens = s->tokens;
    const int64_t q_width = a->heads * a->dim, k_width = a->kv_heads * a->dim;
    char *x = allocate(&scratch, tokens * width * size), *qkv = allocate(&scratch, tokens * all * size);
    char *rotated = allocate(&scratch, tokens * q_width * size);
    char *attended = allocate(&scratch, tokens * q_width * size);
    char *q = qkv, *k = qkv + q_width * size, *v = k + k_width * size;
    int64_t q_stride = all, k_stride = all;
    normed(f, &a->norm, s, width, a->type, x);
    product(f, &a->qkv, x, tokens, a->type, qkv, scratch);
    if (a->q_norm.weight) {
        char *dense_q = allocate(&scratch, tokens * q_width * size);
        char *dense_k = allocate(&scratch, tokens * k_width * size);
        norm_heads(f, &a->q_norm, q, tokens, a->heads, a->dim, all, a->type, dense_q);
        norm_heads(f, &a->k_norm, k, tokens, a->kv_heads, a->dim, all, a->type, dense_k);
        q = dense_q, q_stride = q_width, k = dense_k, k_stride = k_width;
    }
    f->rotary(&(Rotary){q, k, v, step->cos, step->sin, rotated, cache, step->slots, tokens, a->heads, a->kv_heads,
                     a->dim, step->rot_dim, q_stride, k_stride, all, q_width, a->type, step->table_type});
    Attention call = {rotated, q_width, cache, step->tables, step->table_stride, step->seq_lens, step->cu_seqlens,
                      step->seqs, a->heads, a->scale, a->softcap, a->window, a->type, 0, attended,
                      .value_dim = a->dim};
    f->attention[a->type](&call);
    product(f, &a->output, attended, tokens, a->type, s->out, scratch);
}

typedef struct {
    const Kernels *f;
    const Mlp *mlp;
    const Attend *attend;
    const KvCache *cache;
    const Step *step;
    const Stream *stream;
} Sublayer;

static void sublayer_work(const void *context) {
    const Sublayer *l = context;
    if (l->mlp) mlp_part(l->f, l->mlp, l->stream);
    else attention_part(l->f, l->attend, l->cache, l->step, l->stream);
}

void mlp_sublayer(const Kernels *f, const Mlp *m, const Stream *s) {
    run_team(sublayer_work, &(Sublayer){.f = f, .mlp = m, .stream = s});
}

/* Returns 0, or -1 if attention cannot allocate its list of work items. */
int attention_sublayer(const Kernels *f, const Attend *a, const KvCache *cache, const Step *step, const Stream *s) {
    return run_team(sublayer_work, &(Sublayer){.f = f, .attend = a, .cache = cache, .step = step, .stream = s});
}

/* A layer of a model without tensor parallelism. `table_index`: the index of its Step. The `after` norms normalise the
 * output of a sublayer before it is added to the residual; in most models their weights are null. */
typedef struct {
    Attend attention;
    Scale after_attention;
    Mlp mlp;
    const Sparse *experts; /* the experts that replace mlp, or null */
    Scale after_mlp;
    int64_t table_index;
} Layer;

static void scale_rows(const Kernels *f, const Scale *s, void *x, int64_t tokens, int64_t width, int64_t type) {
    if (s->weight)
        f->rms_norm(&(Norm){x, 0, s->weight, x, 0, tokens, 1, width, width, 0, 0, 0, s->eps, s->offset, s->offset == 0.0f,
                         type});
}

typedef struct {
    const Kernels *f;
    const Layer *layers;
    const KvCache *caches;
    int64_t count;
    const Step *steps;
    Stream stream; /* the input of the first layer */
} Layers;

/* Computes all layers. If the last one has experts, they are left out. */
static void layers_work(const void *context) {
    const Layers *c = context;
    const Kernels *f = c->f;
    Stream now = c->stream;
    for (int64_t i = 0; i < c->count; i++) {
        const Layer *l = c->layers + i;
        const int64_t width = l->attention.qkv.depth, type = l->attention.type;
        attention_part(f, &l->attention, c->caches + i, c->steps + l->table_index, &now);
        scale_rows(f, &l->after_attention, now.out, now.tokens, width, type);
        if (l->experts) return;
        now.x = now.out, now.residual = now.sum;
        mlp_part(f, &l->mlp, &now);
        scale_rows(f, &l->after_mlp, now.out, now.tokens, width, type);
    }
}

/* `s`: the input of the first of `count` layers. At the end s->out + s->sum is the input of the next layer; if `last_norm`
 * has a weight, s->out is the norm of that sum. The residual is updated in place. Returns 0, or -1 as attention_sublayer
 * does. One thread plans the work of experts, so a team ends before them. */
int fused_layers(const Kernels *f, const Layer *layers, const KvCache *caches, int64_t count, const Step *steps,
                 const Scale *last_norm, const Stream *s) {
    Stream now = *s;
    for (int64_t first = 0, last; first < count; first = last + 1) {
        for (last = first; last + 1 < count && !layers[last].experts;) last++;
        const Layer *l = layers + last;
        if (run_team(layers_work, &(Layers){f, layers + first, caches + first, last + 1 - first, steps, now})) return -1;
        now.x = now.out, now.residual = now.sum;
        if (!l->experts) continue;
        sparse_sublayer(f, l->experts, &now);
        scale_rows(f, &l->after_mlp, now.out, now.tokens, l->attention.qkv.depth, l->attention.type);
    }
    if (last_norm->weight) normed(f, last_norm, &now, layers->attention.qkv.depth, layers->attention.type, now.out);
    return 0;
}
