/* A Mamba-2 mixer between its projections (formulas and shapes: kernels/linear_attention/mamba2.py), in three
 * operations. Work items of the convolution are a block of channels of one sequence, of the recurrence one head of one
 * sequence, of the gated norm one token. */
#include "convolution.h"
#include "simd/cpu_class.h"
#include "team.h"

#define TOKENS 64           /* tokens of a sequence whose dt and decays are computed before the state is updated */
#define ROWS 16             /* rows of a head's state that stay in the L1 cache for these tokens */
#define PARALLEL_FROM 65536 /* a call with this many state updates (elements times tokens) uses several threads */

INLINE int64_t inner_size(const Mamba2 *m) { return m->heads * m->head_dim; }

INLINE void convolve_block(const Mamba2 *m, int64_t sequence, int64_t first, int type) {
    const Convolution *c = &m->conv;
    const int64_t start = c->cu_seqlens[sequence], stop = c->cu_seqlens[sequence + 1];
    const int64_t length = c->seq_lens[sequence], channels = min_i64(CHANNELS, c->channels - first);
    if (!length || start == stop) return; /* padding, or no token in this step */
    Window window;
    load_window(c, &window, c->slots[sequence], length == stop - start, first, channels, type);
    for (int64_t t = start; t < stop; t++) {
        const void *row = at(m->rows, t * m->stride + inner_size(m) + first, type);
        float *to = m->inputs + t * c->channels + first;
        for (int64_t i = 0; i < channels; i += LANES) {
            const Floats sum = rounded_vector(convolve(c, &window, load_vector(row, i, type), first, i), type);
            store_floats(to + i, rounded_vector(activation(sum, 0), type));
        }
    }
    store_window(c, &window, c->slots[sequence], first, channels, type);
}

/* Update `rows` rows of a head's state by one token, and compute their outputs. Not inlined, so that decodes and chunks
 * of prompts run the same instructions: their results are equal bit for bit. */
__attribute__((noinline)) static void step_rows(float *state, int64_t rows, int64_t size, const float *x,
                                                const float *b, const float *c, float decay, float dt, float skip,
                                                float *out) {
    for (int64_t p = 0; p < rows; p++) {
        float *row = state + p * size;
        const float input = dt * x[p];
        Floats sum = {0};
        for (int64_t n = 0; n < size; n += LANES) {
            const Floats next = load_floats(row + n) * decay + load_floats(b + n) * input;
            store_floats(row + n, next);
            sum += next * load_floats(c + n);
        }
        out[p] = sum_of_lanes(sum) + skip * x[p];
    }
}

static void step_head(const Mamba2 *m, int64_t sequence, int64_t head) {
    const Convolution *conv = &m->conv;
    const int64_t start = conv->cu_seqlens[sequence], stop = conv->cu_seqlens[sequence + 1];
    const int64_t length = conv->seq_lens[sequence], size = m->state_size, inner = inner_size(m);
    if (!length || start == stop) return;
    float *state = m->matrix + (conv->slots[sequence] * m->heads + head) * m->head_dim * size;
    if (length == stop - start) memset(state, 0, (size_t)(m->head_dim * size) * 4);
    const int64_t b_first = inner + head / (m->heads / m->groups) * size, c_first = b_first + m->groups * size;
    const int type = (int)conv->type;
    float decays[TOKENS], dts[TOKENS];
    for (int64_t begin = start; begin < stop; begin += TOKENS) {
        const int64_t count = min_i64(TOKENS, stop - begin);
        for (int64_t t = 0; t < count; t++) {
            const void *row = at(m->rows, (begin + t) * m->stride + inner + conv->channels, type);
            const float dt = softplus(get(row, head, type) + m->biases[head]);
            dts[t] = dt < m->dt_min ? m->dt_min : dt > m->dt_max ? m->dt_max : dt;
            decays[t] = expf(dts[t] * m->rates[head]);
        }
        for (int64_t p = 0; p < m->head_dim; p += ROWS) {
            const int64_t rows = min_i64(ROWS, m->head_dim - p), at_head = head * m->head_dim + p;
            for (int64_t t = 0; t < count; t++) {
                const float *inputs = m->inputs + (begin + t) * conv->channels;
                step_rows(state + p * size, rows, size, inputs + at_head, inputs + b_first, inputs + c_first,
                          decays[t], dts[t], m->skips[head], m->sums + (begin + t) * inner + at_head);
            }
        }
    }
}

