/* A gated delta net between its projections (formulas and shapes: kernels/linear_attention/gated_delta_net.py). An item
 * is one key head of one sequence with its value heads, so no two items touch the same channel or state. */
#include "delta_net.h"

#include "simd/activation.h"
#include "simd/cpu_class.h"
#include "team.h"

#define TOKENS 16   /* tokens of a sequence whose q, k and v are computed before the state is updated */
#define MAX_DIM 256 /* the largest key_dim and value_dim */
#define COLUMNS 32  /* columns of the state that stay in the L1 cache for these tokens */
#define MAX_TAPS 8
#define NORM_EPS 1e-6f
#define PARALLEL_FROM 65536 /* a call with this many state updates (elements times tokens) uses several threads */

/* The inputs of a sequence's convolution: the window (inputs of earlier steps), then the rows of this step. */
typedef struct {
    const char *rows, *window; /* window: null if this step starts the sequence */
    int64_t row_bytes, window_bytes, taps;
} Inputs;

/* The input row at token `token` of this step; a negative token is in the window. Null before the sequence's start. */
INLINE const char *input_row(const Inputs *in, int64_t token) {
    if (token >= 0) return in->rows + token * in->row_bytes;
    return in->window ? in->window + (in->taps - 1 + token) * in->window_bytes : 0;
}

/* to[i] = silu(convolution) of channel first + i at `token`, for i < count. Both are rounded to the dtype, as in
 * torch. */
INLINE void convolve(const DeltaNet *d, const Inputs *in, int64_t token, int64_t first, int64_t count, float *to,
                     int type) {
    for (int64_t i = 0; i < count; i += LANES) {
        Floats sum = {0};
        for (int64_t tap = 0; tap < in->taps; tap++) {
            const char *row = input_row(in, token - in->taps + 1 + tap);
            if (row) sum += load_floats(d->taps + tap * d->channels + first + i) * load_vector(row, first + i, type);
        }
        store_floats(to + i, rounded_vector(activation(rounded_vector(sum, type), 0), type));
    }
}

/* x = x * scale / |x| */
static void normalise(float *x, int64_t dim, float scale) {
    Floats squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) squares += load_floats(x + i) * load_floats(x + i);
    const float factor = scale / sqrtf(sum_of_lanes(squares) + NORM_EPS);
    for (int64_t i = 0; i < dim; i += LANES) store_floats(x + i, load_floats(x + i) * factor);
}

/* Update `width` columns of a head's state by one token, and compute their outputs. `stride`: elements from row to row.
 * `decays`: the decay of each row; null if `decay` is that of all rows. */
INLINE void step_rows(float *state, int64_t stride, int64_t width, int64_t rows, const float *q, const float *k,
                      const float *v, float decay, const float *decays, float beta, float *out) {
    enum { MOST = COLUMNS / LANES };
    Floats sums[MOST] = {{0}}, deltas[MOST] = {{0}};
    const int64_t vectors = width / LANES;
    if (vectors == MOST) {
        for (int64_t i = 0; i < rows; i++) {
            const float key = decays ? decays[i] * k[i] : k[i];
#pragma GCC unroll 8
            for (int c = 0; c < MOST; c++) sums[c] += load_floats(state + i * stride + c * LANES) * key;
        }
    } else {
        for (int64_t i = 0; i < rows; i++) {
            const float key = decays ? decays[i] * k[i] : k[i];
            for (int64_t c = 0; c < vectors; c++) sums[c] += load_floats(state + i * stride + c * LANES) * key;
        }
    }
    for (int64_t c = 0; c < vectors; c++) {
        const Floats value = load_floats(v + c * LANES);
        deltas[c] = beta * (decays ? value - sums[c] : value - decay * sums[c]);
        sums[c] = (Floats){0};
    }
    if (vectors == MOST) {
        for (int64_t i = 0; i < rows; i++) {
            const float factor = decays ? decays[i] : decay;
#pragma GCC unroll 8
            for (int c = 0; c < MOST; c++) {
                float *at = state + i * stride + c * LANES;
                const Floats next = load_floats(at) * factor + deltas[c] * k[i];
                store_floats(at, next);
                sums[c] += next * q[i];
            }
        }
    } else {
        for (int64_t i = 0; i < rows; i++) {
            const float factor = decays ? decays[i] : decay;
            for (int64_t c = 0; c < vectors; c++) {
                float *at = state + i * stride + c * LANES;
                const Floats next = load_floats(at) * factor + deltas[c] * k[i];
                store_floats(at, next);
                sums[c] += next * q[i];
            }
        }
    }
    for (int64_t c = 0; c < vectors; c++) store_floats(out + c * LANES, sums[c]);
}

