/* A mixture of experts as one call: the products of all experts, or the whole sublayer from norm to weighted sum.
 *
 * The pairs (token, choice) are sorted by expert. The products of all experts run as one group of linears, so that each
 * expert's weight is read once and every thread has work. Many rows are computed in several rounds of whole experts,
 * which bounds the scratch memory. */
#include "sublayers.h"

#define ROUND 4096 /* the most rows of a round, unless one expert has more; PADDING rows are added for each expert */
#define PADDING 15 /* the most rows of padding in a linear's repacked x */

typedef struct {
    const void *x;
    const int32_t *ids; /* [tokens][top_k]; the ids of a token differ, so an expert has at most `tokens` rows */
    const float *weights;
    const void *shared, *shared_gate; /* as in WeightedSum */
    void *out, *scratch;
    int64_t tokens;
} ExpertsCall;

static int64_t whole_lines(int64_t size) { return (size + 63) / 64 * 64; }

static int64_t packed_x(int64_t rows, int64_t depth) { return whole_lines((rows + PADDING) * (depth + 31) * 4); }

/* Bytes of scratch that experts_product needs. */
int64_t experts_scratch(const Experts *m, int64_t tokens) {
    const int64_t pairs = tokens * m->top_k, used = min_i64(min_i64(m->count, pairs), MAX_LINEARS), size = bytes(m->type);
    const int64_t most = max_i64(ROUND, tokens + PADDING), padded = min_i64(pairs + PADDING * used, most);
    const int64_t inner = m->down.depth, width = m->down.features, depth = max_i64(m->gate_up.depth, inner);
    return 2 * whole_lines(pairs * 4) + whole_lines((m->count + 1) * 4) + 2 * whole_lines(used * sizeof(Linear)) +
           whole_lines(2 * inner * min_i64(pairs, most) * size) + whole_lines(inner * min_i64(pairs, most) * size) +
           whole_lines(pairs * width * size) + padded * (depth + 31) * 4 + 64 * (used + 1);
}

/* Sorts the pairs by expert and then by token. `starts` [count + 1]: each expert's first row. place[pair]: the pair's
 * row, or -1 if another rank has the expert. token[row]: the token of the row's pair. */