INLINE Floats silu_of(const void *gate, int64_t i, int type) { return activation(load_vector(gate, i, type), 0); }

/* Whether a token is padding: it belongs to no sequence, or to one of length 0. */
static int is_padding(const Convolution *c, int64_t token) {
    int64_t low = 0, high = c->sequences; /* contains the last sequence that starts at or before `token` */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (c->cu_seqlens[middle] > token) high = middle;
        else low = middle;
    }
    return !c->sequences || token >= c->cu_seqlens[low + 1] || !c->seq_lens[low];
}

/* out = weight * norm(sums * silu(gate)); norm_before_gate: weight * norm(sums) * silu(gate); without a norm: sums *
 * silu(gate). Padding gets 0. */
INLINE void norm_token(const Mamba2 *m, int64_t token, int type) {
    const int64_t inner = inner_size(m);
    const void *gate = at(m->rows, token * m->stride, type);
    float *sums = m->sums + token * inner;
    void *out = at(m->out, token * inner, type);
    if (is_padding(&m->conv, token)) {
        for (int64_t i = 0; i < inner; i += LANES) store_vector(out, i, (Floats){0}, type);
        return;
    }
    if (!m->norm) {
        for (int64_t i = 0; i < inner; i += LANES)
            store_vector(out, i, load_floats(sums + i) * silu_of(gate, i, type), type);
        return;
    }
    for (int64_t first = 0; first < inner; first += m->norm_size) {
        Floats squares = {0};
        for (int64_t i = first; i < first + m->norm_size; i += LANES) {
            Floats x = load_floats(sums + i);
            if (!m->norm_before_gate) x *= silu_of(gate, i, type);
            store_floats(sums + i, x);
            squares += x * x;
        }
        const float factor = 1.0f / sqrtf(sum_of_lanes(squares) / (float)m->norm_size + m->eps);
        for (int64_t i = first; i < first + m->norm_size; i += LANES) {
            Floats x = rounded_vector(load_floats(sums + i) * factor, type) * load_floats(m->norm + i);
            if (m->norm_before_gate) x *= silu_of(gate, i, type);
            store_vector(out, i, x, type);
        }
    }
}

static void convolve_blocks(const void *context, int64_t from, int64_t to) {
    const Mamba2 *m = context;
    const int64_t blocks = channel_blocks(&m->conv);
    for (int64_t item = from; item < to; item++) {
        if (m->conv.type == BF16) convolve_block(m, item / blocks, item % blocks * CHANNELS, BF16);
        else convolve_block(m, item / blocks, item % blocks * CHANNELS, F32);
    }
}

static void step_heads(const void *context, int64_t from, int64_t to) {
    const Mamba2 *m = context;
    for (int64_t item = from; item < to; item++) step_head(m, item / m->heads, item % m->heads);
}

static void norm_tokens(const void *context, int64_t from, int64_t to) {
    const Mamba2 *m = context;
    for (int64_t token = from; token < to; token++) {
        if (m->conv.type == BF16) norm_token(m, token, BF16);
        else norm_token(m, token, F32);
    }
}

static void compute_all(const void *context) {
    const Mamba2 *m = context;
    share_items(m->conv.sequences * channel_blocks(&m->conv), 4, convolve_blocks, m);
    share_items(m->conv.sequences * m->heads, 1, step_heads, m);
    share_items(m->conv.tokens, 4, norm_tokens, m);
}

void FOR_CLASS(mamba2)(const Mamba2 *m) {
    const int64_t work = m->conv.tokens * inner_size(m) * m->state_size;
    run_team_if(work >= PARALLEL_FROM, compute_all, m);
}
