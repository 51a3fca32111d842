/* The arguments of a mixture of experts, as the Python launchers pack them (formulas and shapes:
 * kernels/layers/route.py and experts.py). */
#pragma once
#include "rows.h"

enum { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2 };
enum { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

/* How a token's experts follow from its logits. */
typedef struct {
    const float *correction; /* [experts], added to the scores for the choice, not for the weights; or null */
    int64_t experts, top_k, scoring;
    int64_t groups, top_groups, group_best; /* group_best: experts whose sum ranks a group */
    int64_t renormalise;
    float scale, epsilon;
} Routing;

typedef struct {
    const Routing *routing;
    const void *logits; /* [tokens][experts] */
    int32_t *ids;       /* [tokens][top_k] */
    float *weights;     /* [tokens][top_k] */
    int64_t tokens, type;
} Route;

/* out = (clamp(up) + 1) * g * sigmoid(alpha * g), g = min(gate, limit), with gate and up in rows of 2 * width. */
typedef struct {
    const void *gate_up;
    void *out;
    int64_t rows, width, type;
    float alpha, limit;
} ClampedSwiglu;

/* out[t] = sum over j of weights[t][j] * y[place[t][j]], plus sigmoid(shared_gate[t]) * shared[t]. */
typedef struct {
    const void *y;
    const int32_t *place; /* negative: an expert of another rank */
    const float *weights;
    const void *shared, *shared_gate; /* shared null: no shared expert; shared_gate null: factor 1 */
    void *out;
    int64_t tokens, top_k, width, type;
} WeightedSum;