static void sort_pairs(const Experts *m, const int32_t *ids, int64_t pairs, int32_t *starts, int32_t *place, int32_t *token) {
    memset(starts, 0, (m->count + 1) * sizeof *starts);
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t expert = ids[i] - m->first;
        if (m->chosen) m->chosen[ids[i]]++;
        if (expert >= 0 && expert < m->count) starts[expert + 1]++;
    }
    for (int64_t e = 0; e < m->count; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t expert = ids[i] - m->first;
        place[i] = -1;
        if (expert < 0 || expert >= m->count) continue;
        place[i] = starts[expert]++;
        token[place[i]] = (int32_t)(i / m->top_k);
    }
    for (int64_t e = m->count; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* The linear of expert `expert` of this rank. `first`: the weight of the rank's first expert. */
static Linear of_expert(const Weight *first, int64_t expert, int64_t rows, int64_t type) {
    Weight w = *first;
    const int64_t panels = expert * panels_of(w.features) * PANEL;
    if (w.bias) w.bias = at(w.bias, expert * w.features, (int)type);
    if (w.kind == PLAIN) {
        w.packed = (const uint32_t *)w.packed + panels * words_of(w.depth, (int)type);
    } else {
        const int64_t scales = panels * groups_of(&w);
        w.packed = (const uint32_t *)w.packed + panels * (padded_depth(w.depth) / codes_of_word(w.kind));
        w.scales = (const char *)w.scales + scales * scale_bytes(w.scale_type);
        if (w.row_scales) w.row_scales += panels;
        if (w.zeros) w.zeros = (const char *)w.zeros + scales * scale_bytes(w.zero_type);
    }
    return (Linear){w, 0, w.depth, rows, 0, w.features, 0, 0};
}

void experts_product(const Kernels *f, const Experts *m, const ExpertsCall *c) {
    char *scratch = c->scratch;
    const int64_t pairs = c->tokens * m->top_k, type = m->type, size = bytes(type);
    const int64_t inner = m->down.depth, width = m->down.features, most = max_i64(ROUND, c->tokens + PADDING);
    const int64_t used = min_i64(min_i64(m->count, pairs), MAX_LINEARS);
    int32_t *place = allocate(&scratch, pairs * 4), *token = allocate(&scratch, pairs * 4);
    int32_t *starts = allocate(&scratch, (m->count + 1) * 4);
    Linear *ups = allocate(&scratch, used * sizeof(Linear)), *downs = allocate(&scratch, used * sizeof(Linear));
    char *wide = allocate(&scratch, 2 * inner * min_i64(pairs, most) * size);
    char *gated = allocate(&scratch, inner * min_i64(pairs, most) * size);
    char *y = allocate(&scratch, pairs * width * size);
    sort_pairs(m, c->ids, pairs, starts, place, token);
    for (int64_t e = 0; e < m->count;) {
        const int64_t begin = starts[e];
        int64_t count = 0, padded = 0;
        char *next = scratch;
        for (; e < m->count && count < used; e++) {
            const int64_t rows = starts[e + 1] - starts[e], row = starts[e] - begin;
            if (rows == 0) continue;
            if (count && padded + rows + PADDING > ROUND) break;
            Linear *up = ups + count, *down = downs + count++;
            *up = of_expert(&m->gate_up, e, rows, type), *down = of_expert(&m->down, e, rows, type);
            up->x = c->x, up->source = token + starts[e], up->y = wide + row * 2 * inner * size;
            down->x = gated + row * inner * size, down->y = y + starts[e] * width * size;
            up->scratch = down->scratch = next;
            next += packed_x(rows, max_i64(up->weight.depth, down->weight.depth));
            padded += rows + PADDING;
        }
        const int64_t rows = starts[e] - begin;
        if (count == 0) break;
        f->linears[type](ups, count);
        if (m->activation == CLAMPED_SWIGLU)
            f->clamped_swiglu(&(ClampedSwiglu){wide, gated, rows, inner, type, m->alpha, m->limit});
        else f->silu_mul(wide, 2 * inner, gated, rows, inner, m->activation == GELU_TANH, type);
        f->linears[type](downs, count);
    }
    f->weighted_sum(&(WeightedSum){y, place, c->weights, c->shared, c->shared_gate, c->out, c->tokens, m->top_k, width, type});
}

static int64_t mlp_scratch(const Weight *gate_up, const Weight *down, int64_t tokens, int64_t type) {
    const int64_t inner = down->depth, size = bytes(type);
    const int64_t separate = whole_lines(tokens * 2 * inner * size) + whole_lines(tokens * inner * size);
    return max_i64(separate, whole_lines(padded_rows(tokens) * inner * size)) + packed_x(tokens, max_i64(gate_up->depth, inner));
}

/* Bytes of scratch that sparse_sublayer needs. */
int64_t sparse_scratch(const Sparse *m, int64_t tokens) {
    const int64_t width = m->router.depth, experts = m->router.features, type = m->experts.type, size = bytes(type);
    const int64_t rows = 2 * whole_lines(tokens * width * size) + whole_lines(tokens * width * 4) + whole_lines(tokens * 4) +
                         whole_lines(tokens * experts * 4) + 2 * whole_lines(tokens * m->routing.top_k * 4);
    int64_t most = max_i64(packed_x(tokens, width), experts_scratch(&m->experts, tokens));
    if (m->shared_down.packed) most = max_i64(most, mlp_scratch(&m->shared_gate_up, &m->shared_down, tokens, type));
    return rows + most;
}

void sparse_sublayer(const Kernels *f, const Sparse *m, const Stream *s) {
    char *scratch = s->scratch;
    const int64_t width = m->router.depth, experts = m->router.features, type = m->experts.type, size = bytes(type);
    const int64_t tokens = s->tokens, k = m->routing.top_k;
    void *x = allocate(&scratch, tokens * width * size), *logits = allocate(&scratch, tokens * experts * 4);
    int32_t *ids = allocate(&scratch, tokens * k * 4);
    float *weights = allocate(&scratch, tokens * k * 4), *wide = allocate(&scratch, tokens * width * 4);
    void *shared = allocate(&scratch, tokens * width * size), *shared_gate = allocate(&scratch, tokens * size);
    normed(f, &m->norm, s, width, type, x);
    if (m->router_type != type) /* the router computes in float32 */
        for (int64_t i = 0; i < tokens * width; i++) wide[i] = get(x, i, BF16);
    product(f, &m->router, m->router_type == type ? x : wide, tokens, m->router_type, logits, scratch);
    f->route(&(Route){&m->routing, logits, ids, weights, tokens, m->router_type});
    if (m->shared_down.packed)
        mlp_rows(f, &m->shared_gate_up, &m->shared_down, m->experts.activation == GELU_TANH, type, x, tokens, shared, scratch);
    if (m->shared_gate.packed) product(f, &m->shared_gate, x, tokens, type, shared_gate, scratch);
    experts_product(f, &m->experts, &(ExpertsCall){x, ids, weights, m->shared_down.packed ? shared : 0,
                    m->shared_gate.packed ? shared_gate : 0, s->out, scratch, tokens});
}