/* Neither form is inlined, so that decodes and chunks of prompts run the same instructions: their results are equal
 * bit for bit. */
__attribute__((noinline)) static void step_columns(float *state, int64_t stride, int64_t width, int64_t rows,
                                                   const float *q, const float *k, const float *v, float decay,
                                                   float beta, float *out) {
    step_rows(state, stride, width, rows, q, k, v, decay, 0, beta, out);
}

__attribute__((noinline)) static void step_columns_by_channel(float *state, int64_t stride, int64_t width,
                                                              int64_t rows, const float *q, const float *k,
                                                              const float *v, const float *decays, float beta,
                                                              float *out) {
    step_rows(state, stride, width, rows, q, k, v, 0.0f, decays, beta, out);
}

/* Update a head's state [rows][dim] by `count` tokens. For more than one token, COLUMNS columns at a time are copied to
 * a contiguous tile: rows that are a power of two apart would evict each other from the L1 cache. `decay`: one for each
 * token, or with `by_channel` one for each row, MAX_DIM elements from token to token. */
static void step_head(float *state, int64_t rows, int64_t dim, int64_t count, const float *q, const float *k,
                      const float *v, const float *decay, int64_t by_channel, const float *beta, float *out) {
    float tile[MAX_DIM * COLUMNS];
    for (int64_t first = 0; first < dim; first += COLUMNS) {
        const int64_t width = min_i64(COLUMNS, dim - first);
        float *part = state + first;
        int64_t stride = dim;
        if (count > 1) {
            for (int64_t i = 0; i < rows; i++) memcpy(tile + i * COLUMNS, part + i * dim, (size_t)width * 4);
            part = tile, stride = COLUMNS;
        }
        for (int64_t t = 0; t < count; t++) {
            const float *qt = q + t * MAX_DIM, *kt = k + t * MAX_DIM, *vt = v + t * MAX_DIM + first;
            float *to = out + t * MAX_DIM + first;
            if (by_channel) step_columns_by_channel(part, stride, width, rows, qt, kt, vt, decay + t * MAX_DIM, beta[t], to);
            else step_columns(part, stride, width, rows, qt, kt, vt, decay[t], beta[t], to);
        }
        if (count > 1)
            for (int64_t i = 0; i < rows; i++) memcpy(state + first + i * dim, tile + i * COLUMNS, (size_t)width * 4);
    }
}

/* sigmoid(x) */
INLINE Floats sigmoid_of(Floats x) {
    const Floats exponent = larger_of((Floats){} - 87.0f, -larger_of((Floats){} - 69.0f, x));
    return reciprocal_of(1.0f + exp_of(exponent));
}

/* out = weight * (o / rms(o)) * silu(z). With sigmoid(z) only the result is rounded. */
INLINE void norm_and_gate(const DeltaNet *d, float *o, const void *z, void *out, int type) {
    Floats squares = {0};
    for (int64_t i = 0; i < d->value_dim; i += LANES) {
        const Floats one = rounded_vector(load_floats(o + i), type);
        store_floats(o + i, one);
        squares += one * one;
    }
    const float factor = 1.0f / sqrtf(sum_of_lanes(squares) / (float)d->value_dim + d->eps);
    if (d->has_sigmoid_gate) {
        for (int64_t i = 0; i < d->value_dim; i += LANES) {
            const Floats scaled = load_floats(d->norm + i) * (load_floats(o + i) * factor);
            store_vector(out, i, scaled * sigmoid_of(load_vector(z, i, type)), type);
        }
        return;
    }
    for (int64_t i = 0; i < d->value_dim; i += LANES) {
        const Floats normed = rounded_vector(load_floats(o + i) * factor, type);
        const Floats scaled = rounded_vector(load_floats(d->norm + i) * normed, type);
        store_vector(out, i, scaled * activation(load_vector(z, i, type), 0), type);
    }
}

/* Replace channels [first, first + channels) of the window by the last inputs of this step, which has `count` tokens.
 * `size`: bytes of an element. */
INLINE void update_window(const Inputs *in, char *window, int64_t count, int64_t first, int64_t channels, int size) {
    for (int64_t row = 0; row < in->taps - 1; row++) {
        const char *from = input_row(in, count + row - in->taps + 1);
        char *to = window + row * in->window_bytes + first * size;
        if (from) memmove(to, from + first * size, (size_t)(channels * size));
        else memset(to, 0, (size_t)(channels * size));
    }
}

/* The decay of each channel of a head's key at one token. `a`: the head's columns. */
INLINE void channel_decays(const DeltaNet *d, const void *a, int64_t head, float *to, int type) {
    for (int64_t i = 0; i < d->key_dim; i += LANES) {
        const Floats log = d->rates[head]
                           * softplus_of(load_vector(a, i, type) + load_floats(d->biases + head * d->key_dim + i));
        store_floats(to + i, exp_of(larger_of((Floats){} - 87.0f, log)));
    }
}

