/* The row-wise operations of a mixture of experts: the choice of experts, gpt-oss' activation, and the weighted sum. A
 * token's result depends on its own row only. */
#include "experts.h"

#include "simd/cpu_class.h"
#include "team.h"

#define PARALLEL_FROM 16384 /* a call with this many elements uses several threads */
#define MAX_EXPERTS 1024
#define LEAST (-0x1.fffffep127f) /* the smallest value that can be chosen; -infinity marks the others */

/* The value by which a score is compared. As in torch.topk a NaN is the largest; otherwise no comparison with it would
 * hold, and it would hide other experts. */
INLINE float comparable(float x) { return x >= LEAST ? x : x < LEAST ? LEAST : INFINITY; }

/* The index of the largest of `count` values, the first of equal ones. */
INLINE int64_t best_of(const float *values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

/* Sets `choice` to -infinity for all experts outside the best `top_groups` groups. */
static void limit_groups(const Routing *r, float *choice) {
    const int64_t size = r->experts / r->groups;
    float totals[MAX_EXPERTS], copy[MAX_EXPERTS];
    char is_kept[MAX_EXPERTS] = {0};
    memcpy(copy, choice, r->experts * sizeof(float));
    for (int64_t g = 0; g < r->groups; g++) {
        totals[g] = 0;
        for (int64_t n = 0; n < r->group_best; n++) {
            float *best = copy + g * size + best_of(copy + g * size, size);
            totals[g] += *best;
            *best = -INFINITY;
        }
        totals[g] = comparable(totals[g]);
    }
    for (int64_t n = 0; n < r->top_groups; n++) {
        const int64_t g = best_of(totals, r->groups);
        is_kept[g] = 1, totals[g] = -INFINITY;
    }
    for (int64_t e = 0; e < r->experts; e++)
        if (!is_kept[e / size]) choice[e] = -INFINITY;
}

INLINE void softmax(float *x, int64_t count) {
    float top = x[0], total = 0;
    for (int64_t i = 1; i < count; i++) top = x[i] > top ? x[i] : top;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) x[i] = exp_(x[i] - top);
    for (int64_t i = 0; i < count; i++) total += x[i];
    for (int64_t i = 0; i < count; i++) x[i] /= total;
}

static void route_token(const Route *call, int64_t token) {
    const Routing *r = call->routing;
    const int64_t experts = r->experts, k = r->top_k;
    const void *logits = at(call->logits, token * experts, (int)call->type);
    int32_t *ids = call->ids + token * k;
    float *weights = call->weights + token * k, scores[MAX_EXPERTS], choice[MAX_EXPERTS], total = 0;
    if (call->type == BF16)
        for (int64_t e = 0; e < experts; e++) scores[e] = get(logits, e, BF16);
    else memcpy(scores, logits, experts * sizeof(float));
    if (r->scoring == SOFTMAX) softmax(scores, experts);
    if (r->scoring == SIGMOID)
        for (int64_t e = 0; e < experts; e++) scores[e] = 1.0f / (1.0f + exp_(-scores[e]));
    for (int64_t e = 0; e < experts; e++) choice[e] = comparable(r->correction ? scores[e] + r->correction[e] : scores[e]);
    if (r->top_groups < r->groups) limit_groups(r, choice);
    for (int64_t j = 0; j < k; j++) {
        const int64_t e = best_of(choice, experts);
        ids[j] = (int32_t)e, weights[j] = scores[e];
        choice[e] = -INFINITY;
    }
    if (r->scoring == SOFTMAX_OF_CHOSEN) softmax(weights, k);
    for (int64_t j = 0; j < k; j++) total += weights[j];
    for (int64_t j = 0; j < k; j++) weights[j] = (r->renormalise ? weights[j] / (total + r->epsilon) : weights[j]) * r->scale;
}

static void route_items(const void *call, int64_t from, int64_t to) {
    for (int64_t token = from; token < to; token++) route_token(call, token);
}

static void route_work(const void *call) { share_items(((const Route *)call)->tokens, 8, route_items, call); }

void FOR_CLASS(route)(const Route *call) {
    run_team_if(call->tokens * call->routing->experts * call->routing->top_k >= PARALLEL_FROM, route_work, call);
}

INLINE void clamped_row(const ClampedSwiglu *c, int64_t row, int64_t from, int64_t to, int type) {
    const void *gates = at(c->gate_up, row * 2 * c->width, type), *ups = at(gates, c->width, type);
    void *out = at(c->out, row * c->width, type);
    const float alpha = c->alpha, limit = c->limit;
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        const float gate = get(gates, i, type), x = gate > limit ? limit : gate;
        put(out, i, (clamped(get(ups, i, type), limit) + 1.0f) * x / (1.0f + exp_(-alpha * x)), type);
    }
}

/* Parts of 1024 elements, so that even one long row gives work to every thread. */
static int64_t clamped_parts(const ClampedSwiglu *c) { return (c->width + 1023) / 1024; }

static void clamped_items(const void *context, int64_t first, int64_t last) {
    const ClampedSwiglu *c = context;
    for (int64_t i = first, parts = clamped_parts(c); i < last; i++) {
        const int64_t from = i % parts * 1024, to = min_i64(c->width, from + 1024);
        if (c->type == BF16) clamped_row(c, i / parts, from, to, BF16);
        else clamped_row(c, i / parts, from, to, F32);
    }
}

static void clamped_work(const void *c) {
    share_items(((const ClampedSwiglu *)c)->rows * clamped_parts(c), 8, clamped_items, c);
}

void FOR_CLASS(clamped_swiglu)(const ClampedSwiglu *c) { run_team_if(c->rows * c->width >= PARALLEL_FROM, clamped_work, c); }

/* Elements [from, to), at most 256, of a token's sum. Experts are added in the order of ids, then the shared expert. */
INLINE void sum_part(const WeightedSum *s, int64_t token, int64_t from, int64_t to, int type) {
    float sum[256] = {0};
    const int64_t count = to - from;
    for (int64_t j = 0; j < s->top_k; j++) {
        const int64_t place = s->place[token * s->top_k + j];
        if (place < 0) continue;
        const void *y = at(s->y, place * s->width + from, type);
        const float weight = s->weights[token * s->top_k + j];
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sum[i] += weight * get(y, i, type);
    }
    if (s->shared) {
        const void *shared = at(s->shared, token * s->width + from, type);
        const float factor = s->shared_gate ? 1.0f / (1.0f + exp_(-get(s->shared_gate, token, type))) : 1.0f;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sum[i] += factor * get(shared, i, type);
    }
    void *out = at(s->out, token * s->width + from, type);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) put(out, i, sum[i], type);
}

static int64_t sum_parts(const WeightedSum *s) { return (s->width + 255) / 256; }

static void sum_items(const void *context, int64_t first, int64_t last) {
    const WeightedSum *s = context;
    for (int64_t i = first, parts = sum_parts(s); i < last; i++) {
        const int64_t from = i % parts * 256, to = min_i64(s->width, from + 256);
        if (s->type == BF16) sum_part(s, i / parts, from, to, BF16);
        else sum_part(s, i / parts, from, to, F32);
    }
}

static void sum_work(const void *s) { share_items(((const WeightedSum *)s)->tokens * sum_parts(s), 16, sum_items, s); }

void FOR_CLASS(weighted_sum)(const WeightedSum *s) {
    run_team_if(s->tokens * s->width * s->top_k >= PARALLEL_FROM, sum_work, s);
}
