/* The convolution and the selective scan of a Mamba mixer (formulas and shapes:
 * kernels/linear_attention/selective_scan.py). An item of either is a block of channels of one sequence. Tokens are
 * computed one after the other, so the bits do not depend on how prefill is chunked. */
#include "convolution.h"
#include "simd/cpu_class.h"
#include "team.h"

#define GROUP 16            /* channels of a group, whose states lie together: [state_size][GROUP] */
#define PARALLEL_FROM 65536 /* a call with this many products (channels times tokens times taps or state_size) uses
                               several threads */

INLINE void fill_with_zeros(void *out, int64_t stride, int64_t start, int64_t stop, int64_t channels, int type) {
    for (int64_t t = start; t < stop; t++)
        for (int64_t i = 0; i < channels; i += LANES) store_vector(at(out, t * stride, type), i, (Floats){0}, type);
}

INLINE void convolve_block(const ShortConv *s, int64_t sequence, int64_t first, int type) {
    const Convolution *c = &s->conv;
    const int64_t start = c->cu_seqlens[sequence], stop = c->cu_seqlens[sequence + 1];
    const int64_t length = c->seq_lens[sequence], channels = min_i64(CHANNELS, c->channels - first);
    void *out = at(s->out, first, type);
    if (!length || start == stop) { /* padding, or no token in this step */
        fill_with_zeros(out, c->channels, start, stop, channels, type);
        return;
    }
    Window window;
    load_window(c, &window, c->slots[sequence], length == stop - start, first, channels, type);
    for (int64_t t = start; t < stop; t++) {
        const void *row = at(s->rows, t * s->stride + first, type);
        for (int64_t i = 0; i < channels; i += LANES) {
            const Floats sum = rounded_vector(convolve(c, &window, load_vector(row, i, type), first, i), type);
            store_vector(at(out, t * c->channels, type), i, activation(sum, 0), type);
        }
    }
    store_window(c, &window, c->slots[sequence], first, channels, type);
}

/* A token of a group of channels: replaces their states, and computes their outputs. Not inlined, so that decodes and
 * chunks of prompts run the same instructions: their results are equal bit for bit. `b`, `c`: [state_size]. */
#define STEP_GROUP(NAME, TYPE)                                                                                         \
    __attribute__((noinline)) static void NAME(const SelectiveScan *s, float *state, int64_t token, int64_t channel,   \
                                               const float *b, const float *c) {                                       \
        const void *dt = at(s->dt, token * s->dt_stride + channel, TYPE);                                              \
        const void *gate = at(s->gate, token * s->gate_stride + channel, TYPE);                                        \
        const void *inputs = at(s->x, token * s->channels + channel, TYPE);                                            \
        void *out = at(s->out, token * s->channels + channel, TYPE);                                                   \
        const float *rates = s->rates + channel * s->state_size;                                                       \
        for (int64_t i = 0; i < GROUP; i += LANES) {                                                                   \
            const Floats step = softplus_of(load_vector(dt, i, TYPE) + load_floats(s->biases + channel + i));          \
            const Floats x = load_vector(inputs, i, TYPE), input = step * x;                                           \
            Floats sum = load_floats(s->skips + channel + i) * x;                                                      \
            for (int64_t n = 0; n < s->state_size; n++) {                                                              \
                float *at_n = state + n * GROUP + i;                                                                   \
                const Floats decay = exp2_of(load_floats(rates + n * GROUP + i) * step);                               \
                const Floats next = load_floats(at_n) * decay + input * b[n];                                          \
                store_floats(at_n, next);                                                                              \
                sum += next * c[n];                                                                                    \
            }                                                                                                          \
            store_vector(out, i, sum * activation(load_vector(gate, i, TYPE), 0), TYPE);                               \
        }                                                                                                              \
    }

STEP_GROUP(step_group_bf16, BF16)
STEP_GROUP(step_group_f32, F32)

static void scan_block(const SelectiveScan *s, int64_t sequence, int64_t first) {
    const int64_t start = s->cu_seqlens[sequence], stop = s->cu_seqlens[sequence + 1];
    const int64_t length = s->seq_lens[sequence], channels = min_i64(CHANNELS, s->channels - first);
    const int64_t size = s->state_size;
    const int type = (int)s->type;
    if (!length || start == stop) {
        fill_with_zeros(at(s->out, first, type), s->channels, start, stop, channels, type);
        return;
    }
    float *state = s->matrix + (s->slots[sequence] * s->channels + first) * size;
    if (length == stop - start) memset(state, 0, (size_t)(channels * size) * 4);
    float b[MAX_STATE_SIZE], c[MAX_STATE_SIZE];
    for (int64_t t = start; t < stop; t++) {
        const void *row = at(s->bc, t * s->bc_stride, type);
        for (int64_t n = 0; n < size; n++) b[n] = get(row, n, type), c[n] = get(row, size + n, type);
        for (int64_t i = 0; i < channels; i += GROUP) {
            if (type == BF16) step_group_bf16(s, state + i * size, t, first + i, b, c);
            else step_group_f32(s, state + i * size, t, first + i, b, c);
        }
    }
}

static void convolve_blocks(const void *context, int64_t from, int64_t to) {
    const ShortConv *s = context;
    const int64_t blocks = channel_blocks(&s->conv);
    for (int64_t item = from; item < to; item++) {
        if (s->conv.type == BF16) convolve_block(s, item / blocks, item % blocks * CHANNELS, BF16);
        else convolve_block(s, item / blocks, item % blocks * CHANNELS, F32);
    }
}

static int64_t scan_blocks_of(const SelectiveScan *s) { return (s->channels + CHANNELS - 1) / CHANNELS; }

static void scan_blocks(const void *context, int64_t from, int64_t to) {
    const SelectiveScan *s = context;
    const int64_t blocks = scan_blocks_of(s);
    for (int64_t item = from; item < to; item++) scan_block(s, item / blocks, item % blocks * CHANNELS);
}

static void convolve_all(const void *context) {
    const ShortConv *s = context;
    share_items(s->conv.sequences * channel_blocks(&s->conv), 4, convolve_blocks, s);
}

static void scan_all(const void *context) {
    const SelectiveScan *s = context;
    share_items(s->sequences * scan_blocks_of(s), 1, scan_blocks, s);
}

void FOR_CLASS(silu_conv)(const ShortConv *s) {
    run_team_if(s->conv.tokens * s->conv.channels * s->conv.taps_count >= PARALLEL_FROM, convolve_all, s);
}

void FOR_CLASS(selective_scan)(const SelectiveScan *s) {
    run_team_if(s->tokens * s->channels * s->state_size >= PARALLEL_FROM, scan_all, s);
}