INLINE void compute_head(const DeltaNet *d, int64_t sequence, int64_t key_head, int type) {
    const int64_t first = d->cu_seqlens[sequence], count = d->cu_seqlens[sequence + 1] - first;
    const int64_t slot = d->slots[sequence], length = d->seq_lens[sequence], group = d->value_heads / d->key_heads;
    const int64_t key_dim = d->key_dim, value_dim = d->value_dim, keys = d->key_heads * key_dim;
    const int64_t out_row = d->value_heads * value_dim, q_first = key_head * key_dim, k_first = keys + q_first;
    const int64_t value_head = key_head * group, v_first = 2 * keys + value_head * value_dim;
    const int size = type == BF16 ? 2 : 4, is_new = length == count;
    if (!length) { /* padding */
        for (int64_t t = first; t < first + count; t++)
            memset(at(d->out, t * out_row + value_head * value_dim, type), 0, (size_t)(group * value_dim * size));
        return;
    }
    char *window = at(d->window, slot * (d->taps_count - 1) * d->channels, type);
    const Inputs in = {at(d->qkvz, first * d->qkvz_stride, type), is_new ? 0 : window, d->qkvz_stride * size,
                       d->channels * size, d->taps_count};
    float *states = d->matrix + (slot * d->value_heads + value_head) * key_dim * value_dim;
    if (is_new) memset(states, 0, (size_t)(group * key_dim * value_dim) * 4);
    float q[TOKENS * MAX_DIM], k[TOKENS * MAX_DIM], v[TOKENS * MAX_DIM], o[TOKENS * MAX_DIM];
    float decay[TOKENS * MAX_DIM], beta[TOKENS];
    const int64_t by_channel = d->has_channel_decays;
    for (int64_t begin = 0; begin < count; begin += TOKENS) {
        const int64_t n = min_i64(TOKENS, count - begin);
        for (int64_t t = 0; t < n; t++) {
            convolve(d, &in, begin + t, q_first, key_dim, q + t * MAX_DIM, type);
            convolve(d, &in, begin + t, k_first, key_dim, k + t * MAX_DIM, type);
            normalise(q + t * MAX_DIM, key_dim, 1.0f / sqrtf((float)key_dim));
            normalise(k + t * MAX_DIM, key_dim, 1.0f);
        }
        for (int64_t h = 0; h < group; h++) {
            const int64_t head = value_head + h;
            for (int64_t t = 0; t < n; t++) {
                const void *ba = at(d->ba, (first + begin + t) * d->ba_stride, type);
                const float b = get(ba, head, type);
                convolve(d, &in, begin + t, v_first + h * value_dim, value_dim, v + t * MAX_DIM, type);
                if (by_channel)
                    channel_decays(d, at(ba, d->value_heads + head * key_dim, type), head, decay + t * MAX_DIM, type);
                else
                    decay[t] = expf(d->rates[head] * softplus(get(ba, d->value_heads + head, type) + d->biases[head]));
                beta[t] = d->beta_scale * rounded(1.0f / (1.0f + expf(-b)), type);
            }
            step_head(states + h * key_dim * value_dim, key_dim, value_dim, n, q, k, v, decay, by_channel, beta, o);
            for (int64_t t = 0; t < n; t++) {
                const int64_t row = first + begin + t;
                norm_and_gate(d, o + t * MAX_DIM, at(d->qkvz, row * d->qkvz_stride + d->channels + head * value_dim, type),
                              at(d->out, row * out_row + head * value_dim, type), type);
            }
        }
    }
    if (count) {
        update_window(&in, window, count, q_first, key_dim, size);
        update_window(&in, window, count, k_first, key_dim, size);
        update_window(&in, window, count, v_first, group * value_dim, size);
    }
}

static void compute_heads(const void *context, int64_t from, int64_t to) {
    const DeltaNet *d = context;
    for (int64_t item = from; item < to; item++) {
        const int64_t sequence = item / d->key_heads, key_head = item % d->key_heads;
        if (d->type == BF16) compute_head(d, sequence, key_head, BF16);
        else compute_head(d, sequence, key_head, F32);
    }
}

static void compute_all(const void *context) {
    const DeltaNet *d = context;
    share_items(d->sequences * d->key_heads, 1, compute_heads, d);
}

void FOR_CLASS(gated_delta_net)(const DeltaNet *d) {
    const int64_t work = d->tokens * d->value_heads * d->key_dim * d->value_dim;
    run_team_if(work >= PARALLEL_FROM, compute_all, d);
}
